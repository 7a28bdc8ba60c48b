"""The outlet of a stream: its consumers, which epoch each of them reads, and the slabs and messages that it is sent.

A delivery policy sees nothing else of the stream. The policy decides which consumer receives which batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from penstock_proto import PenstockError
from penstock_proto import messages as m

from ..model import commands as do
from ..model.consumer import Consumer
from ..model.feeds import ServedFeed
from ..model.known_lists import SplitsInfo
from ..model.leases import Leases
from ..model.stripe import Source, Stripe
from ..model.turn import Part, Turn
from ..order.epoch import Epoch


class Outlet:
    """The consumers of one stream, for its delivery policy.

    Args:
        feed: the feed that the stream reads.
        slots: the stream's slots.
        epochs: the stream's open epochs.
        fail: called with the error when the stream cannot go on.
        clock: returns the time of the current event.
        wake: `wake(seconds)` lets the stream offer its next batches again after `seconds`.
        out: where commands go.

    Attributes:
        consumers: the stream's consumers, by rank.
        waiting: before the stream begins: the ranks that are there. They become its consumers when all are there.
        error: why the stream failed, or None.
        closed: whether the stream is closed, because no consumer wants anything more.
        live: whether the stream has begun, and has neither failed nor been closed.
        fail, clock, wake: as given.
    """

    def __init__(
        self,
        feed: ServedFeed,
        slots: Leases,
        epochs: Sequence[Epoch],
        *,
        fail: Callable[[PenstockError], None],
        clock: Callable[[], float],
        wake: Callable[[float], None],
        out: Callable[[do.Command], None],
    ) -> None:
        self.feed = feed
        self.slots = slots
        self.consumers: list[Consumer] = []
        self.waiting: list[Consumer] = []
        self.error: PenstockError | None = None
        self.closed = False
        self.live = False
        self.fail = fail
        self.clock = clock
        self.wake = wake
        self._epochs = epochs
        self._do = out

    # --- whether it is open ---

    def begin(self, consumers: list[Consumer]) -> None:
        """Begin the stream with these consumers."""
        self.consumers, self.waiting = consumers, []
        self._update_live()

    def join(self, consumer: Consumer) -> None:
        """Add a consumer."""
        self.consumers.append(consumer)
        self._update_live()

    def remove(self, consumer: Consumer) -> None:
        """Remove a consumer."""
        self.consumers.remove(consumer)
        self._update_live()

    def set_error(self, error: PenstockError) -> None:
        """Note that the stream has failed, and tell its consumers."""
        self.error = error
        self._update_live()
        self.tell(m.Failed(m.ErrorReport.of(error)), self.consumers or self.waiting)

    def close(self) -> None:
        """Close the stream: no consumer wants anything more."""
        self.closed = True
        self._update_live()

    def _update_live(self) -> None:
        self.live = self.error is None and not self.closed and bool(self.consumers)

    # --- who reads ---

    @property
    def epochs_read(self) -> set[int]:
        """The epochs that consumers have begun, and are reading."""
        return {consumer.epoch for consumer in self.consumers if consumer.reading}

    def readers(self, epoch: Epoch) -> list[Consumer]:
        """Return the consumers that read the epoch."""
        return [consumer for consumer in self.consumers if consumer.reading and consumer.epoch == epoch.number]

    def listeners(self, epoch: Epoch) -> list[Consumer]:
        """Return the consumers that read the epoch and do not know its next batch yet."""
        return [consumer for consumer in self.readers(epoch) if (epoch.number, epoch.batches) >= consumer.told]

    @property
    def first_epoch(self) -> Epoch | None:
        """The epoch that is delivered now, or will be next; None if none is open."""
        return self._epochs[0] if self._epochs else None

    def open_epoch(self, number: int) -> Epoch | None:
        """Return the epoch with this number; None if it is not open."""
        return next((epoch for epoch in self._epochs if epoch.number == number), None)

    # --- slabs and messages ---

    def send(
        self,
        epoch: int,
        consumer: Consumer,
        source: Source,
        part: Part,
        nbytes: int,
        *,
        shared: bool = False,
        repeat: bool = False,
        stride: int = 1,
    ) -> None:
        """Send the consumer this part of the source, as a slab of `nbytes` bytes. `shared`: others may get it, too.
        `repeat`: it is another rank's batch, which fills up the last round. `stride`: the places from each of its
        batches to the next; other ranks get those between them."""
        self.slots.hold(source.slot)
        sent = self.feed.sent
        sent.batches += part.batches
        sent.samples += part.rows
        sent.nbytes += nbytes
        self._do(
            do.SendSlab(
                consumer=consumer.number,
                ticket=source.slot.ticket,
                first=part.first,
                nbytes=nbytes,
                seq=consumer.send(epoch, source, part, nbytes),
                epoch=epoch,
                lane=source.lane_at(part.first),
                index=source.index_at(part.first),
                batches=part.batches,
                rows=part.rows,
                shapes=part.shapes,
                record=part.record,
                repeat=repeat,
                lanes=part.lanes,
                places=part.places,
                shared=shared,
                stride=stride,
            )
        )

    def count(self, epoch: Epoch, part: Part) -> None:
        """Count the part as delivered, or passed over."""
        epoch.batches += part.batches
        epoch.rows += part.rows

    def pass_over(self, epoch: Epoch, turn: Turn | Stripe) -> Part:
        """Pass over those batches of the turn's next part that the position's `skip` still covers, and return them.
        (A part of a stripe has no more.)"""
        part = turn.parts.popleft()
        count = min(epoch.skip, part.batches)
        passed = part
        if count < part.batches:
            rows = count * (self.feed.plan.batch_size or 1)
            passed = replace(part, batches=count, rows=rows)
            if part.record:  # that of the lane after the whole part
                passed = replace(passed, record=b"", lanes=(turn.lane_at(part.first),))
            turn.parts.appendleft(
                replace(part, first=part.first + count, batches=part.batches - count, rows=part.rows - rows)
            )
        epoch.skip -= count
        self.tell_elsewhere(epoch.number, turn, passed, self.listeners(epoch))
        self.count(epoch, passed)
        return passed

    def tell(self, message: do.Said, consumers: list[Consumer]) -> None:
        """Send a message to these consumers."""
        for consumer in consumers:
            if not consumer.gone:
                self._do(do.Tell(consumer.number, message))

    def tell_elsewhere(self, epoch: int, turn: Source, part: Part, consumers: list[Consumer]) -> None:
        """Tell these consumers of batches of an epoch that they are not sent."""
        self.tell(elsewhere(epoch, turn, part), consumers)

    def tell_begun(self, epoch: Epoch, consumers: list[Consumer]) -> None:
        """Tell these consumers that the epoch begins, if its splits are known."""
        if epoch.splits is not None and self.error is None:
            self.tell(m.Begun(epoch.number, epoch.splits.digest), consumers)

    # --- lists of splits and slots that a policy holds ---

    def hold_list(self, epoch: int, splits: SplitsInfo) -> None:
        """Hold the epoch's list of splits."""
        if self.feed.static_splits is None:
            self.feed.lists.hold(epoch, splits)

    def release_list(self, splits: SplitsInfo) -> None:
        """Release a list of splits. Workers forget it if nobody else holds it."""
        if self.feed.static_splits is None and self.feed.lists.release(splits):
            self._do(do.ForgetSplits(splits.number))


def elsewhere(epoch: int, source: Source, part: Part) -> m.SentElsewhere:
    """Return the message for consumers that are not sent this part."""
    lane, index = source.lane_at(part.first), source.index_at(part.first)
    return m.SentElsewhere(epoch, lane, index, part.batches, part.rows, part.record, part.lanes, part.places)
