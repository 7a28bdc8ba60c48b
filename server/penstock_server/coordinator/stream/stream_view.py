"""A stream's status for users: how far it is, which worker makes it, and which consumers hold it up. It changes
nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..delivery.delivery import Delivery
from ..delivery.outlet import Outlet
from ..model.consumer import Consumer
from ..model.feeds import ServedFeed
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
    def made_near(self) -> bool:
        """Whether batches of the current epoch are made on the machines of the ranks that read them."""
        return bool(self._epochs) and self._placing.divides(self._lanes)

    @property
    def why_made_anywhere(self) -> str:
        """Why they are not made there, although a host has joined from such a machine; empty if they are, or if none
        has joined."""
        return self._placing.why_anywhere(self._lanes) if self._epochs else ""

    @property
    def holding_up(self) -> list[Consumer]:
        """The consumers that the others wait for now, although their batches are made: slow ranks."""
        return self._delivery.holding_up(self._epochs[0]) if self._epochs and self._outlet.live else []

    @property
    def awaited_worker(self) -> int | None:
        """The worker that makes the next turn in the order; None if any turn may be next, or no worker makes it now."""
        order = self._epochs[0].order if self._epochs else None
        turn = None if order is None else order.awaited
        return turn.fillers[0][0] if turn is not None and turn.fillers else None

    def lanes_of(self, workers: Collection[int]) -> int:
        """Return how many lanes these workers make now; 0 for a feed that is made in ranges."""
        if self._feed.plan.length is not None:
            return 0
        return sum(epoch.loads[worker] for epoch in self._epochs for worker in workers)

    @property
    def _lanes(self) -> int:
        """How many lanes the current epoch has; 0 if it is made in ranges."""
        return 0 if self._feed.plan.length is not None else self._epochs[0].lane_count
