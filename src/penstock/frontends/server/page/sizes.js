// What the lengths of chunks follow from, in words.

import { bytes, count, duration, plural } from "./format.js";

export function chunkWords({ chunk }) {
  const tokens = (number) => (number ? plural(number, "token") : "the whole prompt");
  if (chunk.is_auto) {
    return { size: `auto, at most ${tokens(chunk.most)}`, reason: `${count(chunk.effective)} where nothing asks for less or more (${chunk.reason.replace("auto: ", "")})` };
  }
  const asked = chunk.requested === String(chunk.effective) ? "" : `asked for ${chunk.requested}: `;
  return { size: tokens(chunk.effective), reason: asked + chunk.reason };
}

export function targetWords({ target_itl_s: next, target_ttft_s: first }) {
  const targets = [];
  if (next !== null) targets.push(`next token within ${duration(next)}`);
  if (first !== null) targets.push(`first token within ${duration(first)}`);
  return targets.join(", ");
}

export const memoryWords = ({ budget_bytes: most }) => (most === null ? "not bounded" : `up to ${bytes(most)}`);
