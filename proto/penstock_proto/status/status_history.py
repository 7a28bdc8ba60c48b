"""Rates, worker states and verdicts, from a series of a daemon's statuses. No I/O.

A status has counts since the daemon started, so the difference of two statuses has those of the time between them. The
daemon keeps its own statuses of the last seconds, and adds rates and verdicts from them to each status that it sends. A
trainer compares the statuses at the beginning and the end of its training.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from msgspec.structs import asdict, replace

from .feed_status import Feed, Rates, Sent
from .figures import Figures, WorkerShares
from .host_status import Host, HostRates
from .status_shape import Status
from .stream_status import Stream, Waits
from .verdict import verdict
from .worker_status import Shares

WINDOW = 10.0
"""Seconds over which the figures are averaged."""

LEAST = 1.0
"""Least seconds of reading that a verdict on a consumer needs."""

LEAST_WAITED = 0.5
"""Least seconds of waiting before hosts get shares of it."""

WAITS = ("production", "ranks", "sending")
"""The causes of a consumer's waits, as the daemon sees them."""

Key: TypeAlias = tuple[Any, ...]
Streams: TypeAlias = dict[Key, Stream]


class History:
    """The statuses of the last `WINDOW` seconds."""

    def __init__(self) -> None:
        self._kept: deque[Status] = deque()

    def add(self, status: Status) -> None:
        """Keep a status."""
        self._kept.append(status)
        while status.seconds - self._kept[0].seconds > WINDOW:
            self._kept.popleft()

    def figures(self, since: float, least: float) -> dict[Key, Figures]:
        """Return the figures of each stream that was read, measured from `since` on. Return none if that is less than
        `least` seconds, or if a worker that makes batches has not run for all of that time."""
        kept = [status for status in self._kept if status.seconds >= since]
        if not kept or kept[-1].seconds - kept[0].seconds < least:
            return {}
        span = Span(kept[0], kept[-1])
        if len(span.workers) != sum(worker.makes_batches for worker in span.last.workers):
            return {}
        before = span.before
        read = [key for key, one in span.after.items() if one.reading and key in before and before[key].reading]
        found = {key: figures_of(span, key) for key in read}
        return {key: figures for key, figures in found.items() if figures is not None}

    def described(self, status: Status) -> Status:
        """Return the status with the averages of the last seconds and the verdicts: the fields that have a default."""
        spans = [Span(kept, status) for kept in self._kept] or [Span(status, status)]
        first, shares = spans[0].first, {worker.number: worker for worker in spans[0].workers}
        return replace(
            status,
            window_seconds=round(status.seconds - first.seconds, 3),
            feeds=[replace(feed, rates=_rates(first, status, feed)) for feed in status.feeds],
            workers=[replace(worker, shares=_shares(shares.get(worker.number))) for worker in status.workers],
            hosts=[_with_averages(spans[0], host) for host in status.hosts],
            streams=[_judged(spans, key, stream) for key, stream in keyed(status).items()],
        )


def keyed(status: Status) -> Streams:
    """Return the streams of a status by keys that are the same in the next status."""
    found: Streams = {}
    for stream in status.streams:
        same, count = (stream.stream, stream.client, stream.transport, stream.rank), 0
        while (*same, count) in found:
            count += 1
        found[(*same, count)] = stream
    return found


def worker_shares(before: Status, after: Status) -> Iterator[WorkerShares]:
    """Yield the shares of each worker that makes batches and ran for all of the time between two statuses."""
    spent = {(one.number, one.pid): one.spent for one in before.workers if one.spent}
    for worker in after.workers:
        if not worker.makes_batches:
            continue
        now, then = worker.spent, spent.get((worker.number, worker.pid))
        if now and then and now.seconds > then.seconds:
            seconds = now.seconds - then.seconds
            idle = min(1.0, max(0.0, (now.idle_seconds - then.idle_seconds) / seconds))
            user = min(1 - idle, max(0.0, (now.user_seconds - then.user_seconds) / seconds))
            cpu = (now.cpu_seconds - then.cpu_seconds) / seconds
            waited = (now.cpu_wait_seconds - then.cpu_wait_seconds) / seconds
            lacking = min(user, waited)  # the time in user code includes it
            yield WorkerShares(worker.number, user - lacking, idle, cpu, lacking, worker.name)


def lanes_of(feed: Feed) -> int | None:
    """Return how many workers can work on an epoch of a feed at once, or None if any number can."""
    if feed.indexable:
        return None
    return min(feed.lanes, feed.splits or feed.lanes)


class Span:
    """The time between two statuses.

    Args:
        first: the earlier status.
        last: the later one.
    """

    def __init__(self, first: Status, last: Status) -> None:
        self.first = first
        self.last = last

    @cached_property
    def before(self) -> Streams:
        """The streams of the earlier status."""
        return keyed(self.first)

    @cached_property
    def after(self) -> Streams:
        """The streams of the later status."""
        return keyed(self.last)

    @cached_property
    def workers(self) -> tuple[WorkerShares, ...]:
        """How the workers spent the time."""
        return tuple(worker_shares(self.first, self.last))


