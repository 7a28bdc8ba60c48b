"""A job with one consumer, which gets every batch."""

from __future__ import annotations

from msgspec import Struct

from penstock_proto import PenstockError

from ..model.consumer import Consumer
from ..model.turn import Part
from .front_place import Before
from .jobs import after_left_epochs, end_for, moved
from .outlet import Outlet
from .window import Entry, EpochEnd, LeftEarly, Window, cut


class Joined(Struct, frozen=True):
    """What a consumer that has joined in this epoch does not need: it has the first `known` batches of its next entry.
    Of the `skip` batches after them it is only told, because its position passes over them."""

    epoch: int
    known: int
    skip: int


class SoloJob:
    """A consumer that gets every batch.

    Attributes (others as for Job):
        joined: if it has joined within an epoch: what it does not need of the epoch's next batches; else None.
    """

    round = 0

    def __init__(self, outlet: Outlet, window: Window, consumer: Consumer) -> None:
        self.consumers = [consumer]
        self.at: int | None = None
        self.joined: Joined | None = None
        self.told_first: tuple[Before, ...] = ()
        self._outlet = outlet
        self._window = window
        self._consumer = consumer

    @property
    def gone(self) -> bool:
        """See Job."""
        return self._consumer.gone

    @property
    def there(self) -> list[Consumer]:
        """See Job."""
        return [] if self._consumer.gone else self.consumers

    @property
    def epoch(self) -> int:
        """See Job."""
        return self._consumer.epoch

    def reads(self, epoch: int) -> bool:
        """Whether it reads this epoch now."""
        return self._consumer.reading and self._consumer.epoch == epoch

    def is_at_front(self, epoch: int) -> bool:
        """See Job."""
        return self.at is None and self.reads(epoch)

    @property
    def keeps_up(self) -> bool:
        """See Job."""
        return self.at is None

    @property
    def holding_up(self) -> list[Consumer]:
        """See Job."""
        return []

    def place(self, at: tuple[int, int]) -> tuple[int, int] | None:
        """See Job."""
        if not self._consumer.reading or self.joined is not None or at[0] != self._consumer.epoch:
            return None
        under_way = self._consumer.batches_under_way(at[0])
        return None if under_way is None else (at[0], at[1] - under_way)

    def give(self, entry: Entry, *, shared: bool) -> None:
        """Send the consumer the batches of an entry, without those that it knows or passes over."""
        outlet, source, part = self._outlet, entry.source, entry.item
        assert source is not None
        assert isinstance(part, Part)
        joined, self.joined = self.joined, None
        rest: Part | None = part
        if joined is not None and joined.epoch == entry.epoch:
            size = outlet.feed.plan.batch_size
            if joined.known:
                _, rest = cut(source, part, joined.known, size)
            if rest is not None and joined.skip:
                passed, rest = cut(source, rest, joined.skip, size)
                outlet.tell_elsewhere(entry.epoch, source, passed, self.consumers)
                if joined.skip > passed.batches:
                    self.joined = Joined(entry.epoch, 0, joined.skip - passed.batches)
        if rest is not None:
            outlet.send(entry.epoch, self._consumer, source, rest, outlet.feed.nbytes_of(rest), shared=shared)

    def end(self, epoch: int, total: EpochEnd) -> None:
        """Tell the consumer that the epoch ends."""
        end_for(self._outlet, self._consumer, epoch, total)

    def catch_up(self) -> PenstockError | None:
        """See Job."""
        if self.at is None:
            return None
        consumer, window = self._consumer, self._window
        self.at = after_left_epochs(window, self.at, consumer.epoch)
        while self.at < window.end and consumer.reading:
            entry = window[self.at]
            item = entry.item
            if isinstance(item, LeftEarly):
                if consumer.under_way:
                    break  # it first takes what it was sent, so that it goes on after that
                return moved(self._outlet.feed.name)
            assert entry.epoch == consumer.epoch, "the window lacks the end of an epoch"
            if isinstance(item, Part):
                if not consumer.has_credit_for(self._outlet.feed.nbytes_of(item)):
                    break
                self.give(entry, shared=True)
            elif isinstance(item, EpochEnd):
                self.end(entry.epoch, item)
            else:
                self._outlet.tell(item, self.consumers)
            self.at += 1
        if self.at == window.end:
            self.at = None
        return None

    def batches_behind(self) -> int:
        """See Job."""
        if self.at is None:
            return 0
        return self._window.batches_from(self.at) - (self.joined.known if self.joined is not None else 0)

    def take_back(self) -> None:
        """See Job."""
        self.joined = None
        self.told_first = ()

    def on_lost(self, consumer: Consumer) -> PenstockError | None:
        """See Job."""
        return None
