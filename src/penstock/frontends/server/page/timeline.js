// The last steps: time runs to the right, a step is a block as wide as it took, and each of its spans lies in the lane of
// its request. The step that runs grows. A line under the lanes marks steps in which a decode waited for a chunk. Where
// nothing runs, time stops a moment after the last step.

import { about, count, duration, plural } from "./format.js";
import { shortName } from "./names.js";
import { stageWords } from "./stages.js";

const KEPT_S = 65;
const PAUSE_S = 2;
// A step that has taken so long is seen to grow; shorter ones are over before the server is asked again.
const LONG_S = 0.3;
const FRAME_MS = 100;
const DIMMED = 0.4;
const RUNNING = 0.6;
const MIN_LANES = 4;
const MARGIN = 4;
const NAMES = 54; // to the left, for the names of requests, where there is room
const AXIS = 20;
const STALL = 10;

export class Timeline {
  constructor(canvas, detail, people) {
    this.canvas = canvas;
    this.detail = detail;
    this.people = people;
    this.seconds = 10;
    this.margin = MARGIN;
    this.listen();
    this.clear();
  }

  clear() {
    this.steps = [];
    this.running = []; // steps that are not over
    this.now = 0;
    this.toldAt = 0; // when the server said so
    this.chosen = null; // a step
    this.frozen = null; // where time stands still while a step is looked at
    this.tell();
  }

  update(steps, running, now) {
    for (const step of [...steps, ...running]) step.lanes = step.spans.map((span) => this.people.known.get(span.request_id));
    // The server tells of its last steps alone: of quick ones, or while nobody looked, there were others before them.
    if (steps.length && this.steps.length) steps[0].isAfterGap = steps[0].index > this.steps.at(-1).index + 1;
    this.steps.push(...steps);
    this.running = running;
    [this.now, this.toldAt] = [now, performance.now()];
    const oldest = (this.frozen ?? this.right()) - KEPT_S;
    const first = this.steps.findIndex((step) => step.start_s + step.seconds >= oldest);
    this.steps.splice(0, first === -1 ? this.steps.length : first);
    if (this.chosen && !this.steps.includes(this.chosen)) this.release();
    this.tell();
    this.draw();
    this.grow();
  }

