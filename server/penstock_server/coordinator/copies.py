"""Copies of batches that fill up the last round of ranks: each is copied into a slot of its own.

The batch that a rank was handed may be changed by its consumer, so nothing of a round is sent before its copies are
made.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from . import commands as do
from .feeds import ServedFeed
from .slots import Slots
from .turn import Part, Repeat, Turn


class Copies:
    """The copies of one stream that are being made.

    Args:
        feed: what is copied.
        slots: the stream's slots.
        out: where commands go.

    Attributes:
        unmade: the copies that are not made, by ticket.
    """

    def __init__(self, feed: ServedFeed, slots: Slots, out: Callable[[do.Command], None]) -> None:
        self.unmade: dict[int, Repeat] = {}
        self._feed = feed
        self._slots = slots
        self._do = out

    def repeat(self, turn: Turn, part: Part) -> Repeat:
        """Return a copy of this batch, to be made in a slot of its own. The caller holds that slot, and keeps the
        original."""
        repeat = Repeat(turn, replace(part, record=b""), self._slots.acquire())
        self.unmade[repeat.slot.ticket] = repeat
        return repeat

    def release(self, repeat: Repeat) -> None:
        """Release the hold of the caller of `repeat`."""
        self._slots.release(repeat.slot)
        if repeat.slot.ticket not in self._slots:
            self.unmade.pop(repeat.slot.ticket, None)

    def slot_found(self, ticket: int) -> None:
        """The copy has its slot: have the batch copied. The copy holds both slots while they are written and read."""
        repeat = self.unmade[ticket]
        repeat.copying = True
        for slot in (repeat.slot, repeat.original.slot):
            self._slots.hold(slot)
        regions = self._feed.layout(repeat.part.shapes).regions(repeat.part.first, repeat.part.batches)
        tickets = repeat.slot.ticket, repeat.original.slot.ticket
        self._do(do.Copy(*tickets, repeat.part.first, tuple(regions)))

    def copied(self, ticket: int) -> None:
        """The copy in the ticket's slot is made."""
        repeat = self.unmade.pop(ticket)
        repeat.made = True
        self._stop(repeat)

    def no_slot(self, ticket: int) -> None:
        """The ticket has no slot, or the batch could not be copied into it."""
        repeat = self.unmade.pop(ticket, None)
        if repeat is not None and repeat.copying:
            self._stop(repeat)

    def _stop(self, repeat: Repeat) -> None:
        repeat.copying = False
        for slot in (repeat.slot, repeat.original.slot):
            self._slots.release(slot)
