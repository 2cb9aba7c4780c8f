// Small parts of the page that several lists have.

import { percent, shortId } from "./format.js";
import { nameOf } from "./names.js";

export function element(tag, className, parent) {
  const made = document.createElement(tag);
  made.className = className;
  parent?.append(made);
  return made;
}

// The part of a bar that was in the cache, at its beginning. Its width, unlike a scale, leaves its pattern alone.
export function showCached(fill, cached, total) {
  fill.style.width = `${percent(cached, total)}%`;
}

export function drawing(tag, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent?.append(made);
  return made;
}

// A request's name, by which its chunks are opened, and the end of its id, which its answer has, too.
export function nameButton(id, parent) {
  const button = element("button", "name", parent);
  button.type = "button";
  button.textContent = nameOf(id);
  button.title = id;
  button.setAttribute("aria-label", `${nameOf(id)}: its chunks`);
  element("span", "id", parent).textContent = shortId(id);
  button.setAttribute("aria-expanded", "false");
  button.setAttribute("aria-controls", "explain");
  return button;
}
