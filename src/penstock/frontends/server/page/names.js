// What requests are called. The server numbers them, and answers carry the end of their ids.

import { shortId } from "./format.js";

const REMEMBERED = 5000;
const numbers = new Map(); // id -> number

export function learn({ requests, ended, steps, in_flight: running }) {
  for (const { id, number } of [...requests, ...ended]) numbers.set(id, number);
  for (const step of [...steps, ...running]) for (const { request_id: id, number } of step.spans) numbers.set(id, number);
  for (const id of numbers.keys()) {
    if (numbers.size <= REMEMBERED) break;
    numbers.delete(id);
  }
}

export const nameOf = (id) => (numbers.has(id) ? `Request ${numbers.get(id)}` : shortId(id));
export const shortName = (id) => (numbers.has(id) ? `#${numbers.get(id)}` : shortId(id));
