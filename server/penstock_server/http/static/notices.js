// The latest warnings and errors of the log, with tracebacks.

import {byId, clock, count, keyed, make, setText} from "./dom.js";

export function show({status, notices}) {
  showLeftOut(status.feeds);
  if (notices.kept === null) return;
  const items = notices.kept.map((one) => ({...one, key: `${one.level}\n${one.text}\n${one.traceback}`})).reverse();
  setText(byId("notices-about"), items.length > 1 ? `${items.length} different ones, the latest first` : "");
  keyed(byId("notice-list"), items, (item) => item.key, create, update);
}

/** How many samples transforms have dropped, and how many splits were skipped, of each feed with any. */
function showLeftOut(feeds) {
  const said = feeds.filter((feed) => feed.dropped || feed.skipped_count).map((feed) => {
    const parts = [];
    if (feed.dropped) parts.push(`${count(feed.dropped, "sample")} dropped`);
    if (feed.skipped_count) parts.push(`${count(feed.skipped_count, "split")} skipped`);
    return `${feed.name}: ${parts.join(", ")}`;
  });
  byId("left-out").hidden = !said.length;
  setText(byId("left-out"), `Left out of ${said.join("; of ")}`);
}

function create(item) {
  const lines = item.text.split("\n");
  const rest = [lines.slice(1).join("\n"), item.traceback].filter((text) => text.trim()).join("\n\n");
  const first = [
    make("time"),
    make("span", `pill ${tag(item)}`, tag(item)),
    make("span", "text", lines[0]),
    make("span", "times"),
  ];
  if (!rest) return make("div", "notice", ...first);
  return make("details", "notice", make("summary", "", ...first), make("pre", "", rest));
}

/** A split that was left out is lost data, and looks unlike a warning that only advises. */
const tag = ({event, level}) => (event === "split_skipped" ? "skipped" : level.toLowerCase());

function update(element, item) {
  const parts = element.tagName === "DETAILS" ? element.firstChild : element;
  setText(parts.querySelector("time"), clock(item.at));
  setText(parts.querySelector(".times"), item.times > 1 ? count(item.times, "time") : "");
}
