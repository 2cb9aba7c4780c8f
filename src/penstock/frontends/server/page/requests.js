// Every request that has not ended, with how far it is. One that ended stays a moment, so that the list does not jump.

import { element, nameButton, showCached } from "./elements.js";
import { Estimate } from "./estimate.js";
import { about, count, longDuration, percent, plural } from "./format.js";
import { nameOf } from "./names.js";

const LINGER_MS = 1500;
// Of those that wait, so many are shown; the others are counted.
const MOST_WAITING = 4;
const PHASES = { waiting: "waiting", prompt: "reading", decode: "generating" };

export class Requests {
  // `parts` are elements: the list, a line for when it is empty, one for those left out, and the number of all.
  constructor(parts) {
    this.parts = parts;
    this.lost = null; // the id of a row that went in the last update while it had the keyboard's focus
    this.rows = new Map(); // id -> row
  }

  clear() {
    for (const row of this.rows.values()) row.item.remove();
    this.rows.clear();
  }

  update(requests, nextTokenSeconds, now) {
    this.lost = null;
    let numWaiting = 0;
    const shown = requests.filter((request) => request.phase !== "waiting" || ++numWaiting <= MOST_WAITING);
    const live = new Set(shown.map((request) => request.id));
    for (const [id, row] of this.rows) {
      if (!live.has(id)) this.end(id, row);
    }
    for (const request of shown) this.row(request).show(request, nextTokenSeconds, now);
    const { none, more, counter } = this.parts;
    none.hidden = this.rows.size > 0;
    more.hidden = shown.length === requests.length;
    more.textContent = `and ${count(requests.length - shown.length)} more waiting`;
    counter.textContent = requests.length ? plural(requests.length, "request") : "";
  }

  row(request) {
    let row = this.rows.get(request.id);
    if (!row) {
      row = new Row(request.id);
      this.rows.set(request.id, row);
      this.parts.list.append(row.item);
    }
    return row;
  }

  end(id, row) {
    row.endedAt ??= performance.now();
    row.end();
    if (performance.now() - row.endedAt < LINGER_MS) return;
    const hadFocus = row.item.contains(document.activeElement);
    row.item.remove();
    this.rows.delete(id);
    if (hadFocus) this.lost = id;
  }
}

class Row {
  constructor(id) {
    this.item = element("li", "request");
    this.estimates = { prompt: new Estimate(), decode: new Estimate() };
    this.item.dataset.id = id;
    this.endedAt = null;
    const title = element("div", "title", this.item);
    nameButton(id, title);
    this.phase = element("span", "phase", title);
    this.eta = element("span", "eta", title);
    const bar = element("div", "bar", this.item);
    this.prompt = new Part("prompt", bar, `Prompt of ${nameOf(id)}`);
    this.cachedFill = element("span", "cached", this.prompt.part);
    this.decode = new Part("decode", bar, `Answer of ${nameOf(id)}`);
    const facts = element("div", "facts", this.item);
    this.read = element("span", "", facts);
    this.cached = element("span", "from-cache", facts);
    this.written = element("span", "", facts);
    this.age = element("span", "", facts);
    this.preempted = element("span", "", facts);
  }

  show(request, nextTokenSeconds, now) {
    const { num_prompt_done: done, num_prompt_tokens: total, num_prompt_cached: cached, num_generated: generated, max_tokens: most } = request;
    this.phase.textContent = PHASES[request.phase];
    this.eta.textContent = this.left(request, nextTokenSeconds, now);
    this.prompt.set(done, total);
    showCached(this.cachedFill, cached, total);
    this.decode.set(generated, most);
    this.read.textContent = done < total ? `${count(done)} of ${count(total)} read` : `${count(total)} read`;
    this.cached.textContent = cached ? `${count(cached)} from cache` : "";
    this.written.textContent = done < total && !generated ? "" : `${count(generated)} of ${count(most)} generated`;
    this.age.textContent = `for ${about(request.age_s)}`;
    this.preempted.textContent = request.num_preemptions ? `preempted ${count(request.num_preemptions)}×` : "";
  }

  // How long its phase will take yet.
  left({ phase, prompt_eta_s: guess, max_tokens: most, num_generated: generated }, nextTokenSeconds, now) {
    if (phase === "prompt" && guess !== null) return `first token in about ${roughly(this.estimates.prompt.left(guess, now))}`;
    if (phase === "decode" && nextTokenSeconds) {
      return `up to about ${roughly(this.estimates.decode.left((most - generated) * nextTokenSeconds, now))} left`;
    }
    return "";
  }

  end() {
    this.item.classList.add("ended");
    this.phase.textContent = "ended";
    this.eta.textContent = "";
  }
}

const roughly = (seconds) => (seconds < 1.5 ? "a second" : longDuration(seconds));

class Part {
  constructor(kind, bar, label) {
    this.part = element("div", `part ${kind}`, bar);
    this.fill = element("span", "fill", this.part);
    this.part.setAttribute("role", "progressbar");
    this.part.setAttribute("aria-label", label);
    this.part.setAttribute("aria-valuemin", "0");
  }

  set(done, total) {
    this.part.style.flexGrow = total;
    this.part.setAttribute("aria-valuemax", total);
    this.part.setAttribute("aria-valuenow", done);
    this.fill.style.transform = `scaleX(${percent(done, total) / 100})`;
  }
}
