"""The time between two statuses of a daemon: what workers did in it, and the figures of each stream. No I/O."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any, TypeAlias

from msgspec.structs import asdict

from ..messages import Machine
from .feed_status import Feed, Sent
from .figures import CpuUse, Figures, HostUse, WorkerShares
from .status_shape import Status
from .stream_status import Stream, Waits
from .worker_status import Worker

LEAST = 1.0
"""Least seconds of reading that the figures of a consumer need."""

WAITS = ("production", "ranks", "sending")
"""The causes of a consumer's waits, as the daemon sees them."""

_REASONS = ("listing", "interrupted", "without_lane", "ahead")
"""The parts of its waits for production."""

Key: TypeAlias = tuple[Any, ...]
Streams: TypeAlias = dict[Key, Stream]


def keyed(status: Status) -> Streams:
    """Return the streams of a status by keys that are the same in the next status."""
    found: Streams = {}
    for stream in status.streams:
        same, count = (stream.stream, stream.client, stream.transport, stream.rank), 0
        while (*same, count) in found:
            count += 1
        found[(*same, count)] = stream
    return found


def makers(status: Status) -> dict[int, Worker]:
    """Return the workers that make batches, by number."""
    return {worker.number: worker for worker in status.workers if worker.makes_batches}


def lanes_of(feed: Feed) -> int | None:
    """Return how many workers can work on an epoch of a feed at once, or None if any number can."""
    if feed.indexable:
        return None
    return min(feed.lanes, feed.splits or feed.lanes)


class Span:
    """The time between two statuses of the same daemon.

    Args:
        first: the earlier status.
        last: the later one.
    """

    def __init__(self, first: Status, last: Status) -> None:
        self.first = first
        self.last = last
        self.seconds = last.seconds - first.seconds

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
        """How those workers spent the time that make batches and ran for all of it."""
        return tuple(self._worker_shares())

    @property
    def same_workers(self) -> bool:
        """Whether the same workers make batches at the beginning and at the end, and were ready then. (One that ended
        in between may have been replaced.)"""
        before, after = makers(self.first), makers(self.last)
        return before.keys() == after.keys() and all(before[one].ready or not after[one].ready for one in after)

    def sent(self, feed: Feed) -> Sent:
        """Return how much of a feed was sent; all of it if the feed was not ready in the earlier status."""
        now, before = feed.sent, self._earlier(feed)
        if before is None:
            return now
        return Sent(
            batches=now.batches - before.sent.batches,
            samples=now.samples - before.sent.samples,
            bytes=now.bytes - before.sent.bytes,
        )

    def made(self, feed: Feed) -> int:
        """Return how many batches of a feed workers made."""
        before = self._earlier(feed)
        return feed.made - (0 if before is None else before.made)

    def cache_fills(self, feed: Feed) -> bool:
        """Whether splits of the feed were written to a cache."""
        before = self._earlier(feed)
        written = 0 if feed.cache is None else feed.cache.written
        return written > (0 if before is None or before.cache is None else before.cache.written)

    @property
    def waited_for_production(self) -> float:
        """Seconds in which consumers waited for production, all together."""
        return sum(feed.waits.production for feed in self.last.feeds) - sum(
            feed.waits.production for feed in self.first.feeds
        )

    def waited(self, key: Key) -> Waits:
        """Return the seconds of `waits` of a stream that is in both statuses."""
        before, after = self.before[key].waits, self.after[key].waits
        return Waits(**{name: value - getattr(before, name) for name, value in asdict(after).items()})

    def cpu_use(self, first: Machine | None, last: Machine | None, allowed: int | None) -> CpuUse | None:
        """Return how the CPUs of a host were used; None if that is unknown. `allowed`: how many quotas allow."""
        if first is None or last is None or allowed is None or self.seconds <= 0:
            return None
        idle, free, stolen = (
            max(0.0, getattr(last, name) - getattr(first, name)) / self.seconds
            for name in ("idle_seconds", "free_seconds", "stolen_seconds")
        )
        return CpuUse(last.count, allowed, idle, free, stolen)

    def _earlier(self, feed: Feed) -> Feed | None:
        return next((one for one in self.first.feeds if one.name == feed.name), None)

    def _worker_shares(self) -> Iterator[WorkerShares]:
        before, waited = makers(self.first), self.waited_for_production
        for worker in makers(self.last).values():
            then = before.get(worker.number)
            if then is None or then.pid != worker.pid or then.spent is None or worker.spent is None:
                continue
            seconds = worker.spent.seconds - then.spent.seconds
            if seconds <= 0:
                continue
            idle = min(1.0, max(0.0, (worker.spent.idle_seconds - then.spent.idle_seconds) / seconds))
            user = min(1 - idle, max(0.0, (worker.spent.user_seconds - then.spent.user_seconds) / seconds))
            lacked = (worker.spent.cpu_wait_seconds - then.spent.cpu_wait_seconds) / seconds
            lacking = min(user, lacked)  # the time in user code includes it
            yield WorkerShares(
                worker.number,
                user - lacking,
                idle,
                (worker.spent.cpu_seconds - then.spent.cpu_seconds) / seconds,
                lacking,
                worker.name,
                worker.host,
                min(1.0, (worker.awaited_seconds - then.awaited_seconds) / waited) if waited > 0 else 0.0,
            )


