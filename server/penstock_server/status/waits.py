"""Measures what each consumer waits for: looks ten times a second, and adds up the time by cause.

If a consumer reads an epoch and has taken everything that it was sent, it waits for production or for other ranks. If
its connection takes no more bytes at the moment, it waits for the network. That does not count if enough bytes have
gone through for a batch that the consumer could take: a slow consumer has some batches while others come. The times are
counters, like those of workers: for shares, take the difference of two statuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..consumers.session import Session
from ..consumers.session_table import SessionTable
from ..coordinator import CoordinatorView
from ..coordinator.model.consumer import Consumer

EVERY = 0.1
"""Seconds between two looks."""

BUFFERS = 16 << 20
"""Most bytes that kernels and proxies between the daemon and a consumer hold. Linux allows 4 MiB for sending and 6 MiB
for receiving, unless it is configured otherwise."""

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
    """

    reading: float = 0.0
    production: float = 0.0
    ranks: float = 0.0
    sending: float = 0.0
    holding_up: float = 0.0

    def add(self, seconds: float, cause: str) -> None:
        """Count `seconds` of reading. `cause`: the wait in that time, or ""."""
        self.reading += seconds
        if cause:
            setattr(self, cause, getattr(self, cause) + seconds)

    @property
    def waited(self) -> float:
        """The time in which it had nothing to take."""
        return self.production + self.ranks + self.sending


class Looks:
    """The times of all consumers and workers, added up look by look.

    Args:
        coordinator: knows what consumers were sent and have taken.
        table: the sessions.
        unsent: returns how many bytes wait for a connection over TCP.
        unfetched: returns how many bytes wait at a host, given by its number, for the connections of consumers.
        awaited: called with each worker for whose batch a consumer has waited, and with the seconds.
    """

    def __init__(
        self,
        coordinator: CoordinatorView,
        table: SessionTable,
        unsent: Callable[[bytes], int],
        unfetched: Callable[[int], int],
        awaited: Callable[[int, float], None],
    ) -> None:
        self._coordinator = coordinator
        self._table = table
        self._unsent = unsent
        self._unfetched = unfetched
        self._awaited = awaited
        self._waits: dict[int, Waits] = {}
        self._of_feeds: dict[str, Waits] = {}
        self._looked = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def of(self, consumer: int) -> Waits:
        """Return the waits of a consumer, given by its number."""
        return self._waits.get(consumer, Waits())

    def of_feed(self, name: str) -> Waits:
        """Return the waits of all consumers of a feed, including those that are gone. `holding_up` is not counted."""
        return self._of_feeds.get(name, Waits())

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
        slow: set[int] = set()
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
        if session.peer is None and self._waits_for_network(session):
            cause = "sending"
        elif not consumer.under_way:
            stream = self._coordinator.stream_read_by(consumer).view
            slow = stream.holding_up
            slow = () if consumer in slow else slow
            cause = "ranks" if slow else "production"
            if not slow and (worker := stream.awaited_worker) is not None:
                self._awaited(worker, seconds)
        for waits in both:
            waits.add(seconds, cause)
        return [other.number for other in slow]

    def _waits_for_network(self, session: Session) -> bool:
        """Return whether its connections take no more bytes, and the first slab under way may not have arrived
        completely."""
        sent = [nbytes for _, _, nbytes in session.sending]
        if _is_held_up(sent, self._unsent(session.routing_id)):
            return True
        fetched = [slab.nbytes for slab, _, _ in session.fetching.values()]
        return bool(fetched) and _is_held_up(
            fetched, sum(map(self._unfetched, {host for _, _, host in session.fetching.values()}))
        )


def _is_held_up(sizes: list[int], unsent: int) -> bool:
    """Return whether `unsent` bytes of slabs with these sizes have not left yet, and the first slab may not have
    arrived completely."""
    return unsent > 0 and sum(sizes) - unsent < sum(sizes[:1]) + BUFFERS
