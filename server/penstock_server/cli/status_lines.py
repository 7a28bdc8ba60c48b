"""The output of `penstock status`: a daemon's status as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock_proto.status.figures import count, percent, size
from penstock_proto.text import one_line


def status_lines(state: dict[str, Any]) -> Iterator[str]:
    """Yield a daemon's status, line by line."""
    draining = "  draining: stops when the epochs that are being read have finished" if state.get("draining") else ""
    yield f"{state['endpoint']}  pid {state['pid']}  up {state['seconds']:.0f} s{draining}"
    memory = state["memory"]
    arena, reserved, allowed = (size(memory[key]) for key in ("arena", "reserved", "allowed"))
    yield f"memory   {arena} in slots, {reserved} reserved, {allowed} allowed"
    if state.get("adjusts_workers"):
        yield f"workers  {len(state['workers']) + state.get('more_workers', 0)}, adjusted to the load"
    if engine := state.get("engine"):
        adjusted = ", adjusted to the load from {} to {}".format(*engine["adjusts"]) if engine["adjusts"] else ""
        yield f"hosts    {engine['hosts']} on {engine['name'].capitalize()}{adjusted}"
    for host in state.get("hosts", []):
        yield f"host     {_word(host['name'])}: {_host(host)}"
    if more := state.get("more_hosts", 0):
        yield f"host     {more} more"
    for worker in state["workers"]:
        yield f"worker   {_word(worker.get('name', worker['number']))}: {_worker(worker)}"
    if more := state.get("more_workers", 0):
        yield f"worker   {more} more"
    for feed in state.get("failing", []):
        times = count(feed["times"], "try", "tries")
        yield f"feed     {feed['feed']}: not ready after {times}, trying again: {_word(feed['error'])}"
    for feed in state["feeds"]:
        epoch = f", {feed['batches']} batches an epoch" if feed["batches"] is not None else ""
        if feed.get("segment") is not None:
            epoch += f", segments of {count(feed['segment'], 'sample')}{'' if epoch else ', endless'}"
        yield f"feed     {feed['url']}  {feed['spec']}, batch size {feed['batch_size']}{epoch}"
        if feed.get("cache"):
            yield f"cache    {feed['name']}: {_cache(feed['cache'])}"
        for part, cache in feed.get("part_caches", {}).items():
            yield f"cache    {feed['name']}, {_word(part)}: {_cache(cache)}"
        if feed.get("checks", {}).get("different"):
            yield f"differs  {feed['name']}: samples differ when another worker makes them again; the log says why"
        skipped = feed.get("skipped", [])
        for split in skipped:
            name = _word(split.get("split"))
            yield (
                f"skipped  {feed['name']}, epoch {split.get('epoch')}: "
                f"{name if name.startswith('segment ') else f'split {name}'} after "
                f"{count(split.get('samples', 0), 'sample')}: {_word(split.get('why'))}"
            )
        more = feed.get("skipped_count", 0) - len(skipped)
        if more > 0:
            yield f"skipped  {feed['name']}: {count(more, 'more split' if skipped else 'split')}"
    for stream in state["streams"]:
        yield f"stream   {_stream(stream)}"
        if stream.get("headline"):
            yield f"         {_word(stream['headline'])}"
    if more := state.get("more_streams", 0):
        yield f"stream   {more} more"
    elif not state["streams"]:
        yield "stream   none"


def _cache(cache: dict[str, Any]) -> str:
    hits = cache.get("hits", 0)
    opened = hits + cache.get("misses", 0)
    rate = f"{hits} of {count(opened, 'split')} read from it ({100 * hits // max(1, opened)} %)"
    problem = f"; {_word(cache['problem'])}" if cache.get("problem") else ""
    return f"{size(cache.get('bytes', 0))} in {_word(cache.get('directory'))}, {rate}{problem}"


def _host(host: dict[str, Any]) -> str:
    words = [f"{host['state']} at {host['address']}", f"{host['ready']} of {count(host['workers'], 'worker')} ready"]
    if host["lanes"]:
        words.append(count(host["lanes"], "lane"))
    words.append(count(host["slots"], "slot"))
    if host["rates"]["bytes"]:
        words.append(f"{host['rates']['bytes'] / 1e6:.1f} MB/s")
    if host["awaited"] is not None:
        words.append(f"{percent(host['awaited'])} of the waiting is for it")
    if host["memory"]:
        used, allowed = size(host["memory"]["used"]), size(host["memory"]["allowed"])
        words.append(f"{used} of {allowed} in use")
    words.append(f"{size(host['received_bytes'])} received")
    if host["fetched_bytes"]:
        mapped = f" ({size(host['lent_bytes'])} mapped)" if host["lent_bytes"] else ""
        words.append(f"{size(host['fetched_bytes'])} fetched by consumers{mapped}")
    if host["unsent_bytes"]:
        words.append(f"{size(host['unsent_bytes'])} wait for the network")
    if host["silent_seconds"] >= 3:
        words.append(f"silent for {host['silent_seconds']:.0f} s")
    return ", ".join(words)


def _worker(worker: dict[str, Any]) -> str:
    restarted = f"restarted {count(worker.get('restarts', 0), 'time')}"
    if worker.get("given_up"):
        return f"given up, {restarted}: its processes died before they were ready, see the log"
    if not worker.get("pid"):
        return f"starting, {restarted}"
    words = [f"pid {worker['pid']}", restarted]
    if worker.get("memory"):
        words.append(size(worker["memory"]))
    if worker.get("processes"):
        words.append(f"with {count(worker['processes'], 'process', 'processes')} of user code")
    if worker.get("leaving"):
        words.append("leaving")
    doing = worker.get("doing")
    if worker.get("stopped"):
        words.append("stopped by a signal")
    if not worker.get("ready", True):
        words.append("importing")
    elif not worker.get("makes_batches", True):
        words.append("lists splits and mixes rows, and makes no batches")
    elif doing is None:
        words.append("idle")
    elif doing.get("split") is None:
        words.append(f"{_word(doing.get('what'))}, for {doing.get('seconds', 0):.1f} s")
    else:
        samples = count(doing.get("samples", 0), "sample")
        words.append(f"split {_word(doing.get('split'))}: {samples} as of {doing.get('seconds', 0):.1f} s ago")
    return ", ".join(words)


def _stream(stream: dict[str, Any]) -> str:
    words = ["not begun"] if stream["epoch"] is None else [f"epoch {stream['epoch']}"]
    if stream.get("reading") and "batches" in stream:
        words.append(f"{count(stream['batches'], 'batch', 'batches')} sent")
    elif stream["epoch"] is not None:
        words[0] += " is over"
    words.append(count(stream.get("slots", 0), "slot"))
    if stream.get("made_near"):
        words.append("made on its own machine")
    if stream.get("made_anywhere_because"):
        words.append(f"made on any machine ({_word(stream['made_anywhere_because'])})")
    if stream.get("error"):
        words.append(f"FAILED: {_word(stream['error'])}")
    key = f" with the key {_word(stream['key'])}" if stream.get("key") else ""
    return f"{stream['feed']} to {_word(stream['client'])}{key} ({stream['transport']}): {', '.join(words)}"


def _word(text: object) -> str:
    """Return text of other programs on one line, without control characters."""
    return one_line(str(text))
