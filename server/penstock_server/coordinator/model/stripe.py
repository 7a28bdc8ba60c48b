"""A stripe: the next batches of an epoch in stream order, made in one slot by visits to several lanes.

Place p of the slot is for batch p of the stripe. With L lanes, a visit fills every L-th place. So neighbours in
the stream are neighbours in the slot, whoever made them, and can share a slab.

A lane that ends within the stripe leaves its remaining places empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock_proto import PenstockError

from .leases import NO_SLOT, Lease
from .turn import Part, Turn


@dataclass(slots=True, eq=False)
class Stripe:
    """The visits that share one slot.

    Attributes:
        number: larger for each stripe of the epoch.
        visits: one to each lane, by the place of its first batch.
        batches: how many places it has.
        most: the most batches in a slab.
        slot: the lease of its slot, once one was asked for. Production holds it until all visits have left.
        at: the place of the next batch to be delivered.
        parts: the batches that can be delivered next, in one part; empty if there are none.
        grows: whether that part may be longer later.
    """

    number: int
    visits: list[Turn]
    batches: int
    most: int
    slot: Lease = NO_SLOT
    at: int = 0
    parts: deque[Part] = field(default_factory=deque)
    grows: bool = False
    # What only a turn has:
    pool: None = None
    error: PenstockError | None = None
    complete: bool = False
    deliverable: bool = True

    def lane_at(self, place: int) -> int:
        """Return the lane of the batch at this place."""
        return self.visits[place % len(self.visits)].lane

    def index_at(self, place: int) -> int:
        """Return the number in its lane of the batch at this place."""
        return self.visits[place % len(self.visits)].index_at(place)

    @property
    def next_visit(self) -> Turn:
        """The visit of the next batch to be delivered."""
        return self.visits[self.at % len(self.visits)]

    @property
    def is_over(self) -> bool:
        """Whether all of its batches were delivered."""
        return self.at >= self.batches

    def has(self, place: int) -> bool:
        """Whether the batch at this place is made."""
        visit = self.visits[place % len(self.visits)]
        return place < visit.place + visit.made * visit.step

    def ready(self) -> int:
        """Return the place up to which batches can be delivered together. The one at `at` is made."""
        stop = min(self.batches, self.at + self.most)
        self.grows = False
        for visit in self.visits:
            if visit.made < visit.batches:
                first = visit.place + visit.made * visit.step
                if first < self.at:  # the lane has ended
                    first += -(-(self.at - first) // visit.step) * visit.step
                if first < stop:
                    stop, self.grows = first, not visit.complete
        return stop

    def lanes(self, at: int, batches: int) -> tuple[int, ...]:
        """Return the lanes of `batches` batches from place `at` on, in order, each once."""
        visits = self.visits
        return tuple(visits[(at + more) % len(visits)].lane for more in range(min(batches, len(visits))))

    def counts(self, at: int, batches: int) -> Iterator[tuple[Turn, int]]:
        """Yield the visits of `batches` batches from place `at` on, each with the number in its lane of the batch that
        follows its last one."""
        visits, stop = self.visits, at + batches
        for more in range(min(batches, len(visits))):
            visit = visits[(at + more) % len(visits)]
            last = stop - 1 - (stop - 1 - visit.place) % visit.step
            yield visit, visit.index_at(last) + 1


Source: TypeAlias = Turn | Stripe
"""The turn or stripe whose slot a slab is sent from."""
