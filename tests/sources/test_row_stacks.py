"""Rows that a reader has stacked are copied many at once. The stream is the one that single samples would make."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import penstock
from penstock_proto.spec import Leaf
from penstock_server import Feed
from penstock_server.sources.reader import StackReader
from penstock_server.sources.row_stacks import RowStack, RowStacks, joined
from penstock_server.sources.structure import Columns
from penstock_server.worker.reading import first_split, open_split

zarr.config.set({"threading.max_workers": 1})
zarr.create_array(store={}, shape=(1,), dtype="i4")[:] = 1  # starts its threads, which last as long as the process

ROWS = 200
X = np.random.default_rng(0).random((ROWS, 3, 2)).astype(np.float32)
Y = np.arange(ROWS)
LENGTHS = Y % 4


def numpy_feed(folder: Path, **options: Any) -> Feed:
    np.savez(folder / "a.npz", x=X, y=Y)
    return Feed.from_numpy(str(folder / "a.npz"), ("x", "y"), **options)


def hdf5_feed(folder: Path, **options: Any) -> Feed:
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(7, 3, 2), compression="gzip")
        file["y"] = Y.astype(">i4")
    return Feed.from_hdf5(str(folder / "a.h5"), {"b": "x", "a": "y"}, **options)


def zarr_feed(folder: Path, **options: Any) -> Feed:
    group = zarr.open(str(folder / "a.zarr"), mode="w")
    for name, data, chunk in (("x", X, 11), ("y", Y, 64)):
        group.create_array(name, shape=data.shape, dtype=data.dtype, chunks=(chunk, *data.shape[1:]))[:] = data
    return Feed.from_files(str(folder / "a.zarr"), ("y", "x", "y"), **options)


def arrow_table(**more: Any) -> Any:
    import pyarrow

    structs = pyarrow.StructArray.from_arrays([pyarrow.array(Y), pyarrow.array(Y / 2)], ["p", "q"])
    flat = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(X.reshape(-1)), 6)
    return pyarrow.table({"y": Y, "x": flat, "s": structs, **more})


def parquet_feed(folder: Path, **options: Any) -> Feed:
    from pyarrow import parquet

    parquet.write_table(arrow_table(), folder / "a.parquet", row_group_size=60)
    return Feed.from_parquet(str(folder / "a.parquet"), {"y": "y", "nested": {"x": "x"}}, **options)


def struct_feed(folder: Path, **options: Any) -> Feed:
    import pyarrow

    table = arrow_table()
    with pyarrow.OSFile(str(folder / "a.arrow"), "wb") as out, pyarrow.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
    return Feed.from_files(str(folder / "a.arrow"), ("s", "y"), **options)


def ragged_feed(folder: Path, **options: Any) -> Feed:
    from pyarrow import parquet

    lists = [list(range(length)) for length in LENGTHS]
    parquet.write_table(arrow_table(words=list(map(str, Y)), lists=lists), folder / "b.parquet", row_group_size=70)
    return Feed.from_parquet(str(folder / "b.parquet"), ("words", "lists", "x"), batching="ragged", **options)


def matlab_feed(folder: Path, **options: Any) -> Feed:
    from scipy.io import savemat

    savemat(folder / "a.mat", {"x": X, "y": Y[:, None]})
    return Feed.from_files(str(folder / "a.mat"), ("x", "y"), **options)


def csv_feed(folder: Path, **options: Any) -> Feed:
    lines = ["a,b,c", *(f"{y},{y / 8},{y % 3}" for y in Y)]
    (folder / "a.csv").write_text("\n".join(lines))
    return Feed.from_csv(str(folder / "a.csv"), ({"n": "*", "a": "a"}, "b"), dtypes={"b": "float32"}, **options)


def array_feed(folder: Path, **options: Any) -> Feed:
    return Feed(X, **options)


def fields_feed(folder: Path, **options: Any) -> Feed:
    records = np.zeros(ROWS, [("x", "f4", (3, 2)), ("y", "i8"), ("inner", [("z", "u1")])])
    records["x"], records["y"], records["inner"]["z"] = X, Y, Y % 256
    return Feed(records, **options)


def table_feed(folder: Path, **options: Any) -> Feed:
    return Feed(arrow_table(words=list(map(str, Y))), **options)


FEEDS = [
    numpy_feed, hdf5_feed, zarr_feed, parquet_feed, struct_feed, ragged_feed, matlab_feed,
    csv_feed, array_feed, fields_feed, table_feed,
]  # fmt: skip


def flat(batch: Any) -> list[Any]:
    """Return the bytes, shapes and dtypes of a batch."""
    if isinstance(batch, dict):
        return [(key, flat(value)) for key, value in batch.items()]
    if isinstance(batch, tuple | list):
        return [flat(value) for value in batch]
    if isinstance(batch, penstock.Ragged):
        return [flat(row) for row in batch]
    array = np.asarray(batch)
    return [array.dtype.str, array.shape, array.tolist()]


def stream(feed: Feed) -> list[Any]:
    with penstock.connect(feed, workers=0) as connection:
        return [flat(batch) for _ in range(2) for batch in connection.batches()]


@pytest.mark.parametrize(
    ("make", "shuffle"),
    [(make, 0) for make in FEEDS] + [(make, 100) for make in (numpy_feed, hdf5_feed, ragged_feed, table_feed)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_stream_is_that_of_single_samples(
    make: Callable[..., Feed], shuffle: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = RowStacks.take

    def noted(self: RowStacks, most: int) -> RowStack | None:
        stack = take(self, most)
        taken.append(0 if stack is None else stack.rows)
        return stack

    monkeypatch.setattr(RowStacks, "take", noted)
    stacked = stream(make(tmp_path, batch_size=13, shuffle=shuffle, name="rows"))
    assert max(taken) > 1
    taken.clear()
    assert stacked == stream(make(tmp_path, batch_size=13, shuffle=shuffle, transform=same, name="rows"))
    assert not taken, "a transform takes single samples"


@pytest.mark.parametrize("make", [numpy_feed, array_feed], ids=lambda make: make.__name__)
def test_a_function_of_batches_gets_the_same_batches(make: Callable[..., Feed], tmp_path: Path) -> None:
    def mixed(batch: Any, rng: np.random.Generator) -> Any:
        x = batch[0] if isinstance(batch, tuple) else batch
        return x * rng.random() + x[rng.permutation(len(x))]

    found = [
        stream(make(tmp_path, batch_size=13, shuffle=50, batch_transform=mixed, name="rows", **more))
        for more in ({}, {"transform": same})
    ]
    assert found[0] == found[1]


def same(sample: Any) -> Any:
    return sample


def test_a_split_whose_first_sample_took_long_goes_on_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = numpy_feed(tmp_path, batch_size=13, name="rows")
    whole = stream(feed)
    monkeypatch.setattr(first_split, "SLOW", -1.0)
    monkeypatch.setattr(open_split.OpenSplit, "check", lambda self, spot: None)  # a spot is read one by one
    for batches in range(3):
        with penstock.connect(feed, workers=0) as connection:
            read = connection.batches()
            found = [flat(next(read)) for _ in range(batches)]
            state = connection.state_dict()
        with penstock.connect(feed, workers=0, state=state) as connection:
            assert found + [flat(batch) for batch in connection.batches()] == whole[: len(whole) // 2]


@pytest.mark.parametrize("indexed", [False, True])
def test_a_row_that_does_not_fit_is_named(indexed: bool, tmp_path: Path) -> None:
    values = [*map(float, range(40)), "none", 41.0]
    if indexed:
        feed = Feed(np.array(values, object), batch_size=8, spec=Leaf("float32", ()))
        where = "sample is 'none'.*this leaf holds numbers.*item 40"
    else:
        np.savez(tmp_path / "a.npz", x=np.zeros((10, 3)))
        np.savez(tmp_path / "b.npz", x=np.zeros((10, 4)))
        feed = Feed.from_numpy([str(tmp_path / "a.npz"), str(tmp_path / "b.npz")], "x", batch_size=5)
        where = r"sample is float64 array of shape \(4,\), but the feed's spec has float64\[3\].*sample 0 of its split"
    with penstock.connect(feed, workers=0) as connection, pytest.raises(penstock.SpecError, match=f"(?s){where}"):
        list(connection.batches())


def test_a_reader_that_fails_is_named_with_the_sample(tmp_path: Path) -> None:
    class Broken(StackReader):
        __name__ = "Broken"
        cached_as = None

        def stacks(self, split: Any) -> Iterator[RowStack]:
            yield RowStack(Columns("x", "column"), [np.arange(7)], 7)
            raise OSError("the disk is gone")

    feed = Feed(Broken(), splits=["a"], batch_size=5)
    with penstock.connect(feed, workers=0) as connection:
        batches = connection.batches()
        assert next(batches).tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(penstock.GeneratorError, match=r"(?s)the disk is gone.*split 'a'"):
            next(batches)


def test_stacks_are_taken_in_parts_and_one_by_one() -> None:
    columns = Columns(("x", "y"), "column")
    stacks = RowStacks(iter([RowStack(columns, [np.arange(5), list("abcde")], 5), RowStack(columns, [[7], ["z"]], 1)]))
    first = stacks.take(2)
    assert first is not None
    assert list(first.samples()) == [(0, "a"), (1, "b")]
    assert next(stacks) == (2, "c")
    rest = [stacks.take(10), stacks.take(10)]
    assert [list(stack.samples()) for stack in rest if stack is not None] == [[(3, "d"), (4, "e")], [(7, "z")]]
    assert stacks.take(10) is None
    assert list(stacks) == []


def test_the_rows_before_an_error_are_taken_first() -> None:
    def values() -> Iterator[int]:
        yield from range(7)
        raise OSError("the disk is gone")

    columns = Columns(("x", "y", "z"), "column")
    stacks = RowStacks(iter([RowStack(columns, [np.arange(9), values(), iter("abcdefghi")], 9)]))
    taken: list[int] = []
    stacks.on_taken = taken.append
    found = [stacks.take(4), stacks.take(4)]
    assert [stack.rows for stack in found if stack is not None] == taken == [4, 3]
    rows = [row for stack in found if stack is not None for row in stack.samples()]
    assert rows == [(number, number, "abcdefg"[number]) for number in range(7)]
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            stacks.take(4)


def test_an_error_of_the_first_row_is_raised_at_once() -> None:
    def values() -> Iterator[int]:
        yield from ()
        raise OSError("the disk is gone")

    stacks = RowStacks(iter([RowStack(Columns("x", "column"), [values()], 9)]))
    with pytest.raises(OSError, match="the disk is gone"):
        stacks.take(4)


def test_columns_that_are_read_in_pieces_of_different_lengths_are_joined() -> None:
    columns = Columns(("x", "y"), "column")

    def pieces(*lengths: int) -> Iterator[Any]:
        stops = np.cumsum(lengths).tolist()
        return iter([np.arange(stop - length, stop) for length, stop in zip(lengths, stops, strict=True)])

    found = list(joined(columns, [pieces(4, 0, 4, 2), pieces(1, 9)]))
    assert [stack.rows for stack in found] == [1, 3, 4, 2]
    assert [row for stack in found for row in stack.samples()] == [(number, number) for number in range(10)]
    with pytest.raises(ValueError, match="'y' has fewer rows than others"):
        list(joined(columns, [pieces(4, 4), pieces(4)]))


def test_no_rows_are_kept_while_the_next_ones_are_read() -> None:
    alive: list[weakref.ref[Any]] = []

    def pieces() -> Iterator[Any]:
        for _ in range(4):
            gc.collect()
            assert all(piece() is None for piece in alive)
            piece = np.zeros(6)
            alive.append(weakref.ref(piece))
            yield piece
            del piece

    stacks = RowStacks(joined(Columns("x", "column"), [pieces()]))
    stack = stacks.take(4)
    while stack is not None:
        del stack
        stack = stacks.take(4)
    assert len(alive) == 4
