"""A round is one batch for each rank. This file says what ranks are told of a round, and finds rounds that lie together
in a slot.

If a feed has lanes, messages about a round's batches have `lanes` and `places`, as for a stripe, and no record. Then a
rank can hear of the batches of one lane in any order, and of a batch without a record of its own.
"""

from __future__ import annotations

from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from penstock_proto.batches.layout import TAIL_LANE
from penstock_proto.messages import LaneEnded, LanePlace, PoolBegun, SentElsewhere

from ..model.stripe import Source, Stripe
from ..model.turn import Part, Turn
from .outlet import elsewhere
from .window import EpochEnd, LeftEarly, Window, cut

_MOST_RECORDS = 64 << 10
"""The most bytes of restart records in one message about several batches."""


class Batch(Struct, frozen=True):
    """One batch of a round: its number in the epoch, and where it is."""

    number: int
    source: Source
    part: Part
    shared: bool


class Round(Struct):
    """What the window has of a round, as far as it was looked through.

    `first`: the entry with which it begins. `items`: its batches, and the messages between them; `batches`: only the
    batches. `at`: the entry to look at next; for a round that is `full`, the one with which the next round begins.
    `after`: how many batches of the epoch come before that. `end`: how it ends, if it is not full: with the epoch, or
    because the stream has left the epoch.
    """

    epoch: int
    first: int
    at: int
    after: int
    items: list[Batch | LaneEnded | PoolBegun] = []
    batches: list[Batch] = []
    full: bool = False
    end: EpochEnd | LeftEarly | None = None

    @property
    def complete(self) -> bool:
        """Whether it is known how it ends."""
        return self.full or self.end is not None


class Several:
    """Consecutive batches of a round that fit into one message. Each comes from another lane, or none of them moves a
    lane (batches of pools, and of an indexable feed)."""

    def __init__(self, first: Batch) -> None:
        self._first = first
        self._batches = [first]
        self._lanes = list(first.part.lanes)
        self._places = [first.part.places]
        self._records = _records(first)

    def add(self, batch: Batch) -> bool:
        """Add the next batch, unless it needs a message of its own. Return whether it was added."""
        first, part = self._first, batch.part
        if first.part.lanes or part.lanes:
            joins = bool(first.part.lanes and part.lanes) and part.lanes[0] not in self._lanes
        else:
            joins = batch.source.lane_at(part.first) == first.source.lane_at(first.part.first) != TAIL_LANE
        if not joins or self._records + _records(batch) > _MOST_RECORDS:
            return False
        self._batches.append(batch)
        self._lanes += part.lanes
        self._places.append(part.places)
        self._records += _records(batch)
        return True

    def told(self, epoch: int, begin: int, own: int | None) -> SentElsewhere | None:
        """Return the message for a rank that gets batch `own`, and knows of those before batch `begin`; None if there
        is nothing to tell."""
        at = self._first.number
        known, mine = max(0, begin - at), len(self._batches) if own is None or own < max(at, begin) else own - at
        batches = self._batches[known:mine] + self._batches[mine + 1 :]
        if len(batches) < 2:
            return elsewhere(epoch, batches[0].source, batches[0].part) if batches else None
        lanes, places = self._lanes, self._places
        some = Part(
            batches[0].part.first,
            len(batches),
            sum([batch.part.rows for batch in batches]),
            (),
            b"",
            tuple(lanes[known:mine] + lanes[mine + 1 :]),
            tuple(chain.from_iterable(places[known:mine] + places[mine + 1 :])),
        )
        return elsewhere(epoch, batches[0].source, some)


def _records(batch: Batch) -> int:
    return sum([len(place.record) for place in batch.part.places])


def in_few(found: Round) -> list[tuple[int, Several | LaneEnded | PoolBegun]]:
    """Return what ranks are told of a round, each with the number of the batch before which it comes."""
    told: list[tuple[int, Several | LaneEnded | PoolBegun]] = []
    at = found.after - len(found.batches)
    for item in found.items:
        if not isinstance(item, Batch):
            told.append((at, item))
            continue
        last = told[-1][1] if told else None
        if not (isinstance(last, Several) and last.add(item)):
            told.append((at, Several(item)))
        at += 1
    return told


def together(window: Window, at: int, most: int, size: int) -> Part | None:
    """Return the batches of the window that lie one after another in one slot, from entry `at` on, as one part with
    about `most` of them at the most; None if there are no batches at this entry. `size`: the rows of a full batch. The
    last batch of an epoch, which may be smaller, is left out. The part ends where the record of a lane is needed."""
    entry = window[at]
    source, part = entry.source, entry.item
    if source is None or not isinstance(part, Part) or part.rows < part.batches * size:
        return None
    for number in range(at + 1, window.end):
        other = window[number]
        more = other.item
        if other.source is None or other.source.slot is not source.slot or not isinstance(more, Part):
            break
        if other.shared != entry.shared or part.skipped:
            break
        if part.batches >= most or more.first != part.first + part.batches or more.rows < more.batches * size:
            break
        batches, rows = part.batches + more.batches, part.rows + more.rows
        lanes: tuple[int, ...] = ()
        if isinstance(source, Stripe):
            lanes = source.lanes(part.first, batches)
        places = (*part.places, *more.places)
        part = Part(part.first, batches, rows, (), more.record, lanes, places, more.skipped)
    return part


def part_of(source: Source, whole: Part, number: int, size: int) -> Part:
    """Return batch `number` of a part, of a feed with lanes. `size`: the rows of a full batch."""
    one = one_of(whole, number, size)
    if not isinstance(source, Stripe):
        return _in_lane(source, whole, one)
    lane, index = source.lane_at(one.first), source.index_at(one.first) + 1
    is_first = one.first - len(source.visits) < whole.first
    places = tuple(
        place
        for place in whole.places
        if place.lane == lane and (place.index == index or (place.index < index and is_first))
    )
    return replace(one, record=b"", lanes=(lane,), places=places)


def parts_of(source: Source, whole: Part, known: int, batches: int, size: int) -> Part:
    """Return `batches` batches of a part, without its first `known`, as `part_of` does."""
    rest = cut(source, whole, known, size)[1] if known else whole
    assert rest is not None
    some, _ = cut(source, rest, batches, size)
    return some if isinstance(source, Stripe) else _in_lane(source, whole, some)


def one_of(whole: Part, number: int, size: int) -> Part:
    """Return batch `number` of a part. `size`: the rows of a full batch."""
    if whole.batches == 1:
        return whole
    return replace(whole, first=whole.first + number, batches=1, rows=min(size, whole.rows - number * size))


def _in_lane(turn: Turn, whole: Part, some: Part) -> Part:
    """Return some batches of a part of a turn. Its record is that after the part's last batch."""
    if turn.lane < 0:
        return replace(some, lanes=(), places=())
    places: tuple[LanePlace, ...] = ()
    if whole.record and some.first + some.batches == whole.first + whole.batches:
        places = (LanePlace(turn.lane, turn.index_at(some.first) + some.batches, whole.record),)
    return replace(some, record=b"", lanes=(turn.lane,), places=places)
