"""A job of ranks, which get one batch each per round."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from penstock_proto import ConnectionLost, PenstockError, StateMismatch, StreamClosed
from penstock_proto.batches.position import Position
from penstock_proto.messages import LaneEnded, PoolBegun

from ..model.consumer import Consumer
from ..model.stripe import Source
from ..model.turn import Part
from .front_place import Before
from .jobs import after_left_epochs, end_for, moved
from .outlet import Outlet
from .rounds import Batch, Round, Several, in_few, one_of, part_of, parts_of, together
from .window import Entry, EpochEnd, LeftEarly, Window

_SMALL = 256 << 10
"""A batch of at most this many bytes is sent together with those of later rounds. Its trainer copies it, which costs
less than a slab of its own."""


class RankJob:
    """Ranks: batch j of an epoch goes to rank j mod n. A round is sent when it is whole, so that all ranks get the same
    number of batches.

    If a round lies together in a slot, each rank's slab stands for all of it; and for several rounds, if batches are
    small. Otherwise each rank is told of the others' batches before it is sent its own. Either way its position after
    its batch is the position after the round. A last round of only k batches is left out. With `pad` it is filled up:
    rank r gets the batch of rank r mod k, too.

    Args:
        outlet: where batches go.
        window: holds the batches of rounds that were not sent.
        consumers: the ranks, in order.
        pad: fill up the last round.
        position: the earliest position of a rank; None: the start of epoch 0.
        in_lanes: whether batches come from lanes: those of an indexable feed do not.

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
        self._round: Round | None = None
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
            if self._send_rounds(epoch):
                continue
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

    def _fault(self, found: Round) -> PenstockError | None:
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

    def _next_round(self) -> Round:
        """Return what the window has of the next round."""
        assert self.at is not None
        found, window = self._round, self._window
        if found is None or found.first != self.at:
            epoch = window[self.at].epoch
            found = self._round = Round(epoch, self.at, self.at, self._done[1] if self._done[0] == epoch else 0)
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

    def _look_at(self, found: Round, entry: Entry, part: Part) -> None:
        """Add those batches of an entry to the round that belong to it."""
        source, ranks = entry.source, self.round
        assert source is not None
        for number in range(max(entry.at, found.after), entry.at + part.batches):
            one = self._batch_of(source, part, number - entry.at)
            batch = Batch(number, source, one, entry.shared)
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
        size = self._outlet.feed.plan.batch_size or 1
        return part_of(source, part, number, size) if self._in_lanes else one_of(part, number, size)

    def _send_rounds(self, epoch: int) -> bool:
        """Send each rank its batch of the next round, or of several, if all batches of these lie together. Return
        whether it was sent."""
        assert self.at is not None
        feed, ranks = self._outlet.feed, self.round
        if feed.info.room < ranks:
            return False
        entry = self._window[self.at]
        begin = max(entry.at, self._done[1]) if self._done[0] == epoch else entry.at
        known, size = begin - entry.at, feed.plan.batch_size or 1
        whole = together(self._window, self.at, known + max(feed.info.most, ranks), size)
        if whole is None or whole.batches - known < ranks:
            return False
        readers = self._readers(epoch)
        if len(readers) < ranks or any((epoch, begin // ranks) < one.first for one in readers):
            return False  # one has read them already, or this is not a border between rounds
        rounds, own = 1, Part(whole.first + known, 1, size, ())
        if feed.nbytes_of(own) <= _SMALL:
            rounds = max(1, min(whole.batches - known, feed.info.most) // ranks)
            own = replace(own, batches=rounds, rows=rounds * size)
        nbytes = feed.nbytes_of(own)
        if not all(one.has_credit_for(nbytes) for one in readers):
            return False
        source = entry.source
        assert source is not None
        if self._in_lanes:
            some = parts_of(source, whole, known, rounds * ranks, size)
            newest = {place.lane: place for place in some.places}
            own = replace(own, lanes=some.lanes, places=tuple(newest.values()))
        for one in readers:
            mine = replace(own, first=own.first + one.rank)
            self._outlet.send(epoch, one, source, mine, nbytes, shared=entry.shared, stride=ranks)
        self._done, self._round = (epoch, begin + rounds * ranks), None
        while self.at < self._window.end and self._window[self.at].after <= self._done and self._is_part(self.at):
            self.at += 1
        return True

    def _is_part(self, at: int) -> bool:
        return isinstance(self._window[at].item, Part)

    def _send(self, found: Round) -> bool:
        """Send a round, if all ranks have credit for it. Return whether it was sent."""
        receivers = self._receivers(found)
        if not all(self._has_credit(consumer, batch) for consumer, batch in receivers):
            return False
        own = {consumer.number: batch.number for consumer, batch in receivers if self._is_own(consumer, batch)}
        told = in_few(found)
        # What follows the round comes after a batch that fills it up, so that the position after that is as elsewhere.
        follows = [(at, what) for at, what in told if at >= found.after]
        for consumer in self._readers(found.epoch):
            self._tell_of_others(consumer, found.epoch, told[: -len(follows) or None], own.get(consumer.number))
        times = [batch.number for _, batch in receivers]
        newest = {place.lane: place for batch in found.batches for place in batch.part.places}
        for consumer, batch in receivers:
            part, repeat = batch.part, not self._is_own(consumer, batch)
            if repeat:
                part = replace(part, record=b"", lanes=(), places=())
            elif part.places:  # a later batch of the round may be of the same lane: all ranks keep the same record
                part = replace(part, places=tuple(newest[place.lane] for place in part.places))
            shared = batch.shared or times.count(batch.number) > 1
            nbytes = self._outlet.feed.nbytes_of(part)
            self._outlet.send(found.epoch, consumer, batch.source, part, nbytes, shared=shared, repeat=repeat)
        for consumer in self._readers(found.epoch):
            self._tell_of_others(consumer, found.epoch, follows, None)
        return True

    def _tell_of_others(
        self,
        consumer: Consumer,
        epoch: int,
        told: list[tuple[int, Several | LaneEnded | PoolBegun]],
        own: int | None,
    ) -> None:
        """Tell a rank of the batches of a round that others get, and what lies between them. `own`: the number of its
        own batch, if it gets one."""
        begin = consumer.told[1] if consumer.told[0] == epoch else 0
        for at, what in told if epoch >= consumer.told[0] else ():
            if isinstance(what, Several):
                if (message := what.told(epoch, begin, own)) is not None:
                    self._outlet.tell(message, [consumer])
            elif at >= begin:
                self._outlet.tell(what, [consumer])

    def _is_own(self, consumer: Consumer, batch: Batch) -> bool:
        """Whether a batch is the consumer's own, and does not fill up the last round."""
        return consumer.rank == batch.number % self.round

    def _receivers(self, found: Round) -> list[tuple[Consumer, Batch]]:
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

    def _has_credit(self, consumer: Consumer, batch: Batch) -> bool:
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
