// A row for each chunk. Chunks are only ever added, so rows are.

import { element } from "./elements.js";
import { bytes, count, duration } from "./format.js";

// The last ones are shown; a table of many thousands would be slow, and read by nobody.
const MOST = 500;

export class ChunkTable {
  constructor(body, leftOut) {
    this.body = body;
    this.leftOut = leftOut;
    this.box = body.closest(".chunks");
    this.clear();
  }

  clear() {
    this.body.replaceChildren();
    this.leftOut.textContent = "";
    this.numShown = 0;
    this.reason = null; // of the row before
  }

  show(chunks, rules) {
    const isAtEnd = this.box.scrollTop + this.box.clientHeight > this.box.scrollHeight - 24;
    const isFirst = this.numShown === 0;
    const from = Math.max(this.numShown, chunks.length - MOST);
    for (const chunk of chunks.slice(from)) this.body.append(this.row(chunk, rules[chunk.rule]));
    this.numShown = chunks.length;
    while (this.body.children.length > MOST) this.body.firstChild.remove();
    const left = chunks.length - this.body.children.length;
    this.leftOut.textContent = left > 0 ? ` The first ${count(left)} chunks are not in this table.` : "";
    if (isAtEnd && !isFirst) this.box.scrollTop = this.box.scrollHeight;
  }

  row(chunk, words) {
    const row = element("tr", "");
    row.setAttribute("role", "row");
    const cell = (text, className = "") => {
      const made = element("td", className, row);
      made.setAttribute("role", "cell");
      made.textContent = text;
      return made;
    };
    cell(`${count(chunk.start)}–${count(chunk.end)}`);
    cell(count(chunk.size));
    cell(count(chunk.past));
    cell(count(chunk.num_decodes));
    const setBy = cell("", "set-by");
    setBy.title = chunk.reason;
    element("span", `swatch rule-${chunk.rule}`, setBy);
    setBy.append(chunk.rule);
    // What there is to say beside the rule, where it was not said of the row before.
    if (chunk.reason !== words && chunk.reason !== this.reason) {
      element("small", "", setBy).textContent = chunk.reason.startsWith(words) ? chunk.reason.slice(words.length).replace(/^[:,] /, "") : chunk.reason;
    }
    this.reason = chunk.reason;
    cell(chunk.predicted_s === null ? "–" : duration(chunk.predicted_s));
    cell(duration(chunk.measured_s));
    cell(chunk.predicted_bytes === null ? "–" : bytes(chunk.predicted_bytes));
    return row;
  }
}
