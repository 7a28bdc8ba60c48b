"""The output of `penstock status`: a daemon's status as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_proto.messages import Doing
from penstock_proto.status.feed_status import Cache
from penstock_proto.status.figures import count, percent, size
from penstock_proto.status.host_status import Host
from penstock_proto.status.sharing import what_is_shared
from penstock_proto.status.status_shape import Status
from penstock_proto.status.stream_status import Stream
from penstock_proto.status.worker_status import Worker
from penstock_proto.text import named_split, one_line


def status_lines(state: Status) -> Iterator[str]:
    """Yield a daemon's status, line by line."""
    draining = "  draining: stops when the epochs that are being read have finished" if state.draining else ""
    yield f"{state.endpoint}  pid {state.pid}  up {state.seconds:.0f} s{draining}"
    if not (state.ready or state.draining):
        yield f"starting {_word(state.phase)}"
    memory = state.memory
    yield (f"memory   {size(memory.arena)} in slots, {size(memory.reserved)} reserved, {size(memory.allowed)} allowed")
    if state.adjusts_workers:
        yield f"workers  {len(state.workers) + state.more_workers}, adjusted to the load"
    if engine := state.engine:
        adjusted = ", adjusted to the load from {} to {}".format(*engine.adjusts) if engine.adjusts else ""
        yield f"hosts    {engine.hosts} on {engine.name.capitalize()}{adjusted}"
    for host in state.hosts:
        yield f"host     {_word(host.name)}: {_host(host)}"
    if more := state.more_hosts:
        yield f"host     {more} more"
    for worker in state.workers:
        yield f"worker   {_word(worker.name)}: {_worker(worker)}"
    if more := state.more_workers:
        yield f"worker   {more} more"
    for failing in state.failing:
        times = count(failing.times, "try", "tries")
        yield f"feed     {failing.feed}: not ready after {times}, trying again: {_word(failing.error)}"
    for feed in state.feeds:
        epoch = f", {feed.batches} batches an epoch" if feed.batches is not None else ""
        if feed.segment is not None:
            of = count(feed.segment, *(("batch", "batches") if feed.batch_size is None else ("sample",)))
            epoch += f", segments of {of}{'' if epoch else ', endless'}"
        params = f"({_word(feed.params)})" if feed.params else ""
        size_of_batches = "whole batches" if feed.batch_size is None else f"batch size {feed.batch_size}"
        yield f"feed     {feed.url}{params}  {feed.spec}, {size_of_batches}{epoch}"
        if shared := what_is_shared(state, feed):
            yield f"shared   {feed.name}: {shared}"
        if feed.cache is not None:
            yield f"cache    {feed.name}: {_cache(feed.cache)}"
        for part, cache in feed.part_caches.items():
            if cache is not None:
                yield f"cache    {feed.name}, {_word(part)}: {_cache(cache)}"
        if feed.checks.different:
            yield f"differs  {feed.name}: samples differ when another worker makes them again; the log says why"
        if feed.dropped:
            yield f"dropped  {feed.name}: {count(feed.dropped, 'sample')}"
        for split in feed.skipped:
            yield (
                f"skipped  {feed.name}, epoch {split.epoch}: {named_split(_word(split.split))} after "
                f"{count(split.samples, 'sample')}: {_word(split.why)}"
            )
        more = feed.skipped_count - len(feed.skipped)
        if more > 0:
            yield f"skipped  {feed.name}: {count(more, 'more split' if feed.skipped else 'split')}"
    for stream in state.streams:
        yield f"stream   {_stream(stream)}"
        if stream.headline:
            yield f"         {_word(stream.headline)}"
    if more := state.more_streams:
        yield f"stream   {more} more"
    elif not state.streams:
        yield "stream   none"


def _cache(cache: Cache) -> str:
    opened = cache.hits + cache.misses
    rate = f"{cache.hits} of {count(opened, 'split')} read from it ({100 * cache.hits // max(1, opened)} %)"
    problem = f"; {_word(cache.problem)}" if cache.problem else ""
    return f"{size(cache.bytes)} in {_word(cache.directory)}, {rate}{problem}"


def _host(host: Host) -> str:
    words = [f"{host.state} at {host.address}", f"{host.ready} of {count(host.workers, 'worker')} ready"]
    if host.lanes:
        words.append(count(host.lanes, "lane"))
    words.append(count(host.slots, "slot"))
    if host.rates.bytes:
        words.append(f"{host.rates.bytes / 1e6:.1f} MB/s")
    if host.awaited is not None:
        words.append(f"{percent(host.awaited)} of the waiting is for it")
    if host.memory:
        used, allowed = size(host.memory.used), size(host.memory.allowed)
        words.append(f"{used} of {allowed} in use")
    words.append(f"{size(host.received_bytes)} received")
    if host.fetched_bytes:
        mapped = f" ({size(host.lent_bytes)} mapped)" if host.lent_bytes else ""
        words.append(f"{size(host.fetched_bytes)} fetched by consumers{mapped}")
    if host.unsent_bytes:
        words.append(f"{size(host.unsent_bytes)} wait for the network")
    if host.silent_seconds >= 3:
        words.append(f"silent for {host.silent_seconds:.0f} s")
    return ", ".join(words)


def _worker(worker: Worker) -> str:
    restarted = f"restarted {count(worker.restarts, 'time')}"
    if worker.given_up:
        return f"given up, {restarted}: its processes died before they were ready, see the log"
    doing = worker.doing
    if not worker.pid:
        return ", ".join(["starting" if doing is None else _doing(doing), restarted])
    words = [f"pid {worker.pid}", restarted]
    if worker.memory:
        words.append(size(worker.memory))
    if worker.processes:
        words.append(f"with {count(worker.processes, 'process', 'processes')} of user code")
    if worker.leaving:
        words.append("leaving")
    if worker.stopped:
        words.append("stopped by a signal")
    if not worker.ready:
        words.append("starting" if doing is None else _doing(doing))
    elif not worker.makes_batches:
        words.append("lists splits and mixes rows, and makes no batches")
    elif doing is None:
        words.append("idle")
    elif doing.split is None:
        words.append(_doing(doing))
    else:
        samples = count(doing.samples, "sample")
        words.append(f"{named_split(_word(doing.split))}: {samples} as of {doing.seconds:.1f} s ago")
    return ", ".join(words)


def _doing(doing: Doing) -> str:
    return f"{_word(doing.what)}, for {doing.seconds:.1f} s"


def _stream(stream: Stream) -> str:
    words = ["not begun"] if stream.epoch is None else [f"epoch {stream.epoch}"]
    if stream.reading:
        words.append(f"{count(stream.batches - stream.behind, 'batch', 'batches')} sent")
    elif stream.epoch is not None:
        words[0] += " is over"
    words.append(count(stream.slots, "slot"))
    if stream.jobs > 1:
        words.append(f"shared by {stream.jobs} jobs")
    if stream.behind:
        words.append(f"{count(stream.behind, 'batch', 'batches')} behind the first of them")
    if stream.apart_because:
        words.append(f"shared with no other job ({_word(stream.apart_because)})")
    if stream.made_near:
        words.append("made on its own machine")
    if stream.made_anywhere_because:
        words.append(f"made on any machine ({_word(stream.made_anywhere_because)})")
    if stream.error:
        words.append(f"FAILED: {_word(stream.error)}")
    key = f" with the key {_word(stream.key)}" if stream.key else ""
    return f"{stream.feed} to {_word(stream.client)}{key} ({stream.transport}): {', '.join(words)}"


def _word(text: object) -> str:
    """Return text of other programs on one line, without control characters."""
    return one_line(str(text))
