"""The order of an indexable feed: batch j is a range of the permuted indices, and any worker can make any batch."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from typing import Any

from penstock_proto import GeneratorError, SpecError
from penstock_proto.messages import FeedPlan

from ...feed.options.values import Shuffle, Weights
from ...sources.row_stacks import RowStacks
from ...targets.importing import user_traceback
from ...worker_state.activity import ActivityPage
from ..batch.collate import BadSample, Collate, Raised
from ..failures import describe
from ..isolation.randomness import GlobalRandomness
from ..items.index_order import IndexOrder
from ..items.items import Items, PlainItems
from ..items.keras_items import KerasItems
from ..verification.spot_checks import SpotOf
from .batch_transforming import BatchTransform
from .transforming import TransformFailed, Transforms, one_sample

_END = object()


class IndexRun:
    """One epoch of an indexable feed.

    Args:
        plan: the feed's options; `length` is the number of samples in an epoch.
        items: the indexable object.
        epoch: from 0.
        collate: copies samples into stores.
        randomness: seeded for each batch.
        page: the worker's activity page.
        run: the daemon's number of the run.
        transform: applied to each item.
        batches: transforms whole batches, if the feed has a `batch_transform`.
        weights: those with which items are drawn, if each does not come once.
        spot_of: returns a spot for a batch, or None; see `SpotChecks.of_run`.

    Attributes:
        index: number of the next batch; may be set to any.
        replayed, skipped: as in `LaneRun`.
        leftover, leftover_rows: as in `LaneRun`; there are none, since the last batch may be smaller.
        dropped: as in `LaneRun`; none, as each range has its number of batches.
    """

    leftover = dropped = 0
    leftover_rows: Any = None
    replayed = True
    skipped = False

    def __init__(
        self,
        plan: FeedPlan,
        items: Items,
        *,
        epoch: int,
        collate: Collate,
        randomness: GlobalRandomness,
        page: ActivityPage,
        run: int,
        transform: Transforms | None = None,
        batches: BatchTransform | None = None,
        weights: Weights | None = None,
        spot_of: SpotOf = lambda index, seconds: None,
    ) -> None:
        assert plan.length is not None
        self.index = 0
        self._items = items
        self._length = plan.length
        self._seed = plan.seed
        self._epoch = epoch
        self._order = IndexOrder(plan.seed, epoch, plan.length, Shuffle(plan.shuffle, block=plan.block), weights)
        self._batch_rows = plan.batch_size or 1
        self._collate = collate
        self._randomness = randomness
        self._state, self._variables = randomness.of(items)
        self._page = page
        self._run = run
        self._transform = transform or None
        self._batches = batches
        self._spot_of = spot_of
        self._start = 0
        self._reads: list[int] = []
        self._transforms: int | None = None
        """The item that is being transformed."""

    def at_border(self, batches: int) -> bool:
        """Return True: any worker can go on from anywhere."""
        return True

    def next_batch(self, target: Any) -> int:
        """Put batch `index` in the first rows of the store `target`.

        Returns:
            The number of its rows, less than a full batch only for the last one; 0 after that.

        Raises:
            GeneratorError: reading an item raised.
            SpecError: an item does not fit the spec.
        """
        start = self.index * self._batch_rows
        rows = min(self._batch_rows, self._length - start)
        if rows <= 0:
            return 0
        if not self._items.is_at(self._epoch):
            enter_epoch(self._items, self._epoch, self._randomness, self._page, self._run)
        self._begin(start, start + rows)
        spot = self._spot_of(self.index, 0.0)
        stackable = isinstance(self._items, PlainItems) and self._items.stackable
        fill = self._fill_stacked if stackable and spot is None and self._transform is None else self._fill
        samples = self._page.counting(self._samples())
        if spot is not None:
            samples = spot.of(samples)
        collate = self._collate if self._batches is None else self._batches.rows
        store = target if self._batches is None else self._batches.store()
        self._page.enter(self._run, self.index, f"batch {self.index}")
        try:
            fill(collate, store, rows, samples)
            if self._batches is not None:
                batch = self._batches.arrays(store, rows)
                self._batches.put(batch, self._epoch, (self.index,), target)
                self._randomness.use_settings(self._state)
        except BadSample as error:
            raise SpecError(error.message, split=self._place()) from None
        except Raised as raised:
            raise item_failed(self._place(), raised.error) from raised.error
        finally:
            self._page.leave(collate.copying)
            if spot is not None:
                spot.close()
        self.index += 1
        return rows

    def _fill(self, collate: Collate, store: Any, rows: int, samples: Iterator[Any]) -> None:
        """Copy the items of `_reads` to the first rows of a store, one by one.

        Raises:
            As `Rows.fill`.
        """
        self._randomness.use_settings(self._state)
        self._randomness.seed(self._seed, self._epoch, self.index)
        self._variables.run(collate.timed_fill, store, 0, rows, samples)

    def _fill_stacked(self, collate: Collate, store: Any, rows: int, samples: Iterator[Any]) -> None:
        """Do the same many rows at once, if the object can return them so. No user code runs then."""
        assert isinstance(self._items, PlainItems)
        try:
            stack = self._items.stack(self._reads)
        except BaseException as error:
            raise Raised(error, 0) from error
        if stack is None:
            self._fill(collate, store, rows, samples)
            return
        try:
            collate.fill_stacked(store, 0, rows, RowStacks(iter((stack,))))
        except BadSample as error:
            self._items.item = self._reads[error.row]
            raise
        self._page.count(rows)

    def item(self, batch: int, number: int) -> int:
        """Return the index of an item by its batch and its number there."""
        return self._order.at(batch * self._batch_rows, min(self._length, (batch + 1) * self._batch_rows))[number]

    def first_samples(self, batch: int, count: int) -> Generator[Any, None, None]:
        """Yield the first `count` samples of a batch.

        Raises:
            GeneratorError: reading an item raised.
        """
        start = batch * self._batch_rows
        if not self._items.is_at(self._epoch):
            enter_epoch(self._items, self._epoch, self._randomness, self._page, self._run)
        self._begin(start, min(self._length, start + self._batch_rows))
        items = self._samples()
        self._randomness.use_settings(self._state)
        self._randomness.seed(self._seed, self._epoch, batch)
        self._page.enter(self._run, batch, f"batch {batch}")
        try:
            for _ in range(count):
                sample = self._variables.run(next, items, _END)
                if sample is _END:
                    return
                yield sample
        except GeneratorExit:  # the caller wants no more
            raise
        except BaseException as error:
            raise item_failed(self._place(), error) from error
        finally:
            self._page.leave()

    @property
    def read_again(self) -> int:
        """0: any worker can go on from anywhere."""
        return 0

    @property
    def samples_read(self) -> int:
        """0, as nothing is read again."""
        return 0

    def prepare(self) -> bool:
        """Return True: there is nothing to read before a batch."""
        return True

    def record(self) -> bytes:
        """Return an empty record: the number of a batch is enough."""
        return b""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _begin(self, start: int, stop: int) -> None:
        """Read the items at these positions next."""
        self._start, self._reads, self._transforms = start, self._order.at(start, stop), None

    def _samples(self) -> Iterator[Any]:
        """Yield the items of `_reads`, transformed."""
        items = self._items.read(self._reads)
        if self._transform is None:
            return items
        # An item that is drawn twice is another sample each time, with random numbers of its own.
        return map(
            self._transform_item, self._reads, itertools.count(self._start) if self._order.drawn else self._reads, items
        )

    def _transform_item(self, item: int, number: int, sample: Any) -> Any:
        assert self._transform is not None
        self._transforms = item
        made = one_sample(self._transform(sample, self._epoch, 0, number), keras=isinstance(self._items, KerasItems))
        self._randomness.use_settings(self._state)
        self._transforms = None
        return made

    def _place(self) -> str:
        """Return the item or items that were being read, for an error."""
        if self._transforms is not None:
            return f"item {self._transforms}"
        if self._items.item is not None:
            return f"item {self._items.item}"
        return f"items {', '.join(map(str, self._reads[:8]))}{', ...' if len(self._reads) > 8 else ''}"


def enter_epoch(
    items: Items, epoch: int, randomness: GlobalRandomness, page: ActivityPage, run: int, *, warm: bool = True
) -> None:
    """Switch the items to an epoch; see `KerasItems.enter`. Show that on `page` meanwhile.

    Raises:
        GeneratorError: user code raised.
        FeedError: user code changed the number of batches.
    """
    state, variables = randomness.of(items)
    randomness.use(state)
    page.enter(run, -1, f"item 0 of epoch {epoch}" if warm else f"the beginning of epoch {epoch}")
    try:
        variables.run(items.enter, epoch, warm=warm)
    finally:
        page.leave()


def item_failed(place: str, error: BaseException) -> GeneratorError:
    """Return the error to report when the indexable object, or a transform, raised `error` at `place`, such as "item
    3"."""
    if isinstance(error, TransformFailed):
        return error.user_error(place)
    return GeneratorError(f"reading {place} {describe(error)}", split=place, remote_traceback=user_traceback(error))
