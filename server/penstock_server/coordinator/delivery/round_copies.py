"""Copies of batches that fill up the last round of ranks. Each copy has a slot of its own.

A consumer may change a batch that it was handed. So nothing of a round is sent before its copies are made.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from ..model import commands as do
from ..model.feeds import ServedFeed
from ..model.leases import Leases
from ..model.turn import Part, Repeat, Turn


class RoundCopies:
    """The copies of one stream that are being made.

    Args:
        feed: the feed whose batches are copied.
        slots: the stream's slots.
        out: where commands go.

    Attributes:
        unmade: the copies that are not made yet, by ticket.
    """

    def __init__(self, feed: ServedFeed, slots: Leases, out: Callable[[do.Command], None]) -> None:
        self.unmade: dict[int, Repeat] = {}
        self._feed = feed
        self._slots = slots
        self._do = out

    def repeat(self, turn: Turn, part: Part) -> Repeat:
        """Ask for a slot for a copy of this batch, and return the copy, which is yet to be made. The caller holds that
        slot, and goes on holding the original's."""
        repeat = Repeat(turn, replace(part, record=b""), self._slots.acquire())
        self.unmade[repeat.slot.ticket] = repeat
        return repeat

    def release(self, repeat: Repeat) -> None:
        """Release the copy's slot for the caller of `repeat`."""
        self._slots.release(repeat.slot)
        if repeat.slot.ticket not in self._slots:
            self.unmade.pop(repeat.slot.ticket, None)

    @property
    def tickets(self) -> set[int]:
        """The tickets of slots that are read or written now."""
        copying = [repeat for repeat in self.unmade.values() if repeat.copying]
        return {slot.ticket for repeat in copying for slot in (repeat.slot, repeat.original.slot)}

    def on_slot_found(self, ticket: int) -> None:
        """Have the batch copied, now that the copy has its slot. The copy holds both slots while they are written and
        read."""
        repeat = self.unmade[ticket]
        repeat.copying = True
        for slot in (repeat.slot, repeat.original.slot):
            self._slots.hold(slot)
        regions = self._feed.layout(repeat.part.shapes).regions(repeat.part.first, repeat.part.batches)
        tickets = repeat.slot.ticket, repeat.original.slot.ticket
        self._do(do.Copy(*tickets, repeat.part.first, tuple(regions)))

    def on_copied(self, ticket: int) -> None:
        """Note that the copy in the ticket's slot is made."""
        repeat = self.unmade.pop(ticket)
        repeat.made = True
        self._stop(repeat)

    def on_no_slot(self, ticket: int) -> None:
        """Give up a copy that got no slot, or into whose slot the batch could not be copied."""
        repeat = self.unmade.pop(ticket, None)
        if repeat is not None and repeat.copying:
            self._stop(repeat)

    def _stop(self, repeat: Repeat) -> None:
        repeat.copying = False
        for slot in (repeat.slot, repeat.original.slot):
            self._slots.release(slot)
