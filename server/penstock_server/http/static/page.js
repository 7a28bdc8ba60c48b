// Asks the daemon once a second for what is new, and hands it to the parts of the page.
// A tab that nobody sees does not ask.

import {ago, byId, count, keyed, make, percent, setText} from "./dom.js";
import * as charts from "./charts.js";
import * as consumers from "./consumers.js";
import * as notices from "./notices.js";
import * as preview from "./preview.js";
import * as tiles from "./tiles.js";
import * as workers from "./workers.js";

const EVERY = 1000;
const PATIENCE = 10000;

const had = {seconds: 0, minutes: 0, looks: 0, changes: 0};
let daemon = null;
let answered = Date.now();

async function ask() {
  const signal = AbortSignal.timeout(PATIENCE);
  const answer = await fetch(`api/live?${new URLSearchParams(had)}`, {signal});
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

async function again() {
  if (!document.hidden) {
    try {
      const news = await ask();
      if (daemon !== null && daemon !== news.status.id) {
        location.reload(); // another daemon: what is drawn here was the last one's
        return;
      }
      daemon = news.status.id;
      answered = Date.now();
      show(news);
    } catch (error) {
      lost(error);
    }
  }
  setTimeout(again, EVERY);
}

function show(news) {
  had.seconds = news.rates.seconds.count;
  had.minutes = news.rates.minutes.count;
  had.looks = news.timeline.count;
  had.changes = news.notices.changes;
  document.body.classList.remove("lost");
  setText(byId("link"), "");
  header(news.status);
  charts.add(news);
  tiles.show(news);
  consumers.show(news);
  workers.show(news);
  notices.show(news);
  preview.feeds(news);
  const ready = charts.leastReady(news.status);
  document.title = ready === null ? "Penstock" : `readiness ${percent(ready.share)} - Penstock`;
}

function header(status) {
  const state = status.draining ? "draining" : status.ready ? "serving" : "starting";
  setText(byId("endpoint"), status.endpoint);
  setText(byId("state"), state);
  byId("state").className = `pill ${state}`;
  byId("failing").hidden = !status.failing.length;
  keyed(
    byId("failing"),
    status.failing,
    (one) => one.feed,
    () => make("p"),
    (line, {feed, times, error}) => {
      setText(line, `Feed ${feed} cannot start, and is tried again (failed ${count(times, "time")}): ${error}`);
    },
  );
  const doing = state === "starting" && !status.failing.length ? `${status.phase}, ` : "";
  setText(byId("about"), `${doing}pid ${status.pid}, up ${ago(status.seconds)}, ${count(status.cpus, "CPU")}`);
}

function lost(error) {
  document.body.classList.add("lost");
  document.title = "no answer - Penstock";
  const seconds = Math.round((Date.now() - answered) / 1000);
  setText(byId("link"), `no answer for ${ago(seconds)}, asking again`);
  byId("link").title = String(error);
}

document.addEventListener("visibilitychange", () => {
  answered = Date.now();
});
again();
