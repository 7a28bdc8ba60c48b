"""The places of a feed that samples are read from: splits, or batches of an indexable feed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock_proto.messages import FeedPlan
from penstock_proto.text import printable

from ...feed.objects.indexables import is_indexable, length_of
from ...worker.batch.sample_spec import nbytes_of
from ...worker.batch.shares import stretch_of_share
from ...worker.isolation.randomness import GlobalRandomness
from ...worker.reading.first_sample import Probe
from ...worker.reading.indexed import IndexRun
from ...worker.reading.loaded_feed import LoadedFeed
from ...worker.reading.open_split import OpenSplit
from ...worker.reading.passes import Passes
from ...worker.reading.split_opener import SplitOpener
from ...worker.reading.transforming import transform_of
from ...worker_state.activity import ActivityPage

_STORE_NBYTES = 4 << 20
_STORE_ROWS = 256


class SplitPlaces:
    """The splits of epoch 0, or its segments.

    If zipped generators yield different numbers of samples, `on_uneven` is called with the place, the number of samples
    of the shortest, and a message.

    Attributes:
        rows: the most samples that one read takes.
        in_batches: whether each read must be of a whole batch, so of `rows` samples.
    """

    in_batches = False

    def __init__(
        self,
        feed: LoadedFeed,
        splits: Any,
        randomness: GlobalRandomness,
        page: ActivityPage,
        on_uneven: Callable[[int, int, str], None],
    ) -> None:
        self._feed = feed
        self._splits = splits
        passes = Passes(shared=False)
        self._opener = SplitOpener(
            feed.declared,
            feed.plan,
            randomness,
            page,
            0,
            stretch=stretch_of_share(feed.plan, feed.layout),
            drops=feed.drops,
            items=feed.items if is_indexable(feed.declared.generate) else None,
            on_uneven=lambda _, place, samples, why: on_uneven(place, samples, why),
            passes=passes,
        )
        self._open: dict[int, OpenSplit] = {}
        self._passes = passes
        self.rows = _rows_of_a_store(feed)

    def store(self) -> Any:
        """Return memory for `rows` samples."""
        return self._feed.sample_collate.store(self.rows)

    def __len__(self) -> int:
        return len(self._splits)

    def show(self, place: int) -> str:
        """Return a short text for a place."""
        text = self._opener.show(self._splits[place])
        named = self._feed.declared.splits is not None
        return printable(f"split {text}" if named else text)

    def read(self, place: int, store: Any, rows: int) -> int:
        """Read the next samples of a place into a store; return their number, fewer than `rows` if the place ended."""
        split = self._open.get(place)
        if split is None:
            split = self._open[place] = self._opener.open(self._splits[place], place, 0)
        return split.read(self._feed.sample_collate, store, 0, rows)

    @property
    def undivided_seconds(self) -> float:
        """How long a generator has run that cannot be divided. Each lane runs all of it."""
        return self._passes.seconds

    def taken(self, place: int) -> int:
        """Return how many samples of a split were read; 0 if it is not open."""
        return self._open[place].taken if place in self._open else 0

    def is_empty(self, place: int) -> bool:
        """Return whether the generator has yielded no sample for this split. Whatever drops samples hides that."""
        if self._feed.declared.splits is None or self._feed.drops is not None or place not in self._open:
            return False
        return self._open[place].source_place.read == 0

    def generator(self, place: int) -> Any:
        """Return the user's generator that reads a split; None if the split is not open."""
        return self._open[place].generator if place in self._open else None

    def close(self, place: int) -> None:
        """Close a place, if it is open."""
        split = self._open.pop(place, None)
        if split is not None:
            split.close()


class BatchPlaces:
    """The batches of an indexable feed, in the order of its items. Attributes: as SplitPlaces."""

    in_batches = True
    undivided_seconds = 0.0

    def __init__(self, feed: LoadedFeed, randomness: GlobalRandomness, page: ActivityPage) -> None:
        plan = _unshuffled(feed)
        assert plan.length is not None
        self.rows = plan.batch_size or 1
        self._collate = feed.collate
        self._count = -(-plan.length // self.rows)
        self._length = plan.length
        self._run = IndexRun(
            plan,
            feed.items,
            epoch=0,
            collate=feed.collate,
            randomness=randomness,
            page=page,
            run=0,
            transform=transform_of(feed.declared, plan.seed, randomness),
            batches=Probe(feed, randomness, page, 0).batches(),
        )

    def store(self) -> Any:
        return self._collate.store(self.rows)

    def __len__(self) -> int:
        return self._count

    def show(self, place: int) -> str:
        if self.rows == 1:
            return f"item {place}"
        return f"items {place * self.rows} to {min(self._length, (place + 1) * self.rows) - 1}"

    def read(self, place: int, store: Any, rows: int) -> int:
        self._run.index = place
        return self._run.next_batch(store)

    def is_empty(self, place: int) -> bool:
        """Return False: items are samples."""
        return False

    def close(self, place: int) -> None:
        """Do nothing: nothing is open."""


def _unshuffled(feed: LoadedFeed) -> FeedPlan:
    return msgspec.structs.replace(
        feed.plan, shuffle=0, block=None, length=length_of(feed.declared.generate), weights=""
    )


def _rows_of_a_store(feed: LoadedFeed) -> int:
    if feed.plan.batch_size is None:
        return 1  # a ready batch must be used before user code continues
    assert feed.spec is not None
    try:
        nbytes = nbytes_of(feed.spec, None)
    except Exception:  # its size varies
        nbytes = _STORE_NBYTES // 16
    return max(1, min(_STORE_ROWS, _STORE_NBYTES // max(1, nbytes)))
