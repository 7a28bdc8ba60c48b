// Throughput and readiness of each feed over time, drawn by uPlot.

import {byId, choice, clock, colour, keyed, make, number, percent, setText} from "./dom.js";

const UNITS = {batches: "batches/s", samples: "samples/s", bytes: "MB/s"};
const RANGES = {120: "2 min", 900: "15 min", 86400: "24 h"};
const MOST = {seconds: 900, minutes: 1440};
const COLOURS = 8;

const tracks = {seconds: {at: [], feeds: {}}, minutes: {at: [], feeds: {}}};
const charts = {};
let offset = null; // from the daemon's seconds to those of the clock
let until = 0;
let names = [];
let hovered = null;

const unit = choice(byId("unit"), "unit", UNITS, () => rebuild());
const range = choice(byId("range"), "range", RANGES, () => rebuild());

export const feedColour = (name) => colour(`feed-${names.indexOf(name) % COLOURS}`);

/** Of the feeds that somebody reads: the one whose consumers had something to take for the smallest share of the last
 * seconds, and this share; or null. */
export function leastReady({streams}) {
  const read = new Set(streams.filter((stream) => stream.reading).map((stream) => stream.feed));
  const feeds = Object.entries(tracks.seconds.feeds).filter(([name]) => read.has(name));
  const found = feeds.map(([name, feed]) => ({name, share: feed.ready.at(-1) ?? null}));
  return found.filter((one) => one.share !== null).sort((one, other) => one.share - other.share)[0] ?? null;
}

export function add({now, rates, status}) {
  offset ??= Date.now() / 1000 - now;
  until = now + offset;
  for (const [name, track] of Object.entries(tracks)) append(track, rates[name], MOST[name]);
  const found = status.feeds.map((feed) => feed.name);
  if (found.join("\n") !== names.join("\n")) {
    names = found;
    rebuild();
  }
  draw();
}

function append(track, news, most) {
  const before = track.at.length;
  track.at.push(...news.at.map((at) => at + offset));
  for (const [name, columns] of Object.entries(news.feeds)) {
    const feed = (track.feeds[name] ??= {});
    for (const [key, values] of Object.entries(columns)) {
      feed[key] ??= new Array(before).fill(null);
      feed[key].push(...values);
      feed[key].splice(0, feed[key].length - most);
    }
  }
  track.at.splice(0, track.at.length - most);
}

const track = () => (Number(range()) > MOST.seconds ? tracks.minutes : tracks.seconds);

function data(key) {
  const {at, feeds} = track();
  const scale = key === "bytes" ? 1e-6 : 1;
  const values = names.map((name) => feeds[name]?.[key]?.map((value) => (value === null ? null : value * scale)));
  return [at, ...values.map((found) => found ?? at.map(() => null))];
}

function rebuild() {
  for (const [id, chart] of Object.entries(charts)) {
    chart.destroy();
    delete charts[id];
  }
  if (!names.length) return;
  hovered = null;
  charts.throughput = chart("throughput", unit(), (most) => [0, Math.max(most * 1.1, 1)], number);
  charts.readiness = chart("readiness", "ready", () => [0, 1], percent, {splits: () => [0, 0.5, 1]});
  draw();
}

function draw() {
  if (!charts.throughput) return;
  for (const [id, key] of [
    ["throughput", unit()],
    ["readiness", "ready"],
  ]) {
    const found = charts[id];
    found.batch(() => {
      found.setData(data(key), false);
      found.setScale("x", {min: until - Number(range()), max: until});
      found.setScale("y", {min: null, max: null});
    });
  }
  legend();
}

const times = (_, at) => at.map((seconds) => clock(seconds).slice(0, Number(range()) > 3600 ? 5 : 8));

const nothing = (_, at) => at.map(() => "");

/** Makes the chart in element `id` of the columns `key`. Only the lower one names the times. */
function chart(id, key, scale, shown, more = {}) {
  const lower = id === "readiness";
  const grid = {stroke: () => colour("line"), width: 1};
  const axis = {stroke: () => colour("quiet"), grid, ticks: {show: false}, font: "11px system-ui"};
  const line = (name) => ({label: name, stroke: () => feedColour(name), width: 1.6, points: {show: false}});
  return new uPlot(
    {
      ...measured(id),
      legend: {show: false},
      cursor: {y: false, sync: {key: "rates"}, points: {size: 5}, drag: {x: false, y: false}},
      scales: {x: {time: true}, y: {range: (_, least, most) => scale(most)}},
      axes: [
        {...axis, size: lower ? 22 : 6, space: 70, values: lower ? times : nothing},
        {...axis, size: 52, space: 26, values: (_, at) => at.map(shown), ...more},
      ],
      series: [{}, ...names.map(line)],
      hooks: {setCursor: [(self) => hover(self.cursor.idx)]},
      padding: [8, 28, 0, 0],
    },
    data(key),
    byId(id),
  );
}

const measured = (id) => ({width: byId(id).clientWidth, height: byId(id).clientHeight});

function hover(place) {
  hovered = place ?? null;
  legend();
}

function legend() {
  const {at, feeds} = track();
  const place = hovered ?? at.length - 1;
  const scale = unit() === "bytes" ? 1e-6 : 1;
  const items = names.map((name) => {
    const feed = feeds[name] ?? {};
    const value = feed[unit()]?.[place];
    const ready = feed.ready?.[place];
    const rate = value === null || value === undefined ? "-" : `${number(value * scale)} ${UNITS[unit()]}`;
    return {name, text: ready === null || ready === undefined ? rate : `${rate}, readiness ${percent(ready)}`};
  });
  const averages = track() === tracks.seconds ? "averages of 10 s" : "averages of a minute";
  const when = hovered === null ? averages : clock(at[place]);
  keyed(
    byId("legend"),
    [...items, {name: "", text: when}],
    (item) => item.name,
    (item) => {
      return make(
        "span",
        item.name ? "feed" : "quiet",
        ...(item.name ? [make("i"), make("b", "", item.name)] : []),
        make("span"),
      );
    },
    (element, item) => {
      if (item.name) element.firstChild.style.background = feedColour(item.name);
      setText(element.lastChild, item.text);
    },
  );
}

new ResizeObserver(() => Object.entries(charts).forEach(([id, found]) => found.setSize(measured(id)))).observe(
  byId("rates"),
);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);
