"""Measures what each consumer waits for: looks ten times a second, and adds up the time by cause.

If a consumer reads an epoch and has taken everything that it was sent, it waits for production or for other ranks. If
its connection takes no more bytes at the moment, it waits for the network. That does not count if enough bytes have
gone through for a batch that the consumer could take: a slow consumer has some batches while others come. The times are
counters, like those of workers: for shares, take the difference of two statuses.

A wait for production has reasons of its own. Some workers may have nothing to do at that moment: they have no lane, or
have made all that there are slots for, and a batch before that is not ready.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..consumers.session import Session
from ..consumers.session_table import SessionTable
from ..coordinator import CoordinatorView
from ..coordinator.model.consumer import Consumer
from ..coordinator.stream.stream_view import StreamView

EVERY = 0.1
"""Seconds between two looks."""

BUFFERS = 16 << 20
"""Most bytes that kernels and proxies between the daemon and a consumer hold. Linux allows 4 MiB for sending and 6 MiB
for receiving, unless it is configured otherwise."""

_VOTES = 50
"""Most looks by which a split can be ahead of others. So another one can take its place in as many."""

_MOST = 1.0
"""Most seconds that one look counts for. If a look comes later, the daemon itself was blocked."""


@dataclass(slots=True)
class Waits:
    """How a consumer spent its time, in seconds.

    Attributes:
        reading: seconds in which it read an epoch. All other times are parts of that.
        production: seconds in which it had nothing to take, because no batch was made for it.
        ranks: seconds in which it had nothing to take, because its batch waited for other ranks.
        sending: seconds in which its connection took no more, and it may have had nothing to take.
        holding_up: seconds in which other ranks waited for it.
        listing: the part of `production` in which the splits of the epoch were not known.
        interrupted: the part in which nobody made the next batch: its lane waited after an error or the end of a
            worker, or no worker was ready.
        without_lane: seconds of `production`, times the share of the workers that had no lane to work on.
        ahead: seconds of `production`, times the share of the workers that had made all that there were slots for.
    """

    reading: float = 0.0
    production: float = 0.0
    ranks: float = 0.0
    sending: float = 0.0
    holding_up: float = 0.0
    listing: float = 0.0
    interrupted: float = 0.0
    without_lane: float = 0.0
    ahead: float = 0.0

    def add(self, seconds: float, cause: str) -> None:
        """Count `seconds` of reading. `cause`: the wait in that time, or ""."""
        self.reading += seconds
        if cause:
            setattr(self, cause, getattr(self, cause) + seconds)

    @property
    def waited(self) -> float:
        """The time in which it had nothing to take."""
        return self.production + self.ranks + self.sending


class Majority:
    """The name that made up most of those seen of late, found in one pass (Boyer and Moore's majority vote, 1981).

    Attributes:
        name: the name; None if none has a majority.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._votes = 0

    def add(self, name: str) -> None:
        """See a name."""
        if not self._votes:
            self.name = name
        self._votes = min(_VOTES, self._votes + 1) if name == self.name else self._votes - 1


class Looks:
    """The times of all consumers and workers, added up look by look.

    Args:
        coordinator: knows what consumers were sent and have taken.
        table: the sessions.
        unfetched: returns how many bytes wait at a host, given by its number, for the connections of consumers.
        awaited: called with each worker for whose batch a consumer has waited, and with the seconds.
        split_of: returns the split that a worker reads now, if it reads one.
    """

    def __init__(
        self,
        coordinator: CoordinatorView,
        table: SessionTable,
        unfetched: Callable[[int], int],
        awaited: Callable[[int, float], None],
        split_of: Callable[[int], str | None],
    ) -> None:
        self._coordinator = coordinator
        self._table = table
        self._unfetched = unfetched
        self._awaited = awaited
        self._split_of = split_of
        self._waits: dict[int, Waits] = {}
        self._of_workers: dict[int, float] = {}
        self._splits: dict[int, Majority] = {}
        self._of_feeds: dict[str, Waits] = {}
        self._idle: tuple[int, set[int]] | None = None
        self._looked = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def of(self, consumer: int) -> Waits:
        """Return the waits of a consumer, given by its number."""
        return self._waits.get(consumer, Waits())

    def of_feed(self, name: str) -> Waits:
        """Return the waits of all consumers of a feed, including those that are gone. `holding_up` is not counted."""
        return self._of_feeds.get(name, Waits())

    def of_worker(self, worker: int) -> float:
        """Return how many seconds consumers have waited for batches of this worker."""
        return self._of_workers.get(worker, 0.0)

    def awaited_at(self, worker: int) -> str | None:
        """Return the split at which the worker was in most of these seconds, of late; None if there is no such one."""
        majority = self._splits.get(worker)
        return None if majority is None else majority.name

    def start(self) -> None:
        """Look regularly from now on, on the running loop."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(EVERY, self.start)
        now = loop.time()
        self.look(min(_MOST, now - self._looked) if self._looked else 0.0)
        self._looked = now

    def stop(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()

    def look(self, seconds: float) -> None:
        """Look at all consumers. The look counts for `seconds` seconds."""
        opened = self._table.by_consumer
        for gone in self._waits.keys() - opened.keys():
            del self._waits[gone]
        for worker in self._of_workers.keys() - set(self._coordinator.workers.numbers):
            del self._of_workers[worker]
            self._splits.pop(worker, None)
        slow: set[int] = set()
        self._idle = None
        for number, session in opened.items():
            consumer = self._coordinator.consumers.get(number)
            if consumer is not None and consumer.reading:
                slow.update(self._look_at(consumer, session, seconds))
        for number in slow & opened.keys():
            self._waits.setdefault(number, Waits()).holding_up += seconds

    def _look_at(self, consumer: Consumer, session: Session, seconds: float) -> list[int]:
        """Count the time for the consumer's present wait. Return the numbers of the consumers that it waits for."""
        both = self._waits.setdefault(consumer.number, Waits()), self._of_feeds.setdefault(session.feed, Waits())
        slow: Collection[Consumer] = ()
        cause = ""
        if self._waits_for_network(session):
            cause = "sending"
        elif not consumer.under_way:
            stream = self._coordinator.stream_read_by(consumer).view
            slow = stream.holding_up(consumer)
            slow = () if consumer in slow else slow
            cause = "ranks" if slow else "production"
            if not slow:
                self._look_at_production(stream, both[0], seconds)
        for waits in both:
            waits.add(seconds, cause)
        return [other.number for other in slow]

    def _look_at_production(self, stream: StreamView, waits: Waits, seconds: float) -> None:
        """Count the time of a wait for production by its reasons."""
        if stream.listing:
            waits.listing += seconds
            return
        if stream.interrupted:
            waits.interrupted += seconds
        if (worker := stream.awaited_worker) is not None:
            self._of_workers[worker] = self.of_worker(worker) + seconds
            if (split := self._split_of(worker)) is not None:
                self._splits.setdefault(worker, Majority()).add(split)
            self._awaited(worker, seconds)
        ready, idle = self._workers()
        ahead = stream.with_work(idle)
        waits.ahead += seconds * ahead / max(1, ready)
        waits.without_lane += seconds * (len(idle) - ahead) / max(1, ready)

    def _workers(self) -> tuple[int, set[int]]:
        """Return how many workers can make batches now, and which of them make none, for any stream. The same for all
        consumers of a look."""
        if self._idle is None:
            workers = self._coordinator.workers
            ready = set(workers.makers) - workers.away - workers.leaving
            busy = (stream.view.at_work for stream in self._coordinator.streams.values())
            self._idle = len(ready), ready.difference(*busy)
        return self._idle

    def _waits_for_network(self, session: Session) -> bool:
        """Return whether its connections take no more bytes, and the first slab under way may not have arrived
        completely."""
        if _is_held_up(session.link.under_way, session.link.unsent_bytes):
            return True
        fetched = [slab.nbytes for slab, _, _ in session.fetching.values()]
        return bool(fetched) and _is_held_up(
            fetched, sum(map(self._unfetched, {host for _, _, host in session.fetching.values()}))
        )


def _is_held_up(sizes: list[int], unsent: int) -> bool:
    """Return whether `unsent` bytes of slabs with these sizes have not left yet, and the first slab may not have
    arrived completely."""
    return unsent > 0 and sum(sizes) - unsent < sum(sizes[:1]) + BUFFERS