  // While a long step runs, time goes on between two answers of the server.
  grow() {
    clearTimeout(this.timer);
    if (!this.running.some((step) => step.seconds > LONG_S) || matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    this.timer = setTimeout(() => {
      const passed = (performance.now() - this.toldAt) / 1000;
      this.toldAt += passed * 1000;
      this.now += passed;
      for (const step of this.running) step.seconds += passed;
      this.tell();
      this.draw();
      this.grow();
    }, FRAME_MS);
  }

  get idleSeconds() {
    const last = this.steps.at(-1);
    return last && !this.running.length ? this.now - last.start_s - last.seconds : 0;
  }

  // How long time goes on after the last step.
  get pauseSeconds() {
    return Math.min(PAUSE_S, this.seconds / 5);
  }

  get isPaused() {
    return this.idleSeconds > this.pauseSeconds;
  }

  // Where the time shown ends.
  right() {
    return this.frozen ?? this.now - Math.max(this.idleSeconds - this.pauseSeconds, 0);
  }

  show(seconds) {
    this.seconds = seconds;
    this.draw();
  }

  listen() {
    const { canvas } = this;
    let isPinned = false;
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse" && !isPinned) this.choose(this.stepAt(event.offsetX));
    });
    canvas.addEventListener("pointerleave", () => {
      if (!isPinned) this.release();
    });
    canvas.addEventListener("click", (event) => {
      const step = this.stepAt(event.offsetX);
      isPinned = step !== null && !(isPinned && step === this.chosen);
      if (isPinned) this.choose(step);
      else this.release();
    });
    canvas.addEventListener("blur", () => {
      isPinned = false;
      this.release();
    });
    canvas.addEventListener("keydown", (event) => {
      const at = this.steps.indexOf(this.chosen);
      const end = this.steps.length - 1;
      const to = {
        ArrowLeft: at === -1 ? end : at - 1, ArrowDown: at === -1 ? end : at - 1,
        ArrowRight: at === -1 ? end : at + 1, ArrowUp: at === -1 ? end : at + 1,
        PageDown: at - 10, PageUp: at + 10, Home: 0, End: end,
      }[event.key];
      if (event.key === "Escape") {
        isPinned = false;
        this.release();
      } else if (to !== undefined && end >= 0) {
        event.preventDefault();
        isPinned = true;
        this.choose(this.steps[Math.max(0, Math.min(end, to))]);
      }
    });
    new ResizeObserver(() => this.draw()).observe(canvas);
    for (const query of ["(prefers-color-scheme: dark)", "(resolution: 1dppx)"]) {
      matchMedia(query).addEventListener("change", () => this.draw());
    }
  }

  choose(step) {
    if (step === null) return;
    this.frozen ??= this.right();
    this.chosen = step;
    const end = step.start_s + step.seconds;
    if (end > this.frozen) this.frozen = end;
    if (step.start_s < this.frozen - this.seconds) this.frozen = Math.max(end, step.start_s + this.seconds);
    this.tell();
    this.draw();
  }

  release() {
    this.chosen = this.frozen = null;
    this.tell();
    this.draw();
  }

  tell() {
    const { canvas, chosen, steps, running } = this;
    const long = running.find((step) => step.seconds > LONG_S);
    const pause = this.isPaused ? `Nothing runs; the last step was ${about(this.idleSeconds)} ago. ` : "";
    const hint = steps.length ? `${pause}Point at a step, tap it, or use the arrow keys, to see what ran in it.` : "No steps yet.";
    const text = chosen ? describe(chosen) : long ? `Running: ${describe(long)}` : hint;
    if (this.detail.textContent !== text) this.detail.textContent = text;
    canvas.setAttribute("aria-valuemin", steps.length ? steps[0].index : 0);
    canvas.setAttribute("aria-valuemax", steps.length ? steps.at(-1).index : 0);
    canvas.setAttribute("aria-valuenow", chosen?.index ?? steps.at(-1)?.index ?? 0);
    canvas.setAttribute("aria-valuetext", chosen ? text : "no step chosen");
  }

  stepAt(x) {
    const { left, perSecond } = this.scale();
    let best = null;
    let bestGap = 12; // pixels: a finger is wider than a decode
    for (const step of this.steps) {
      const from = (step.start_s - left) * perSecond + this.margin;
      const gap = Math.max(from - x, x - from - step.seconds * perSecond, 0);
      if (gap < bestGap || (gap === 0 && bestGap === 0)) [best, bestGap] = [step, gap];
    }
    return best;
  }

  scale() {
    const width = this.canvas.clientWidth - this.margin - MARGIN;
    const right = this.right();
    return { left: right - this.seconds, right, perSecond: width / this.seconds };
  }

  draw() {
    const { canvas } = this;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    this.margin = width > 560 ? NAMES : MARGIN;
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(`--${name}`);
    const { left, right, perSecond } = this.scale();
    const bottom = height - AXIS - STALL;
    this.drawAxis(context, colour, left, perSecond, width, height);
    const seen = [...this.steps, ...this.running].filter((step) => step.start_s + step.seconds >= left && step.start_s <= right);
    const lanes = seen.reduce((most, step) => Math.max(most, ...step.lanes.map((lane) => lane + 1)), MIN_LANES);
    const lane = Math.min(bottom / lanes, 48);
    // Blocks end on whole pixels, one after the other, with a pixel between them where they are wide enough to spare it.
    const snapped = (time) => Math.round((this.margin + (time - left) * perSecond) * ratio) / ratio;
    const place = (step) => {
      const from = Math.max(snapped(step.start_s), this.margin);
      const wide = snapped(Math.min(step.start_s + step.seconds, right)) - from;
      return { from, wide: Math.max(wide - (wide > 3 ? 1 : 0), 1 / ratio) };
    };
    let before = left;
    for (const step of seen) {
      const { from, wide } = place(step);
      const begun = step.isAfterGap ? Math.max(snapped(before), this.margin) : from;
      context.fillStyle = colour("sunken");
      context.fillRect(begun, 0, from + wide - begun, bottom);
      before = step.start_s + step.seconds;
    }
    this.drawLives(context, colour("muted"), seen, place, lane);
    if (this.margin === NAMES) drawNames(context, colour("muted"), seen, lane);
    const isDimmed = this.isPaused && this.frozen === null;
    for (const step of seen) {
      const { from, wide } = place(step);
      const isRunning = this.running.includes(step);
      context.fillStyle = colour("sunken");
      if (isRunning) context.fillRect(from, 0, wide, bottom); // nothing is to be seen through it
      context.globalAlpha = isRunning ? RUNNING : 1;
      step.spans.forEach((span, at) => drawSpan(context, colour, span, step.lanes[at], from, wide, lane));
      if (step.stalls_decodes) {
        context.fillStyle = colour("stall");
        // Thin where decodes ran in this step, thick where they had to wait for another.
        context.fillRect(from, bottom + 3, wide, step.num_held_decodes ? 5 : 2);
      }
    }
    if (isDimmed) { // all at once: thin blocks may share a pixel
      context.globalAlpha = 1 - DIMMED;
      context.fillStyle = colour("surface");
      context.fillRect(this.margin, 0, width - this.margin, bottom + STALL);
    }
    context.globalAlpha = 1;
    for (const step of seen) {
      const { from, wide } = place(step);
      context.fillStyle = colour(isDimmed || this.running.includes(step) ? "ink" : "surface");
      step.spans.forEach((span, at) => drawLabel(context, span, step.lanes[at], from, wide, lane));
    }
    if (this.chosen && seen.includes(this.chosen)) {
      const { from, wide } = place(this.chosen);
      context.strokeStyle = colour("ink");
      context.lineWidth = 1.5;
      context.strokeRect(from - 1, 0.75, wide + 2, bottom + STALL - 2);
    }
  }

  // A thin line from a request's first span to its last: where it has no block, it waits for its turn.
  drawLives(context, colour, seen, place, lane) {
    const lives = [];
    let last = new Map(); // by request
    for (const step of seen) {
      const { from, wide } = place(step);
      if (step.isAfterGap) last = new Map();
      step.spans.forEach((span, at) => {
        if (!last.has(span.request_id)) {
          last.set(span.request_id, { from, lane: step.lanes[at] });
          lives.push(last.get(span.request_id));
        }
        last.get(span.request_id).to = from + wide;
      });
    }
    context.fillStyle = colour;
    context.globalAlpha = 0.55;
    for (const life of lives) context.fillRect(life.from, (life.lane + 0.5) * lane - 0.5, life.to - life.from, 1);
    context.globalAlpha = 1;
  }

  drawAxis(context, colour, left, perSecond, width, height) {
    const every = this.seconds / 5;
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    let free = width; // to the right there are labels
    for (let mark = 5; mark >= 0; mark--) {
      const x = this.margin + mark * every * perSecond;
      context.fillStyle = colour("line");
      context.fillRect(Math.round(x), 0, 1, height - AXIS + 2);
      const ago = this.seconds - mark * every;
      const now = this.isPaused ? `last step ${about(this.idleSeconds)} ago` : "now";
      const label = ago > 0 ? `−${+ago.toFixed(1)} s` : this.frozen === null ? now : "held";
      const wide = context.measureText(label).width;
      const from = mark === 5 ? width - 1 - wide : mark === 0 ? this.margin : x - wide / 2;
      if (from + wide > free) continue;
      context.fillStyle = colour("muted");
      context.fillText(label, from, height - 4);
      free = from - 6;
    }
  }
}

