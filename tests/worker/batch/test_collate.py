"""Samples from user code are checked before they are served, and errors name the place."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_proto import DictSpec, Leaf, SpecError, TupleSpec
from penstock_proto.batches.inferring import infer
from penstock_proto.spec import flatten
from penstock_server.worker.batch.collate import BadSample, Raised, Rows
from penstock_server.worker.batch.ready_batches import ReadyBatches
from penstock_server.worker.batch.sample_spec import infer_spec, nbytes_of


class Pair(NamedTuple):
    x: Any
    y: Any


def collate(spec: Any, *samples: Any) -> list[Any]:
    rows = Rows(spec)
    store = rows.store(len(samples))
    assert rows.fill(store, 0, len(samples), iter(samples)) == len(samples)
    return store


IMAGE = np.arange(6, dtype=np.float32).reshape(2, 3)
SPEC = TupleSpec((Leaf("float32", (2, 3)), Leaf("int64", ())))


def test_samples_become_rows() -> None:
    x, y = collate(SPEC, (IMAGE, np.int64(1)), (IMAGE + 1, 2))
    np.testing.assert_array_equal(x, np.stack([IMAGE, IMAGE + 1]))
    assert (x.dtype, y.dtype, y.tolist()) == (np.float32, np.int64, [1, 2])


def test_rows_of_a_mapped_file_are_arrays_like_any_other(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.stack([IMAGE, IMAGE + 1]))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    x, _ = collate(SPEC, *((row, 1) for row in mapped))
    np.testing.assert_array_equal(x, mapped)
    with pytest.raises(BadSample, match="float32 array of shape \\(3,\\)"):
        collate(SPEC, (mapped[0, 0], 1))
    with pytest.raises(BadSample, match=r"yield it with .astype\('int64'\)"):
        collate(SPEC, (IMAGE, mapped[0, 0, :1]))


def test_a_sample_is_copied_before_the_next_is_asked_for() -> None:
    def reuses_its_buffer() -> Any:
        buffer = np.zeros(3, np.float32)
        for i in range(4):
            buffer[:] = i
            yield buffer

    rows = Rows(Leaf("float32", (3,)))
    store = rows.store(4)
    assert rows.fill(store, 0, 4, reuses_its_buffer()) == 4
    assert store[0][:, 0].tolist() == [0, 1, 2, 3]


def test_no_sample_more_is_taken_than_fits() -> None:
    samples = iter([np.int64(i) for i in range(5)])
    rows = Rows(Leaf("int64", ()))
    assert rows.fill(rows.store(3), 1, 3, samples) == 3
    assert next(samples) == 2
    assert rows.fill(rows.store(9), 0, 9, samples) == 2


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int64", 3),
        ("uint8", 255),
        ("int8", -128),
        ("float32", 2),
        ("float32", 0.1),
        ("float32", -3.4028234663852886e38),
        ("float32", float("-inf")),
        ("float16", float("inf")),
        ("float64", float("nan")),
        ("bool", True),
        ("complex64", 1 + 2j),
        ("complex64", 1.5),
        ("bfloat16", 1.5),
        ("bfloat16", ml_dtypes.bfloat16(2)),
        ("float32", np.array(1.5, ">f4")),
        ("int64", np.array(7)),
    ],
)
def test_numbers_go_where_they_keep_their_value(dtype: str, value: Any) -> None:
    (leaf,) = collate(Leaf(dtype, ()), value)
    assert leaf.dtype.name == dtype
    assert leaf[0] == np.asarray(value).astype(leaf.dtype) or leaf[0] != leaf[0]


@pytest.mark.parametrize(
    ("spec", "sample", "message"),
    [
        (Leaf("uint8", ()), 256, "sample is 256, but the feed's spec has uint8\\[\\] there: uint8 holds 0 to 255"),
        (Leaf("uint8", ()), -1, "holds 0 to 255"),
        (Leaf("int64", ()), 2**63, "int64 holds"),
        (Leaf("int64", ()), 1.0, "yield all numbers of a leaf with one type"),
        (Leaf("int64", ()), True, "with one type"),
        (Leaf("bool", ()), 1, "with one type"),
        (Leaf("float32", ()), True, "with one type"),
        (Leaf("float16", ()), 1e6, "too large for float16"),
        (Leaf("float32", ()), -3.41e38, "too large for float32"),
        (Leaf("float32", (2,)), [1.0, 1e300], "too large for float32"),
        (Leaf("float32", ()), 1j, "with one type"),
        (Leaf("int64", ()), np.int32(1), "yield it with .astype\\('int64'\\), which a transform= can do too"),
        (Leaf("float32", ()), np.float64(1), "yield it with .astype\\('float32'\\)"),
        (Leaf("uint8", ()), np.int64(300), "uint8 cannot hold it: yield all samples with .astype\\('int64'\\)"),
        (Leaf("uint8", ()), np.int16(-1), "all samples with .astype\\('int16'\\)"),
        (Leaf("int8", ()), np.uint8(200), "all samples with .astype\\('int16'\\)"),
        (Leaf("int64", ()), np.uint64(2**63), "all samples with .astype\\('uint64'\\)"),
        (Leaf("uint8", ()), np.float32(0.5), "all samples with .astype\\('float32'\\)"),
        (Leaf("float32", ()), np.float64(1e300), "all samples with .astype\\('float64'\\)"),
        (
            Leaf("float32", (2, 3)),
            IMAGE.astype(np.float64),
            "float64 array of shape \\(2, 3\\), but .* float32\\[2, 3\\]",
        ),
        (
            Leaf("float32", (2, 3)),
            IMAGE[:1],
            r"declare the leaf .* varies, here Leaf\(.float32., \(None, 3\)\), and give",
        ),
        (Leaf("float32", (2, 3)), IMAGE[0], "float32 array of shape \\(3,\\)"),
        (Leaf("float32", ()), IMAGE, "a leaf has the same number of dimensions in every sample, here 0"),
        (Leaf("float32", (2, 3)), np.ma.array(IMAGE), "masked array, whose mask would be lost"),
        (Leaf("float32", (2,)), np.array([None, 1]), "dtype object, which cannot be served; None has no dtype"),
        (Leaf("float32", (2,)), [[1], [1, 2]], 'declare it with batching="ragged" and spec='),
        (Leaf("int64", ()), "text", "dtype <U4, which cannot be served; this leaf holds numbers"),
        (Leaf("int64", ()), None, "dtype object"),
        (Leaf("int64", (2,)), (1, 2), "same structure"),
        (Leaf("int64", ()), {"a": 1}, "same structure"),
        (SPEC, IMAGE, "should be a tuple of 2"),
        (SPEC, (IMAGE, 1, 2), "should be a tuple of 2"),
        (SPEC, [IMAGE, 1], "should be a tuple of 2"),
        (SPEC, (IMAGE, IMAGE), "sample\\[1\\] is float32 array"),
        (infer({"x": 1, "y": 2}), {"x": 1}, "should be a dict with the keys \\['x', 'y'\\]"),
        (infer({"x": 1, "y": 2}), {"x": 1, "z": 2}, "should be a dict with the keys"),
        (infer({"x": 1}), 1, "should be a dict"),
        (infer({"x": 1}), [{"x": 1}], "of a list of dicts, make one dict of lists"),
        (infer(({"x": 1}, 2)), ({"y": 1}, 2), "sample\\[0\\] should be a dict with the keys"),
        (infer({"x": ({"y": 1.5},)}), {"x": ({"y": IMAGE},)}, "sample\\['x'\\]\\[0\\]\\['y'\\] is float32 array"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused_with_its_leaf_and_the_mend(spec: Any, sample: Any, message: str) -> None:
    with pytest.raises(BadSample, match=message):
        collate(spec, sample)


@pytest.mark.parametrize("given", [0, 1, 3, 7, 8, 9])
@pytest.mark.parametrize("row", [0, 5, 7])
def test_a_fill_that_is_timed_takes_what_any_fill_takes(given: int, row: int) -> None:
    asked = []

    def samples() -> Iterator[int]:
        for i in range(given):
            asked.append(i)
            yield i
        asked.append("end")

    class AskedOnce:
        """An iterator that must not be called again after its end."""

        def __init__(self) -> None:
            self.inner = samples()

        def __iter__(self) -> AskedOnce:
            return self

        def __next__(self) -> int:
            assert "end" not in asked
            return next(self.inner)

    timed, plain = Rows(infer(0)), Rows(infer(0))
    for _ in range(3):
        one, other = timed.store(8), plain.store(8)
        one[0][:] = other[0][:] = -1
        end = timed.timed_fill(one, row, 8, AskedOnce())
        taken = asked.copy()
        asked.clear()
        assert end == plain.fill(other, row, 8, AskedOnce())
        assert taken == asked
        asked.clear()
        np.testing.assert_array_equal(one[0], other[0])


def test_what_collating_takes_is_told_from_what_user_code_takes() -> None:
    def slow(sample: int) -> int:
        time.sleep(0.001)
        return sample

    def copying(sample: Any, samples: Iterator[Any]) -> int:
        rows = Rows(infer(sample))
        assert rows.timed_fill(rows.store(8), 0, 8, samples) == 8
        return rows.copying

    # The least of several measurements: other processes can only add to them.
    large = np.zeros(1 << 20, np.uint8)
    assert min(copying(0, map(slow, range(8))) for _ in range(5)) < 4_000_000
    assert min(copying(large, repeat(large)) for _ in range(5)) > 8 * 5_000


def test_the_row_of_a_bad_sample_is_known() -> None:
    rows = Rows(SPEC)
    good, bad = (IMAGE, 1), (IMAGE, 1.5)
    with pytest.raises(BadSample) as caught:
        rows.fill(rows.store(9), 2, 9, iter([good, good, bad]))
    assert caught.value.row == 4


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3)])
def test_what_came_before_user_code_raised_is_kept(error: BaseException) -> None:
    def raises() -> Any:
        yield IMAGE, 1
        yield IMAGE, 2
        raise error

    rows = Rows(SPEC)
    store = rows.store(9)
    with pytest.raises(Raised) as caught:
        rows.fill(store, 2, 9, raises())
    assert (caught.value.row, caught.value.error) == (4, error)
    assert store[1][2:4].tolist() == [1, 2]
    ready = ReadyBatches(SPEC, copy=False)
    with pytest.raises(Raised) as caught:
        ready.fill(ready.store(9), 2, 9, raises())
    assert (caught.value.row, caught.value.error) == (4, error)


@pytest.mark.parametrize(
    "sample",
    [
        5,
        (1, 2),
        (1,),
        {"a": 1},
        {"b": 1, "a": 2},
        ({"a": (1, 2), "b": 3}, 4),
        {"z": {"y": {"x": 1}}, "a": (2,)},
        Pair(1, 2),
        (Pair(1, {"k": 2}), 3),
        {"a": Pair(1, 2)},
    ],
)
def test_every_structure_is_taken_apart_alike(sample: Any) -> None:
    spec = infer(sample)
    assert [leaf.tolist() for leaf in collate(spec, sample)] == [[value] for value in flatten(spec, sample)]


def test_lists_are_arrays() -> None:
    (leaf,) = collate(Leaf("float32", (2,)), [1, 2], [0.5, 1.5])
    assert leaf.tolist() == [[1, 2], [0.5, 1.5]]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=10), st.data())
def test_rows_move_in_the_order_asked_for(values: list[int], data: st.DataObject) -> None:
    order = np.array(data.draw(st.permutations(range(len(values)))), np.int64)
    rows = Rows(infer((1, 0.5)))
    store = collate(infer((1, 0.5)), *[(value, value / 2) for value in values])
    target = rows.store(len(values) + 1)
    rows.move(store, order, target)
    assert target[0][:-1].tolist() == [values[i] for i in order]
    assert target[1][:-1].tolist() == [values[i] / 2 for i in order]


def test_ready_batches_vary_in_their_first_dimension() -> None:
    spec = infer_spec({"x": IMAGE, "n": 3}, None)
    assert spec == DictSpec(("n", "x"), (Leaf("int64", ()), Leaf("float32", (None, 3))))
    ready = ReadyBatches(spec, copy=False)
    store = ready.store(2)
    assert ready.fill(store, 0, 2, iter([{"x": IMAGE, "n": 1}, {"x": IMAGE[:1], "n": 2}])) == 2
    assert [leaf.shape for leaf in store[1]] == [(), (1, 3)]
    assert store[0][1] is IMAGE
    with pytest.raises(BadSample, match=r'batch\[.x.\] .* that varies, here Leaf\("float32", \(None, None\)\)'):
        ready.fill(store, 0, 1, iter([{"x": IMAGE[:, :2], "n": 1}]))


@pytest.mark.parametrize(
    ("spec", "empty"),
    [
        (Leaf("float64", (None, 30, 3)), np.array([])),
        (Leaf("int64", (None,)), np.array([])),
        (Leaf("float32", (16, 3)), np.zeros((0, 3), "float32")),
        (Leaf("string", (None, 2)), []),
    ],
)
def test_a_ready_batch_without_rows_is_said_to_be_empty(spec: Leaf, empty: Any) -> None:
    ready = ReadyBatches(spec, copy=False)
    with pytest.raises(BadSample, match=r"this batch is empty.* `__len__` probably counts too many") as raised:
        ready.fill(ready.store(1), 0, 1, iter([empty]))
    assert "Feed(spec=" not in str(raised.value)


@pytest.mark.parametrize(("collate", "what"), [(Rows, "sample"), (partial(ReadyBatches, copy=False), "batch")])
def test_no_leaf_is_proposed_for_another_number_of_dimensions(collate: Any, what: str) -> None:
    collates = collate(Leaf("float32", (2, 3)))
    with pytest.raises(BadSample, match=f"the same number of dimensions in every {what}, here 2") as raised:
        collates.fill(collates.store(1), 0, 1, iter([IMAGE[0]]))
    assert str(raised.value).endswith("If Feed(spec=...) has a wrong shape, correct it to (3,)")
    assert "Leaf(" not in str(raised.value)


def test_the_leaves_of_a_ready_batch_have_one_length_unless_the_user_has_declared_them() -> None:
    uneven = {"x": IMAGE, "n": 3, "y": [1, 2, 3]}
    says = r"batch\['x'\] has 2, batch\['y'\] has 3. Yield the same number for each, or, .* declare them with Feed"
    with pytest.raises(SpecError, match=says):
        infer_spec(uneven, None)
    spec = infer_spec({"x": IMAGE, "n": 3, "y": [1, 2]}, None)
    inferred = ReadyBatches(spec, copy=False, one_length=True)
    with pytest.raises(BadSample, match=says) as caught:
        inferred.fill(inferred.store(2), 0, 2, iter([{"x": IMAGE, "n": 3, "y": [1, 2]}, uneven]))
    assert caught.value.row == 1
    declared = ReadyBatches(spec, copy=False)
    assert declared.fill(declared.store(1), 0, 1, iter([uneven])) == 1


def test_ready_batches_that_wait_are_private_copies() -> None:
    ready = ReadyBatches(infer_spec(IMAGE, None), copy=True)
    store = ready.store(1)
    ready.fill(store, 0, 1, iter([IMAGE]))
    assert not np.shares_memory(store[0][0], IMAGE)


def test_bytes_of_a_sample_are_counted() -> None:
    assert nbytes_of(SPEC, None) == 32
    assert nbytes_of(infer_spec(IMAGE, None), IMAGE) == 24


def test_what_cannot_be_served_has_no_spec() -> None:
    for sample in ("\ud800", None, np.ma.array([1]), (), {}, {1: 2}, np.array(["a", 1], object)):
        with pytest.raises(SpecError):
            infer_spec(sample, 4)
