// The consumers: what they wait for, in words.

import {byId, keyed, make, number, percent, setText} from "./dom.js";

const MOST = 32;

export function show({status}) {
  const seen = new Map();
  const found = status.streams.slice(0, MOST).map((stream) => {
    const name = [stream.feed, stream.client, stream.transport, stream.rank].join("\n");
    seen.set(name, (seen.get(name) ?? 0) + 1);
    return {...stream, key: `${name}\n${seen.get(name)}`};
  });
  const more = status.streams.length - found.length + status.more_streams;
  const rest = more
    ? [`and ${more} more`]
    : found.length
      ? []
      : ["Nobody reads. Trainers connect to:", ...status.feeds.map((feed) => feed.url)];
  const items = [...found, ...rest.map((text) => ({key: `\n${text}`, text}))];
  keyed(byId("consumer-list"), items, (item) => item.key, create, update);
}

function create(item) {
  if (item.text !== undefined) return make("p", "quiet");
  const bar = make("div", "share", make("i", "waits"));
  const head = make("div", "row", make("b"), make("span", "right"), bar);
  return make("div", "consumer", head, make("p", "quiet"), make("p"));
}

function update(element, item) {
  if (item.text !== undefined) {
    setText(element, item.text);
    return;
  }
  const [head, about, verdict] = element.children;
  const [name, waits, bar] = head.children;
  const wait = item.reading ? item.waiting : null;
  setText(name, item.client);
  const epoch = item.epoch === null ? "not begun" : item.reading ? `epoch ${item.epoch}` : `epoch ${item.epoch} is over`;
  const apart = item.apart_because ? `, shared with no other job (${item.apart_because})` : "";
  const batches = item.behind === 1 ? "1 batch" : `${number(item.behind)} batches`;
  const behind = item.behind ? `, ${batches} behind the first of them` : "";
  const shared = item.jobs > 1 ? `, shared by ${item.jobs} jobs${behind}` : apart;
  setText(about, `${item.feed}, ${item.transport}, ${epoch}, ${item.sent - item.handed} queued${shared}`);
  setText(waits, wait === null ? "" : `waits ${percent(wait)}`);
  element.dataset.state = wait === null ? "" : wait >= 0.5 ? "bad" : wait >= 0.1 ? "fair" : "good";
  bar.firstChild.style.width = `${100 * (wait ?? 0)}%`;
  setText(
    verdict,
    item.verdict || (item.reading ? "Looking for some seconds before there is a verdict." : "It reads no epoch now."),
  );
}
