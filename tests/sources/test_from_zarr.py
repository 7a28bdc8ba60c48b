"""`Feed.from_zarr`: rows of Zarr arrays, of versions 2 and 3, in folders and zip files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from penstock_command import main
from penstock_server import Feed
from penstock_server.sources import bounds
from penstock_server.sources.zarr_stores import reader
from tests.conftest import Serve
from tests.reference.one_stream import one_stream

zarr = pytest.importorskip("zarr")
zarr.config.set({"threading.max_workers": 1})
zarr.create_array(store={}, shape=(1,), dtype="i4")[:] = 1  # starts its threads, which last as long as the process

ROWS = 300
IDS = np.arange(ROWS)
IMAGES = np.arange(ROWS * 12, dtype=np.float32).reshape(ROWS, 3, 4)


def write(path: Any, arrays: dict[str, Any], **options: Any) -> None:
    """Write arrays as a group."""
    group = zarr.open_group(store=path, mode="w", zarr_format=options.pop("zarr_format", 3))
    for name, values in arrays.items():
        chunks = (min(50, len(values)), *values.shape[1:])
        made = group.create_array(name, shape=values.shape, dtype=values.dtype, **{"chunks": chunks, **options})
        made[:] = values


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(feed: Feed) -> list[Any]:
    splits: Any = feed.splits
    generate: Any = feed.generate
    return [sample for split in splits() for sample in generate(split)]


def rows(*args: Any, **options: Any) -> list[Any]:
    return read(Feed.from_zarr(*args, batch_size=4, **options))


def test_the_stream_is_the_same_with_any_workers_through_a_kill_and_a_resume(folder: Path, serve: Serve) -> None:
    write("d.zarr", {"x": IMAGES, "y": IDS})
    source = """
        import os
        from penstock_server import Feed
        feed = Feed.from_zarr(os.environ["DATA"] + "/d.zarr", {"x": "x", "y": "y"}, batch_size=16, shuffle=100, seed=3)
        """
    batches = one_stream(serve, source, folder)
    assert sorted(np.concatenate([batch["y"] for batch in batches])) == IDS.tolist()
    for batch in batches:
        np.testing.assert_array_equal(batch["x"], IMAGES[batch["y"]])


@pytest.mark.parametrize("options", [{}, {"zarr_format": 2}, {"shards": (100,), "chunks": (20,)}])
def test_rows_are_those_that_zarr_reads(options: dict[str, Any]) -> None:
    write("d.zarr", {"y": IDS}, **options)
    assert rows("d.zarr/", "y", split_rows=50) == IDS.tolist()
    assert rows("d.zarr", "y", rows=(10, 120)) == IDS[10:120].tolist()
    assert rows("*.zarr") == [{"y": number} for number in IDS]


def test_a_single_array_and_a_zip_file_and_groups_in_groups() -> None:
    single = zarr.open_array(store="one.zarr", mode="w", shape=IDS.shape, chunks=(7,), dtype=">i4")
    single[:] = IDS
    found = rows("one.zarr")
    assert found == IDS.tolist()
    assert found[0].dtype == np.dtype("=i4")
    write("d.zarr", {"a/x": IMAGES, "b/c/y": IDS})
    shutil.make_archive("d.zarr", "zip", "d.zarr")
    for store in ("d.zarr", "d.zarr.zip"):
        images, ids = zip(*rows(store, ("a/x", "b/c/y")), strict=True)
        np.testing.assert_array_equal(images, IMAGES)
        assert [*ids] == IDS.tolist()


def test_splits_follow_the_chunks_of_large_arrays_and_are_many() -> None:
    write("d.zarr", {"x": IMAGES}, chunks=(10, 3, 4))
    splits: Any = Feed.from_zarr("d.zarr", "x", batch_size=4, split_rows=15).splits
    assert {(split.start % 20, split.stop - split.start) for split in splits()} == {(0, 20)}
    group = zarr.open_group(store="odd.zarr", mode="w")
    for name, chunk in {"image": 37, "mask": 41}.items():
        group.create_array(name, shape=(3000, 40), chunks=(chunk, 40), dtype="u1")
    listed: Any = Feed.from_zarr("odd.zarr", ("image", "mask"), batch_size=4).splits
    assert len(listed()) >= 16, "not one, though their chunks meet only after 1517 rows"


@pytest.mark.parametrize("few", [1, 400, 1 << 16])
@pytest.mark.parametrize("slab", [1, 2000, 4 << 20])
def test_samples_are_the_same_however_much_is_read_at_once(
    slab: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_SLAB", slab)
    monkeypatch.setattr(reader, "_FEW", few)
    write("d.zarr", {"x": IMAGES})
    labels = zarr.open_group(store="d.zarr", mode="a").create_array("y", shape=(ROWS,), chunks=(7,), dtype=IDS.dtype)
    labels[:] = IDS
    images, ids = zip(*rows("d.zarr", ("x", "y"), rows=(13, 290), split_rows=100), strict=True)
    np.testing.assert_array_equal(images, IMAGES[13:290])
    assert [*ids] == IDS[13:290].tolist()


def test_text_is_served_as_text() -> None:
    names = np.array([f"row {number}" for number in range(60)], np.dtypes.StringDType())
    write("d.zarr", {"name": names})
    assert rows("d.zarr", "name") == names.tolist()


def test_a_damaged_chunk_is_named_and_a_lost_one_is_seen_by_peek(folder: Path) -> None:
    write("d.zarr", {"y": IDS})
    chunk = folder / "d.zarr" / "y" / "c" / "2"
    chunk.write_bytes(chunk.read_bytes()[:-9])
    with pytest.raises(OSError, match=r"d\.zarr: rows 100 to 199 of 'y' cannot be read: is a chunk damaged"):
        rows("d.zarr", "y")
    chunk.unlink()
    text = CliRunner().invoke(main, ["peek", "d.zarr"]).output
    assert "'y': 1 of 6 chunks are not stored, and are read as 0" in " ".join(text.split())
    assert "y: int64" in text
    assert "penstock serve d.zarr --leaf y=y --batch-size 32" in text


def test_a_cached_split_is_read_again_when_a_chunk_changes(folder: Path) -> None:
    write("d.zarr", {"x": IMAGES, "y": IDS})
    feed = Feed.from_zarr("d.zarr", ("x", "y"), batch_size=4)
    splits: Any = feed.splits
    reader: Any = feed.generate
    (split, *_) = splits()
    before = reader.stamp(split)
    assert reader.stamp(split) == before
    for name in ("x", "y"):
        zarr.open_group(store="d.zarr", mode="a")[name][3] = 7
        assert reader.stamp(split) != before
        before = reader.stamp(split)


@pytest.mark.parametrize(
    ("store", "leaves", "message"),
    [
        ("absent.zarr", "y", r"absent\.zarr: no such store in /"),
        ("empty.zarr", "y", r"empty\.zarr is not a Zarr store: it has no zarr\.json"),
        ("junk.zarr.zip", "y", r"junk\.zarr\.zip cannot be opened as a Zarr store: BadZipFile"),
        ("none-*.zarr", "y", r"no folder matches none-\*\.zarr in /"),
        ("d.zarr", "z", r"d\.zarr has no array 'z'; its arrays are short \(float64\[3\]\), time \(datetime64"),
        ("d.zarr", ("y", "short"), r"'y' has 300 rows and 'short' has 3: each sample takes one row"),
        ("d.zarr", "time", r"'time' has dtype datetime64\[s\], which cannot be served"),
    ],
)
def test_a_store_that_cannot_be_read_is_named(folder: Path, store: str, leaves: Any, message: str) -> None:
    write("d.zarr", {"y": IDS, "short": np.zeros(3), "time": IDS.astype("M8[s]")})
    (folder / "empty.zarr").mkdir()
    (folder / "junk.zarr.zip").write_bytes(b"junk")
    with pytest.raises((OSError, LookupError, TypeError, ValueError), match=message):
        rows(store, leaves)


def test_a_chunk_that_claims_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    write("d.zarr", {"y": IDS})
    monkeypatch.setattr(bounds, "AT_ONCE", 400)
    assert len(rows("d.zarr", "y")) == ROWS
    monkeypatch.setattr(bounds, "AT_ONCE", 399)
    with pytest.raises(ValueError, match=r"d\.zarr: 'y' has chunks of 400 bytes, and more than 399 bytes are not read"):
        rows("d.zarr", "y")
