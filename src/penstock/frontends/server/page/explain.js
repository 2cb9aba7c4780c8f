// The panel of one request: each chunk of its prompt, how long it is and why, what was expected of it and what came.

import { ChunkChart } from "./chunk_chart.js";
import { ChunkTable } from "./chunk_table.js";
import { hasKey, headers } from "./connection.js";
import { element } from "./elements.js";
import { count, duration, plural } from "./format.js";
import { nameOf } from "./names.js";
import { chunkWords, memoryWords, targetWords } from "./sizes.js";

const ANSWER_MS = 8_000;
// Many chunks are asked for less often.
const MANY = 300;
const MANY_MS = 2_000;
const PHASES = {
  waiting: "Waiting", prompt: "Reading its prompt", decode: "Generating",
  stop: "Done", length: "Reached its limit", cancelled: "Cancelled", error: "Failed",
};
const FORGOTTEN = "The server knows no more of this request.";

const byId = (id) => document.getElementById(id);

function write(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

export class Explain {
  // `lists` hold elements with a request's id and a button. `onLocked` is called where the server wants a key.
  constructor(lists, onLocked) {
    this.lists = lists;
    this.onLocked = onLocked;
    this.panel = byId("explain");
    this.table = new ChunkTable(byId("explain-rows"), byId("explain-left-out"));
    this.chart = new ChunkChart(byId("explain-chart"), byId("explain-detail"));
    this.clear(null);
    for (const list of lists) list.addEventListener("click", (event) => this.click(event));
    byId("explain-close").addEventListener("click", () => this.close());
    this.panel.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
  }

  clear(id) {
    this.id = id;
    this.shown = null; // how far the request was when it was asked for last
    this.isOver = false; // nothing more is to come
    this.isAsking = false;
    this.askedAt = -Infinity;
    this.numChunks = 0;
  }

  click(event) {
    const id = event.target.closest("[data-id]")?.dataset.id;
    if (!id || String(getSelection())) return; // text that is being selected
    if (id === this.id) this.close();
    else this.open(id);
  }

  open(id) {
    this.clear(id);
    this.table.clear();
    byId("explain-parts").hidden = true;
    for (const name of ["read", "off", "chunk", "targets", "memory"]) write(`explain-${name}`, "");
    write("explain-name", nameOf(id).replace("Request", "request"));
    write("explain-state", "Asking the server.");
    byId("explain-json").href = `explain/${encodeURIComponent(id)}`;
    byId("explain-json").hidden = hasKey(); // a link carries no key
    this.panel.hidden = false;
    this.mark();
    this.ask("opened").then(() => {
      if (this.id === id) this.panel.scrollIntoView({ block: "nearest" });
    });
  }

  close() {
    const button = this.buttons().find(([id]) => id === this.id)?.[1];
    const hadFocus = this.panel.contains(document.activeElement);
    this.clear(null);
    this.panel.hidden = true;
    this.mark();
    if (hadFocus) (button ?? byId("prompt")).focus({ preventScroll: true });
  }

  // `requests` are those that have not ended.
  update(requests) {
    this.mark();
    if (this.id === null || this.isOver) return;
    const live = requests.find((request) => request.id === this.id);
    const now = live ? [live.phase, live.num_prompt_done, live.num_preemptions].join() : "ended";
    const isSoon = live && this.numChunks > MANY && performance.now() - this.askedAt < MANY_MS;
    if (now !== this.shown && !isSoon) this.ask(now);
  }

  restarted() {
    if (this.id !== null) this.forget();
  }

  async ask(now) {
    if (this.isAsking) return;
    const { id } = this;
    this.isAsking = true;
    this.askedAt = performance.now();
    try {
      const options = { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) };
      const response = await fetch(`explain/${encodeURIComponent(id)}`, options);
      const explained = response.ok ? await response.json() : null;
      if (this.id !== id) return; // another was chosen meanwhile
      if (response.status === 401) this.onLocked();
      else if (response.status === 404) this.forget();
      else if (explained) {
        this.shown = explained.requests[0].outcome === null && now === "ended" ? null : now; // how it ended comes last
        this.show(explained);
      }
    } catch {
      // The page tells of a server that does not answer; this is asked for again when it does.
    } finally {
      if (this.id === id) this.isAsking = false;
    }
  }

  forget() {
    this.isOver = true;
    write("explain-state", FORGOTTEN);
  }

  show({ settings, rules, requests: [request] }) {
    const { chunks, phase, outcome, num_prompt_tokens: total } = request;
    this.isOver = phase === "ended" && outcome !== null;
    this.numChunks = chunks.length;
    write("explain-state", PHASES[outcome ?? phase] ?? "Ended");
    write("explain-read", readWords(chunks, total));
    write("explain-off", offWords(chunks));
    write("explain-chunk", `Requested chunk: ${settings.chunk.requested}${settings.chunk.is_auto ? "" : ` (${chunkWords(settings).size})`}`);
    write("explain-targets", `Targets: ${targetWords(settings) || "none"}`);
    write("explain-memory", `Step memory: ${memoryWords(settings)}`);
    byId("explain-parts").hidden = chunks.length === 0;
    showRules(rules, chunks);
    this.table.show(chunks, rules);
    this.chart.show(chunks, total, settings.target_itl_s);
    byId("explain-target").hidden = settings.target_itl_s === null;
  }

  buttons() {
    const items = this.lists.flatMap((list) => [...list.querySelectorAll("[data-id]")]);
    return items.map((item) => [item.dataset.id, item.querySelector("button"), item]);
  }

  mark() {
    for (const [id, button, item] of this.buttons()) {
      button.setAttribute("aria-expanded", id === this.id);
      item.classList.toggle("chosen", id === this.id);
    }
  }
}

function readWords(chunks, total) {
  if (!chunks.length) return "no chunk yet";
  const sizes = chunks.map((chunk) => chunk.size);
  const [least, most] = [Math.min(...sizes), Math.max(...sizes)];
  const read = Math.max(...chunks.map((chunk) => chunk.end));
  const of = total === null || read === total ? plural(read, "token") : `${count(read)} of ${plural(total, "token")}`;
  // What no chunk has read was there.
  const cached = Math.min(...chunks.map((chunk) => chunk.start));
  const found = cached ? `, ${count(cached)} from cache` : "";
  return `${of} in ${plural(chunks.length, "chunk")} of ${least === most ? count(most) : `${count(least)} to ${count(most)}`}${found}`;
}

// How far the predicted times are from the measured ones, in the median.
function offWords(chunks) {
  if (!chunks.length) return "";
  const measured = chunks.reduce((sum, chunk) => sum + chunk.measured_s, 0);
  const off = chunks.filter((chunk) => chunk.predicted_s !== null)
    .map((chunk) => Math.abs(chunk.predicted_s / chunk.measured_s - 1)).sort((a, b) => a - b);
  const words = off.length ? `, predictions off by ${Math.round(100 * off[Math.floor(off.length / 2)])}% (median)` : "";
  return `${duration(measured)} in all${words}`;
}

function showRules(rules, chunks) {
  const list = byId("explain-rules");
  const words = Object.entries(rules).map(([rule, text]) => {
    const number = chunks.filter((chunk) => chunk.rule === rule).length;
    return { rule, text: `${rule}, ${plural(number, "chunk")}: ${text}` };
  });
  const now = words.map(({ text }) => text).join();
  if (list.dataset.shown === now) return;
  list.dataset.shown = now;
  list.replaceChildren(...words.map(({ rule, text }) => {
    const item = element("li", "");
    element("span", `swatch rule-${rule}`, item);
    item.append(text);
    return item;
  }));
}
