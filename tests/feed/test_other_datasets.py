"""Datasets of Hugging Face, webdataset and Grain that cannot be indexed, and what is said about those that are refused.

The libraries are replaced by stand-ins, and read themselves where they are installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_server import Feed

EPOCHS = 2


def read(source: Any, **options: Any) -> list[list[Any]]:
    """Return the samples of two epochs."""
    with penstock.connect(Feed(source, batch_size=4, name="train", **options), workers=0) as connection:
        return [[row for batch in connection.batches() for row in batch.tolist()] for _ in range(EPOCHS)]


def stand_in(cls: Any, module: str) -> Any:
    cls.__module__ = module
    return cls


class IterableDataset:
    """As of `datasets`, without PyTorch."""

    def __init__(self, parts: list[range]) -> None:
        self.parts, self.num_shards, self.epoch = parts, len(parts), 0

    def shard(self, *, num_shards: int, index: int, contiguous: bool) -> IterableDataset:
        assert not contiguous
        return IterableDataset(self.parts[index::num_shards])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return (number + 100 * self.epoch for part in self.parts for number in part)


class MapDataset:
    """As of Grain: a range of numbers."""

    parents: tuple[Any, ...] = ()

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index


class FilterMapDataset(MapDataset):
    def __getitem__(self, index: int) -> Any:
        return None if index % 3 else index


class MapMapDataset(MapDataset):
    def __init__(self, parent: MapDataset) -> None:
        super().__init__(len(parent))
        self.parents = (parent,)

    def __getitem__(self, index: int) -> Any:
        item = self.parents[0][index]
        return None if item is None else 10 * item


class IterDataset:
    """As of Grain."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.fixture(autouse=True, scope="module")
def stand_ins() -> None:
    for cls in (MapDataset, FilterMapDataset, MapMapDataset, IterDataset):
        stand_in(cls, "grain._src.python.dataset.dataset")
    stand_in(IterableDataset, "datasets.iterable_dataset")


def test_shards_of_hugging_face_are_divided_among_lanes() -> None:
    source = IterableDataset([range(5), range(5, 12), range(12, 20)])
    first, second = read(source, lanes=2)
    assert sorted(first) == list(range(20))
    assert second == [number + 100 for number in first]
    assert sorted(read(source)[0]) == list(range(20))
    assert not Feed(source, batch_size=4, lanes=3).plan("train").warnings
    said = "feed train has lanes=16, but its dataset only 3 shards, so 13 lanes are empty: give lanes=3"
    (warning,) = Feed(source, batch_size=4).plan("train").warnings
    assert said in warning


def test_what_a_filter_leaves_out_is_not_served() -> None:
    source = MapMapDataset(FilterMapDataset(1000))
    kept = list(range(0, 10_000, 30))
    first, second = read(source, shuffle=300)
    assert sorted(first) == sorted(second) == kept
    assert first != second
    feed = Feed(source, batch_size=4)
    assert isinstance(feed.splits, list)
    assert len(feed.splits) == 250, "many workers can share them"


def test_a_dataset_that_can_only_be_iterated_over_begins_again_in_each_epoch() -> None:
    assert read(IterDataset()) == [list(range(10))] * EPOCHS


def test_a_dataset_that_repeats_itself_for_ever_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"if it repeats its items for ever, as Grain's \.repeat\(\) does, leave that"):
        Feed(MapDataset(2**63 - 1), batch_size=4)


def test_a_dict_of_datasets_is_refused_with_their_names() -> None:
    said = r"expected one dataset, got a dict of 2, which are 'train' \(9 samples\), 'test': give .* Feed\(datasets\['"
    with pytest.raises(TypeError, match=said):
        Feed({"train": MapDataset(9), "test": IterDataset()}, batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"If these are columns"):
        Feed({"x": np.zeros(3), "y": np.zeros(3)}, batch_size=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("source", [IterableDataset([range(2)]), FilterMapDataset(9), IterDataset()])
def test_they_have_no_cache(source: Any) -> None:
    with pytest.raises(ValueError, match=f"a {type(source).__name__} may change with the epoch"):
        Feed(source, batch_size=4, cache="cache")


# --- the libraries themselves ---


def test_objects_of_hugging_face_are_read() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": range(20)})
    with pytest.raises(TypeError, match=r"got a DatasetDict of 2, which are 'a' \(20 samples\), 'b' \(20 samples\)"):
        Feed(datasets.DatasetDict(a=rows, b=rows), batch_size=4)
    feed = Feed(rows.to_iterable_dataset(num_shards=3), batch_size=4, name="train")
    with penstock.connect(feed, workers=0) as connection:
        assert sorted(x for batch in connection.batches() for x in batch["x"].tolist()) == list(range(20))


def test_objects_of_grain_are_read() -> None:
    grain = pytest.importorskip("grain")
    numbers = grain.MapDataset.range(100)
    assert sorted(read(numbers.filter(lambda x: x % 2 == 0).map(lambda x: x + 1))[0]) == list(range(1, 101, 2))
    assert read(numbers.to_iter_dataset())[1] == list(range(100))
    with pytest.raises(ValueError, match="leave that out"):
        Feed(numbers.repeat(), batch_size=4)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_pipeline_of_webdataset_with_fewer_shards_than_lanes_is_read(
    tmp_path: Any,
) -> None:
    pytest.importorskip("torch")
    wds = pytest.importorskip("webdataset")
    for number in range(3):
        with wds.TarWriter(str(tmp_path / f"{number}.tar")) as tar:
            for row in range(4):
                tar.write({"__key__": f"{number}{row}", "cls": 4 * number + row})
    urls = [str(tmp_path / f"{number}.tar") for number in range(3)]
    source = wds.WebDataset(urls, shardshuffle=False).decode().to_tuple("cls")
    feed = Feed(source, batch_size=4, name="train")
    assert "give lanes=3" in feed.plan("").warnings[0]
    with penstock.connect(feed, workers=0) as connection:
        assert sorted(x for (batch,) in connection.batches() for x in batch.tolist()) == list(range(12))
