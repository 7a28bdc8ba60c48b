"""Columns of Arrow are read as pyarrow reads them, whole and row by row, in any chunks and slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_server.sources.arrow_columns import Place, can_be_served, rows_of

pa = pytest.importorskip("pyarrow")

PLACE = Place("column 'x'", "fill them", "cast it")
NUMBERS = st.integers(-100, 100)
KINDS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "numbers": (pa.int16(), NUMBERS),
    "flags": (pa.bool_(), st.booleans()),
    "halves": (pa.float32(), st.integers(-9, 9).map(lambda n: n / 2)),
    "text": (pa.string(), st.text(max_size=3)),
    "words": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from("abc")),
    "sizes": (pa.dictionary(pa.int8(), pa.int64()), st.sampled_from([3, 5])),
    "blobs": (pa.large_binary(), st.binary(max_size=3)),
    "lists": (pa.list_(pa.int32()), st.lists(NUMBERS, max_size=3)),
    "large lists": (pa.large_list(pa.bool_()), st.lists(st.booleans(), max_size=3)),
    "pairs": (pa.list_(pa.int32(), 2), st.lists(NUMBERS, min_size=2, max_size=2)),
    "grids": (
        pa.list_(pa.list_(pa.int32(), 2), 2),
        st.lists(st.lists(NUMBERS, min_size=2, max_size=2), min_size=2, max_size=2),
    ),
    "boxes": (pa.list_(pa.list_(pa.int32(), 2)), st.lists(st.lists(NUMBERS, min_size=2, max_size=2), max_size=2)),
    "uneven": (pa.list_(pa.list_(pa.int32())), st.lists(st.lists(NUMBERS, max_size=2), max_size=3)),
    "deep": (
        pa.list_(pa.list_(pa.list_(pa.int8()))),
        st.lists(st.lists(st.lists(NUMBERS, max_size=2), max_size=2), max_size=2),
    ),
    "tags": (pa.list_(pa.string()), st.lists(st.text(max_size=2), max_size=3)),
    "files": (pa.large_list(pa.binary()), st.lists(st.binary(max_size=2), max_size=3)),
    "categories": (pa.list_(pa.dictionary(pa.int8(), pa.string())), st.lists(st.sampled_from("abc"), max_size=3)),
    "turns": (pa.list_(pa.list_(pa.string())), st.lists(st.lists(st.text(max_size=2), max_size=2), max_size=3)),
    "objects": (
        pa.list_(pa.struct([("a", pa.int64()), ("b", pa.list_(pa.int8())), ("c", pa.struct([("d", pa.string())]))])),
        st.lists(
            st.fixed_dictionaries(
                {
                    "a": NUMBERS,
                    "b": st.lists(NUMBERS, max_size=2),
                    "c": st.fixed_dictionaries({"d": st.text(max_size=2)}),
                }
            ),
            max_size=3,
        ),
    ),
    "structs": (
        pa.struct([("a", pa.int64()), ("b", pa.list_(pa.int8()))]),
        st.fixed_dictionaries({"a": NUMBERS, "b": st.lists(NUMBERS, max_size=2)}),
    ),
}


def of_lists(value: Any, kind: Any) -> Any:
    """Return lists of dicts as dicts of lists."""
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        fields = {field.name: field.type for field in kind.value_type}
        return {name: of_lists([row[name] for row in value], pa.list_(fields[name])) for name in fields}
    return value


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(data=st.data())
def test_rows_are_those_of_pyarrow(kind: str, data: st.DataObject) -> None:
    type_, values = KINDS[kind]
    chunks = data.draw(st.lists(st.lists(values, max_size=6), max_size=3))
    column = pa.chunked_array([pa.array(chunk, type_) for chunk in chunks], type_)
    start = data.draw(st.integers(0, len(column)))
    column = column.slice(start, data.draw(st.integers(0, len(column) - start)))
    assert can_be_served(type_)
    rows, expected = rows_of(column, PLACE), [of_lists(row, type_) for row in column.to_pylist()]
    assert len(rows) == len(expected)
    assert [plain(row) for row in rows] == expected
    assert [plain(rows[index]) for index in range(len(rows))] == expected


@given(st.lists(st.one_of(st.none(), st.lists(st.one_of(st.none(), NUMBERS), max_size=3)), max_size=6))
def test_the_first_null_is_named_wherever_it_is(values: list[list[int | None] | None]) -> None:
    column = pa.array([[0], *values], pa.list_(pa.int64())).slice(1)
    null_rows = [row for row, value in enumerate(values) if value is None]
    null_items = [row for row, value in enumerate(values) if value is not None and None in value]
    if not null_rows and not null_items:
        assert [plain(row) for row in rows_of(column, PLACE)] == values
        return
    with pytest.raises(ValueError, match=rf"column 'x' holds .* row {(null_rows or null_items)[0]}\)"):
        rows_of(column, PLACE)


def test_images_of_datasets_within_lists_are_their_bytes() -> None:
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    column = pa.chunked_array(
        [pa.array([[{"bytes": b"a", "path": None}], [], [{"bytes": b"b", "path": "b"}] * 2], pa.list_(image))]
    )
    assert list(rows_of(column, PLACE)) == [[b"a"], [], [b"b", b"b"]]


def test_a_null_within_lists_of_structs_is_named() -> None:
    kind = pa.list_(pa.struct([("a", pa.int64())]))
    with pytest.raises(ValueError, match=r"column 'x', field 'a' holds a null in its lists .*row 1"):
        rows_of(pa.chunked_array([pa.array([[{"a": 1}], [{"a": None}]], kind)]), PLACE)
    with pytest.raises(ValueError, match=r"column 'x' holds a null in its lists .*row 1"):
        rows_of(pa.chunked_array([pa.array([[{"a": 1}], [None]], kind)]), PLACE)


@pytest.mark.parametrize(
    "kind", [pa.timestamp("s"), pa.decimal128(5, 2), pa.null(), pa.map_(pa.string(), pa.int8())], ids=str
)
def test_a_type_that_cannot_be_served_is_named(kind: Any) -> None:
    assert not can_be_served(kind)
    assert not can_be_served(pa.list_(pa.list_(kind)))
    with pytest.raises(TypeError, match=r"column 'x' has type .*, which cannot be served: cast it"):
        rows_of(pa.chunked_array([], kind), PLACE)
