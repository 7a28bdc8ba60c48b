"""Arrow files, Feather files, and the streams that Hugging Face's `save_to_disk` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock_server import Feed
from penstock_server.sources.registry import format_of

pa = pytest.importorskip("pyarrow")

ROWS = 1000
TABLE = pa.table({"id": range(ROWS), "text": [f"row {i}" for i in range(ROWS)], "gap": [None, *range(1, ROWS)]})


def written(path: Path, kind: str, rows: int = 3) -> Path:
    make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with make(str(path), TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=rows)
    return path


def read(feed: Feed) -> list[Any]:
    return [sample for split in feed.splits() for sample in feed.generate(split)]  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_each_row_is_read_once_from_splits_that_many_workers_can_share(tmp_path: Path, kind: str) -> None:
    file = written(tmp_path / "a.arrow", kind)
    feed = Feed.from_files(file, {"id": "id", "text": "text"}, batch_size=4)
    splits = feed.splits()  # type: ignore[operator]
    assert 100 < len(splits) <= 256
    assert str(splits[1]) == f"{file} record batch 2 to 3"
    assert read(feed) == [{"id": i, "text": f"row {i}"} for i in range(ROWS)]


def test_a_feather_file_with_another_ending_is_recognized(tmp_path: Path) -> None:
    feather = pytest.importorskip("pyarrow.feather")
    feather.write_feather(TABLE.select(["id"]), str(tmp_path / "a.data"))
    found = format_of(str(tmp_path / "a.data"))
    assert found is not None
    assert found.name == "Arrow"
    assert len(read(Feed.from_files(tmp_path / "a.data", "id", batch_size=4))) == ROWS


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_what_is_wrong_names_the_file_and_the_place(tmp_path: Path, kind: str) -> None:
    file = written(tmp_path / "a.arrow", kind)
    with pytest.raises(ValueError, match=r"a\.arrow record batch 0: column 'gap' holds a null \(in row 0\)"):
        read(Feed.from_files(file, "gap", batch_size=4))
    with pytest.raises(LookupError, match=r"a\.arrow has no column 'no'; its columns are id, text, gap"):
        read(Feed.from_files(file, "no", batch_size=4))
    feed = Feed.from_files(file, "id", batch_size=4)
    splits = feed.splits()  # type: ignore[operator]
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(OSError, match=r"a\.arrow has changed"):
        list(feed.generate(splits[0]))  # type: ignore[operator]
    with pytest.raises(OSError, match=r"a\.arrow: it is not an Arrow file, or "):
        read(feed)
    file.write_bytes(b"no data")
    with pytest.raises(OSError, match=r"a\.arrow: it is not an Arrow file"):
        read(feed)


def test_offsets_beyond_the_data_are_an_error(tmp_path: Path) -> None:
    offsets = pa.array([0, 2, 2, 5, 7], pa.int32()).buffers()[1]
    lists = pa.Array.from_buffers(pa.list_(pa.int64()), 4, [None, offsets], children=[pa.array(range(7))])
    file = tmp_path / "a.arrow"
    with pa.ipc.new_stream(str(file), pa.schema([("x", lists.type)])) as writer:
        writer.write_batch(pa.record_batch([lists], ["x"]))
    found = bytes(offsets)
    assert file.read_bytes().count(found) == 1
    file.write_bytes(file.read_bytes().replace(found, found[:-4] + (1 << 30).to_bytes(4, "little")))
    with pytest.raises(OSError, match=r"a\.arrow record batch 0: it is not an Arrow file, or is truncated or damaged"):
        read(Feed.from_files(file, batch_size=4))


def test_a_column_may_be_two_leaves_but_two_columns_with_one_name_are_an_error(tmp_path: Path) -> None:
    file = written(tmp_path / "a.arrow", "file", rows=ROWS)
    assert read(Feed.from_files(file, ("id", "id"), batch_size=4))[7] == (7, 7)
    twice = pa.table([[1], [2]], names=["x", "x"])
    with pa.ipc.new_file(str(file), twice.schema) as writer:
        writer.write_table(twice)
    with pytest.raises(LookupError, match=r"a\.arrow has two columns 'x'"):
        read(Feed.from_files(file, "x", batch_size=4))


def test_a_stream_that_is_cut_between_two_record_batches_is_an_error(tmp_path: Path) -> None:
    file = written(tmp_path / "a.arrow", "stream")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(OSError, match=r"a\.arrow: .*a stream that is damaged or cut off: copy it again"):
        read(Feed.from_files(file, "id", batch_size=4))


def test_a_folder_that_hugging_face_saved_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # it would start a thread
    rows = datasets.Dataset.from_dict({"x": range(20), "tokens": [[i] * (i % 3) for i in range(20)]})
    rows.save_to_disk(str(tmp_path / "saved"))
    found = read(Feed.from_files(str(tmp_path / "saved/*.arrow"), batch_size=4))
    assert [(row["x"], row["tokens"].tolist()) for row in found] == [(i, [i] * (i % 3)) for i in range(20)]
