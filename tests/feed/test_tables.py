"""Tables of pandas, polars, pyarrow and NumPy are served as they are: a sample is a row, as a dict of columns."""

from __future__ import annotations

import datetime
import importlib.util
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_server import Feed, Leaf
from tests.conftest import Serve

ROWS = 1000


if importlib.util.find_spec("polars"):  # its threads and descriptors stay as long as the process
    import polars

    polars.DataFrame({"x": [1]}).select("x")


def library(name: str) -> Any:
    return pytest.importorskip(name)


def of_pandas(columns: dict[str, Any]) -> Any:
    return library("pandas").DataFrame({name: list(values) for name, values in columns.items()})


def of_polars(columns: dict[str, Any]) -> Any:
    library("pyarrow")
    return library("polars").DataFrame(columns)


def of_pyarrow(columns: dict[str, Any]) -> Any:
    return library("pyarrow").table(columns)


Make = Callable[[dict[str, Any]], Any]
FRAMES = pytest.mark.parametrize("make", [of_pandas, of_polars, of_pyarrow], ids=lambda one: one.__name__[3:])


def rows(source: Any, **options: Any) -> list[Any]:
    """Return the samples of a feed of `source`, as batches of one have them."""
    with penstock.connect(Feed(source, batch_size=1, name="rows", **options), workers=0) as connection:
        return [plain(batch) for batch in connection.batches()]


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: plain(leaf) for name, leaf in batch.items()}
    return batch.tolist()[0]


@FRAMES
def test_a_sample_is_a_dict_of_columns(make: Make) -> None:
    table = make({"x": [1, 2, 3], "y": [0.5, float("nan"), 2.5], "on": [True, False, True], "t": ["a", "", "\0ü"]})
    found = rows(table)
    assert [list(row) for row in found] == [["x", "y", "on", "t"]] * 3
    assert repr([tuple(row.values()) for row in found]) == repr(
        [(1, 0.5, True, b"a"), (2, float("nan"), False, b""), (3, 2.5, True, "\0ü".encode())]
    )


@FRAMES
def test_lists_of_a_column_may_have_different_lengths(make: Make) -> None:
    found = rows(make({"tokens": [[1, 2], [3], []]}), batching="ragged")
    assert found == [{"tokens": [1, 2]}, {"tokens": [3]}, {"tokens": []}]


@FRAMES
def test_lists_of_lists_and_of_text_are_ragged(make: Make) -> None:
    columns = {"areas": [[[1, 2], [3]], [], [[]]], "tags": [["a"], [], ["b", "ü"]]}
    spec = {"areas": Leaf("int64", (None, None)), "tags": Leaf(str, (None,))}
    assert rows(make(columns), batching="ragged", spec=spec) == [
        {"areas": [[1, 2], [3]], "tags": [b"a"]},
        {"areas": [], "tags": []},
        {"areas": [[]], "tags": [b"b", "ü".encode()]},
    ]


@pytest.mark.parametrize("make", [of_polars, of_pyarrow], ids=lambda one: one.__name__[3:])
def test_lists_of_structs_are_dicts_of_lists(make: Make) -> None:
    table = make({"objects": [[{"kind": 1, "name": "a"}], [{"kind": 2, "name": "b"}] * 2]})
    spec = {"objects": {"kind": Leaf("int64", (None,)), "name": Leaf(str, (None,))}}
    assert rows(table, batching="ragged", spec=spec) == [
        {"objects": {"kind": [1], "name": [b"a"]}},
        {"objects": {"kind": [2, 2], "name": [b"b", b"b"]}},
    ]


@FRAMES
def test_boxes_are_arrays_of_two_dimensions(make: Make) -> None:
    found = rows(make({"boxes": [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]}))
    assert found == [{"boxes": [[1.0, 2.0], [3.0, 4.0]]}, {"boxes": [[5.0, 6.0], [7.0, 8.0]]}]


