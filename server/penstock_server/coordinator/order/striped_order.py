"""The order of an epoch whose lanes take turns after each batch, with the batches of several lanes in one slot.

It is `ExactOrder` with turns of one batch. But a visit is planned for a whole stripe (`model/stripe.py`), and makes all
batches of its lane there. So the order costs per visit what it would otherwise cost per batch, and batches of several
lanes share a slab.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from msgspec import Struct

from penstock_proto.batches.position import Position
from penstock_proto.messages import LanePlace

from ..model.stripe import Stripe
from ..model.turn import Part, Turn
from .order import EpochOrder
from .visits import LaneVisits

_MOST_RECORDS = 64 << 10
"""The most bytes of restart records in one message. Others come with a later one."""


class _Record(Struct, frozen=True):
    """A restart record that the consumers do not have yet. `needed`: it lists splits that earlier records do not, so
    consumers get it even if there is a later one."""

    place: LanePlace
    needed: bool


class StripedOrder(EpochOrder):
    """The stripes of one epoch, and the merged batches between their batches.

    A visit leaves the order where its lane ends, or with its stripe. `next` returns the stripe, with one part, if
    batches of it can be delivered; or a visit that ends its lane or has failed; or a merged batch.

    Args:
        visits: where new visits come from.
        batches: how many batches a stripe has.
        most: the most batches in a slab.
        batch_size: rows in a full batch.
        drop_remainder: leave out the last, smaller batch.
        singly: whether batches are delivered one by one: `next` returns the visit of the next batch.
        position: where the order begins; None at the start of the epoch.

    Attributes:
        singly: as given.
    """

    def __init__(
        self,
        visits: LaneVisits,
        *,
        batches: int,
        most: int,
        batch_size: int,
        drop_remainder: bool,
        singly: bool,
        position: Position | None = None,
    ) -> None:
        self._lane_visits = visits
        self._batches = batches
        self._most = most
        self._rows = batch_size
        self.singly = singly
        self._stripes: deque[Stripe] = deque()
        self._planned = 0
        self._entered = position.batches if position is not None else 0
        self._merges: deque[Turn] = deque()
        """The merged batches that are next in the order."""
        self._tail: deque[Turn] = deque()
        """The merged batch that ends the epoch."""
        self._to = self._merges
        """Where a merged batch goes that becomes known now."""
        self._unmade = 0
        """How many visits are not complete."""
        self._ends: list[tuple[int, int, Turn]] = []
        """The ends of lanes whose leftovers are not counted yet: the number of the stripe, the place, and the visit."""
        self._records: dict[int, deque[_Record]] = {}
        """The restart records that consumers were not told yet, by lane."""
        self._last_told = -1
        """The lane of the record that was told last."""
        super().__init__(visits, batch_size=batch_size, drop_remainder=drop_remainder, position=position)

    @property
    def window(self) -> list[Turn]:  # type: ignore[override]
        """See EpochOrder."""
        return list(self._all())

    @property
    def finished(self) -> bool:
        """See EpochOrder."""
        return self._flushed and not (self._merges or self._stripes or self._tail)

    @property
    def head(self) -> Turn | None:
        """See EpochOrder."""
        if self._merges:
            return self._merges[0]
        visit = next((stripe.next_visit for stripe in self._stripes if not stripe.is_over), None)
        return visit or (self._tail[0] if self._tail else None)

    def plan(self) -> Stripe | None:
        """Add the next stripe to the end of the order, and return it; None if all lanes have ended."""
        visits = self._lane_visits.stripe(self._batches)
        self.more = not self._lane_visits.exhausted
        if not visits:
            return None
        self._planned += 1
        stripe = Stripe(self._planned, visits, self._batches, self._most)
        for visit in visits:
            visit.foreseen = self._entered + visit.place
        self._entered += self._batches
        self._unmade += len(visits)
        self._stripes.append(stripe)
        return stripe

    def on_ready(self, turn: Turn) -> None:
        """See EpochOrder. The turn has its place already."""

    def on_record(self, turn: Turn, record: bytes, *, needed: bool = False) -> None:
        """Note the restart record after the batches of the visit that are made."""
        place = LanePlace(turn.lane, turn.index + turn.made, record)
        self._records.setdefault(turn.lane, deque()).append(_Record(place, needed))

    def next(self, most: int = 0) -> Turn | Stripe | None:
        """See EpochOrder."""
        while True:
            if self._merges:
                return self._merges[0] if self._merges[0].shows else None
            if not self._stripes:
                return self._tail[0] if self._tail and self._tail[0].shows else None
            stripe = self._stripes[0]
            if stripe.is_over:
                left = next((visit for visit in stripe.visits if not visit.left_order), None)
                if left is not None:
                    return left
                self._stripes.popleft()
                continue
            visit = stripe.next_visit
            if stripe.has(stripe.at):
                if not self.singly:
                    stripe.parts = deque([self._part(stripe, most)])
                    return stripe
                if visit.parts and visit.parts[0].first == stripe.at:
                    return visit
            elif not visit.left_order:  # otherwise the lane ended before this place
                self._count_leftovers()
                return visit if visit.complete or visit.error is not None else None
            stripe.at += 1

    @property
    def awaited(self) -> Turn | None:
        """See EpochOrder."""
        return self.head

    def on_delivered(self, turn: Turn | Stripe, part: Part) -> None:
        """See EpochOrder."""
        if isinstance(turn, Stripe):
            for lane in part.lanes:
                records = self._records.get(lane)
                told = max((place.index for place in part.places if place.lane == lane), default=0)
                while records and records[0].place.index <= told:
                    records.popleft()
            if part.places:
                self._last_told = part.places[-1].lane
            turn.at += part.batches

    def on_completed(self, turn: Turn) -> None:
        """See EpochOrder."""
        if turn.striped:
            self._unmade -= 1
            self._entered -= turn.batches - turn.made
            if turn.ended:
                self._on_lane_ended(turn)
                if turn.error is None and all(turn.lane != other.lane for _, _, other in self._ends):
                    number = next(stripe.number for stripe in self._stripes if turn in stripe.visits)
                    self._ends.append((number, turn.place + turn.made * turn.step, turn))
                    self._ends.sort(key=lambda end: end[:2])
        self._count_leftovers()

    def take(self, turn: Turn) -> None:
        """See EpochOrder."""
        if not turn.striped:
            (self._merges or self._tail).popleft()
        else:
            self._merges.extend(turn.merges)
            turn.merges.clear()
            if turn.ended:
                self._records.pop(turn.lane, None)

    def drop(self) -> list[Turn]:
        """See EpochOrder."""
        dropped = self.window
        self._stripes.clear()
        self._merges.clear()
        self._tail.clear()
        return dropped

    def _all(self) -> Iterator[Turn]:
        """Yield all turns that have not left, roughly in order."""
        yield from self._merges
        for stripe in self._stripes:
            for visit in stripe.visits:
                if not visit.left_order:
                    yield visit
                    yield from visit.merges
        yield from self._tail

    def _part(self, stripe: Stripe, most: int) -> Part:
        """Return the next batches of the stripe that can be delivered together, but not more than `most` if that is
        given."""
        batches = stripe.ready() - stripe.at
        if most:
            batches = min(batches, most)
        lanes, places = stripe.lanes(stripe.at, batches), self._new_places(stripe, batches)
        return Part(stripe.at, batches, batches * self._rows, (), lanes=lanes, places=places)

    def _new_places(self, stripe: Stripe, batches: int) -> tuple[LanePlace, ...]:
        """Return the records that are new after the next `batches` batches: of each lane the latest, and those that are
        needed. If they do not fit into a message, lanes take turns."""
        found: list[_Record] = []
        for visit, index in stripe.counts(stripe.at, batches):
            records = self._records.get(visit.lane, deque())
            kept: list[_Record] = []
            while records and records[0].place.index <= index:
                if kept and not kept[-1].needed:
                    kept.pop()
                kept.append(records.popleft())
            records.extendleft(reversed(kept))
            found += kept
        if sum(len(record.place.record) for record in found) <= _MOST_RECORDS:
            return tuple(record.place for record in found)
        found.sort(key=lambda one: (not one.needed, one.place.lane <= self._last_told, one.place.lane))
        places: list[LanePlace] = []
        nbytes = 0
        for record in found:
            nbytes += len(record.place.record)
            if nbytes > _MOST_RECORDS and places:
                break
            places.append(record.place)
        return tuple(places)

    def _count_leftovers(self) -> None:
        """Count the leftover rows of the lanes whose ends are the next ones in the order."""
        while self._ends and self._are_made_before(*self._ends[0][:2]):
            _, _, turn = self._ends.pop(0)
            self._to = turn.merges
            self._resolve(turn)
        self._to = self._tail
        self._flush()
        self._to = self._merges

    def _are_made_before(self, number: int, place: int) -> bool:
        """Whether all batches before this place of this stripe are made, or do not exist."""
        for stripe in self._stripes:
            if stripe.number > number:
                break
            for visit in stripe.visits:
                unmade = visit.place + visit.made * visit.step
                if not visit.complete and (stripe.number < number or unmade < place):
                    return False
        return True

    def _add(self, turn: Turn) -> None:
        raise NotImplementedError("stripes are planned as a whole")

    def _all_counted(self) -> bool:
        return not self._unmade and not self._ends

    def _insert(self, turn: Turn, position: int | None) -> None:
        self._entered += turn.batches
        self._to.append(turn)
