"""Files that change while a daemon serves them: an epoch never mixes two versions of one file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_server import Feed, FixedLen
from penstock_server.worker.reading.split_list import SharedSplits, write_list
from penstock_server.worker.verification.file_versions import FileVersions
from tests.conftest import Serve


def test_a_table_that_changes_with_the_same_number_of_rows_is_not_mixed(tmp_path: Path, serve: Serve) -> None:
    table = tmp_path / "t.csv"
    table.write_text("x\n" + "1\n" * 20_000)
    source = f"""
        from penstock_server import Feed
        feed = Feed.from_csv({str(table)!r}, "x", batch_size=2)
        """
    daemon = serve(source, workers=1, memory="1M")
    with penstock.connect(daemon.url, transport="local") as connection:
        reading = connection.batches()
        next(reading)
        table.write_text("x\n" + "2\n" * 20_000)
        daemon.workers()[0].kill()
        why = r"it imported other feeds than the daemon serves, as the files of feed .* changed: restart the daemon"
        with pytest.raises(penstock.WorkerDied, match=why):
            for batch in reading:
                assert batch.tolist() == [1, 1]


def test_a_file_that_is_written_again_with_its_size_fails_the_stream(tmp_path: Path, serve: Serve) -> None:
    file = tmp_path / "x.npy"
    np.save(file, np.full(20_000, 1))
    source = f"""
        from penstock_server import Feed
        feed = Feed.from_numpy({str(file)!r}, batch_size=2, split_rows=1000, lanes=1)
        """
    daemon = serve(source, workers=1, memory="1M")
    with penstock.connect(daemon.url, transport="local") as connection:
        reading = connection.batches()
        values = next(reading).tolist()
        np.save(tmp_path / "new.npy", np.full(20_000, 2))
        os.replace(tmp_path / "new.npy", file)
        with pytest.raises(
            penstock.GeneratorError, match=r"x\.npy has changed: it was written again .* start the daemon again"
        ):
            for batch in reading:
                values += batch.tolist()
        assert values == sorted(values)
        assert values.count(2) <= 1000, "only a split that was being opened at that moment may have the new rows"
        state = connection.state_dict()
    with penstock.connect(daemon.url, transport="local", state=state) as connection:
        assert next(connection.batches()).tolist() == [2, 2], "its list of splits is the same, and a new look was had"


def test_a_file_that_changes_while_its_only_split_is_read_fails_the_stream(tmp_path: Path, serve: Serve) -> None:
    file = tmp_path / "x.npy"
    np.save(file, np.full(400_000, 1))
    source = f"""
        from penstock_server import Feed
        feed = Feed.from_numpy({str(file)!r}, batch_size=20, split_rows=400_000)
        """
    daemon = serve(source, workers=1, memory="1M")
    with penstock.connect(daemon.url, transport="local") as connection:
        reading = connection.batches()
        next(reading)
        np.save(tmp_path / "new.npy", np.full(400_000, 2))
        os.replace(tmp_path / "new.npy", file)
        with pytest.raises(penstock.GeneratorError, match=r"x\.npy has changed: it was written again"):
            list(reading)


def test_a_split_whose_file_has_changed_does_not_enter_the_cache(tmp_path: Path, serve: Serve) -> None:
    file, kept = tmp_path / "x.npy", tmp_path / "kept.npy"
    np.save(file, np.full(400_000, 1))
    shutil.copy2(file, kept)
    source = f"""
        from penstock_server import Feed
        feed = Feed.from_numpy(
            {str(file)!r}, batch_size=20, lanes=1, split_rows=400_000, cache={str(tmp_path / "cache")!r}
        )
        """
    daemon = serve(source, workers=1, memory="1M")
    with penstock.connect(daemon.url, transport="local") as connection:
        reading = connection.batches()
        next(reading)
        with file.open("r+b") as opened:
            opened.seek(1_600_000)
            opened.write(np.full(200_000, 2).tobytes())
        with pytest.raises(penstock.GeneratorError, match=r"x\.npy has changed"):
            list(reading)
    shutil.copy2(kept, file)  # with its old time
    with penstock.connect(daemon.url, transport="local") as connection:
        assert {value for batch in connection.batches() for value in batch.tolist()} == {1}


def _write_arrow(file: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    with pa.ipc.new_file(file, pa.schema([("x", pa.int64())])) as writer:
        writer.write_table(pa.table({"x": [1, 2, 3]}))


def _write_parquet(file: Path) -> None:
    pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").table({"x": [1, 2, 3]}), file)


def _write_hdf5(file: Path) -> None:
    with pytest.importorskip("h5py").File(file, "w") as h5:
        h5["x"] = [1, 2, 3]


def _write_mat(file: Path) -> None:
    pytest.importorskip("scipy.io").savemat(file, {"x": np.arange(1, 4)[:, None]})


def _write_lmdb(file: Path) -> None:
    environment = pytest.importorskip("lmdb").open(str(file), subdir=False)
    with environment.begin(write=True) as transaction:
        transaction.put(b"x-1", b"1")
    environment.close()


FORMATS: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "a.npy": (lambda file: np.save(file, np.arange(3)), {}),
    "a.npz": (lambda file: np.savez(file, x=np.arange(3)), {}),
    "a.jsonl": (lambda file: file.write_text('{"x": 1}\n'), {}),
    "a.arrow": (_write_arrow, {}),
    "a.parquet": (_write_parquet, {}),
    "a.h5": (_write_hdf5, {"leaves": "x"}),
    "a.mat": (_write_mat, {"leaves": "x"}),
    "a.lmdb": (_write_lmdb, {"leaves": "x-*"}),
    "a.tfrecord": (lambda file: file.write_bytes(b""), {"leaves": {"x": FixedLen((), "int64")}}),
    "a.tar": (lambda file: file.write_bytes(b""), {"leaves": "txt"}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_all_readers_that_divide_files_compare_the_time_of_their_change(name: str, tmp_path: Path) -> None:
    write, options = FORMATS[name]
    file = tmp_path / name
    write(file)
    feed = Feed.from_files(str(file), batch_size=2, **options)
    splits = feed.splits()  # type: ignore[operator]
    versions = FileVersions.loads(FileVersions.of([(feed, splits)]).dumps())
    versions.check(feed, splits[0])
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(OSError, match=rf"{name} has changed: it was written again"):
        versions.check(feed, splits[0])
    replace(versions, paths="another host").check(feed, splits[0])


def test_the_versions_of_files_are_no_part_of_the_digest_of_a_list() -> None:
    splits = ["a", "b"]
    plain, nbytes, digest = write_list(splits)
    fd, more, same = write_list(splits, FileVersions("here", {"a": (1, 2)}))
    try:
        assert (digest, nbytes < more) == (same, True)
        assert SharedSplits(fd, more).versions == FileVersions("here", {"a": (1, 2)})
        assert SharedSplits(plain, nbytes).versions == FileVersions("", {})
        assert [SharedSplits(fd, more)[number] for number in range(2)] == splits
    finally:
        os.close(plain)
        os.close(fd)
