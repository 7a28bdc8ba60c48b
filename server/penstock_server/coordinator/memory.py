"""How much of the allowed memory a stream may hold, decided when it opens.

A stream holds slots in three places: some are being made or wait for their place in the order (*production*), some are
under way to the consumer (its credit), and some lie under its tensors (its alias quota). The consumer never holds more
than credit + quota, so with one slot of production beyond that the head of the stream can always be made. That is the
least that a stream can live on; what it gets beyond makes it faster. Shuffle blocks live in the workers' heaps and
count as well.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """What a stream may hold: slots by place, and `nbytes` in all, shuffle blocks included."""

    production: int
    credit: int
    quota: int
    nbytes: int

    @property
    def slots(self) -> int:
        """Slots in all places."""
        return self.production + self.credit + self.quota


def least_slots(quota: int) -> int:
    """The fewest slots a stream can live on: one of credit, one for the head, and one of quota if it aliases at all."""
    return 3 if quota else 2


def share(*, free: int, kept: int = 0, slot: int, blocks: int, workers: int, credit: int, quota: int) -> Share | None:
    """The share of a stream that asks for `credit` and `quota` slots of `slot` bytes, or None if `free` is too little.

    A stream wants two slots of production for each worker and one for the head. It gets at most half of what is free,
    so that the next stream finds room too, and leaves `kept` bytes to feeds that nobody reads yet, unless that is less
    than it can live on.
    """
    least = least_slots(quota)
    if blocks + least * slot > free:
        return None
    wanted = 2 * workers + 1 + credit + quota
    slots = max(least, min(wanted, (min(free // 2, free - kept) - blocks) // slot))
    return _dealt(slots, wanted, credit, quota, blocks + slots * slot)


def regrown(old: Share, *, free: int, held: int, blocks: int, slot: int) -> Share | None:
    """The share of a stream whose slots must grow to `slot` bytes while it holds `held` bytes in smaller ones.

    It gets as many as it had, or fewer where that is more than half of what it could have (slots may have to grow once
    more); None if there is no room for the least.
    """
    room = old.nbytes + free - blocks - held
    least = least_slots(old.quota)
    if least * slot > room:
        return None
    slots = max(least, min(old.slots, room // 2 // slot))
    return _dealt(slots, old.slots, old.credit, old.quota, max(old.nbytes, blocks + held + slots * slot))


def _dealt(slots: int, wanted: int, credit: int, quota: int, nbytes: int) -> Share:
    """`slots` dealt to the three places in proportion to what was wanted of each, and one at least."""
    credit = min(max(1, credit * slots // wanted), slots - 1 - min(quota, 1))
    quota = min(max(min(quota, 1), quota * slots // wanted), slots - 1 - credit)
    return Share(slots - credit - quota, credit, quota, nbytes)
