// The workers: a table, and on its right what each did, drawn on one canvas for each row. If hosts have joined, the
// workers of each stand below its name.

import {ago, byId, colour, count, exactClock, keyed, make, number, percent, setText, size, tip} from "./dom.js";

const SPAN = 60; // seconds that are drawn
const KEPT = 130;
const LONG = 5; // looks after which another split begins behind a line; a lane with many open splits would be all lines
const GAP = 1; // seconds between two looks from which on nobody looked
const [, IMPORTS, STARTS, GIVEN_UP] = [0, 1, 2, 3];

const looks = new Map(); // of each worker, by its number: {from, to, state, generating, collating, text}
let offset = null;
let until = 0;

export function show({now, status, timeline}) {
  offset ??= Date.now() / 1000 - now;
  until = now;
  take(timeline);
  const found = status.workers.filter((worker) => looks.has(worker.number));
  const more = status.workers.length - found.length + status.more_workers;
  setText(byId("more-workers"), more > 0 ? `and ${more} more` : "");
  byId("worker-rows").classList.toggle("many", found.length > 12);
  keyed(
    byId("worker-rows"),
    status.hosts.length || status.engine ? grouped(found, status) : found,
    (item) => item.group ?? item.number,
    (item) => (item.group ? group() : create(item)),
    (row, item) => {
      if (item.group) {
        setText(row.heading, item.group);
        setText(row.about, item.about);
      } else {
        update(row, item);
        draw(row.canvas, item);
      }
    },
  );
}

/** Puts before the workers of each host what there is to say of it. */
function grouped(workers, {hosts, cpus, engine}) {
  const own = workers.filter((worker) => !worker.host);
  const head = {group: "head", about: count(cpus, "CPU")};
  return [
    ...(own.length ? [head, ...own] : []),
    ...hosts.flatMap((host) => {
      const words = [host.state, host.address, ...(host.cpus ? [count(host.cpus, "CPU")] : [])];
      if (host.lanes) words.push(count(host.lanes, "lane"));
      if (host.rates.bytes) words.push(`${(host.rates.bytes / 1e6).toFixed(1)} MB/s`);
      if (host.awaited !== null) words.push(`${Math.round(100 * host.awaited)} % of the waiting is for it`);
      if (host.silent_seconds >= 3) words.push(`silent for ${ago(host.silent_seconds)}`);
      return [
        {group: `host ${host.name}`, about: words.join(", ")},
        ...workers.filter((worker) => worker.host === host.name),
      ];
    }),
    ...(engine ? missing(engine, hosts) : []),
  ];
}

/** Says how many hosts are yet to come of those that the engine is to run. */
function missing({name, hosts: wanted}, hosts) {
  const coming = wanted - hosts.filter((host) => host.name.startsWith(`${name}-`)).length;
  return coming > 0 ? [{group: name, about: `${count(coming, "more host")} of ${wanted} to come`}] : [];
}

function group() {
  const [heading, about] = [make("strong"), make("span", "quiet")];
  const cell = make("td", "", heading, " ", about);
  cell.colSpan = 7;
  return Object.assign(make("tr", "host", cell), {heading, about});
}

function take(timeline) {
  for (const [at, cells] of timeline.looks) {
    for (const [number, state, generating, collating, text] of cells) {
      if (!looks.has(number)) looks.set(number, []);
      const before = looks.get(number).at(-1)?.to ?? -Infinity;
      if (at <= before) continue; // another host's clock
      const cell = {
        from: at - before < GAP ? before : at - 0.2,
        to: at,
        state,
        generating: generating / 1000,
        collating: collating / 1000,
        text: timeline.texts[text],
      };
      looks.get(number).push(cell);
    }
  }
  for (const [number, cells] of looks) {
    const first = cells.findIndex((cell) => cell.to > until - KEPT);
    if (first < 0) looks.delete(number);
    else cells.splice(0, first);
  }
}

function create(worker) {
  const canvas = make("canvas", "time");
  const bar = make("div", "share", ...["generating", "collating", "lacking"].map((name) => make("i", name)));
  const cells = ["", "", "right", "right", "right", "what", ""].map((name) => make("td", name));
  cells[1].append(bar);
  cells[6].append(canvas);
  canvas.onmousemove = (event) => tip(event, describe(worker, event));
  canvas.onmouseleave = (event) => tip(event, null);
  const row = make("tr", "", ...cells);
  row.canvas = canvas;
  return row;
}