def figures_of(span: Span, key: Key) -> Figures | None:
    """Return the figures of the stream with this key (see `keyed`), or None if it did not exist or read too little in
    this time."""
    first, last, before, after = span.first, span.last, span.before, span.after
    seconds = last.seconds - first.seconds
    if key not in before or key not in after or seconds <= 0:
        return None
    stream, waits = after[key], _waited(before[key], after[key])
    feed = next((one for one in last.feeds if one.name == stream.feed), None)
    if feed is None or waits.reading < LEAST:
        return None
    waited = sum(getattr(waits, cause) for cause in WAITS)
    waiting = min(1.0, waited / waits.reading)
    ranks = {
        other.rank: _waited(before[one], other).holding_up
        for one, other in after.items()
        if other.stream == stream.stream and other.rank is not None and one in before
    }
    slowest = max(ranks, key=lambda rank: ranks[rank], default=None)
    sent, memory = _sent(first, last, feed), last.memory
    return Figures(
        url=feed.url,
        transport=stream.transport,
        consumer=stream.client,
        seconds=seconds,
        batches=sent.batches,
        samples=sent.samples,
        nbytes=sent.bytes,
        first_batch_seconds=0.0,
        waiting=waiting,
        receiving=0.0,
        step=1 - waiting,
        workers=span.workers,
        daemon_cpu=(last.cpu_seconds - first.cpu_seconds) / seconds,
        consumer_cpu=0.0,
        cpus=last.cpus + sum(host.cpus or 0 for host in last.hosts),
        without_makers=not any(worker.makes_batches for worker in last.workers),
        lanes=lanes_of(feed),
        others=len(last.streams) + last.more_streams - 1,
        fast=feed.order == "fast",
        whole_batches=feed.batch_size is None,
        bytes_only=set(re.findall(r"\b([a-z]+[0-9]*)\[", feed.spec)) <= {"bool", "int8", "uint8"},
        memory_full=2 * memory.reserved >= memory.allowed,
        slots=stream.production.slots,
        memory=memory.allowed,
        ranks_share=waits.ranks / waited if waited > 0 else 0.0,
        sending_share=waits.sending / waited if waited > 0 else 0.0,
        slow_rank=slowest if slowest is not None and ranks[slowest] > 0 else None,
        holding_up=min(1.0, waits.holding_up / waits.reading),
    )


def _judged(spans: Sequence[Span], key: Key, stream: Stream) -> Stream:
    """Return a stream with its averages and its verdict. `spans` end with the same status, the longest first."""
    # Workers may have been idle before the consumer began to read.
    span = next((span for span in spans if key in span.before and span.before[key].reading), None)
    seen = figures_of(span, key) if span is not None and stream.reading else None
    if seen is None:
        return stream
    found = verdict(seen)
    return replace(
        stream,
        waiting=round(seen.waiting, 4),
        limit=found.limit,
        headline=found.headline,
        verdict=found.text,
    )


def _waited(before: Stream, after: Stream) -> Waits:
    """Return the seconds of `waits` between two states of a stream."""
    return Waits(**{name: value - getattr(before.waits, name) for name, value in asdict(after.waits).items()})


def _sent(first: Status, last: Status, feed: Feed) -> Sent:
    """Return how much of a feed was sent between two statuses; all of it if the feed was not ready in the first."""
    now, before = feed.sent, next((one.sent for one in first.feeds if one.name == feed.name), None)
    if before is None:
        return now
    return Sent(
        batches=now.batches - before.batches, samples=now.samples - before.samples, bytes=now.bytes - before.bytes
    )


def _rates(first: Status, last: Status, feed: Feed) -> Rates:
    seconds = last.seconds - first.seconds
    if seconds <= 0:
        return feed.rates
    return Rates(**{name: round(value / seconds, 3) for name, value in asdict(_sent(first, last, feed)).items()})


def _with_averages(span: Span, host: Host) -> Host:
    """Return a joined host with its averages."""
    first, last = span.first, span.last
    before = next((one for one in first.hosts if (one.name, one.address) == (host.name, host.address)), None)
    nbytes, awaited = host.received_bytes + host.fetched_bytes, host.awaited_seconds
    if before is not None and before.awaited_seconds <= awaited:  # otherwise it has joined since, perhaps again
        nbytes, awaited = nbytes - before.received_bytes - before.fetched_bytes, awaited - before.awaited_seconds
    seconds = last.seconds - first.seconds
    waited = sum(feed.waits.production for feed in last.feeds) - sum(feed.waits.production for feed in first.feeds)
    return replace(
        host,
        rates=HostRates(bytes=round(max(0, nbytes) / seconds, 3) if seconds > 0 else 0.0),
        awaited=round(min(1.0, awaited / waited), 4) if waited >= LEAST_WAITED else None,
    )


def _shares(worker: WorkerShares | None) -> Shares | None:
    if worker is None:
        return None
    return Shares(**{name: round(getattr(worker, name), 4) for name in Shares.__struct_fields__})
