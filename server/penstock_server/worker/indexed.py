"""The order of an indexable feed: batch j is a range of the permuted indices, and any worker can make any batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock_proto import GeneratorError, SpecError
from penstock_proto.messages import FeedPlan

from ..activity import ActivityPage
from ..importing import user_traceback
from ..permutation import make_key, permute
from .collate import BadSample, Collate, Raised
from .failures import describe
from .randomness import GlobalRandomness
from .transforming import SampleTransform, TransformFailed

_AHEAD = 4096  # permuted positions that are computed at once


class IndexRun:
    """One epoch of an indexable feed.

    Args:
        plan: the feed's options; `length` is that of `source`.
        source: has `__getitem__`.
        epoch: from 0.
        collate: copies samples into stores.
        randomness: seeded for each batch.
        page: the worker's activity page.
        run: the daemon's number of the run.
        transform: applied to each item.

    Attributes:
        index: number of the next batch; may be set to any.
        border, settled: as in `LaneRun`.
        leftover, leftover_rows: as in `LaneRun`; there are none, since the last batch may be smaller.
    """

    leftover = 0
    leftover_rows: Any = None
    border = True
    settled = True

    def __init__(
        self,
        plan: FeedPlan,
        source: Any,
        *,
        epoch: int,
        collate: Collate,
        randomness: GlobalRandomness,
        page: ActivityPage,
        run: int,
        transform: SampleTransform | None = None,
    ) -> None:
        assert plan.length is not None
        self.index = 0
        self._source = source
        self._length = plan.length
        self._seed = plan.seed
        self._epoch = epoch
        self._key = make_key(plan.seed, epoch, "index") if plan.shuffle else None
        self._batch_rows = plan.batch_size or 1
        self._collate = collate
        self._randomness = randomness
        self._page = page
        self._run = run
        self._transform = transform or None
        self._ahead: tuple[int, list[int]] = 0, []
        self._item = 0

    def next_batch(self, target: Any) -> int:
        """Put batch `index` in the first rows of the store `target`.

        Returns:
            Its rows, fewer than a full batch only for the last; 0 beyond it.

        Raises:
            GeneratorError: `source[i]` raised.
            SpecError: `source[i]` does not fit the spec.
        """
        start = self.index * self._batch_rows
        rows = min(self._batch_rows, self._length - start)
        if rows <= 0:
            return 0
        items = self._page.counting(self._items(start, start + rows))
        self._randomness.seed(self._seed, self._epoch, self.index)
        self._page.enter(self._run, self.index, f"batch {self.index}")
        try:
            self._collate.timed_fill(target, 0, rows, items)
        except BadSample as error:
            raise SpecError(error.message, split=f"item {self._item}") from None
        except Raised as raised:
            raise item_failed(self._item, raised.error) from raised.error
        finally:
            self._page.leave(self._collate.copying)
        self.index += 1
        return rows

    def prepare(self) -> bool:
        """Return True: nothing must be read before a batch."""
        return True

    def record(self) -> bytes:
        """Return an empty record: the number of a batch is enough."""
        return b""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _items(self, start: int, stop: int) -> Iterator[Any]:
        source, transform = self._source, self._transform
        for item in self._indices(start, stop):
            self._item = item
            yield source[item] if transform is None else transform(source[item], self._epoch, 0, item)

    def _indices(self, start: int, stop: int) -> list[int]:
        if self._key is None:
            return list(range(start, stop))
        first, known = self._ahead
        if start < first or stop > first + len(known):
            first = start
            positions = np.arange(start, min(self._length, max(stop, start + _AHEAD)))
            known = permute(self._key, self._length, positions).tolist()
            self._ahead = first, known
        return known[start - first : stop - first]


def item_failed(item: int, error: BaseException) -> GeneratorError:
    """Return the error to report when the indexable object, or a transform, raised `error` for this item."""
    if isinstance(error, TransformFailed):
        return error.user_error(f"item {item}")
    return GeneratorError(
        f"reading item {item} {describe(error)}", split=f"item {item}", remote_traceback=user_traceback(error)
    )
