"""The delivery policy of jobs that read the same stream: each gets all of it, at its own pace.

The *front* is the next batch in the order. A consumer at the front is sent it as soon as it is made. If it has no
credit, others do not wait for it: the front goes on, and the consumer is *behind*. The window keeps what it has missed,
as long as there is memory for that. Then the consumer is told that its stream *moves*: it connects again with its
position, as after a loss, and reads another stream, which shares again when it meets one.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from penstock_proto import StreamMoved
from penstock_proto import messages as m
from penstock_proto.batches.position import Position, pack
from penstock_proto.messages import MAX_START, LaneEnded, PoolBegun

from ..model.consumer import Consumer
from ..model.known_lists import SplitsInfo
from ..model.stripe import Stripe
from ..model.turn import Part, Turn
from ..order.epoch import Epoch
from .delivery import SingleDelivery
from .front_place import Before, FrontPlace
from .outlet import Outlet, elsewhere
from .window import Entry, EpochEnd, LeftEarly, Window, cut

Place = tuple[int, int]
"""A place in the stream: an epoch, and how many of its batches come before."""


class _Joined(Struct, frozen=True):
    """What a consumer that has joined in this epoch does not need: it has the first `known` batches of its next entry.
    Of the `skip` batches after them it is only told, because its position passes over them."""

    epoch: int
    known: int
    skip: int


class SharedDelivery(SingleDelivery):
    """Sends everything to each of the stream's consumers.

    Args:
        outlet: where batches go.
        room: returns the most bytes and the most slots that the window may hold now.
        on_moved: called with the epoch and its list of splits when a consumer moves within the epoch.

    Attributes:
        window: what consumers that are behind still need.
        keeps: whether the window also keeps what none of them needs, for those of another stream, which is behind.
    """

    def __init__(
        self, outlet: Outlet, room: Callable[[], tuple[int, int]], on_moved: Callable[[int, SplitsInfo], None]
    ) -> None:
        super().__init__(outlet)
        self.window = Window(outlet.slots)
        self.keeps = False
        self._room = room
        self._on_moved = on_moved
        self._behind: dict[Consumer, int] = {}
        """The consumers that are behind, each with the number of the entry that it gets next."""
        self._joined: dict[Consumer, _Joined] = {}
        """What consumers that have joined within an epoch do not need of its next batches."""
        self._front_place = FrontPlace(outlet.feed.info, None)
        self._first: dict[Consumer, tuple[Before, ...]] = {}
        """What consumers that have joined at the front are told first, when they begin their epoch."""
        self._latest: list[Entry] = []
        """What the consumers at the front were told since the latest batch."""
        self._lists: dict[int, SplitsInfo] = {}
        """The lists of splits of the epochs that are closed, but are still in the window."""

    # --- consumers ---

    @property
    def readers(self) -> list[Consumer]:
        """The consumers that are not gone."""
        return [consumer for consumer in self._outlet.consumers if not consumer.gone]

    @property
    def front(self) -> Place | None:
        """The place of the next batch that nobody has been sent; None if no epoch is open, or it is not known yet."""
        epoch = self._outlet.first_epoch
        return None if epoch is None or epoch.order is None else (epoch.number, epoch.batches)

    @property
    def next_epoch(self) -> int | None:
        """The next epoch that begins with its first batch; None if that is not known yet."""
        epoch = self._outlet.first_epoch
        if epoch is None or epoch.order is None:
            return None
        return epoch.number + (epoch.batches + epoch.skip > 0)

    @property
    def front_position(self) -> Position | None:
        """The position of the front; None if there is no batch of the epoch to come, or the position is not known yet,
        or it is too long."""
        epoch = self._outlet.first_epoch
        if epoch is None or epoch.order is None or epoch.skip or epoch.order.finished or epoch.splits is None:
            return None
        if not epoch.batches:
            return Position(self._outlet.feed.info, epoch.number)
        position = self._front_place.position(epoch.splits.digest)
        return position if len(pack(position)) <= MAX_START else None

    def list_of(self, epoch: int) -> SplitsInfo | None:
        """Return the list of splits of an epoch that consumers read; None if it is not known."""
        first = self._outlet.first_epoch
        return first.splits if first is not None and first.number == epoch else self._lists.get(epoch)

    def covers(self, place: Place, digest: bytes = b"") -> bool:
        """Whether a consumer can join that has read everything before this place, of an epoch whose splits have this
        digest (if it knows that)."""
        outlet = self._outlet
        if not self._is_common(place):
            return False
        if not outlet.live or (outlet.first_epoch is not None and outlet.first_epoch.skip):
            return False
        if digest and ((splits := self.list_of(place[0])) is None or splits.digest != digest):
            return False
        return self.window.find(*place) is not None if self.window else place == self.front

    def reaches(self, place: Place) -> bool:
        """Whether a consumer that joins before this place comes beyond it, and does not have to move before."""
        front = self.front
        return self._is_common(place) and (
            (front is not None and place[0] == front[0] and place[1] >= front[1])
            or (bool(self.window) and self.window.find(*place) is not None)
        )

    def begin_at(self, position: Position | None) -> None:
        """Begin the stream at this position (None: at epoch 0)."""
        self._front_place = FrontPlace(self._outlet.feed.info, position)

    def join_front(self, consumer: Consumer) -> None:
        """Let a consumer begin with the front's next batch, or with a later epoch."""
        self._first[consumer] = self._front_place.told_first

    def join(self, consumer: Consumer, position: Position | None) -> None:
        """Let a consumer go on at this position, which `covers` has accepted. (None: epoch 0)."""
        place = (position.epoch, position.batches) if position else (0, 0)
        if not self.window and self._latest:  # those at the front have heard that a lane ends or a pool begins here
            for entry in self._latest:
                self.window.append(entry)
        at = self.window.find(*place) if self.window else None
        known = 0
        if at is not None and at < self.window.end:
            self._behind[consumer] = at
            entry = self.window[at]
            if isinstance(entry.item, Part) and entry.epoch == place[0]:
                known = max(0, place[1] - entry.at)
        skip = position.skip if position else 0
        if known or skip:
            self._joined[consumer] = _Joined(place[0], known, skip)

    def place_of(self, consumer: Consumer) -> Place | None:
        """Return the place up to which the consumer was handed everything; None if that is not in the epoch that it
        reads, or not known."""
        at = self._behind.get(consumer)
        place = self.front if at is None else (self.window[at].epoch, self.window[at].at)
        if not consumer.reading or consumer in self._joined or place is None or place[0] != consumer.epoch:
            return None
        under_way = consumer.batches_under_way(consumer.epoch)
        return None if under_way is None else (place[0], place[1] - under_way)

    def behind(self, consumer: Consumer) -> int:
        """Return how many batches of the window a consumer has not been sent."""
        at = self._behind.get(consumer)
        if at is None:
            return 0
        joined = self._joined.get(consumer)
        return self.window.batches_from(at) - (joined.known if joined is not None else 0)

    def move(self, consumer: Consumer) -> None:
        """Let the consumer go: it connects again, and goes on in another stream."""
        said = "the job reads another stream from here on, which goes on where it is"
        self._outlet.tell(m.Failed(m.ErrorReport.of(StreamMoved(said, feed=self._outlet.feed.name))), [consumer])
        if (splits := self.list_of(consumer.epoch)) is not None:
            self._on_moved(consumer.epoch, splits)
        consumer.moved = True
        consumer.on_gone()
        self._forget_consumer(consumer)

    def overtakes(self, consumer: Consumer) -> bool:
        """Decide what happens when a consumer begins an epoch after the front's, which it has left early. Return
        whether the front goes on to that epoch. Then those that are behind move if they want more of theirs. If
        another consumer is at the front, the one that begins moves instead."""
        if self.front is None or (consumer.start is not None and consumer.start.epoch == consumer.epoch):
            return False
        epoch, _ = self.front
        others = [other for other in self.readers if other is not consumer and other.epoch <= epoch]
        if not others:
            return False
        if any(other not in self._behind for other in others):
            self.move(consumer)
            return False
        return True

    def tell_begun(self, consumer: Consumer) -> None:
        """See Delivery: the stream may have delivered all of the epoch, or the consumer begins within it."""
        if (splits := self._lists.get(consumer.epoch)) is not None:
            self._outlet.tell(m.Begun(consumer.epoch, splits.digest), [consumer])
        for message in self._first.pop(consumer, ()):
            if message.epoch == consumer.epoch:
                self._outlet.tell(message, [consumer])

    # --- the order ---

    def wanted(self, epoch: Epoch) -> bool:
        """See Delivery."""
        return bool(self._at_front(epoch))

    def deliver(self, epoch: Epoch, turn: Turn | Stripe, part: Part) -> bool:
        """See Delivery. It has to wait only as long as no consumer at the front has credit."""
        outlet = self._outlet
        front = self._at_front(epoch)
        if isinstance(turn, Stripe) and not self._may_send(turn, part, front):
            return False
        nbytes = outlet.feed.nbytes_of(part)
        takers = [consumer for consumer in front if consumer.has_credit_for(nbytes)]
        if not takers:
            return False
        entry = Entry(epoch.number, epoch.batches, part, turn)
        shared = self._keep(entry, takers) or len(takers) > 1
        for consumer in takers:
            self._give(consumer, entry, shared=shared)
        self._latest.clear()
        outlet.count(epoch, part)
        self._front_place.on_delivered(elsewhere(epoch.number, turn, part))
        self._trim()
        return True

    def on_passed_over(self, epoch: Epoch, turn: Turn | Stripe, part: Part) -> None:
        """See Delivery."""
        self._front_place.on_message(elsewhere(epoch.number, turn, part))

    def on_lane_ended(self, epoch: Epoch, ended: LaneEnded) -> None:
        """See Delivery."""
        self._front_place.on_message(ended)
        self._tell(epoch, ended)

    def on_pool_begun(self, epoch: Epoch, pool: PoolBegun) -> None:
        """See Delivery."""
        self._front_place.on_message(pool)
        self._tell(epoch, pool)

    def end(self, epoch: Epoch) -> None:
        """See Delivery."""
        front = self._at_front(epoch)
        self._keep(Entry(epoch.number, epoch.batches, EpochEnd(epoch.batches, epoch.rows)), front)
        for consumer in front:
            self._end_for(consumer, epoch.number, epoch.batches, epoch.rows)
        self._latest.clear()

    def catch_up(self) -> None:
        """See Delivery."""
        for consumer in list(self._behind):
            self._catch_up(consumer)
        self._trim()

    def on_failed(self, epoch: Epoch | None) -> None:
        """See Delivery: those that have not come to the failure begin elsewhere."""
        front = [] if epoch is None else self._at_front(epoch)
        for consumer in self.readers:
            if consumer not in front:
                self.move(consumer)

    def take_back(self, consumer: Consumer, handed: int) -> None:
        """See Delivery. The consumer leaves an epoch, or is gone."""
        self._joined.pop(consumer, None)
        self._first.pop(consumer, None)

    def forget(self, epoch: Epoch) -> None:
        """See Delivery. Consumers that are behind may still read it from the window."""
        self._latest.clear()
        if not self.window:
            return
        if epoch.splits is not None:
            self._lists[epoch.number] = epoch.splits
            self._outlet.hold_list(epoch.number, epoch.splits)
        if self.window.after != (epoch.number + 1, 0):
            self.window.append(Entry(epoch.number, epoch.batches, LeftEarly()))

    def keep_for_others(self, keeps: bool) -> None:
        """Keep from now on what is delivered, for consumers of other streams that are behind, or no longer."""
        self.keeps = keeps
        self._trim()

    def stop(self) -> None:
        """See Delivery."""
        self._behind.clear()
        self.window.clear()
        self._release_lists()
        self.keeps = False

    def abandon(self) -> None:
        """See Delivery."""
        self._behind.clear()
        self.window.forget()
        self._release_lists()

    def give_up_window(self) -> None:
        """Drop the window, because others need its memory: consumers that are behind move."""
        for consumer in list(self._behind):
            self.move(consumer)
        self.window.clear()
        self._release_lists()

    # --- helpers ---

    def _is_common(self, place: Place) -> bool:
        """Whether all streams of the feed have the same batches before this place. With `on_error="skip"` that is so
        only where an epoch begins: one stream may have left out a split that another has."""
        return self._outlet.feed.plan.on_error != "skip" or not place[1]

    def _at_front(self, epoch: Epoch) -> list[Consumer]:
        """Return the consumers that read the epoch, and have been sent everything that the stream has delivered."""
        return [
            consumer
            for consumer in self._outlet.consumers
            if consumer.reading and consumer.epoch == epoch.number and consumer not in self._behind
        ]

    def _tell(self, epoch: Epoch, message: LaneEnded | PoolBegun) -> None:
        front = self._at_front(epoch)
        entry = Entry(epoch.number, epoch.batches, message)
        if not epoch.skip:  # otherwise batches that are passed over follow, which nobody else can get here
            self._keep(entry, front)
            self._latest.append(entry)
        self._outlet.tell(message, front)

    def _keep(self, entry: Entry, given: list[Consumer]) -> bool:
        """Let the consumers at the front that are not given the entry fall behind. Keep it if somebody needs it, and
        return whether that is so."""
        more = len(self._outlet.consumers) > len(given)
        for consumer in self.readers if more else ():
            if consumer.epoch == entry.epoch and consumer not in given and consumer not in self._behind:
                self._behind[consumer] = self.window.end + (0 if self.window else len(self._latest))
        if not (self.keeps or self._behind):
            self.window.clear()
            self._release_lists()
            return False
        if not self.window:
            for earlier in self._latest:
                self.window.append(earlier)
        self.window.append(entry)
        return True

    def _catch_up(self, consumer: Consumer) -> None:
        """Send a consumer what it has missed, as far as it has credit."""
        at = self._skip_epochs(consumer, self._behind[consumer])
        while at < self.window.end and consumer.reading:
            entry = self.window[at]
            item = entry.item
            if isinstance(item, LeftEarly):
                if consumer.under_way:
                    break  # it first takes what it was sent, so that it goes on after that
                self.move(consumer)
                return
            assert entry.epoch == consumer.epoch, "the window lacks the end of an epoch"
            if isinstance(item, Part):
                if not consumer.has_credit_for(self._outlet.feed.nbytes_of(item)):
                    break
                self._give(consumer, entry, shared=True)
            elif isinstance(item, EpochEnd):
                self._end_for(consumer, entry.epoch, item.batches, item.rows)
            else:
                self._outlet.tell(item, [consumer])
            at += 1
            self._behind[consumer] = at
        self._behind[consumer] = at
        if at == self.window.end:
            del self._behind[consumer]

    def _skip_epochs(self, consumer: Consumer, at: int) -> int:
        """Return the number of the first entry from `at` on that is not of an epoch which the consumer has left."""
        while at < self.window.end and self.window[at].epoch < consumer.epoch:
            at += 1
        return at

    def _give(self, consumer: Consumer, entry: Entry, *, shared: bool) -> None:
        """Send the consumer the batches of an entry, without those that it knows or passes over."""
        outlet, source, part = self._outlet, entry.source, entry.item
        assert source is not None
        assert isinstance(part, Part)
        joined = self._joined.pop(consumer, None)
        rest: Part | None = part
        if joined is not None and joined.epoch == entry.epoch:
            size = outlet.feed.plan.batch_size
            if joined.known:
                _, rest = cut(source, part, joined.known, size)
            if rest is not None and joined.skip:
                passed, rest = cut(source, rest, joined.skip, size)
                outlet.tell_elsewhere(entry.epoch, source, passed, [consumer])
                if joined.skip > passed.batches:
                    self._joined[consumer] = _Joined(entry.epoch, 0, joined.skip - passed.batches)
        if rest is not None:
            outlet.send(entry.epoch, consumer, source, rest, outlet.feed.nbytes_of(rest), shared=shared)

    def _end_for(self, consumer: Consumer, epoch: int, batches: int, rows: int) -> None:
        self._outlet.tell(m.End(epoch, consumer.slabs, batches, rows), [consumer])
        consumer.ends += 1
        consumer.leave()

    def _forget_consumer(self, consumer: Consumer) -> None:
        self._behind.pop(consumer, None)
        self._joined.pop(consumer, None)
        self._first.pop(consumer, None)

    def _trim(self) -> None:
        """Drop what nobody needs, and what there is no room for."""
        window = self.window
        if not window:
            return
        for consumer in [consumer for consumer in self._behind if consumer.gone]:
            self._forget_consumer(consumer)
        if not self.keeps:
            needed = min(self._behind.values(), default=window.end)
            while window.first < needed:
                window.drop_first()
        nbytes, slots = self._room()
        while window and (window.nbytes > nbytes or window.slots > slots):
            for consumer in [consumer for consumer, at in self._behind.items() if at == window.first]:
                self.move(consumer)
            window.drop_first()
        self._release_lists()

    def _release_lists(self) -> None:
        """Release the lists of the epochs that are no longer in the window."""
        first = self.window[self.window.first].epoch if self.window else None
        for epoch in [epoch for epoch in self._lists if first is None or epoch < first]:
            self._outlet.release_list(self._lists.pop(epoch))
