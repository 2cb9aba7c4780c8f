// The requests that ended last, so that they can still be looked into.

import { element, nameButton } from "./elements.js";
import { count, duration } from "./format.js";

const OUTCOMES = { stop: "done", length: "reached its limit", cancelled: "cancelled", error: "failed" };

export class Ended {
  constructor(part, list) {
    this.part = part;
    this.list = list;
    this.rows = new Map(); // id -> element
  }

  // `ended` are summaries, the newest first; those that `requests` still lists are not shown twice.
  update(ended, requests) {
    const shown = ended.filter((one) => !requests.rows.has(one.id));
    const ids = new Set(shown.map((one) => one.id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.remove();
      this.rows.delete(id);
    }
    let next = this.list.firstChild;
    for (const one of shown) {
      const row = this.rows.get(one.id) ?? this.add(one);
      if (row === next) next = row.nextSibling;
      else this.list.insertBefore(row, next); // new: the others keep their order
    }
    this.part.hidden = shown.length === 0;
    if (requests.lost) this.rows.get(requests.lost)?.querySelector("button").focus();
  }

  add(one) {
    const row = element("tr", `past ${one.outcome}`);
    row.dataset.id = one.id;
    nameButton(one.id, element("th", "", row)).parentElement.scope = "row";
    const facts = [
      OUTCOMES[one.outcome] ?? one.outcome,
      count(one.num_prompt_tokens),
      count(one.num_generated),
      one.first_token_s === null ? "–" : duration(one.first_token_s),
      duration(one.seconds),
    ];
    for (const fact of facts) element("td", "", row).textContent = fact;
    row.lastChild.className = "total";
    this.rows.set(one.id, row);
    return row;
  }
}
