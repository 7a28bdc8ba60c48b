"""At a host: the memory in which its workers build the head's slots, from the first byte until nobody needs it.

Finished batches go to the head at once, before the worker's message about them. If the head says so, the host keeps
them instead: consumers fetch them from here until the head releases them. Kept batches are still sent to the head when
it asks for them, when a worker waits for memory, and when this host leaves.

Consumers on this machine borrow the memory itself (lending.py). If they still use memory that the head has released,
the host waits for them. If a worker needs memory before that, the host leaves this memory to the consumers and no
longer counts it as used. While consumers hold more than half of the memory that this host allows, they copy what they
borrow.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock_proto import messages as m
from penstock_proto.transport import codec

from ..shared_memory.arena import Memfd
from .building import Building, Regions
from .to_head import ToHead

Writes: TypeAlias = m.Fill | m.WriteRows


@dataclass(slots=True, eq=False)
class BuiltSlot:
    """One slot.

    Attributes:
        worker: the head's number of the worker that builds it.
        memfd: its memory.
        wanted: the message that says what to write.
        regions: computes where batches lie.
        secret: the secret of a kept slot; otherwise empty.
        parts: the reported batches of a kept slot, as (first, batches, shapes).
        unsent: how many pieces wait to be sent to the head.
        fetched: how many pieces wait to be sent to consumers.
        lent: how many slabs of it consumers on this machine have borrowed.
        answered: True once the worker no longer writes there.
    """

    worker: int
    memfd: Memfd
    wanted: Writes
    regions: Regions
    secret: bytes = b""
    parts: list[tuple[int, int, m.Shapes]] = field(default_factory=list)
    unsent: int = 0
    fetched: int = 0
    lent: int = 0
    answered: bool = False

    def find(self, first: int, batches: int, stride: int = 1) -> list[tuple[int, int]] | None:
        """Return the regions of these batches, as (start, stop); None if not all of them were reported."""
        for start, count, shapes in self.parts:
            if (start, count, 1) == (first, batches, stride):
                return self.regions.of_batches(first, batches, shapes)
        reported = sum(count for _, count, shapes in self.parts if not shapes)
        if first + (batches - 1) * stride >= reported:
            return None
        return self.regions.of_batches(first, batches, (), stride)

    @property
    def is_over(self) -> bool:
        """True once neither a worker nor the head needs it."""
        return self.answered and not self.unsent and not self.secret

    def on_fetched(self) -> None:
        """Note that a piece was sent to a consumer."""
        self.fetched -= 1


class BuiltSlots:
    """All slots that this host builds, by ticket and run.

    Args:
        link: the connection to the head.
        building: where the slots' memory comes from.
    """

    def __init__(self, link: ToHead, building: Building) -> None:
        self._link = link
        self._building = building
        self._building.wanted = self._make_room
        self._open: dict[tuple[int, int], BuiltSlot] = {}
        """Slots that a worker has not answered for yet."""
        self._kept: dict[int, BuiltSlot] = {}
        """Kept slots by ticket, the oldest first."""
        self._in_use: set[BuiltSlot] = set()
        self._held = 0
        """Bytes of memory that consumers hold: lent to them, or left to them."""
        self._leaving = False

    def begin(self, worker: int, memfd: Memfd, wanted: Writes, regions: Regions, *, keep: bool) -> None:
        """Register a slot, which a worker is to build in `memfd`. `keep`: keep its batches here, unless this host is
        leaving."""
        slot = BuiltSlot(worker, memfd, wanted, regions)
        self._in_use.add(slot)
        self._open[wanted.ticket, wanted.run] = slot
        if keep and not self._leaving:
            slot.secret = secrets.token_bytes(16)
            self._kept[wanted.ticket] = slot

    def is_used(self, run: int) -> bool:
        """Return whether the run still builds a slot."""
        return any(other == run for _, other in self._open)

    def on_made(self, made: m.Made) -> bytes:
        """Send or keep the batches that a worker has made. Return the slot's secret if they are kept."""
        slot = self._open.get((made.ticket, made.run))
        if slot is None or not made.batches or not isinstance(slot.wanted, m.Fill):
            return b""
        first = slot.wanted.first + made.first * slot.wanted.step
        if slot.secret:
            slot.parts.append((first, made.batches, made.shapes))
        else:
            self._send(slot, slot.regions.of_batches(first, made.batches, made.shapes, slot.wanted.step))
        return slot.secret

    def rows_written(self, ticket: int, run: int) -> None:
        """Send the rows of a merged batch that a worker has written."""
        slot = self._open.get((ticket, run))
        if slot is not None and isinstance(slot.wanted, m.WriteRows):
            self._send(slot, slot.regions.of_rows(slot.wanted))

    def on_answered(self, ticket: int, run: int) -> None:
        """Note that the worker has answered for the ticket, and no longer writes there."""
        slot = self._open.pop((ticket, run), None)
        if slot is None:
            return
        slot.answered = True
        if not slot.parts:
            self._stop_keeping(slot)
        self._release_if_over(slot)
        if self._building.is_short:  # perhaps for a batch that comes before these
            self._make_room()

    def on_run_failed(self, run: int) -> None:
        """Note that the run has failed, and will not answer for its tickets."""
        for ticket, of in [key for key in self._open if key[1] == run]:
            self.on_answered(ticket, of)

    def on_worker_ended(self, worker: int) -> None:
        """Note that the process of a worker has ended. `worker`: its number at the head."""
        for (ticket, run), slot in list(self._open.items()):
            if slot.worker == worker:
                self.on_answered(ticket, run)

    def send_kept(self, ticket: int) -> None:
        """Send the kept batches of a ticket to the head."""
        slot = self._kept.get(ticket)
        if slot is None:
            return  # they are on their way
        for first, batches, shapes in slot.parts:
            self._send(slot, slot.regions.of_batches(first, batches, shapes))
        self._stop_keeping(slot)
        self._release_if_over(slot)

    def release(self, ticket: int) -> None:
        """Release the kept batches of a ticket: the head no longer needs them."""
        slot = self._kept.get(ticket)
        if slot is not None:
            self._stop_keeping(slot)
            self._release_if_over(slot)

    def leave(self) -> None:
        """Send everything that is kept, and keep nothing more: this host is about to leave."""
        self._leaving = True
        for ticket in list(self._kept):
            self.send_kept(ticket)

    def fetch(self, fetch: m.Fetch) -> tuple[BuiltSlot, list[tuple[int, int]]] | None:
        """Return the slot that a consumer asks for, and the regions of the batches in it; None if it is not kept, or
        the secret is wrong."""
        slot = self._kept.get(fetch.ticket)
        if slot is None or not hmac.compare_digest(slot.secret, fetch.secret):
            return None
        found = slot.find(fetch.first, fetch.batches, fetch.stride)
        return None if found is None else (slot, found)

    @property
    def may_lend(self) -> bool:
        """Whether more memory may be lent. False if consumers hold more than this host allows: then they do not copy as
        they should."""
        return self._held <= self._building.allowed

    def lend(self, slot: BuiltSlot) -> bool:
        """Lend a slab of the slot to a consumer. Return whether the consumer must copy it, and give it back at once."""
        self._held += 0 if slot.lent else slot.memfd.nbytes
        slot.lent += 1
        return self._held > self._building.allowed // 2

    def given_back(self, slot: BuiltSlot) -> None:
        """Take back a slab of the slot that a consumer had borrowed."""
        slot.lent -= 1
        self._held -= 0 if slot.lent else slot.memfd.nbytes
        self._release_if_over(slot)

    @property
    def in_use(self) -> Iterator[Memfd]:
        """The memory of all slots."""
        return (slot.memfd for slot in self._in_use)

    def _make_room(self) -> None:
        """Make room for a worker that waits for memory. First leave consumers the memory that only they use. If there
        is none, send the batches that were kept for the longest time, unless memory comes back anyway."""
        left = next((slot for slot in self._in_use if slot.is_over), None)
        if left is not None:
            self._release_if_over(left)
            return
        if any(slot.answered and slot.unsent for slot in self._in_use):
            return
        ticket = next((ticket for ticket, slot in self._kept.items() if slot.parts), None)
        if ticket is not None:
            self.send_kept(ticket)

    def _stop_keeping(self, slot: BuiltSlot) -> None:
        if slot.secret:
            if slot.parts:
                self._link.send(codec.encode(m.KeptNoLonger(slot.wanted.ticket)))
            slot.secret = b""
            slot.parts.clear()
            del self._kept[slot.wanted.ticket]

    def _send(self, slot: BuiltSlot, regions: list[tuple[int, int]]) -> None:
        """Send these bytes of the slot to the head."""
        for begin, end in regions:
            for start in range(begin, end, self._link.PIECE):
                stop = min(end, start + self._link.PIECE)
                payload = m.Payload(slot.worker, slot.wanted.run, slot.wanted.ticket, start, stop - start)
                body = slot.memfd.view(start, stop).data
                slot.unsent += 1
                self._link.send(codec.encode(payload), body, done=lambda: self._on_sent(slot))

    def _on_sent(self, slot: BuiltSlot) -> None:
        slot.unsent -= 1
        self._release_if_over(slot)

    def _release_if_over(self, slot: BuiltSlot) -> None:
        if slot in self._in_use and slot.is_over and (not slot.lent or self._building.is_short):
            self._in_use.discard(slot)
            # Consumers may still use these bytes, or the connection of one that is gone may still refer to them.
            slot.memfd.retired |= slot.lent > 0 or slot.fetched > 0
            self._building.release(slot.memfd)
