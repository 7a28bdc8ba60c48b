"""Spot checks run a generator with a copy of its object, so that they change nothing under those of the stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock_server import Feed
from penstock_server.feed.combined.own_object import with_own_object


class Rows:
    def __init__(self) -> None:
        self.rows = list(range(20))
        self.rng = np.random.default_rng(3)
        self.lock = threading.Lock()
        self.parts = {"b": np.arange(4)}

    def __call__(self, step: int = 1) -> Iterator[Any]:
        self.rng.shuffle(self.rows)
        self.parts["b"] += 1
        yield from self.rows[::step]


class Closes(Rows):
    def __del__(self) -> None:
        self.rows.clear()


class Alone(Rows):
    def __copy__(self) -> Any:
        raise TypeError("this cannot be copied")


@pytest.mark.parametrize(
    "of",
    [lambda rows: rows, lambda rows: rows.__call__, lambda rows: partial(rows, step=2)],
    ids=["object", "method", "partial"],
)
def test_a_copy_has_lists_arrays_and_random_generators_of_its_own(of: Any) -> None:
    rows = Rows()
    feed: Any = Feed(of(rows), batch_size=4, name="rows")
    own: Any = with_own_object(feed)
    made = list(own.generate())
    assert rows.rows == list(range(20))
    assert rows.parts["b"].tolist() == [0, 1, 2, 3]
    assert own.name == "rows"
    assert list(feed.generate()) == made, "the random generator was copied where it stood"


def test_a_copy_is_cheap_though_the_object_holds_the_data() -> None:
    rows = Rows()
    images = [np.zeros(3)] * 200
    vars(rows).update(images=images, table=np.zeros(1 << 18), index={i: [i] for i in range(200)})
    made: Any = with_own_object(Feed(rows, batch_size=4)).generate
    assert made.images is not images
    assert made.images[0] is images[0]
    assert made.index is not vars(rows)["index"]
    assert made.table.base is vars(rows)["table"]
    with pytest.raises(ValueError, match="read-only"):
        made.table[0] = 1


@pytest.mark.parametrize("kind", [Closes, Alone])
def test_what_cannot_be_copied_or_closes_something_at_its_end_is_shared(kind: type[Rows]) -> None:
    feed = Feed(kind(), batch_size=4)
    assert with_own_object(feed) is feed


def test_functions_classes_and_indexable_objects_stay_as_they_are() -> None:
    def samples() -> Iterator[int]:
        yield 1

    for feed in (Feed(samples, batch_size=1), Feed(Rows, method="__call__", batch_size=1), Feed([1, 2], batch_size=1)):
        assert with_own_object(feed) is feed