function update(row, worker) {
  const {shares} = worker;
  const [number, bar, busy, memory, restarts, what] = row.children;
  setText(number, worker.name.slice(worker.name.lastIndexOf("/") + 1));
  number.title = worker.pid ? `pid ${worker.pid}` : "no process";
  const parts = shares ? [shares.generating, shares.collating, shares.cpu_wait] : [0, 0, 0];
  [...bar.firstChild.children].forEach((part, place) => (part.style.width = `${100 * parts[place]}%`));
  const names = {generating: "generating", collating: "collating", cpu_wait: "no CPU", idle: "idle"};
  const words = Object.entries(names).map(([key, name]) => `${name} ${percent(shares?.[key])}`);
  bar.title = shares ? words.join(", ") : "";
  setText(busy, shares ? percent(shares.generating + shares.collating) : "");
  setText(memory, worker.memory ? size(worker.memory) : "");
  setText(restarts, String(worker.restarts));
  restarts.classList.toggle("fair", worker.restarts > 0);
  const special = stateOf(worker);
  setText(what, special ?? reads(worker.number) ?? "idle");
  what.title = what.textContent;
  what.classList.toggle("special", special !== null);
}

/** What a worker has read in the last second; null if nothing. */
function reads(number) {
  const cells = (looks.get(number) ?? []).slice(-5);
  return cells.findLast((cell) => cell.text)?.text ?? null;
}

function stateOf(worker) {
  if (worker.given_up) return "given up: see the log";
  if (worker.stopped) return "stopped by a signal";
  if (!worker.ready) return worker.doing?.what ?? "starting";
  return worker.leaving ? "leaving" : null;
}

function draw(canvas, {number}) {
  const ratio = devicePixelRatio;
  const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, {width, height});
  const context = canvas.getContext("2d");
  const names = ["generating", "collating", "importing", "down", "idle", "unseen"];
  const colours = Object.fromEntries(names.map((name) => [name, colour(name)]));
  context.fillStyle = colours.unseen;
  context.fillRect(0, 0, width, height);
  const place = (at) => Math.round((width * (at - until + SPAN)) / SPAN);
  let [before, long] = ["", 0];
  for (const cell of looks.get(number) ?? []) {
    const [left, right] = [place(cell.from), place(cell.to)];
    if (right <= 0) continue;
    const bar = (name, from, share) => {
      const [bottom, top] = [Math.round(height * from), Math.round(height * (from + share))];
      context.fillStyle = colours[name];
      context.fillRect(left, height - top, right - left, top - bottom);
    };
    bar("idle", 0, 1);
    if (cell.state === STARTS || cell.state === GIVEN_UP) bar("down", 0, 1);
    else if (cell.state === IMPORTS) bar("importing", 0, 1);
    else {
      bar("generating", 0, cell.generating);
      bar("collating", cell.generating, cell.collating);
    }
    if (cell.text && cell.text !== before) {
      if (long >= LONG) {
        context.fillStyle = colours.idle;
        context.fillRect(left, 0, Math.max(1, Math.round(ratio)), height);
      }
      [before, long] = [cell.text, 0];
    }
    long++;
  }
}

/** What a worker did at the pointer: what it read, for how long, and how the time was spent. */
function describe(worker, event) {
  const box = event.target.getBoundingClientRect();
  const at = until - SPAN + (SPAN * (event.clientX - box.left)) / box.width;
  const cells = looks.get(worker.number) ?? [];
  const place = cells.findIndex((cell) => cell.from <= at && at < cell.to);
  const cell = cells[place];
  if (!cell) return at > until || !cells.length ? null : ["nobody looked at this time"];
  let [first, end] = [place, place];
  const same = (other) =>
    other && other.text === cell.text && other.state === cell.state && (cell.text || !busy(other) === !busy(cell));
  while (same(cells[first - 1]) && cells[first - 1].to === cells[first].from) first--;
  while (same(cells[end + 1]) && cells[end + 1].from === cells[end].to) end++;
  const seconds = cells[end].to - cells[first].from;
  const mean = (key) =>
    cells.slice(first, end + 1).reduce((sum, one) => sum + one[key] * (one.to - one.from), 0) / seconds;
  const when = `${exactClock(cells[first].from + offset)}, ${first === 0 ? "at least " : ""}${number(seconds)} s`;
  const states = {
    [IMPORTS]: "imports your modules",
    [STARTS]: "had no process for some of this time",
    [GIVEN_UP]: "given up",
  };
  if (cell.state in states) return [`worker ${worker.name}: ${states[cell.state]}`, when];
  const [generating, collating] = [mean("generating"), mean("collating")];
  const idle = Math.max(0, 1 - generating - collating);
  return [
    `worker ${worker.name}: ${cell.text || (busy(cell) ? "at work" : "idle")}`,
    when,
    `generating ${percent(generating)}, collating ${percent(collating)}, idle ${percent(idle)}`,
  ];
}

const busy = (cell) => cell.generating + cell.collating > 0;
