// Puts the page together: a question to the server, and each part shows what concerns it.

import { Attempt } from "./attempt.js";
import { Connection, hasKey, setKey } from "./connection.js";
import { Ended } from "./ended.js";
import { Explain } from "./explain.js";
import { showFigures } from "./figures.js";
import { about } from "./format.js";
import { learn } from "./names.js";
import { People } from "./people.js";
import { Requests } from "./requests.js";
import { Stages } from "./stages.js";
import { Timeline } from "./timeline.js";

const byId = (id) => document.getElementById(id);

const people = new People();
const timeline = new Timeline(byId("timeline"), byId("step-detail"), people);
const ended = new Ended(byId("ended-part"), byId("ended"));
const requests = new Requests(
  { list: byId("requests"), none: byId("requests-none"), more: byId("requests-more"), counter: byId("requests-count") },
);
const stages = new Stages(byId("stages-card"), byId("stages"), byId("stages-count"));
const attempt = new Attempt(askForKey);
const explain = new Explain([byId("requests"), byId("ended")], askForKey);

const connection = new Connection({
  status(status) {
    learn(status);
    people.follow([...status.steps, ...status.in_flight], new Set(status.requests.map((request) => request.id)));
    timeline.update(status.steps, status.in_flight, status.uptime_s);
    requests.update(status.requests, status.latency.inter_token?.p50, status.uptime_s);
    ended.update(status.ended, requests);
    byId("requests-hint").hidden = requests.rows.size + ended.rows.size === 0;
    explain.update(status.requests);
    showFigures(status);
    stages.update(status.stages, status.uptime_s);
    attempt.update(status.model);
    showPace(status.pace, timeline.isPaused);
    byId("key-form").hidden = true;
    byId("links").hidden = hasKey(); // a link carries no key
    if (status.is_healthy && status.missing) {
      showState("gone", "waiting");
      showNotice(`Requests wait: ${status.missing}.`);
    } else if (status.is_healthy) {
      showState("live", "live");
      byId("notice").hidden = true;
    } else {
      showState("gone", "stopped");
      showNotice("The engine has stopped after an error: restart the server.");
    }
  },
  locked: askForKey,
  lost(why, retryMs) {
    showState("gone", "no answer");
    showNotice(`${why} Its last figures are shown; the next try is in ${about(retryMs / 1000)}.`);
  },
  restarted() {
    timeline.clear();
    requests.clear();
    explain.restarted();
  },
});

function showState(state, text) {
  byId("connection").dataset.state = state;
  if (byId("connection-text").textContent !== text) byId("connection-text").textContent = text;
}

// Said only while steps run: of a pause nobody knows.
function showPace({ ratio, is_slow: isSlow }, isPaused) {
  byId("pace").hidden = !isSlow || isPaused;
  if (isSlow) byId("pace").textContent = `The machine seems busy: steps take ${ratio.toFixed(1)} times as long as they did at their fastest.`;
}

function showNotice(text) {
  byId("notice").hidden = false;
  if (byId("notice-text").textContent !== text) byId("notice-text").textContent = text;
}

function askForKey() {
  showState("locked", "locked");
  byId("notice").hidden = true;
  byId("key-form").hidden = false;
  byId("key-text").textContent = hasKey() ? "The server does not accept this key." : "The server asks for a key. It is kept until this tab is closed.";
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  connection.ask();
});
byId("retry").addEventListener("click", () => connection.ask());
for (const button of document.querySelectorAll("[data-window]")) {
  button.addEventListener("click", () => {
    for (const other of document.querySelectorAll("[data-window]")) other.setAttribute("aria-pressed", other === button);
    timeline.show(Number(button.dataset.window));
  });
}

connection.ask();
