"""`Feed.from_parquet`: rows of Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_server import Feed
from penstock_server.sources.parquet import reader
from penstock_server.sources.parquet.describe import describe
from tests.conftest import Serve
from tests.reference.one_stream import one_stream

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = 600
IDS = np.arange(ROWS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of 12 row groups."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(IDS, 3).astype(np.float32)), 3)
    varying = pa.array([[i] * (i % 3) for i in range(ROWS)], pa.list_(pa.int32()))
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.repeat(IDS, 4).reshape(ROWS, 2, 2))
    columns = {
        "id": IDS,
        "vector": vectors,
        "varying": varying,
        "tensor": tensors,
        "flag": IDS % 2 == 0,
        "half": IDS.astype(np.float16),
        "text": [f"row {i}" for i in range(ROWS)],
        "word": pa.array(["even", "odd"] * (ROWS // 2)).dictionary_encode(),
        "blob": [bytes([i % 256, 0]) for i in range(ROWS)],
        "gaps": pa.array([None if i == 550 else i for i in range(ROWS)]),
        "when": pa.array([0] * ROWS, pa.timestamp("s")),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=50)
    return tmp_path / "a.parquet"


def from_parquet(file: Any, leaves: Any = None, **options: Any) -> Feed:
    return Feed.from_parquet(file, leaves, batch_size=4, **options)


def read(feed: Feed) -> list[Any]:
    return [sample for split in feed.splits() for sample in feed.generate(split)]  # type: ignore[operator]


def test_the_stream_is_the_same_with_any_workers_through_a_kill_and_a_resume(file: Path, serve: Serve) -> None:
    source = """
        import os
        from penstock_server import Feed
        feed = Feed.from_parquet(os.environ["DATA"] + "/*.parquet", {"x": "vector", "y": ("id", "flag")},
                                 batch_size=32, shuffle=100, seed=3)
        """
    batches = one_stream(serve, source, file.parent)
    ids = np.concatenate([batch["y"][0] for batch in batches])
    assert sorted(ids) == IDS.tolist()
    assert all((batch["x"] == batch["y"][0][:, None]).all() for batch in batches)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("id", IDS),
        ("vector", np.repeat(IDS, 3).reshape(ROWS, 3).astype(np.float32)),
        ("tensor", np.repeat(IDS, 4).reshape(ROWS, 2, 2)),
        ("flag", IDS % 2 == 0),
        ("half", IDS.astype(np.float16)),
    ],
)
def test_numbers_and_arrays_keep_dtype_and_shape(file: Path, column: str, expected: Any) -> None:
    found = np.array(read(from_parquet(file, column)))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_lists_of_varying_length_are_arrays(file: Path) -> None:
    found = read(from_parquet(file, "varying"))
    assert [row.tolist() for row in found] == [[i] * (i % 3) for i in range(ROWS)]
    assert found[0].dtype == np.int32


def test_nested_lists_and_structs_are_arrays_and_dicts(tmp_path: Path) -> None:
    boxes = [[[1.0, 2.0], [3.0, 4.0]], [], [[5.0, 6.0]]]
    encoded = [{"bytes": bytes([i]), "path": None} for i in range(3)]
    columns = {
        "boxes": pa.array(boxes, pa.list_(pa.list_(pa.float32()))),
        "pairs": pa.array(boxes, pa.list_(pa.list_(pa.float64(), 2))),
        "uneven": [[[1], [2, 3]], [[4]], []],
        "grid": pa.array([[[1, 2], [3, 4]]] * 3, pa.list_(pa.list_(pa.int8(), 2), 2)),
        "image": pa.array(encoded, pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        "answers": [{"text": "a", "at": 1}, {"text": "b", "at": 2}, {"text": "c", "at": 3}],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    found = read(from_parquet(tmp_path / "a.parquet"))
    for name in ("boxes", "pairs"):
        assert [row[name].shape for row in found] == [(2, 2), (0, 2), (1, 2)]
        assert [row[name].tolist() for row in found] == boxes
        assert {row[name].dtype.name for row in found} == {"float32" if name == "boxes" else "float64"}
    assert [part.tolist() for part in found[0]["uneven"]] == [[1], [2, 3]]
    assert found[2]["grid"].tolist() == [[1, 2], [3, 4]]
    assert found[2]["grid"].dtype == np.int8
    assert [row["image"] for row in found] == [b"\0", b"\1", b"\2"]
    assert found[1]["answers"] == {"text": "b", "at": 2}


def test_an_image_that_is_only_a_path_is_named(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    image = pa.array([{"bytes": b"x", "path": "0.png"}, {"bytes": None, "path": "1.png"}], kind)
    pq.write_table(pa.table({"image": image}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"row group 0: column 'image' holds no bytes in row 1, only the path '1.png'"):
        read(from_parquet(tmp_path / "a.parquet"))


def test_text_and_bytes_are_as_they_were_written(file: Path) -> None:
    found = read(from_parquet(file, ("text", "word", "blob")))
    assert found[-1] == ("row 599", "odd", bytes([599 % 256, 0]))


def test_all_columns_are_served_if_none_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2], "b": [3.0, 4.0]}), tmp_path / "a.parquet")
    assert read(from_parquet(tmp_path / "a.parquet")) == [{"a": 1, "b": 3.0}, {"a": 2, "b": 4.0}]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("nothing", "a.parquet has no column 'nothing'; its columns are id, vector"),
        ("gaps", "a.parquet row group 11: column 'gaps' holds a null (in row 0)"),
        ("when", "a.parquet row group 0: column 'when' has type timestamp[ms]"),
    ],
)
def test_a_column_that_cannot_be_served_is_named(file: Path, column: str, message: str) -> None:
    with pytest.raises((LookupError, TypeError, ValueError)) as raised:
        read(from_parquet(file, column))
    assert message in str(raised.value)


def test_a_truncated_or_changed_file_is_named(file: Path) -> None:
    feed = from_parquet(file, "id")
    split = feed.splits()[0]  # type: ignore[operator]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OSError, match=r"a\.parquet: it is not a Parquet file, or is truncated"):
        read(feed)
    with pytest.raises(OSError, match=r"a\.parquet has changed"):
        list(feed.generate(split))  # type: ignore[operator]


def test_a_flipped_byte_is_an_error_if_pages_have_checksums(tmp_path: Path) -> None:
    written = tmp_path / "a.parquet"
    table = pa.table({"x": IDS.astype(np.float32) + 0.1})
    pq.write_table(table, written, write_page_checksum=True, use_dictionary=False, compression="none")
    data = bytearray(written.read_bytes())
    data[data.find((IDS[300:302].astype(np.float32) + 0.1).astype(np.float32).tobytes())] ^= 1
    written.write_bytes(data)
    with pytest.raises(OSError, match=r"a.parquet row group 0: .*damaged.*CRC checksum verification failed"):
        read(from_parquet(written))


def test_a_row_group_is_decoded_part_by_part(tmp_path: Path) -> None:
    text = "x" * (1 << 20)
    words = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), pa.array([text]))
    pq.write_table(pa.table({"id": np.arange(20_000), "word": words}), tmp_path / "a.parquet")
    feed = from_parquet(tmp_path / "a.parquet", "id")
    ids = read(feed)
    assert ids == list(range(20_000))
    parts = [table.num_rows for table in tables_of(feed, "id")]
    assert sum(parts) == 20_000
    assert max(parts) <= 8192
    words = read(from_parquet(tmp_path / "a.parquet", "word"))
    assert len(words) == 20_000
    assert all(word is words[0] for word in words[:1000]), "a word of the dictionary is not copied for each row"


def tables_of(feed: Feed, name: str) -> list[Any]:
    (split,) = feed.splits()  # type: ignore[operator]
    with reader.opened_parquet(split.file) as parquet:
        return list(reader._tables(parquet, split, [name]))


def test_a_large_row_group_is_divided_if_there_are_few(tmp_path: Path) -> None:
    words = [f"row {number}" for number in range(50_000)]
    noise = {f"noise{number}": np.random.default_rng(number).random(50_000) for number in range(10)}
    table = pa.table({"id": np.arange(50_000), "word": words, **noise})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=30_000)
    feed = from_parquet(tmp_path / "a.parquet", ("id", "word"))
    splits: Any = feed.splits()  # type: ignore[operator]
    assert len(splits) == 5
    assert repr(splits[1]).endswith("a.parquet row group 0 rows 10000 to 19999")
    assert read(feed) == list(enumerate(words))
    assert feed.generate.files_of(splits[1]) == [str(tmp_path / "a.parquet")]  # type: ignore[union-attr]
    assert "divided into 5 splits" in describe(str(tmp_path / "a.parquet")).facts[0]


def test_small_or_many_row_groups_are_not_divided() -> None:
    def parts(groups: int, rows: int, nbytes: int) -> int:
        return len(reader.divided([(reader.RowGroup("a", at, rows, None), nbytes) for at in range(groups)]))

    assert parts(1, 1_000_000, 1 << 30) == 8
    assert parts(2, 1_000_000, 1 << 30) == 16
    assert parts(5, 1_000_000, 1 << 30) == 20
    assert parts(8, 1_000_000, 1 << 30) == 8
    assert parts(1, 127, 1 << 30) == 1
    assert parts(1, 1_000_000, 1 << 20) == 1
    assert parts(0, 0, 0) == 0


def test_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    text = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    pq.write_table(pa.table({"x": text}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet row group 0: column 'x' holds text that is not UTF-8"):
        read(from_parquet(tmp_path / "a.parquet"))


def test_many_columns_are_not_described_one_by_one(tmp_path: Path) -> None:
    columns = {f"c{number}": pa.array([1], pa.int8()) for number in range(1500)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet has 1,500 columns, the first of which are c0 \(int8\), c1"):
        describe(str(tmp_path / "a.parquet"))
    assert read(from_parquet(tmp_path / "a.parquet", ("c0", "c1499"))) == [(1, 1)]


@pytest.mark.parametrize("leaves", [None, "x"])
def test_two_columns_of_one_name_are_refused(leaves: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table([pa.array([1]), pa.array([2]), pa.array([3])], ["x", "x", "y"]), tmp_path / "a.parquet")
    with pytest.raises(LookupError, match=r"a\.parquet has two columns 'x'; its columns are x, x, y\. Write the file"):
        read(from_parquet(tmp_path / "a.parquet", leaves))
    assert read(from_parquet(tmp_path / "a.parquet", "y")) == [3]
