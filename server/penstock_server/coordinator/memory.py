"""How much of the allowed memory a stream may hold, decided when it opens.

A stream holds slots in three places: some are being made or wait for their place in the order (*production*), some are
under way to the consumer (its credit), and some lie under its tensors (its alias quota). The consumer never holds more
than credit + quota, so with one slot of production beyond that the head of the stream can always be made. That is the
least that a stream can live on; what it gets beyond makes it faster. Shuffle blocks live in the workers' heaps and
count as well. Slots also take file descriptors, so their number is bounded, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MANY = 1 << 40
"""More slots than there ever are."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a stream may hold: slots by place, and `nbytes` in all, shuffle blocks included.

    `credit` and `quota` are those of each consumer. `round` is what a round of ranks holds: a slot for each of them.
    """

    production: int
    credit: int
    quota: int
    nbytes: int
    consumers: int = 1
    round: int = 0

    @property
    def slots(self) -> int:
        """Slots in all places."""
        return self.production + self.consumers * (self.credit + self.quota) + self.round


def least_slots(quota: int, consumers: int = 1) -> int:
    """The fewest slots a stream can live on: one for the head, and for each consumer one of credit, one of quota if it
    aliases at all, and one of the round if there are several."""
    return 1 + consumers * (2 if quota else 1) + _round(consumers)


def _round(consumers: int) -> int:
    return consumers if consumers > 1 else 0


def share(
    *,
    free: int,
    kept: int = 0,
    slot: int,
    blocks: int,
    workers: int,
    credit: int,
    quota: int,
    consumers: int = 1,
    most: int = MANY,
) -> Share | None:
    """The share of a stream whose consumers ask for `credit` and `quota` slots of `slot` bytes each, or None if `free`
    bytes, or the `most` slots that there may still be, are too little.

    A stream wants two slots of production for each worker and one for the head. It gets at most half of what is free,
    so that the next stream finds room too, and leaves `kept` bytes to feeds that nobody reads yet, unless that is less
    than it can live on.
    """
    least = least_slots(quota, consumers)
    if blocks + least * slot > free or least > most:
        return None
    wanted = 2 * workers + 1 + consumers * (credit + quota) + _round(consumers)
    slots = max(least, min(wanted, most // 2, (min(free // 2, free - kept) - blocks) // slot))
    return _dealt(slots, wanted, credit, quota, consumers, blocks + slots * slot)


def with_consumers(old: Share, consumers: int, *, free: int, slot: int, most: int = MANY) -> Share | None:
    """The share of a stream that has this many consumers from now on; None if `free` bytes, or `most` more slots, are
    too little."""
    new = replace(old, consumers=consumers)
    more = new.slots - old.slots
    return None if more * slot > free or more > max(0, most) else replace(new, nbytes=old.nbytes + more * slot)


def regrown(old: Share, *, free: int, held: int, blocks: int, slot: int) -> Share | None:
    """The share of a stream whose slots must grow to `slot` bytes while it holds `held` bytes in smaller ones.

    It gets as many as it had, or fewer where that is more than half of what it could have (slots may have to grow once
    more); None if there is no room for the least. Where nobody reads it just now it keeps room for one who may come.
    """
    consumers = max(1, old.consumers)
    room = old.nbytes + free - blocks - held
    least = least_slots(old.quota, consumers)
    if least * slot > room:
        return None
    wanted = replace(old, consumers=consumers).slots
    slots = max(least, min(wanted, room // 2 // slot))
    nbytes = max(old.nbytes, blocks + held + slots * slot)
    return replace(_dealt(slots, wanted, old.credit, old.quota, consumers, nbytes), consumers=old.consumers)


def _dealt(slots: int, wanted: int, credit: int, quota: int, consumers: int, nbytes: int) -> Share:
    """`slots` dealt to the three places in proportion to what was wanted of each, and one at least."""
    left = slots - 1 - _round(consumers)
    credit = min(max(1, credit * slots // wanted), left // consumers - min(quota, 1))
    quota = min(max(min(quota, 1), quota * slots // wanted), left // consumers - credit)
    return Share(1 + left - consumers * (credit + quota), credit, quota, nbytes, consumers, _round(consumers))
