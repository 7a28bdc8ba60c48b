// The figures of the moment, in large.

import {byId, count, keyed, make, number, percent, setText, size} from "./dom.js";
import {leastReady} from "./charts.js";

export function show({status}) {
  const sum = (key) => status.feeds.reduce((total, feed) => total + feed.rates[key], 0);
  const ready = leastReady(status);
  const running = status.workers.filter((worker) => worker.shares);
  const busy = running.reduce((total, {shares}) => total + shares.generating + shares.collating, 0);
  const pss = status.workers.reduce((total, {memory}) => total + memory, 0);
  const restarts = status.workers.reduce((total, worker) => total + worker.restarts, 0);
  const reading = status.streams.filter((stream) => stream.reading).length;
  const readiness =
    ready === null
      ? {value: "-", note: reading ? "too early to tell" : "nobody reads"}
      : {
          value: percent(ready.share),
          note: status.feeds.length > 1 ? `of ${ready.name}, the lowest` : "how often a batch is there",
          state: ready.share <= 0.5 ? "bad" : ready.share <= 0.9 ? "fair" : "good",
        };
  const all = [
    {name: "readiness", ...readiness},
    {name: "batches/s", value: number(sum("batches")), note: `${number(sum("samples"))} samples/s`},
    {name: "MB/s", value: number(sum("bytes") / 1e6), note: `to ${reading} of ${status.streams.length + status.more_streams} consumers`},
    {
      name: "workers busy",
      value: running.length ? busy.toFixed(1) : "-",
      note: `of ${status.workers.length + status.more_workers}${restarts ? `, ${count(restarts, "restart")}` : ""}`,
      state: restarts ? "fair" : "",
    },
    {name: "batches in memory", value: size(status.memory.arena), note: `of ${size(status.memory.allowed)}`},
    {name: "workers' memory", value: pss ? size(pss) : "-", note: "shared pages in part"},
  ];
  keyed(
    byId("tiles"),
    all,
    (tile) => tile.name,
    (tile) => {
      return make("div", "tile", make("span", "name", tile.name), make("strong"), make("span", "quiet"));
    },
    (element, tile) => {
      element.dataset.state = tile.state ?? "";
      setText(element.children[1], tile.value);
      setText(element.children[2], tile.note);
    },
  );
}
