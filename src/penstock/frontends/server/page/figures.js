// The plain figures: queue, rates, cache, latency, settings.

import { bytes, count, duration, longDuration, percent, plural, rate } from "./format.js";
import { chunkWords, memoryWords, targetWords } from "./sizes.js";

// Rates are means over so many seconds of the past.
const RATE_S = 5;
const samples = []; // of all tokens so far, by the server's clock

const byId = (id) => document.getElementById(id);

function write(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

export function showFigures(status) {
  showNow(status);
  showCache(status.cache);
  showReuse(status.reuse);
  showLatency("first-token", status.latency.first_token);
  showLatency("inter-token", status.latency.inter_token);
  const waits = status.latency.inter_token?.count ?? 0;
  write("latency-count", waits ? `last ${plural(waits, "token")}` : "");
  showSettings(status);
}

function showNow(status) {
  write("running", count(status.num_running));
  write("running-of", `of ${count(status.settings.max_running)}`);
  write("waiting", count(status.num_waiting));
  write("waiting-of", `of ${count(status.settings.max_waiting)}`);
  showErrors(status.errors);
  const now = { at: status.uptime_s, ...status.tokens };
  if (samples.length && now.at < samples.at(-1).at) samples.length = 0; // another server by now
  samples.push(now);
  while (samples.length > 2 && samples[1].at <= now.at - RATE_S) samples.shift();
  const passed = now.at - samples[0].at || 1;
  write("read-rate", rate((now.read - samples[0].read) / passed));
  write("write-rate", rate((now.generated - samples[0].generated) / passed));
}

function showErrors({ failed, refused }) {
  const all = Object.values(refused).reduce((sum, number) => sum + number, 0);
  write("failed", count(failed));
  write("refused", `failed, ${count(all)} refused`);
  byId("refused").title = Object.entries(refused).map(([status, number]) => `${count(number)} with status ${status}`).join(", ");
  byId("errors").classList.toggle("some", failed > 0);
}

function showCache(cache) {
  const { blocks_total: ofBlocks, slots_total: ofSlots } = cache;
  write("cache-tokens", `${count(ofBlocks * cache.block_tokens)} tokens in blocks of ${count(cache.block_tokens)}`);
  showGauge("blocks", cache.blocks_used, cache.blocks_idle, ofBlocks);
  byId("slots-gauge").hidden = ofSlots === 0;
  showGauge("slots", cache.slots_used, cache.slots_idle, ofSlots);
}

// Idle ones are kept for requests that begin alike, and given up as soon as others need them.
function showGauge(id, used, idle, total) {
  const gauge = byId(id);
  const words = [`${count(used)} used`, ...(idle ? [`${count(idle)} idle`] : []), `${count(total - used - idle)} free`].join(", ");
  write(`${id}-text`, words);
  gauge.setAttribute("aria-valuemax", total);
  gauge.setAttribute("aria-valuenow", used);
  gauge.setAttribute("aria-valuetext", words);
  gauge.querySelector(".fill").style.transform = `scaleX(${percent(used, total) / 100})`;
  gauge.querySelector(".kept").style.transform = `scaleX(${percent(used + idle, total) / 100})`;
}

function showReuse(reuse) {
  const { memory_tokens: memory, disk_tokens: disk, num_hits: hits, disk_bytes: stored, num_disk_damaged: damaged, num_disk_dropped: dropped } = reuse;
  byId("cache-key").hidden = byId("reuse").hidden = !reuse.is_on;
  const found = memory + disk;
  write("found", `${count(found)} of ${plural(found + reuse.missed_tokens, "prompt token")}`);
  const where = [memory && `${count(memory)} in memory`, disk && `${count(disk)} on disk`].filter(Boolean);
  write("found-where", where.join(", "));
  write("hits", `${count(hits)} of ${count(hits + reuse.num_misses)} found some`);
  byId("disk-name").hidden = byId("disk").hidden = stored === null;
  if (stored !== null) write("disk-text", `${bytes(stored)} of ${bytes(reuse.disk_limit_bytes)}`);
  const trouble = [damaged && `${plural(damaged, "file")} damaged`, dropped && `${count(dropped)} not written`].filter(Boolean);
  write("disk-trouble", trouble.join(", "));
}

function showLatency(id, percentiles) {
  const cells = byId(id).querySelectorAll("td");
  ["p50", "p95", "p99", "max"].forEach((name, at) => {
    cells[at].textContent = percentiles ? duration(percentiles[name]) : "–";
  });
}

function showSettings({ model, settings, reuse, uptime_s: uptime }) {
  const { size, reason } = chunkWords(settings);
  write("model", model.name);
  write("chunk", size);
  write("chunk-reason", reason);
  write("targets", targetWords(settings) || "none");
  write("step-memory", memoryWords(settings));
  write("policy", settings.policy);
  write("policy-gap", `each request gets a token ${settings.longest_decode_gap === 1 ? "in every step" : `within ${plural(settings.longest_decode_gap, "step")}`}`);
  write("step-tokens", settings.step_tokens === null ? "a chunk and every decode" : plural(settings.step_tokens, "token"));
  const shared = settings.isolates ? "between requests with the same key" : "between all requests";
  write("reuse-of", reuse.is_on ? `prefixes are shared ${shared}` : "off");
  write("strict", settings.strict ? "on: alone or beside others, the same" : "off");
  const { context_tokens: context, max_request_tokens: most } = model;
  write("context", most < context ? `${plural(most, "token")} by the cache, ${count(context)} by the model` : plural(context, "token"));
  write("uptime", longDuration(uptime));
  document.title = `${model.name} · Penstock`;
}