@FRAMES
@pytest.mark.parametrize("value", ["text", 7], ids=["text", "numbers"])
def test_a_missing_value_is_an_error_that_names_column_and_row(make: Make, value: Any) -> None:
    values = [value, None, value, None]
    if isinstance(value, int) and make is of_pandas:
        pytest.skip("pandas makes NaN of it, a number like any other")
    with pytest.raises(ValueError, match=r"'age'.*row 1\b.*fill them.*leave"):
        Feed(make({"x": [0, 1, 2, 3], "age": values}), batch_size=2)


@FRAMES
def test_a_column_of_times_is_an_error_that_names_it(make: Make) -> None:
    when = [datetime.datetime(2026, 1, 2)] * 3
    with pytest.raises(TypeError, match=r"'when'.* (dtype|type) .*which cannot be served: .*leave the column out"):
        Feed(make({"when": when}), batch_size=2)


def test_pandas_own_dtypes_are_read() -> None:
    pd = library("pandas")
    frame = pd.DataFrame(
        {
            "color": pd.Categorical(["red", "blue", "red"]),
            "size": pd.Categorical([3, 5, 3]),
            "count": pd.array([1, 2, 3], "Int16"),
            "text": pd.array(["a", "b", "c"], "string"),
            "big": np.arange(3, dtype=">i4"),
            "objects": [{"n": 1}, {"n": 2}, {"n": 3}],
        },
        index=[7, 7, 5],
    )
    assert rows(frame)[1] == {"color": b"blue", "size": 5, "count": 2, "text": b"b", "big": 1, "objects": {"n": 2}}
    frame["count"] = pd.array([1, None, 3], "Int16")
    said = r"df\['count'\] has no value in row 1 \(index 7\).*dropna\(subset=\['count'\]"
    with pytest.raises(ValueError, match=said):
        Feed(frame, batch_size=1)


def test_a_series_is_read_by_place_and_not_by_label() -> None:
    series = library("pandas").Series([1.5, 2.5, 3.5], index=[10, 20, 30])
    assert rows(series[series > 2]) == [2.5, 3.5]


def test_a_frame_without_text_as_names_is_an_error_with_the_fix() -> None:
    with pytest.raises(TypeError, match=r"column with the name 0, and names are text: df\.columns = df\.columns\.map"):
        Feed(library("pandas").DataFrame(np.zeros((3, 2))), batch_size=1)


def test_polars_own_types_are_read() -> None:
    library("pyarrow")
    pl = library("polars")
    frame = pl.DataFrame(
        {
            "color": pl.Series(["red", "blue"], dtype=pl.Categorical),
            "pair": pl.Series([[1, 2], [3, 4]], dtype=pl.Array(pl.Int8, 2)),
            "struct": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}],
            "blob": [b"\0", b"ab"],
        }
    )
    both = pl.concat([frame, frame], rechunk=False)
    assert rows(both)[3] == {"color": b"blue", "pair": [3, 4], "struct": {"a": 2, "b": b"y"}, "blob": b"ab"}
    with pytest.raises(TypeError, match=r"df\['o'\] holds Python objects"):
        Feed(pl.DataFrame({"o": pl.Series([object()])}), batch_size=1)
    with pytest.raises(TypeError, match=r"polars\.LazyFrame has no rows in memory.*\.collect\(\)"):
        Feed(frame.lazy(), batch_size=1)


def test_a_table_of_several_chunks_is_read_where_it_lies() -> None:
    pa = library("pyarrow")
    one = pa.table({"x": np.arange(5.0), "word": pa.array(list("abcab")).dictionary_encode()})
    table = pa.concat_tables([one, one.slice(1, 2), one.slice(0, 0), one])
    feed: Any = Feed(table, batch_size=1)
    assert [feed.generate[i]["x"] for i in range(12)] == [0, 1, 2, 3, 4, 1, 2, 0, 1, 2, 3, 4]
    assert [row["word"] for row in rows(table)] == [b"a", b"b", b"c", b"a", b"b", b"b", b"c", *map(str.encode, "abcab")]
    with pytest.raises(IndexError):
        feed.generate[12]["x"]
    with pytest.raises(ValueError, match=r"column 'x' of the table holds a null \(in row 6\)"):
        Feed(pa.concat_tables([one.select(["x"]), pa.table({"x": [1.0, None]})]), batch_size=1)


