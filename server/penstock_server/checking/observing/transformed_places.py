"""Reads the batches of a feed with `batch_transform=` place by place, and transforms them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from penstock_proto import PenstockError
from penstock_proto.spec import leaf_list

from ...worker.isolation.randomness import GlobalRandomness
from ...worker.reading.lane_batches import batch_transform_of
from ...worker.reading.loaded_feed import LoadedFeed
from ...worker_state.activity import ActivityPage
from .places import SplitPlaces


class TransformedPlaces:
    """The splits of epoch 0, or its segments, in whole batches of successive samples.

    A store has the leaves of the samples, and then the leaves of what the transform makes of them. The last batch of a
    place is filled up with its own samples, because nearly all batches of a feed are full: rows of another split would
    follow there.

    Attributes:
        rows: samples of a batch.
        raised: the error of the transform, if it has raised.
    """

    in_batches = True

    def __init__(self, feed: LoadedFeed, places: SplitPlaces, randomness: GlobalRandomness, page: ActivityPage) -> None:
        transform = batch_transform_of(feed, randomness)
        assert transform is not None
        assert feed.sample_spec is not None
        self.rows = feed.plan.batch_size or 1
        self.raised: PenstockError | None = None
        self._transform = transform
        self._served = feed.collate
        self._samples = len(leaf_list(feed.sample_spec))
        self._places = places
        self._page = page
        self._numbers: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._places)

    def show(self, place: int) -> str:
        return self._places.show(place)

    def store(self) -> list[Any]:
        """Return memory for a batch, before and after it is transformed."""
        return [*self._transform.store(), *self._served.store(self.rows)]

    def read(self, place: int, store: list[Any], rows: int) -> int:
        count, taken = 0, self._places.taken(place)
        try:
            count = self._places.read(place, store[: self._samples], rows)
        finally:
            # If user code raised, the rows before that count.
            count = count or max(0, self._places.taken(place) - taken)
            if count:
                self._put(place, store, count)
        return count

    @property
    def undivided_seconds(self) -> float:
        """See SplitPlaces."""
        return self._places.undivided_seconds

    def taken(self, place: int) -> int:
        """See SplitPlaces."""
        return self._places.taken(place)

    def is_empty(self, place: int) -> bool:
        """See SplitPlaces."""
        return self._places.is_empty(place)

    def generator(self, place: int) -> Any:
        """See SplitPlaces."""
        return self._places.generator(place)

    def close(self, place: int) -> None:
        self._places.close(place)
        self._numbers.pop(place, None)

    def _put(self, place: int, store: list[Any], count: int) -> None:
        """Transform the batch in a store. Its first `count` rows were read, and fill up the others."""
        number, samples = self._numbers[place], self._samples
        self._numbers[place] += 1
        for leaf in store[:samples]:
            for row in range(count, self.rows):
                leaf[row] = leaf[row % count]
        self._page.enter(0, -1, f"batch_transform= of batch {number} of {self.show(place)}")
        try:
            arrays = self._transform.arrays(store[:samples], self.rows)
            self._transform.put(arrays, 0, (place, number), store[samples:])
        except PenstockError as error:
            error.split = f"batch {number} of {self.show(place)}"
            self.raised = error
            raise
        finally:
            self._page.leave()
