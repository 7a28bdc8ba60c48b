"""Reads an indexable object whose items may be left out: as splits, so that lanes fill batches with the items that are
there.

The positions of an epoch (`IndexOrder`) are dealt to lanes in stretches of a batch, so that the stream is in the order
of the positions, as long as nothing is left out. A split is some stretches of one lane. Any item can be read on its
own: the random numbers that reading it draws are seeded for its position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from penstock_proto import FeedError, GeneratorError
from penstock_proto.drop import DROP
from penstock_proto.messages import FeedPlan

from ...feed.feed import Feed
from ...feed.options.generator_call import Wants
from ...feed.options.values import Shuffle
from ...worker_state.activity import ActivityPage
from ..failures import describe
from ..isolation.randomness import GlobalRandomness, seeds
from ..items.index_order import IndexOrder
from ..items.items import PlainItems
from .generators import CallFailed, Started
from .indexed import enter_epoch, item_failed
from .transforming import TransformFailed

_MOST_SPLITS = 4096
"""About how many splits an epoch has at most. All of them are listed."""

_SHOWN = 8

Report: TypeAlias = Callable[[int, str], None]


class ItemSplits:
    """How the positions of an epoch are divided into splits.

    Args:
        length: positions of an epoch.
        plan: the feed's options.
    """

    def __init__(self, length: int, plan: FeedPlan) -> None:
        self._length = length
        self.batch = plan.batch_size or 1
        self.stretch = self.batch * (plan.turn or 1)
        self._stretches = -(-length // self.stretch)
        self._lanes = max(1, min(plan.lanes, self._stretches))
        each = -(-self._stretches // self._lanes)
        self._joined = max(1, math.ceil(each * self._lanes / _MOST_SPLITS))
        """Stretches of a split."""
        self.count = self._lanes * -(-each // self._joined)

    def size(self, split: int) -> int:
        """Return how many items a split has."""
        turn, lane = divmod(split, self._lanes)
        first = turn * self._joined * self._lanes + lane
        count = max(0, min(self._joined, -(-(self._stretches - first) // self._lanes)))
        has_last = count and first + (count - 1) * self._lanes == self._stretches - 1
        return count * self.stretch - (self._stretches * self.stretch - self._length if has_last else 0)

    def position(self, split: int, number: int) -> int | None:
        """Return the position of a split's item `number`, or None if the split has fewer items."""
        stretch, within = divmod(number, self.stretch)
        turn, lane = divmod(split, self._lanes)
        found = ((turn * self._joined + stretch) * self._lanes + lane) * self.stretch + within
        return found if stretch < self._joined and found < self._length else None


def list_item_splits(feed: Feed, plan: FeedPlan) -> list[tuple[Any, ...]]:
    """Return the splits of an epoch. Each has everything that decides which items it has, so that the list of another
    order or length is another one.

    Raises:
        FeedError: the object has no items.
    """
    length = feed.items_of_epoch()
    if not length:
        raise FeedError("the feed yields nothing: the indexable object has no items (its len() is 0)")
    shuffle, weights = Shuffle.of(feed.shuffle), feed.weights
    order = shuffle.samples > 0, shuffle.block and (shuffle.block, shuffle.samples), weights and weights.digest
    count = ItemSplits(length, plan).count
    return [(number, count, length, *order) for number in range(count)]


class ItemsGenerator:
    """Starts to read splits of an indexable object. It has the interface of `OneGenerator`.

    Args:
        items: the object.
        feed: the user's declaration.
        plan: its options.
        randomness: the random numbers of this process.
        page: shows what user code does, for `run`.
        run: the daemon's number of the run.
    """

    wants = Wants(split=True, rng=False, epoch=False, shard=False)
    held: str | None = None

    def __init__(
        self, items: PlainItems, feed: Feed, plan: FeedPlan, randomness: GlobalRandomness, page: ActivityPage, run: int
    ) -> None:
        self.name = type(feed.generate).__name__
        self._items = items
        self._feed = feed
        self._plan = plan
        self._randomness = randomness
        self._page = page
        self._run = run
        self._length = feed.items_of_epoch()
        self._splits = ItemSplits(self._length, plan)
        self._order: tuple[int, IndexOrder] | None = None

    def start(self, split: Any, index: int, epoch: int, report: Report, state: Any = None) -> Started:
        """Start to read a split; see `OneGenerator`. `report` is called at its end with the number of its samples and a
        text, if items were left out."""
        if not self._items.is_at(epoch):
            try:
                enter_epoch(self._items, epoch, self._randomness, self._page, self._run)
            except BaseException as error:
                raise CallFailed(self.name, error) from error
        if self._order is None or self._order[0] != epoch:
            feed, seed = self._feed, self._plan.seed
            self._order = epoch, IndexOrder(seed, epoch, self._length, Shuffle.of(feed.shuffle), feed.weights)
        state, variables = self._randomness.of(self._items)
        skips = self._plan.on_error == "skip"
        samples = ItemSamples(
            self._items,
            self._splits,
            index,
            self._order[1],
            self._randomness,
            seed=(self._plan.seed, epoch),
            report=report if skips else None,
        )
        return Started(samples, state, variables)


