// The chunks over the prompt, from its first token to its last: above, how many tokens each has, in the colour of the
// rule that set it; below, how long its step took, with a mark where it was expected to end.

import { drawing } from "./elements.js";
import { bytes, count, duration, plural } from "./format.js";

const LEFT = 50; // for the scales
const RIGHT = 4;
const TITLE = 20;
const SIZES = 84; // heights
const TIMES = 84;
const GAP = 12;
const AXIS = 18;

export class ChunkChart {
  constructor(svg, detail) {
    this.svg = svg;
    this.detail = detail;
    this.chunks = [];
    this.total = 0;
    this.target = null;
    this.chosen = null;
    svg.setAttribute("height", 2 * TITLE + SIZES + GAP + TIMES + AXIS);
    new ResizeObserver(() => this.draw()).observe(svg);
    const point = (event) => this.choose(event.clientX - svg.getBoundingClientRect().left);
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") this.choose(null);
    });
  }

  // `target` is the time that a step is to keep, null where there is none.
  show(chunks, total, target) {
    this.chunks = chunks;
    this.total = Math.max(total ?? 0, ...chunks.map((chunk) => chunk.end), 1);
    this.target = target;
    if (!chunks.includes(this.chosen)) this.chosen = chunks.find((one) => one.start === this.chosen?.start) ?? null;
    this.draw();
  }

  choose(x) {
    const token = x === null ? -1 : ((x - LEFT) / this.width()) * this.total;
    const chosen = this.chunks.findLast((chunk) => chunk.start <= token && token < chunk.end) ?? null;
    if (chosen === this.chosen) return;
    this.chosen = chosen;
    this.draw();
  }

  width() {
    return Math.max(this.svg.clientWidth - LEFT - RIGHT, 1);
  }

  draw() {
    const { svg, chunks, chosen } = this;
    svg.replaceChildren();
    this.detail.textContent = chosen ? describe(chosen) : "Point at a chunk, or tap it, to read its figures.";
    if (!chunks.length || !svg.clientWidth) return;
    const perToken = this.width() / this.total;
    const place = (chunk) => {
      const wide = chunk.size * perToken;
      return { x: LEFT + chunk.start * perToken, wide: Math.max(wide - (wide > 4 ? 1 : 0), 0.5) };
    };
    // A prompt's last chunk may be as short as it likes; the scale is not for its sake.
    const ruled = chunks.some((chunk) => chunk.rule !== "end") ? chunks.filter((chunk) => chunk.rule !== "end") : chunks;
    const sizes = this.plot(0, SIZES, "Chunk size", sizeScale(ruled.map((chunk) => chunk.size)), count);
    const seconds = ruled.flatMap((chunk) => [chunk.measured_s, chunk.predicted_s ?? chunk.measured_s]);
    const times = this.plot(TITLE + SIZES + GAP, TIMES, "Step time", timeScale([...seconds, this.target ?? seconds[0]]), duration);
    const rules = new Map(); // rule -> path
    let [measured, predicted] = ["", ""];
    for (const chunk of chunks) {
      const { x, wide } = place(chunk);
      rules.set(chunk.rule, (rules.get(chunk.rule) ?? "") + bar(x, wide, sizes.y(chunk.size), sizes.bottom));
      measured += bar(x, wide, times.y(chunk.measured_s), times.bottom);
      if (chunk.predicted_s !== null) predicted += `M${x} ${times.y(chunk.predicted_s)}h${wide}`;
    }
    for (const [rule, path] of rules) drawing("path", { d: path, class: `bars rule-${rule}` }, svg);
    drawing("path", { d: measured, class: "bars measured" }, svg);
    drawing("path", { d: predicted, class: "predicted" }, svg);
    if (this.target !== null) {
      drawing("path", { d: `M${LEFT} ${times.y(this.target)}h${this.width()}`, class: "target" }, svg);
    }
    this.drawPositions(times.bottom);
    if (chosen) {
      const { x, wide } = place(chosen);
      drawing("rect", { x: x - 1, y: sizes.top, width: wide + 2, height: times.bottom - sizes.top, class: "chosen" }, svg);
    }
  }

  // A title, and a line at the bottom, in the middle and at the top with what each stands for.
  plot(above, tall, title, scale, words) {
    const [top, bottom] = [above + TITLE, above + TITLE + tall];
    const right = LEFT + this.width();
    this.text(scale.isLog ? `${title} (log scale)` : title, LEFT, above + 12, "start");
    for (const part of [1, 0.5, 0]) {
      const y = bottom - tall * part;
      drawing("path", { d: `M${LEFT} ${Math.round(y) + 0.5}H${right}`, class: "grid" }, this.svg);
      this.text(part || scale.isLog ? words(scale.at(part)) : "0", LEFT - 6, y + 4, "end");
    }
    return { top, bottom, y: (value) => bottom - tall * Math.max(scale.part(value), 0) };
  }

  drawPositions(bottom) {
    const { total } = this;
    for (const [part, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
      const words = count(Math.round(total * part));
      this.text(part ? words : "token 0", LEFT + this.width() * part, bottom + 14, anchor);
    }
  }

  text(words, x, y, anchor) {
    const made = drawing("text", { x, y, "text-anchor": anchor }, this.svg);
    made.textContent = words;
    return made;
  }
}

const bar = (x, wide, top, bottom) => `M${x} ${bottom}V${Math.min(top, bottom - 0.5)}h${wide}V${bottom}z`;

// Scales say which part of the height a value has, and which value is at a part of it. Where the largest value is many
// times the smallest, both are to be seen.
const linear = (most) => ({ isLog: false, part: (value) => value / most, at: (part) => part * most });

function logarithmic(least, most) {
  const powers = Math.log2(most / least);
  return { isLog: true, part: (value) => Math.log2(value / least) / powers, at: (part) => least * 2 ** (part * powers) };
}

const isWide = (values) => Math.max(...values) > 12 * Math.min(...values);

// A round number that half of is one, too.
function roundAbove(number, leastUnit = 0) {
  const unit = Math.max(10 ** Math.floor(Math.log10(number)) / 5, leastUnit);
  return Math.ceil(number / (2 * unit)) * 2 * unit;
}

// From and to powers of 2, with one in the middle; or from 0.
function sizeScale(sizes) {
  const most = Math.max(...sizes);
  if (isWide(sizes)) {
    const top = Math.ceil(Math.log2(most));
    const bottom = Math.max(Math.floor(Math.log2(Math.min(...sizes))) - 1, 0);
    return logarithmic(2 ** bottom, 2 ** (top + ((top - bottom) % 2)));
  }
  return linear(roundAbove(most, 1));
}

function timeScale(seconds) {
  const most = Math.max(...seconds);
  return isWide(seconds) ? logarithmic(Math.min(...seconds) / 2, most * 1.04) : linear(roundAbove(most));
}

function describe(chunk) {
  const expected = chunk.predicted_s === null ? "" : `, predicted ${duration(chunk.predicted_s)}`;
  const memory = chunk.predicted_bytes === null ? "" : ` · memory ${bytes(chunk.predicted_bytes)}`;
  const decodes = chunk.num_decodes ? ` · ${plural(chunk.num_decodes, "decode")} beside it` : "";
  return `${count(chunk.start)}–${count(chunk.end)} · ${plural(chunk.size, "token")} · ${duration(chunk.measured_s)}${expected}${memory}${decodes} · ${chunk.reason}`;
}
