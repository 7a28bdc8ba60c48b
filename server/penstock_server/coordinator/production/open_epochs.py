"""The open epochs of a stream: opens each, has its splits listed, plans its order, and closes it."""

from __future__ import annotations

from collections import deque

from penstock_proto import StateMismatch
from penstock_proto.batches.position import Position

from ..model.feeds import ServedFeed
from ..model.known_lists import SplitsInfo
from ..model.workers import VACANT, Workers
from ..order.epoch import Epoch
from .split_lists import SplitLists


class OpenEpochs:
    """The epoch that consumers read, and the next one.

    Args:
        feed: the feed that the stream reads.
        epochs: holds the open epochs, in order; only this class adds and removes them.
        lists: asks workers for the splits of an epoch.
        workers: the worker processes.

    Attributes:
        next: the number of the epoch that is opened next.
    """

    def __init__(
        self, feed: ServedFeed, epochs: deque[Epoch], lists: SplitLists, workers: Workers, *, singly: bool
    ) -> None:
        self.next = 0
        self._feed = feed
        self._epochs = epochs
        self._lists = lists
        self._workers = workers
        self._singly = singly
        self._position: Position | None = None

    def start(self, epoch: int, position: Position | None) -> None:
        """Begin with this epoch, at `position` (None: at its start)."""
        self.next, self._position = epoch, position

    def at_least(self, epoch: int) -> None:
        """Do not open epochs before this one."""
        self.next = max(self.next, epoch)

    def open_next(self) -> Epoch | None:
        """Open the next epoch, and plan it as soon as its splits are known. Return None if
        the feed has no further epoch."""
        number = self.next
        if self._feed.plan.epochs is not None and number >= self._feed.plan.epochs:
            return None
        self.next = number + 1
        position, self._position = self._position, None
        epoch = Epoch(number, position)
        self._epochs.append(epoch)
        splits = self._feed.static_splits
        if splits is None and position is not None and position.digest:
            splits = self._feed.lists.find(number, position.digest)
        if splits is not None:
            self.plan(epoch, splits)
        else:
            self._lists.ask(epoch)
        return epoch

    def plan(self, epoch: Epoch, splits: SplitsInfo) -> None:
        """Plan the epoch's order, now that its splits are known, or keep the error with which the stream is to fail."""
        if self._feed.static_splits is None:
            self._feed.lists.hold(epoch.number, splits)
        try:
            epoch.plan(self._feed, splits, self._lane_sets(splits), singly=self._singly)
        except StateMismatch as error:
            epoch.error = error

    def _lane_sets(self, splits: SplitsInfo) -> int:
        """Return how many sets of lanes are visited independently of each other: in fast order one for each worker. If
        there is no worker yet, each lane is a set."""
        plan, workers = self._feed.plan, self._workers.available
        if plan.order == "exact":
            return 1
        return len(workers) if workers != [VACANT] else max(1, min(plan.lanes, splits.count))

    def close_first(self) -> Epoch:
        """Remove the first epoch, and return it."""
        return self._epochs.popleft()
