// What is being fed: some samples of a batch, and figures of its leaves. It is asked for only while it can be seen.

import {ago, byId, choice, count, make, setText, size} from "./dom.js";

const EVERY = 3000;

let names = [];
let chosen = () => names[0];
let shown = null;
let shownFeed = null;
let paused = false;
let visible = false;
let now = 0;

export function feeds(news) {
  now = news.now;
  const found = news.status.feeds.map((feed) => feed.name);
  if (found.join("\n") !== names.join("\n")) {
    names = found;
    chosen = choice(byId("preview-feeds"), "preview", Object.fromEntries(names.map((name) => [name, name])), ask);
    byId("preview-feeds").hidden = names.length < 2;
  }
  about();
}

async function ask() {
  const feed = chosen();
  if (feed === undefined) return;
  try {
    const number = feed === shownFeed ? (shown?.number ?? 0) : 0;
    const answer = await fetch(`api/preview?${new URLSearchParams({feed, number})}`);
    const found = answer.ok ? await answer.json() : null;
    if (feed !== chosen()) return;
    if (found || feed !== shownFeed) await draw(feed, found);
  } catch {
    // the page says already that there is no answer
  }
}

async function draw(feed, found) {
  const pictures = found
    ? Math.max(0, ...found.samples.map((sample) => sample.filter((cell) => "picture" in cell).length))
    : 0;
  const drawn = found ? (pictures ? cards(found) : [table(found)]) : [];
  const images = drawn.flatMap((one) => [...one.querySelectorAll("img")]);
  await Promise.allSettled(images.map((image) => image.decode())); // otherwise the page would flicker
  if (feed !== chosen()) return;
  shown = found;
  shownFeed = feed;
  about();
  byId("samples").style.setProperty("--pictures", pictures);
  byId("samples").replaceChildren(...drawn);
  byId("samples").className = pictures ? "cards" : "scroll";
  const more = found?.more_leaves ? [make("p", "quiet", `and ${found.more_leaves} more`)] : [];
  byId("leaves").replaceChildren(...(found?.leaves ?? []).map(leaf), ...more);
}

function about() {
  const what = shown
    ? `${shown.one ? "" : `${shown.samples.length} of ${count(shown.rows, "sample")} of `}batch ${shown.index}` +
      `${shown.lane < 0 ? "" : ` of lane ${shown.lane}`}, epoch ${shown.epoch}, ${size(shown.bytes)}, ` +
      `sent ${ago(Math.max(0, now - shown.taken))} ago`
    : "waiting for the next batch";
  setText(byId("preview-about"), what);
}

function cards({leaves, samples}) {
  return samples.map((sample) => {
    const pictures = sample.filter((cell) => "picture" in cell).map(picture);
    const texts = sample.flatMap((cell, place) => ("text" in cell ? [line(leaves[place].path, cell.text)] : []));
    return make("figure", "", make("div", "pictures", ...pictures), make("figcaption", "", ...texts));
  });
}

function picture(cell) {
  const image = make("img");
  image.onload = () => image.classList.toggle("small", image.naturalWidth < 96 && image.naturalHeight < 96);
  image.alt = "";
  image.src = `data:image/png;base64,${cell.picture}`;
  return image;
}

function line(name, text) {
  const found = make("div", "", make("span", "quiet", name), " ", make("code", "", text));
  found.title = `${name} ${text}`;
  return found;
}

function table({leaves, samples}) {
  const head = make("tr", "", ...leaves.map((leaf) => make("th", "", leaf.path)));
  const rows = samples.map((sample) =>
    make("tr", "", ...sample.map((cell) => make("td", "", make("code", "", cell.text)))),
  );
  return make("table", "", make("thead", "", head), make("tbody", "", ...rows));
}

function leaf({path, kind, range, strange, histogram}) {
  const words = make(
    "div",
    "",
    make("b", "", path),
    " ",
    make("span", "quiet", kind),
    make("div", strange ? "bad" : "quiet", range),
  );
  return make("div", "leaf", words, ...(histogram ? [bars(histogram)] : []));
}

const SVG = "http://www.w3.org/2000/svg";

function bars({low, high, counts, lengths}) {
  const most = Math.max(...counts);
  const [width, height] = [120, 30];
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  const step = width / counts.length;
  counts.forEach((found, place) => {
    const bar = document.createElementNS(SVG, "rect");
    const tall = found ? Math.max(1, (height * found) / most) : 0;
    const box = {x: place * step, y: height - tall, width: Math.max(0.5, step - 0.7), height: tall};
    for (const [name, value] of Object.entries(box)) bar.setAttribute(name, value);
    svg.append(bar);
  });
  const what = lengths ? " bytes" : "";
  return make(
    "div",
    "bars",
    svg,
    make("div", "ends quiet", make("span", "", short(low) + what), make("span", "", short(high) + what)),
  );
}

const short = (value) => (Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(3))));

byId("preview-pause").onclick = (event) => {
  paused = !paused;
  event.target.textContent = paused ? "Continue" : "Pause";
};
new IntersectionObserver((entries) => {
  visible = entries.at(-1).isIntersecting;
}).observe(byId("preview"));
const wanted = () => visible && !paused && !document.hidden && !document.body.classList.contains("lost");
setInterval(() => wanted() && ask(), EVERY);
