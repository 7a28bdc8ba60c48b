"""Decides how much of the allowed memory a stream may hold, when it opens.

A stream holds slots in three places. In *production* they are being filled, or wait until the order comes to them.
Slots under way to the consumer are bounded by its *credit*, and slots of shared memory under its tensors by its
*quota*. The consumer never holds more than credit + quota, so with one more slot for production the head of the stream
can always be made. That is the minimum for a stream, and more slots make it faster. Shuffle blocks live in the workers'
heaps and count as well. Slots also take file descriptors, so their number is bounded, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MANY = 1 << 40
"""More slots than there ever are."""

_AHEAD = 16 << 20
_MANY_AHEAD = 48
"""Bytes and slots of production that a stream with shuffle blocks wants, however few workers there are."""


@dataclass(frozen=True, slots=True)
class Share:
    """The limits of a stream: slots in each place, and `nbytes` in total, including shuffle blocks.

    `credit` and `quota` are for each consumer. `round` is for a round of ranks: one slot for each of them. Jobs that
    share a stream have shares of their own, each for its credit and quota. That of the stream has no `consumers` then,
    and its `credit` and `quota` are the most that one of the jobs has.
    """

    production: int
    credit: int
    quota: int
    nbytes: int
    consumers: int = 1
    round: int = 0

    @property
    def slots(self) -> int:
        """Slots in all places together."""
        return self.production + self.consumers * (self.credit + self.quota) + self.round


def least_slots(quota: int, consumers: int = 1, pool: int = 1, stripe: int = 1) -> int:
    """Return the fewest slots with which a stream can run.

    It needs one for the head, and with pools one for each lane of a pool. With stripes it needs two: a merged batch may
    belong between batches of a stripe. Each consumer needs one of credit, one of
    quota if it reads shared memory, and one for the round if there are several consumers.
    """
    return _least_production(pool, stripe) + consumers * (2 if quota else 1) + round_of(consumers)


def _least_production(pool: int, stripe: int) -> int:
    return 1 + (pool > 1) * pool + (stripe > 1)


def round_of(consumers: int) -> int:
    """Return the slots that are reserved for a round of so many ranks."""
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
    pool: int = 1,
    stripe: int = 1,
    most: int = MANY,
) -> Share | None:
    """Return the share of a stream whose consumers ask for `credit` and `quota` slots of `slot` bytes each; None if
    `free` bytes, or `most` further slots, are too few.

    A stream wants two slots of production for each worker, and one for the head. If slots are small it wants more of
    them, so that enough batches are ready while workers fill shuffle blocks. With pools of `pool` lanes it wants slots
    for two pools, one that is mixed while the other is made, and half a pool more for the mixed batches. With stripes
    of `stripe` batches it wants two batches for each worker, and at least two stripes. It gets at
    most half of what is free, so that the next stream finds room too. It leaves `kept` bytes to feeds that nobody reads
    yet, unless it needs them for its minimum.
    """
    least = least_slots(quota, consumers, pool, stripe)
    if blocks + least * slot > free or least > most:
        return None
    wanted = _wanted(workers, slot, blocks, pool, stripe) + consumers * (credit + quota) + round_of(consumers)
    slots = max(least, min(wanted, most // 2, (min(free // 2, free - kept) - blocks) // slot))
    return _dealt(slots, wanted, credit, quota, consumers, blocks + slots * slot, _least_production(pool, stripe))


def with_workers(
    old: Share,
    before: int,
    workers: int,
    *,
    free: int,
    slot: int,
    blocks: int,
    pool: int = 1,
    stripe: int = 1,
    most: int = MANY,
) -> Share:
    """Return the share of a stream that was planned for `before` workers, now that there are `workers`. It grows by
    `free` bytes and `most` slots at most."""
    more = _wanted(workers, slot, blocks, pool, stripe) - _wanted(before, slot, blocks, pool, stripe)
    more = max(0, min(more, free // slot, most))
    return replace(old, production=old.production + more, nbytes=old.nbytes + more * slot)


def with_consumers(old: Share, consumers: int, *, free: int, slot: int, most: int = MANY) -> Share | None:
    """Return the share of a stream that has this many consumers from now on; None if `free` bytes, or `most` further
    slots, are too few."""
    new = replace(old, consumers=consumers)
    more = new.slots - old.slots
    return None if more * slot > free or more > max(0, most) else replace(new, nbytes=old.nbytes + more * slot)


def share_of_job(*, free: int, kept: int, slot: int, credit: int, quota: int, most: int) -> Share | None:
    """Return what a job gets that joins a stream of others, and asks for `credit` and `quota` slots of `slot` bytes;
    None if `free` bytes, or `most` further slots, are too few.

    Like a new stream it gets at most half of what is free, and leaves `kept` bytes, unless it needs them for its
    minimum.
    """
    least, wanted = (2 if quota else 1), credit + quota
    if least * slot > free or least > most:
        return None
    slots = max(least, min(wanted, most // 2, min(free // 2, free - kept) // slot))
    dealt = _dealt(slots, wanted, credit, quota, 1, 0, production=0)
    return replace(dealt, production=0, nbytes=(dealt.credit + dealt.quota) * slot)


def regrown(old: Share, *, free: int, held: int, blocks: int, slot: int) -> Share | None:
    """Return the share of a stream whose slots must grow to `slot` bytes, while it holds `held` bytes in smaller ones.

    It keeps its number of slots, unless they would take more than half of the room, because slots may have to grow
    again. Return None if there is no room for the minimum. A stream that nobody reads at the moment keeps room for one
    consumer.
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


def _wanted(workers: int, slot: int, blocks: int, pool: int, stripe: int) -> int:
    """Return the slots of production that a stream wants."""
    if stripe > 1:
        return max(2, -(-2 * workers // stripe)) + 1
    ahead = min(_MANY_AHEAD, _AHEAD // slot) if blocks else 0
    pools = 0 if pool == 1 else 2 * pool + (pool + 1) // 2
    return max(2 * workers + 1, ahead, pools)


def _dealt(slots: int, wanted: int, credit: int, quota: int, consumers: int, nbytes: int, production: int = 1) -> Share:
    """Divide `slots` among the three places in proportion to the number wanted for each, with at least one for each,
    and `production` for production."""
    left = slots - production - round_of(consumers)
    credit = min(max(1, credit * slots // wanted), left // consumers - min(quota, 1))
    quota = min(max(min(quota, 1), quota * slots // wanted), left // consumers - credit)
    production += left - consumers * (credit + quota)
    return Share(production, credit, quota, nbytes, consumers, round_of(consumers))
