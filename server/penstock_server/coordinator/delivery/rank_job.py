"""A job of ranks, which get one batch each per round."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from penstock_proto import ConnectionLost, PenstockError, StateMismatch, StreamClosed
from penstock_proto.batches.position import Position
from penstock_proto.messages import LaneEnded, LanePlace, PoolBegun

from ..model.consumer import Consumer
from ..model.stripe import Source, Stripe
from ..model.turn import Part
from .front_place import Before
from .jobs import after_left_epochs, end_for, moved
from .outlet import Outlet, elsewhere
from .window import Entry, EpochEnd, LeftEarly, Window


class _Batch(Struct, frozen=True):
    """One batch of a round: its number in the epoch, and where it is."""

    number: int
    source: Source
    part: Part
    shared: bool


class _Round(Struct):
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
    items: list[_Batch | LaneEnded | PoolBegun] = []
    batches: list[_Batch] = []
    full: bool = False
    end: EpochEnd | LeftEarly | None = None

    @property
    def complete(self) -> bool:
        """Whether it is known how it ends."""
        return self.full or self.end is not None


class RankJob:
    """Ranks: batch j of an epoch goes to rank j mod n. A round is sent when it is whole, so that all ranks get the same
    number of batches.

    Each rank is told of the others' batches before it is sent its own. So its position after that batch is the position
    after the round. A last round of only k batches is left out. With `pad` it is filled up: rank r gets the batch of
    rank r mod k, too.

    Args:
        outlet: where batches go.
        window: holds the batches of rounds that were not sent.
        consumers: the ranks, in order.
        pad: fill up the last round.
        position: the earliest position of a rank; None: the start of epoch 0.
        in_lanes: whether a batch may be part of a slab of several. See `_part_of`.

    Attributes: as for Job.
    """

    def __init__(
        self,
        outlet: Outlet,
        window: Window,
        consumers: Sequence[Consumer],
        *,
        pad: bool,
        position: Position | None,
        in_lanes: bool,
    ) -> None:
        self.consumers = list(consumers)
        self.at: int | None = None
        self.told_first: tuple[Before, ...] = ()
        self.round = len(consumers)
        self._done = (position.epoch, position.batches) if position else (0, 0)
        """The epoch, and how many of its batches come before the next round."""
        self._off_border = off_border(position, len(consumers), outlet.feed.name)
        self._begins = (position.epoch, position.batches + position.skip) if position else (0, 0)
        self._pad = pad
        self._in_lanes = in_lanes
        self._outlet = outlet
        self._window = window
        self._round: _Round | None = None
        """The next round, as far as it was looked through."""

    @property
    def gone(self) -> bool:
        """See Job."""
        return all(consumer.gone for consumer in self.consumers)

    @property
    def there(self) -> list[Consumer]:
        """See Job."""
        return [consumer for consumer in self.consumers if not consumer.gone]

    @property
    def epoch(self) -> int:
        """See Job."""
        return min((consumer.epoch for consumer in self.there), default=self.consumers[0].epoch)

    def reads(self, epoch: int) -> bool:
        """Whether every rank that has not finished the epoch has begun it."""
        found = False
        for consumer in self.consumers:
            if consumer.reading:
                found = found or consumer.epoch == epoch
            elif consumer.epoch <= epoch and not consumer.gone:
                return False
        return found

    def is_at_front(self, epoch: int) -> bool:
        """See Job."""
        if not self.reads(epoch):
            return False
        if self.at is None:
            return True
        return not self._next_round().complete

    @property
    def keeps_up(self) -> bool:
        """See Job."""
        return self.at is None or self._window.slots_from(self.at) <= self.round

    @property
    def holding_up(self) -> list[Consumer]:
        """See Job."""
        epochs = {consumer.epoch for consumer in self.there if consumer.reading}
        if not epochs:
            return []
        epoch = min(epochs)
        if not self.reads(epoch):
            return [one for one in self.consumers if not (one.gone or one.reading or one.epoch > epoch)]
        if self.at is None or not (found := self._next_round()).full:
            return []
        return [one for one, batch in self._receivers(found) if not self._has_credit(one, batch)]

    def place(self, at: tuple[int, int]) -> tuple[int, int] | None:
        """See Job."""
        epoch, batches = max(self._done, at) if self._done[0] == at[0] else at
        if epoch != self.epoch or not self.reads(epoch):
            return None
        rounds = [consumer.batches_under_way(epoch) for consumer in self._readers(epoch)]
        if any(one is None for one in rounds):
            return None
        return epoch, max(0, batches - self.round * max(one or 0 for one in rounds))

    def catch_up(self) -> PenstockError | None:
        """Send the rounds that are whole, as far as all ranks have credit. Return why the job cannot go on here, or
        None."""
        while self.at is not None:
            found = self._round
            if found is not None and found.first == self.at and found.at == self._window.end and not found.complete:
                break
            self.at = after_left_epochs(self._window, self.at, self.epoch)
            if self.at == self._window.end:
                self.at = None
                break
            epoch = self._window[self.at].epoch
            if not self.reads(epoch):
                break
            found = self._next_round()
            if isinstance(found.end, LeftEarly):
                under_way = any(consumer.under_way for consumer in self.there)
                return None if under_way else moved(self._outlet.feed.name)
            if (error := self._fault(found)) is not None:
                return error
            if not found.complete or not self._send(found):
                break
            self.at, self._done, self._round = found.at, (epoch, found.after), None
            if isinstance(found.end, EpochEnd):
                for consumer in self._readers(epoch):
                    end_for(self._outlet, consumer, epoch, found.end)
                self._done = (epoch + 1, 0)
        return None

    def batches_behind(self) -> int:
        """See Job."""
        if self.at is None or self.keeps_up:
            return 0
        entry = self._window[self.at] if self.at < self._window.end else None
        known = max(0, self._done[1] - entry.at) if entry is not None and entry.epoch == self._done[0] else 0
        return self._window.batches_from(self.at) - known

    def take_back(self) -> None:
        """Do nothing: the other ranks may go on with the epoch."""

    def on_lost(self, consumer: Consumer) -> PenstockError | None:
        """Return why the job cannot go on without the consumer, which is lost."""
        said = f"rank {consumer.rank} of {self.round} is gone: all ranks go on when it is back"
        return ConnectionLost(said, feed=self._outlet.feed.name)

    # --- helpers ---

    def _fault(self, found: _Round) -> PenstockError | None:
        """Return why the ranks cannot get this round; None if they can.

        A rank that has closed before or within the epoch cannot. Then the others would wait for it in their
        collectives, and not know why.
        """
        begun, at = self._begins
        if self._off_border is not None and found.epoch == begun and any(one.number >= at for one in found.batches):
            return self._off_border  # the epoch did not end with a padded round
        if not (found.full or (self._pad and isinstance(found.end, EpochEnd) and found.batches)):
            return None
        for consumer in self.consumers:
            if consumer.gone and (consumer.begun is None or consumer.begun <= found.epoch):
                when = "within" if consumer.begun == found.epoch else "before"
                return StreamClosed(
                    f"rank {consumer.rank} of {self.round} has closed its connection {when} epoch {found.epoch}, and "
                    "the others cannot go on in step without it: end all ranks, and start the job again",
                    feed=self._outlet.feed.name,
                )
        return None

    def _readers(self, epoch: int) -> list[Consumer]:
        return [consumer for consumer in self.consumers if consumer.reading and consumer.epoch == epoch]

    def _next_round(self) -> _Round:
        """Return what the window has of the next round."""
        assert self.at is not None
        found, window = self._round, self._window
        if found is None or found.first != self.at:
            epoch = window[self.at].epoch
            found = self._round = _Round(epoch, self.at, self.at, self._done[1] if self._done[0] == epoch else 0)
        while not found.complete and found.at < window.end:
            entry = window[found.at]
            if isinstance(entry.item, Part):
                self._look_at(found, entry, entry.item)
                continue
            found.at += 1
            if isinstance(entry.item, EpochEnd | LeftEarly):
                found.end = entry.item
            else:
                found.items.append(entry.item)
                found.after = max(found.after, entry.at)  # batches before it may have been passed over
        return found

    def _look_at(self, found: _Round, entry: Entry, part: Part) -> None:
        """Add those batches of an entry to the round that belong to it."""
        source, ranks = entry.source, self.round
        assert source is not None
        for number in range(max(entry.at, found.after), entry.at + part.batches):
            one = self._batch_of(source, part, number - entry.at)
            batch = _Batch(number, source, one, entry.shared)
            found.items.append(batch)
            found.batches.append(batch)
            found.after = number + 1
            if found.after % ranks == 0:
                found.full = True
                break
        if found.after >= entry.at + part.batches:
            found.at += 1

    def _batch_of(self, source: Source, part: Part, number: int) -> Part:
        """Return one batch of a part."""
        one = part
        if part.batches > 1:
            size = self._outlet.feed.plan.batch_size or 1
            one = replace(part, first=part.first + number, batches=1, rows=min(size, part.rows - number * size))
        return _part_of(source, part, one) if self._in_lanes else one

    def _send(self, found: _Round) -> bool:
        """Send a round, if all ranks have credit for it. Return whether it was sent."""
        receivers = self._receivers(found)
        if not all(self._has_credit(consumer, batch) for consumer, batch in receivers):
            return False
        epoch, readers = found.epoch, self._readers(found.epoch)
        own = {batch.number: consumer for consumer, batch in receivers if consumer.rank == batch.number % self.round}
        at = found.after - len(found.batches)
        for item in found.items:
            listening = [one for one in readers if (epoch, at) >= one.told]
            if isinstance(item, _Batch):
                consumer = own.get(at)
                others = listening if consumer is None else [one for one in listening if one is not consumer]
                self._outlet.tell(elsewhere(epoch, item.source, item.part), others)
                at += 1
            else:
                self._outlet.tell(item, listening)
        times = [batch.number for _, batch in receivers]
        for consumer, batch in receivers:
            part, repeat = batch.part, consumer.rank != batch.number % self.round
            if repeat:
                part = replace(part, record=b"", lanes=(), places=())
            shared = batch.shared or times.count(batch.number) > 1
            nbytes = self._outlet.feed.nbytes_of(part)
            self._outlet.send(found.epoch, consumer, batch.source, part, nbytes, shared=shared, repeat=repeat)
        return True

    def _receivers(self, found: _Round) -> list[tuple[Consumer, _Batch]]:
        """Return who gets which batch of a round."""
        batches = found.batches
        if not batches or not (found.full or (self._pad and isinstance(found.end, EpochEnd))):
            return []
        by_rank = {batch.number % self.round: batch for batch in batches}
        number = batches[0].number // self.round
        return [
            (consumer, by_rank.get(consumer.rank) or batches[consumer.rank % len(batches)])
            for consumer in self._readers(found.epoch)
            if (found.epoch, number) >= consumer.first
        ]

    def _has_credit(self, consumer: Consumer, batch: _Batch) -> bool:
        return consumer.has_credit_for(self._outlet.feed.nbytes_of(batch.part))


def off_border(position: Position | None, world_size: int, feed: str) -> StateMismatch | None:
    """Return the error if a position is not between two rounds of `world_size` ranks, else None."""
    if position is None or (position.batches + position.skip) % world_size == 0:
        return None
    return StateMismatch(
        f"the state was taken after batch {position.batches + position.skip} of epoch {position.epoch}, which is not a "
        f"border between rounds of {world_size} ranks: it was made with another world_size, or at the end of an epoch "
        'with last_round="pad"',
        feed=feed,
    )


def _part_of(source: Source, whole: Part, one: Part) -> Part:
    """Return one batch of a part as a batch of a stripe is told: `lanes` and `places` instead of the record.

    Then a rank can be told of the batches of one lane in any order, and of a batch without a record of its own.
    """
    lane, index = source.lane_at(one.first), source.index_at(one.first) + 1
    if lane < 0:
        return replace(one, lanes=(), places=())
    if isinstance(source, Stripe):
        is_first = one.first - len(source.visits) < whole.first
        places = tuple(
            place
            for place in whole.places
            if place.lane == lane and (place.index == index or (place.index < index and is_first))
        )
    elif whole.record and one.first + 1 == whole.first + whole.batches:
        places = (LanePlace(lane, index, whole.record),)
    else:
        places = ()
    return replace(one, record=b"", lanes=(lane,), places=places)