def test_lists_of_arrow_are_views_and_their_nulls_are_named() -> None:
    pa = library("pyarrow")
    lists = pa.chunked_array([[[9], [1, 2]], [[3, 4, 5], [], [6]]]).slice(1)
    feed: Any = Feed(pa.table({"x": lists}), batch_size=1)
    assert [feed.generate[i]["x"].tolist() for i in range(4)] == [[1, 2], [3, 4, 5], [], [6]]
    with pytest.raises(ValueError, match=r"column 'x' of the table holds a null in its lists \(in row 2\)"):
        Feed(pa.table({"x": [[1], [], [2, None]]}), batch_size=1)


def test_a_structured_array_is_a_dict_of_its_fields() -> None:
    inner = np.dtype([("a", "i2"), ("b", "f4", (2,))])
    array = np.zeros(3, [("id", ">i4"), ("inner", inner), ("name", "S3")])
    array["id"], array["inner"]["b"][1], array["name"] = [5, 6, 7], [1, 2], [b"x", b"y", b"z"]
    expected = {"id": 6, "inner": {"a": 0, "b": [1.0, 2.0]}, "name": b"y"}
    assert rows(array)[1] == expected
    assert rows(array.view(np.recarray))[1] == expected
    with pytest.raises(TypeError, match=r"array\['t'\] has dtype datetime64\[s\]"):
        Feed(np.zeros(3, [("t", "M8[s]")]), batch_size=1)


def test_a_masked_value_of_a_structured_array_is_an_error_that_names_field_and_row() -> None:
    fields = [("id", "i4"), ("inner", [("box", "f4", (2,))])]
    array = np.ma.zeros(3, fields)
    assert rows(array)[1] == {"id": 0, "inner": {"box": [0.0, 0.0]}}
    array["inner"]["box"][2, 1] = np.ma.masked
    with pytest.raises(ValueError, match=r"array\['inner'\]\['box'\] has no value in row 2 .*array.filled"):
        Feed(array, batch_size=1)
    array["id"][1] = np.ma.masked
    with pytest.raises(ValueError, match=r"array\['id'\] has no value in row 1"):
        Feed(array, batch_size=1)


def test_plain_arrays_are_read_as_ever() -> None:
    array = np.arange(6).reshape(3, 2)
    assert Feed(array, batch_size=1).generate is array


FEEDS = """
    import numpy as np
    from penstock_server import Feed

    NUMBERS = np.arange(1000)
    columns = {"x": NUMBERS, "y": NUMBERS / 7, "text": [f"row {i}" for i in NUMBERS]}
    array = np.zeros(1000, [("x", "i8"), ("y", "f8")])
    array["x"], array["y"] = columns["x"], columns["y"]
    structured = Feed(array, batch_size=32, shuffle=1000)
"""
IMPORTS = {
    "pyarrow": "import pyarrow\narrow = Feed(pyarrow.table(columns), batch_size=32, shuffle=1000)",
    "pandas": "import pandas\nframe = Feed(pandas.DataFrame(columns), batch_size=32, shuffle=1000)",
    "polars": "import polars\nframe2 = Feed(polars.DataFrame(columns), batch_size=32, shuffle=1000)",
}


def test_the_stream_is_the_same_with_any_number_of_workers(serve: Serve) -> None:
    installed = [text for name, text in IMPORTS.items() if importlib.util.find_spec(name)]
    source = textwrap.dedent(FEEDS) + "\n".join(installed)
    names = ["structured", *[text.partition("\n")[2].partition(" ")[0] for text in installed]]
    daemon = serve(source, *names, workers=3)
    module: dict[str, Any] = {}
    exec(source, module)
    expected = epochs(penstock.connect(module["structured"], workers=0))
    assert [sorted(row for batch in epoch for row in batch) for epoch in expected] == [list(range(ROWS))] * 2
    for name in names:  # the order depends on the number of rows alone
        assert epochs(penstock.connect(daemon.urls[name])) == expected, name
        assert epochs(penstock.connect(module[name], workers=0)) == expected, name


def epochs(connection: penstock.Connection) -> list[list[list[int]]]:
    with connection:
        return [[batch["x"].tolist() for batch in connection.batches()] for _ in range(2)]