def figures_of(span: Span, key: Key, least: float = LEAST) -> Figures | None:
    """Return the figures of the stream with this key (see `keyed`). Return None if it did not exist for all of this
    time, or was read for less than `least` seconds."""
    first, last = span.first, span.last
    if key not in span.before or key not in span.after or span.seconds <= 0:
        return None
    stream, waits = span.after[key], span.waited(key)
    feed = next((one for one in last.feeds if one.name == stream.feed), None)
    if feed is None or waits.reading < least:
        return None
    waited = sum(getattr(waits, cause) for cause in WAITS)
    reading = max(waits.reading, 1e-9)
    waiting = min(1.0, waited / reading)
    ranks = {
        other.rank: span.waited(one).holding_up
        for one, other in span.after.items()
        if other.rank is not None and one in span.before and _job(other) == _job(stream)
    }
    slowest = max(ranks, key=lambda rank: ranks[rank], default=None)
    parts: dict[str, Any] = {name: getattr(waits, name) / max(waits.production, 1e-9) for name in _REASONS}
    sent, memory, there = span.sent(feed), last.memory, makers(last)
    return Figures(
        url=feed.url,
        transport=stream.transport,
        consumer=stream.client,
        seconds=span.seconds,
        batches=sent.batches,
        samples=sent.samples,
        nbytes=sent.bytes,
        first_batch_seconds=0.0,
        waiting=waiting,
        receiving=0.0,
        step=1 - waiting,
        workers=span.workers,
        daemon_cpu=(last.cpu_seconds - first.cpu_seconds) / span.seconds,
        consumer_cpu=_cpu_between(span.before[key], stream) / span.seconds,
        cpus=last.cpus + sum(host.cpus or 0 for host in last.hosts),
        lanes=lanes_of(feed),
        others=len(last.streams) + last.more_streams - 1,
        jobs=stream.jobs,
        machine=span.cpu_use(first.machine, last.machine, last.cpus),
        undivided=feed.undivided,
        fast=feed.order == "fast",
        whole_batches=feed.batch_size is None,
        bytes_only=set(re.findall(r"\b([a-z]+[0-9]*)\[", feed.spec)) <= {"bool", "int8", "uint8"},
        memory_full=2 * memory.reserved >= memory.allowed,
        slots=stream.production.slots,
        memory=memory.allowed,
        turn=feed.turn,
        stripe=feed.stripe,
        splits=feed.splits,
        made=span.made(feed),
        sent=sent.batches,
        reading=min(1.0, waits.reading / span.seconds),
        unmade=waiting,
        ranks_share=waits.ranks / waited if waited > 0 else 0.0,
        sending_share=waits.sending / waited if waited > 0 else 0.0,
        **parts,
        slow_rank=slowest if slowest is not None and ranks[slowest] > 0 else None,
        holding_up=min(1.0, waits.holding_up / reading),
        without_makers=not there,
        began=span.before[key].handed > 0,
        workers_before=len(makers(first)),
        workers_after=len(there),
        starting=tuple(_starting(there.values())),
        ended=sum(worker.restarts - makers(first)[number].restarts for number, worker in _in_both(first, last)),
        stopped=tuple(worker.name for worker in there.values() if worker.stopped),
        awaited_at=_awaited_at(span),
        cache_filling=span.cache_fills(feed),
        hosts=tuple(_hosts(span)),
    )


def _cpu_between(before: Stream, after: Stream) -> float:
    if before.cpu_seconds is None or after.cpu_seconds is None:
        return 0.0
    return after.cpu_seconds - before.cpu_seconds


def _hosts(span: Span) -> Iterator[HostUse]:
    earlier = {(host.name, host.address): host for host in span.first.hosts}
    waited = span.waited_for_production
    for host in span.last.hosts:
        before = earlier.get((host.name, host.address))
        awaited = host.awaited_seconds - (0.0 if before is None else before.awaited_seconds)
        use = None if before is None else span.cpu_use(before.machine, host.machine, host.cpus)
        yield HostUse(host.name, use, min(1.0, max(0.0, awaited) / waited) if waited > 0 else 0.0)


def _in_both(first: Status, last: Status) -> Iterator[tuple[int, Worker]]:
    before = makers(first)
    return ((number, worker) for number, worker in makers(last).items() if number in before)


def _starting(workers: Collection[Worker]) -> Iterator[str]:
    """Yield what workers do that are not ready."""
    for worker in workers:
        if not worker.ready and not worker.given_up:
            doing = worker.doing
            yield "starting" if doing is None else f"{doing.what} ({doing.seconds:.0f} s)"


def _awaited_at(span: Span) -> str:
    """Return the split at which that worker was whose batches were awaited most."""
    if not span.workers:
        return ""
    return makers(span.last)[max(span.workers, key=lambda one: one.awaited).number].awaited_at or ""


def _job(stream: Stream) -> tuple[int, int, str]:
    """Return what all ranks of a job have in common."""
    return stream.stream, stream.world_size, stream.group