class ItemSamples(Iterator[Any]):
    """The items of a split.

    Args:
        items: the object.
        splits: how the positions are divided into splits.
        split: number of the split.
        order: the item at each position.
        randomness: the random numbers of this process.
        seed: the feed's seed, and the epoch.
        report: if items that raise are left out, as `DROP`: called at the end of the split, as for `ItemsGenerator`.
    """

    def __init__(
        self,
        items: PlainItems,
        splits: ItemSplits,
        split: int,
        order: IndexOrder,
        randomness: GlobalRandomness,
        *,
        seed: tuple[int, int],
        report: Report | None,
    ) -> None:
        self._items = items
        self._splits = splits
        self._split = split
        self._order = order
        self._randomness = randomness
        self._seed = seed
        self._report = report
        self._next = 0
        self._together: list[Any] = []
        """Items that were read together, from `_first` on."""
        self._first = 0
        self._left_out: list[str] = []

    def __next__(self) -> Any:
        number, position = self._next, self._splits.position(self._split, self._next)
        if position is None:
            self._tell()
            raise StopIteration
        self._next += 1
        try:
            if self._items.several:
                return self._of_several(number, position)
            return self._read(position)
        except GeneratorError:
            raise
        except BaseException as error:
            item = self.item_of(number)
            if self._report is not None:
                self._left_out.append(f"item {item} ({describe(error)})")
                return DROP
            raise item_failed(f"item {item}", error) from error

    def seek(self, number: int) -> int:
        """Go to item `number` of the split, or past the last one if there are fewer. Return the number of the next
        one."""
        self._next = min(number, self._splits.size(self._split))
        return self._next

    def number_of(self, number: int) -> int:
        """Return by which number the transform of item `number` of the split is seeded. An item that is drawn twice is
        another sample each time."""
        position = self._splits.position(self._split, number) or 0
        return position if self._order.drawn else self._order.at(position, position + 1)[0]

    def item_of(self, number: int) -> int:
        """Return the index of item `number` of the split."""
        position = self._splits.position(self._split, number) or 0
        return self._order.at(position, position + 1)[0]

    def leaves_out(self, number: int, error: TransformFailed) -> bool:
        """Return whether to leave out item `number` of the split, whose transform failed."""
        if self._report is not None:
            self._left_out.append(f"item {self.item_of(number)} ({error.user_error(None).message})")
        return self._report is not None

    def _read(self, position: int) -> Any:
        self._randomness.seed_for_call(seeds("item", *self._seed, position))
        return next(self._items.read(self._order.at(position, position + 1)))

    def _of_several(self, number: int, position: int) -> Any:
        """Return an item, for which the object reads those of a batch together. If that fails, read it alone."""
        if not self._first <= number < self._first + len(self._together):
            self._first, self._together = number - number % self._splits.batch, []
            positions = self._positions(self._first)
            self._randomness.seed_for_call(seeds("batch", *self._seed, positions[0]))
            try:
                self._together = list(self._items.read(self._order.at(positions[0], positions[-1] + 1)))
            except BaseException as error:
                describe(error)
                if self._report is None:
                    raise
        if not self._together:
            return self._read(position)
        return self._together[number - self._first]

    def _positions(self, first: int) -> Sequence[int]:
        found = [self._splits.position(self._split, first + more) for more in range(self._splits.batch)]
        return [position for position in found if position is not None]

    def _tell(self) -> None:
        """Report the items that were left out, at the end of the split."""
        left_out, self._left_out = self._left_out, []
        if left_out and self._report is not None:
            more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
            items = "1 item was" if len(left_out) == 1 else f"{len(left_out)} items were"
            text = f"{items} left out, all others are served: {', '.join(left_out[:_SHOWN])}{more}"
            self._report(self._next - len(left_out), text)
