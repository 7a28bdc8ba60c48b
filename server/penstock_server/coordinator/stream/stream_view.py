"""A stream's status for users: how far it is, which worker makes it, and which consumers hold it up. It changes
nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..delivery.delivery import Delivery
from ..delivery.outlet import Outlet
from ..delivery.shared_delivery import SharedDelivery
from ..model.consumer import Consumer
from ..model.feeds import ServedFeed
from ..model.workers import VACANT
from ..order.epoch import Epoch
from ..production.rank_placing import Placing


class StreamView:
    """Reads the parts of one stream for the status.

    Args:
        feed: the stream's feed.
        epochs: its open epochs. The first is being read, or will be read next.
        outlet: its consumers.
        delivery: its delivery policy.
        placing: says where the batches of ranks are made.
    """

    def __init__(
        self, feed: ServedFeed, epochs: Sequence[Epoch], outlet: Outlet, delivery: Delivery, placing: Placing
    ) -> None:
        self._feed = feed
        self._epochs = epochs
        self._outlet = outlet
        self._delivery = delivery
        self._placing = placing

    @property
    def batches(self) -> int:
        """How many batches of the current epoch were sent, counted from its start; 0 if nobody reads it."""
        return self._epochs[0].batches if self._epochs and self._outlet.readers(self._epochs[0]) else 0

    @property
    def jobs(self) -> int:
        """How many jobs read all of the stream, each at its own pace."""
        if not isinstance(self._delivery, SharedDelivery):
            return int(self._delivery.whole)
        return len(self._delivery.jobs)

    def behind(self, consumer: Consumer) -> int:
        """Return how many batches were sent to the first of several jobs, and not yet to this one."""
        return self._delivery.behind(consumer) if isinstance(self._delivery, SharedDelivery) else 0

    @property
    def made_near(self) -> bool:
        """Whether batches of the current epoch are made on the machines of the ranks that read them."""
        return bool(self._epochs) and self._placing.divides(self._lanes)

    @property
    def why_made_anywhere(self) -> str:
        """Why they are not made there, although a host has joined from such a machine; empty if they are, or if none
        has joined."""
        return self._placing.why_anywhere(self._lanes) if self._epochs else ""

    def holding_up(self, consumer: Consumer) -> list[Consumer]:
        """Return the ranks for which the others of the consumer's job wait now, although their batches are made."""
        return self._delivery.holding_up(consumer) if self._epochs and self._outlet.live else []

    @property
    def awaited_worker(self) -> int | None:
        """The worker that makes the next turn in the order; None if any turn may be next, or no worker makes it now."""
        order = self._epochs[0].order if self._epochs else None
        turn = None if order is None else order.awaited
        worker = turn.fillers[0][0] if turn is not None and turn.fillers else VACANT
        return None if worker == VACANT else worker

    @property
    def listing(self) -> bool:
        """Whether the next batch cannot be made yet, because the splits of its epoch are not known."""
        return not self._epochs or self._epochs[0].order is None

    @property
    def interrupted(self) -> bool:
        """Whether nobody makes the next turn in the order: its lane waits after an error or the end of a worker, or no
        worker is ready."""
        epoch = self._epochs[0] if self._epochs else None
        turn = None if epoch is None or epoch.order is None else epoch.order.awaited
        if epoch is None or turn is None or turn.lane < 0:
            return False
        if turn.fillers:
            return turn.fillers[0][0] == VACANT
        return turn.key in epoch.lanes and epoch.lanes[turn.key].waits

    @property
    def at_work(self) -> set[int]:
        """The workers that make batches for this stream now."""
        lanes = (lane for epoch in self._epochs for lane in epoch.lanes.values())
        return {lane.run[0] for lane in lanes if lane.run is not None and lane.busy}

    def with_work(self, workers: Collection[int]) -> int:
        """Return for how many of these workers there is more to make as soon as there is a slot for it: a lane that
        they make or that nobody makes yet, or a range of an indexable feed."""
        epochs = self._epochs
        if self._feed.plan.length is not None:
            more = any(epoch.order is not None and epoch.order.more for epoch in epochs)
        else:
            more = any(epoch.live > epoch.loads.total() for epoch in epochs)
        return len(workers) if more else sum(any(epoch.loads[worker] for epoch in epochs) for worker in workers)

    def lanes_of(self, workers: Collection[int]) -> int:
        """Return how many lanes these workers make now; 0 for a feed that is made in ranges."""
        if self._feed.plan.length is not None:
            return 0
        return sum(epoch.loads[worker] for epoch in self._epochs for worker in workers)

    @property
    def _lanes(self) -> int:
        """How many lanes the current epoch has; 0 if it is made in ranges."""
        return 0 if self._feed.plan.length is not None else self._epochs[0].lane_count
