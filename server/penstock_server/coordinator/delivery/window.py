"""The window of a stream that several consumers share: what was delivered lately, for those that are behind.

It knows no consumers: shared_delivery.py decides what is kept, and for whom. For each entry with batches the window
holds their slot.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from penstock_proto.messages import LaneEnded, PoolBegun

from ..model.leases import Lease, Leases
from ..model.stripe import Source, Stripe
from ..model.turn import Part


class EpochEnd(Struct, frozen=True):
    """The epoch ends here, with these totals."""

    batches: int
    rows: int


class LeftEarly(Struct, frozen=True):
    """The stream goes on with a later epoch here. Its consumers at the front had left this one before its end."""


Item: TypeAlias = Part | LaneEnded | PoolBegun | EpochEnd | LeftEarly


class Entry(Struct, frozen=True):
    """Something that was delivered.

    `at`: how many batches of the epoch come before it. `source`: whose slot has the batches of a part; else None.
    `shared`: whether several jobs may get it. Otherwise the only one may write to its slot.
    """

    epoch: int
    at: int
    item: Item
    source: Source | None = None
    shared: bool = True

    @property
    def after(self) -> tuple[int, int]:
        """The place after it: an epoch, and how many of its batches come before."""
        if isinstance(self.item, EpochEnd | LeftEarly):
            return self.epoch + 1, 0
        return self.epoch, self.at + (self.item.batches if isinstance(self.item, Part) else 0)


class Window:
    """The latest entries of one stream. Each has a number; numbers go up by one.

    Args:
        slots: the stream's slots.

    Attributes:
        first: the number of the oldest entry.
        nbytes: bytes of the slots that it holds.
    """

    def __init__(self, slots: Leases) -> None:
        self.first = 0
        self.nbytes = 0
        self._slots = slots
        self._entries: deque[Entry] = deque()
        self._held: Counter[Lease] = Counter()
        """How many entries hold each slot."""
        self._whole_from = (0, 0)
        """From this place on it has everything up to its last entry."""

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, number: int) -> Entry:
        return self._entries[number - self.first]

    @property
    def end(self) -> int:
        """The number that the next entry gets."""
        return self.first + len(self._entries)

    @property
    def after(self) -> tuple[int, int]:
        """The place after its last entry."""
        return self._entries[-1].after

    @property
    def slots(self) -> int:
        """How many slots it holds."""
        return len(self._held)

    def batches_from(self, number: int) -> int:
        """Return how many batches its entries from this one on have."""
        entries = islice(self._entries, number - self.first, None)
        return sum(entry.item.batches for entry in entries if isinstance(entry.item, Part))

    def slots_from(self, number: int) -> int:
        """Return how many slots its entries from this one on have."""
        entries = islice(self._entries, number - self.first, None)
        return len({entry.source.slot for entry in entries if entry.source is not None})

    def append(self, entry: Entry) -> None:
        """Add an entry, and hold its slot. If the window is empty, nothing else was delivered at the entry's place."""
        if not entry.shared:
            self._whole_from = entry.after
        elif not self._entries:
            self._whole_from = entry.epoch, entry.at
        self._entries.append(entry)
        if entry.source is not None:
            lease = entry.source.slot
            self._slots.hold(lease)
            self.nbytes += 0 if lease in self._held else lease.nbytes
            self._held[lease] += 1

    def drop_first(self) -> None:
        """Drop the oldest entry, and release its slot."""
        entry = self._entries.popleft()
        self.first += 1
        epoch, at = entry.after
        self._whole_from = max(self._whole_from, (epoch, at + isinstance(entry.item, LaneEnded | PoolBegun)))
        if entry.source is not None:
            self._release(entry.source.slot)

    def clear(self) -> None:
        """Drop all entries."""
        while self._entries:
            self.drop_first()

    def forget(self) -> None:
        """Drop all entries without releasing their slots, because somebody else has released them."""
        self.first = self.end
        self._entries.clear()
        self._held.clear()
        self.nbytes = 0

    def find(self, epoch: int, batches: int, least: int = 1) -> int | None:
        """Return the number of the entry with which a job goes on that has read `batches` batches of this epoch; `end`
        if it has read everything here. Return None if the window does not have all that comes next, if some of that is
        not shared, or if fewer than `least` batches of the epoch come here, because the stream has left it."""
        if not self._entries or (epoch, batches) < self._whole_from:
            return None
        for number, entry in enumerate(self._entries, self.first):
            item = entry.item
            if entry.epoch < epoch:
                continue
            if entry.epoch > epoch or isinstance(item, LeftEarly):
                return None
            if isinstance(item, EpochEnd) or entry.at + (item.batches if isinstance(item, Part) else 1) > batches:
                return None if self._is_left_before(number, batches + least) else number
        return self.end if self.after == (epoch, batches) else None

    def _is_left_before(self, number: int, batches: int) -> bool:
        """Whether the stream leaves the epoch of this entry before its batch number `batches`."""
        for entry in islice(self._entries, number - self.first, None):
            if isinstance(entry.item, LeftEarly | EpochEnd):
                return isinstance(entry.item, LeftEarly)
            if isinstance(entry.item, Part) and entry.at + entry.item.batches >= batches:
                return False
        return False

    def _release(self, lease: Lease) -> None:
        self._held[lease] -= 1
        if not self._held[lease]:
            del self._held[lease]
            self.nbytes -= lease.nbytes
        self._slots.release(lease)


def cut(source: Source, part: Part, batches: int, batch_size: int | None) -> tuple[Part, Part | None]:
    """Cut a part after its first `batches` batches. If it has no more, the second value is None. Only full batches are
    ever together in a part."""
    if batches >= part.batches:
        return part, None
    rows = batches * (batch_size or 1)
    left = replace(part, batches=batches, rows=rows)
    right = replace(part, first=part.first + batches, batches=part.batches - batches, rows=part.rows - rows)
    if not isinstance(source, Stripe):
        if part.record:  # that of the lane after the whole part
            left = replace(left, record=b"", lanes=(source.lane,))
        return left, right
    return _in_lanes(source, part, left), _in_lanes(source, part, right)


def _in_lanes(stripe: Stripe, whole: Part, piece: Part) -> Part:
    """Return the piece of a part of a stripe with its own lanes, and with those records that belong to it."""
    lanes = stripe.lanes(piece.first, piece.batches)
    reached = {visit.lane: index for visit, index in stripe.counts(piece.first, piece.batches)}
    places = tuple(place for place in whole.places if place.lane in reached and place.index <= reached[place.lane])
    return replace(piece, lanes=lanes, places=places)
