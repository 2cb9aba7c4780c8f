// The box to try a prompt: the server's own OpenAI-compatible stream, with the prompt's progress.

import { headers } from "./connection.js";
import { showCached } from "./elements.js";
import { about, count, duration, percent, plural, rate } from "./format.js";

const byId = (id) => document.getElementById(id);

export class Attempt {
  // `onLocked` is called where the server wants a key.
  constructor(onLocked) {
    this.onLocked = onLocked;
    this.model = null;
    this.abort = null; // of the request in progress
    byId("try").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.abort) this.run(byId("prompt").value, byId("max-tokens").valueAsNumber);
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("try").requestSubmit();
    });
    byId("cancel").addEventListener("click", () => this.abort?.abort());
  }

  update(model) {
    this.model = model;
    byId("try-kind").textContent = model.has_chat_template ? "as a chat, without sampling" : "as plain text, without sampling";
  }

  async run(prompt, maxTokens) {
    this.abort = new AbortController();
    this.begin();
    const shown = new Shown();
    try {
      const response = await fetch(...this.request(prompt, maxTokens, this.abort.signal));
      if (response.status === 401) this.onLocked();
      if (!response.ok) throw new Error(await refusal(response));
      for await (const piece of pieces(response.body)) shown.take(piece);
      shown.end();
    } catch (error) {
      if (this.abort.signal.aborted) shown.end("cancelled");
      else shown.fail(error.message);
    }
    this.abort = null;
    byId("send").disabled = false;
    byId("cancel").disabled = true;
  }

  begin() {
    byId("answer").hidden = false;
    byId("send").disabled = true;
    byId("cancel").disabled = false;
    byId("try-text").textContent = "";
  }

  request(prompt, maxTokens, signal) {
    const isChat = this.model?.has_chat_template ?? true;
    const asked = isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
    const body = {
      model: this.model?.name, ...asked, max_tokens: maxTokens, temperature: 0,
      stream: true, return_progress: true, stream_options: { include_usage: true },
    };
    const url = isChat ? "v1/chat/completions" : "v1/completions";
    return [url, { method: "POST", headers: { "Content-Type": "application/json", ...headers() }, body: JSON.stringify(body), signal }];
  }
}

// What is seen of one attempt.
class Shown {
  constructor() {
    this.startedAt = performance.now();
    this.firstAt = this.lastAt = null;
    this.tokens = 0;
    this.cached = 0; // tokens of the prompt that were in the cache
    this.reason = null;
    this.read(0, 0);
    this.state("Waiting for its turn.");
  }

  take(piece) {
    const { prompt_progress: progress, usage, choices = [] } = piece;
    if (progress) this.progress(progress);
    if (usage) {
      this.tokens = usage.completion_tokens;
      this.cached = usage.prompt_tokens_details.cached_tokens;
    }
    for (const choice of choices) {
      const text = choice.delta?.content ?? choice.text;
      if (text) this.write(text);
      this.reason = choice.finish_reason ?? this.reason;
    }
  }

  progress({ processed, cache, total, time_ms: milliseconds }) {
    this.cached = cache;
    this.read(processed, total, cache);
    // What was in the cache took no time.
    const eta = processed > cache ? (milliseconds / 1000) * ((total - cache) / (processed - cache) - 1) : 0;
    const left = eta > 0 ? `, first token in about ${about(eta)}` : "";
    const cached = cache ? `, ${count(cache)} from cache` : "";
    if (this.firstAt === null) this.state(`Reading: ${count(processed)} of ${plural(total, "token")}${cached}${left}`);
  }

  write(text) {
    this.lastAt = performance.now();
    if (this.firstAt === null) {
      this.firstAt = this.lastAt;
      this.read(1, 1, null);
      this.tokens = 0;
    }
    this.tokens += 1;
    const box = byId("try-text");
    const isAtEnd = box.scrollTop + box.clientHeight > box.scrollHeight - 24;
    box.append(text);
    if (isAtEnd) box.scrollTop = box.scrollHeight;
    this.state(`Generating: ${this.facts()}`, { isQuiet: true });
  }

  facts() {
    if (this.firstAt === null) return `${duration((performance.now() - this.startedAt) / 1000)}, no token yet`;
    const facts = [plural(this.tokens, "token"), `first after ${duration((this.firstAt - this.startedAt) / 1000)}`];
    const seconds = (this.lastAt - this.firstAt) / 1000;
    if (this.tokens > 1 && seconds > 0) facts.splice(1, 0, `${rate((this.tokens - 1) / seconds)} tokens/s`);
    if (this.cached) facts.push(`${plural(this.cached, "prompt token")} from cache`);
    return facts.join(", ");
  }

  end(how = { stop: "done", length: "reached its limit" }[this.reason] ?? this.reason ?? "done") {
    this.state(`${how[0].toUpperCase()}${how.slice(1)}: ${this.facts()}`);
  }

  fail(why) {
    this.state(why);
  }

  // `cached` is null where it stays as it is.
  read(done, total, cached = 0) {
    if (cached !== null) showCached(byId("try-bar").querySelector(".cached"), cached, total);
    byId("try-bar").setAttribute("aria-valuenow", Math.round(percent(done, total)));
    byId("try-bar").querySelector(".fill").style.transform = `scaleX(${percent(done, total) / 100})`;
  }

  // A screen reader is told of every state, but not of every token.
  state(text, { isQuiet = false } = {}) {
    byId("try-state").setAttribute("aria-live", isQuiet ? "off" : "polite");
    byId("try-state").textContent = text;
  }
}

// The JSON of each server-sent event, up to [DONE].
async function* pieces(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const piece = JSON.parse(data);
      if (piece.error) throw new Error(piece.error.message);
      yield piece;
    }
  }
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answers with error ${response.status}.`;
  }
}