// Of each lane, who was the last in it.
function drawNames(context, colour, seen, lane) {
  const names = [];
  for (const step of seen) step.spans.forEach((span, at) => { names[step.lanes[at]] = shortName(span.request_id); });
  context.fillStyle = colour;
  context.textAlign = "left";
  names.forEach((name, at) => {
    if (lane >= 11) context.fillText(name, 0, (at + 0.5) * lane + 4);
  });
}

const height = (span, lane) => Math.max((lane - 2) * (span.kind === "decode" ? 0.5 : 0.86), 1.5);

function drawSpan(context, colour, span, inLane, from, wide, lane) {
  const tall = height(span, lane);
  const top = (inLane + 0.5) * lane - tall / 2;
  context.fillStyle = colour(span.kind === "decode" ? "decode" : "chunk");
  if (span.kind === "replay") {
    const alpha = context.globalAlpha;
    context.globalAlpha = 0.35 * alpha;
    context.fillRect(from, top, wide, tall);
    context.globalAlpha = alpha;
    context.fillRect(from, top, wide, 2);
    context.fillRect(from, top + tall - 2, wide, 2);
  } else {
    rounded(context, from, top, wide, tall);
  }
}

function drawLabel(context, span, inLane, from, wide, lane) {
  if (span.kind === "decode" || height(span, lane) < 14) return;
  const label = count(span.end - span.start);
  const free = wide - context.measureText(label).width;
  if (free > 8) context.fillText(label, from + free / 2, (inLane + 0.5) * lane + 4);
}

function rounded(context, x, y, wide, tall) {
  if (wide < 6) return context.fillRect(x, y, wide, tall);
  context.beginPath();
  context.roundRect(x, y, wide, tall, Math.min(3, tall / 2));
  return context.fill();
}

function describe(step) {
  const sizes = { chunk: [], replay: [], decode: [] };
  for (const span of step.spans) {
    const range = span.kind === "decode" ? "" : ` ${count(span.start)}–${count(span.end)}`;
    sizes[span.kind].push(`${shortName(span.request_id)}${range}`);
  }
  const parts = [`Step ${count(step.index)}`, duration(step.seconds)];
  for (const [kind, who] of Object.entries(sizes)) if (who.length) parts.push(`${plural(who.length, kind)}: ${who.join(", ")}`);
  if (step.num_held_decodes) parts.push(`${plural(step.num_held_decodes, "decode")} held back`);
  else if (step.stalls_decodes) parts.push("its decodes waited for its chunks");
  if (step.stages.length) parts.push(stageWords(step.stages, duration));
  if (step.preempted.length) parts.push(`preempted: ${step.preempted.map(shortName).join(", ")}`);
  return parts.join(" · ");
}
