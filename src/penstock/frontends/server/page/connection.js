// Asks the server how it is, again and again: often while the page is seen, seldom while it is hidden or nobody answers.

const SEEN_MS = 500;
const HIDDEN_MS = 10_000;
const ANSWER_MS = 8_000;
const FIRST_RETRY_MS = 1_000;
const LAST_RETRY_MS = 15_000;
const KEY = "penstock-api-key";

export function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export class Connection {
  // on.status(json), on.locked() where a key is needed, on.lost(why, retryMs): the handlers may not throw.
  constructor(on) {
    this.on = on;
    this.timer = null;
    this.isAsking = false;
    this.retryMs = FIRST_RETRY_MS;
    this.lastIndex = -1;
    this.lastUptime = 0;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.ask();
    });
  }

  async ask() {
    if (this.isAsking) return;
    this.isAsking = true;
    clearTimeout(this.timer);
    let wait = null;
    try {
      wait = await this.fetchOnce();
    } catch (error) {
      wait = this.lose(error.name === "TimeoutError" ? "The server takes too long to answer." : "The server does not answer.");
    }
    this.isAsking = false;
    if (wait !== null) this.timer = setTimeout(() => this.ask(), document.hidden ? Math.max(wait, HIDDEN_MS) : wait);
  }

  // How long to wait before the next question; null: until a key is given.
  async fetchOnce() {
    const options = { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) };
    const response = await fetch(`status?steps_after=${this.lastIndex}`, options);
    if (response.status === 401) {
      this.on.locked();
      return null;
    }
    if (!response.ok) return this.lose(`The server answers with error ${response.status}.`);
    const status = await response.json();
    if (status.uptime_s < this.lastUptime) {
      // Another server by now: its steps count from 0 again.
      this.lastUptime = 0;
      this.lastIndex = -1;
      this.on.restarted();
      return 0;
    }
    this.lastUptime = status.uptime_s;
    if (status.steps.length) this.lastIndex = status.steps.at(-1).index;
    this.retryMs = FIRST_RETRY_MS;
    this.on.status(status);
    return SEEN_MS;
  }

  lose(why) {
    const wait = this.retryMs;
    this.retryMs = Math.min(this.retryMs * 2, LAST_RETRY_MS);
    this.on.lost(why, wait);
    return wait;
  }
}
