// Of a model in stages: which are there, and what each did with the last seconds.

import { element } from "./elements.js";
import { count, percent, plural } from "./format.js";

const WINDOW_S = 5;

export class Stages {
  constructor(card, body, counter) {
    this.card = card;
    this.body = body;
    this.counter = counter;
    this.past = []; // answers of the last seconds, oldest first
  }

  update(stages, now) {
    this.card.hidden = stages.length === 0;
    if (this.past.length && now < this.past.at(-1).now) this.past = []; // the server is another
    this.past.push({ now, stages });
    while (this.past.length > 2 && this.past[1].now <= now - WINDOW_S) this.past.shift();
    const up = stages.filter((stage) => stage.trouble === null).length;
    this.counter.textContent = up === stages.length ? plural(up, "stage") : `${count(up)} of ${plural(stages.length, "stage")}`;
    this.body.replaceChildren(...stages.map((stage) => this.row(stage, now)));
  }

  row(stage, now) {
    const before = this.past[0].stages[stage.stage] ?? stage;
    const seconds = Math.max(now - this.past[0].now, 1e-9);
    const share = (name) => `${Math.round(Math.min(percent(Math.max(stage[name] - before[name], 0), seconds), 100))}%`;
    const row = element("tr", stage.trouble === null ? "" : "missing");
    row.title = stage.trouble === null ? stage.where : `${stage.where}: ${stage.trouble}`;
    const name = element("th", "", row);
    name.scope = "row";
    name.textContent = `${count(stage.first_layer)}–${count(stage.last_layer)}`;
    const shares = stage.trouble === null ? ["busy_s", "waited_s", "link_s"].map(share) : ["missing", "–", "–"];
    for (const text of [...shares, count(stage.num_restarts)]) element("td", "", row).textContent = text;
    return row;
  }
}

// What each stage did in a step.
export function stageWords(stages, duration) {
  return stages?.length ? `stages: ${stages.map((seconds) => (seconds === null ? "–" : duration(seconds))).join(" | ")}` : "";
}
