"""Feeds of HDF5 files: `Feed.from_hdf5`, and `penstock serve` with files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

import penstock
from penstock_server import Feed
from penstock_server.cli.main import main
from tests.conftest import Daemon, Serve
from tests.reference.one_stream import one_stream

ROWS = 600


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    """Two files of 600 rows, with compressed images."""
    for number in range(2):
        ids = np.arange(number * ROWS, (number + 1) * ROWS)
        with h5py.File(tmp_path / f"digits-{number}.h5", "w") as file:
            images = np.broadcast_to(ids.astype(np.float32)[:, None, None], (ROWS, 4, 5))
            file.create_dataset("images", data=images, chunks=(50, 2, 5), compression="gzip")
            file.create_dataset("labels", data=ids.astype(">i4"))
            file.create_dataset("names", data=[f"näme {number}" for number in ids])
            file.create_dataset("short", data=ids[:7])
            file.create_dataset("group/flag", data=ids % 2 == 0)
    return tmp_path


def read(feed: Feed) -> list[Any]:
    """Return all samples in the order of the splits, as a worker would read them."""
    return [sample for split in feed.splits() for sample in feed.generate(split)]  # type: ignore[operator]


def from_hdf5(files: Any, leaves: Any = "labels", **options: Any) -> Feed:
    return Feed.from_hdf5(files, leaves, batch_size=4, **options)


def test_the_stream_is_the_same_with_any_workers_through_a_kill_and_a_resume(digits: Path, serve: Serve) -> None:
    source = """
        import os
        from penstock_server import Feed
        feed = Feed.from_hdf5(os.environ["DATA"] + "/digits-*.h5", {"image": "images", "label": "labels"},
                              batch_size=32, shuffle=200, seed=3)
        """
    batches = one_stream(serve, source, digits)
    labels = np.concatenate([batch["label"] for batch in batches])
    assert labels.dtype == np.int32
    assert sorted(labels) == list(range(2 * ROWS))
    assert all((batch["image"] == batch["label"][:, None, None]).all() for batch in batches)


def test_files_are_served_from_the_command_line(digits: Path, tf: Any) -> None:
    (digits / "images.py").write_text("def twice(sample):\n    x, name, y = sample\n    return 2 * x, name, y\n")
    words = "digits-*.h5 --leaf images --leaf names --leaf labels --batch-size 32 --shuffle 100 --rows 500:700"
    words += " --transform images.py:twice --name ddddddddd"
    command = [sys.executable, "-m", "penstock_server", "serve", *words.split(), "--bind", "tcp://127.0.0.1:0"]
    daemon = Daemon(command, digits, digits / "log", dict(os.environ))
    daemon.wait_ready(1)
    labels = []
    for x, name, y in penstock.dataset(daemon.url):
        assert (x.numpy()[:, 0, 0] == 2 * y.numpy()).all()
        assert name.numpy().tolist() == [f"näme {label}".encode() for label in y.numpy()]
        labels += y.numpy().tolist()
    assert sorted(labels) == list(range(500, 700))
    assert daemon.url.endswith("/ddddddddd")
    assert daemon.stop() == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a.h5 --leaf images", "--batch-size"),
        ("a.h5 --batch-size 4", "need --leaf"),
        ("a.h5 --leaf x=images --leaf labels --batch-size 4", "for all leaves"),
        ("a.h5 b.py:feed --leaf images --batch-size 4", "second daemon"),
        ("b.py:feed --leaf images", "--leaf is for data files"),
        ("a.h5 --leaf x --batch-size 4 --rows 7", "START:STOP"),
        ("a.h5 b.npz --leaf x --batch-size 4", "one format"),
        ("b.py:feed --transform b.py:twice", "--transform is for data files"),
        ("a.tar --batch-size 4", "--leaf NAME=DATASET"),
        ("a.tar --leaf cls --batch-size 4 --rows 1:2", "--rows is for HDF5 and NumPy"),
    ],
)
def test_options_that_cannot_work_are_refused(words: str, message: str) -> None:
    found = CliRunner().invoke(main, ["serve", *words.split()])
    assert found.exit_code == 2
    assert message in found.output


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ("images.py", "expected MODULE:FUNCTION, such as images.py:augment, got 'images.py'"),
        ("images.py:nothing", "images.py has no attribute 'nothing'"),
        ("absent.py:f", "absent.py: no such file"),
    ],
)
def test_a_transform_that_cannot_be_loaded_ends_the_command(digits: Path, transform: str, message: str) -> None:
    (digits / "images.py").write_text("")
    words = f"digits-0.h5 --leaf labels --batch-size 32 --bind tcp://127.0.0.1:0 --transform {transform}"
    command = [sys.executable, "-m", "penstock_server", "serve", *words.split()]
    found = subprocess.run(command, cwd=digits, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert message in found.stderr
    assert "Traceback" not in found.stderr


def test_an_error_of_a_file_ends_the_command_and_names_the_file(digits: Path) -> None:
    words = "digits-0.h5 --leaf pictures --batch-size 32 --bind tcp://127.0.0.1:0"
    command = [sys.executable, "-m", "penstock_server", "serve", *words.split()]
    found = subprocess.run(command, cwd=digits, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert "digits-0.h5 has no dataset 'pictures'; its datasets are group/flag (bool[600]), images" in found.stderr
    assert "Traceback" not in found.stderr


def test_samples_have_the_structure_of_the_leaves(digits: Path) -> None:
    file = digits / "digits-0.h5"
    nested = read(from_hdf5(file, ({"a": "labels", "b": ("images", "group/flag")}, "labels")))[3]
    assert nested[0]["a"] == nested[1] == 3
    assert nested[0]["b"][0].shape == (4, 5)
    assert not nested[0]["b"][1]
    assert read(from_hdf5(file))[7] == 7
    assert type(read(from_hdf5(file))[0]) is np.int32, "native byte order"


@pytest.mark.parametrize(
    ("rows", "served"), [(None, range(1200)), ((590, 610), range(590, 610)), ((7, None), range(7, 1200))]
)
def test_rows_are_counted_over_all_files(digits: Path, rows: Any, served: range) -> None:
    assert read(from_hdf5(str(digits / "digits-*.h5"), rows=rows)) == list(served)


def test_no_chunk_is_decompressed_twice(digits: Path) -> None:
    feed = from_hdf5([digits / "digits-0.h5", digits / "digits-1.h5"], ("images", "labels"), rows=(120, None))
    splits: Any = feed.splits()  # type: ignore[operator]
    assert [split.start for split in splits[:3]] == [120, 200, 300], "64 rows, rounded up to two chunks of 50"
    assert all(split.start % 50 == 0 for split in splits[1:])


def test_chunks_of_labels_are_followed_only_if_many_splits_remain(tmp_path: Path) -> None:
    def unit_of(label_chunk: int) -> int:
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file.create_dataset("x", shape=(10_000, 64), chunks=(50, 64), compression="gzip")
            file.create_dataset("y", shape=(10_000,), chunks=(label_chunk,), compression="gzip")
        return int(from_hdf5(tmp_path / "a.h5", ("x", "y")).splits()[0].stop)  # type: ignore[operator]

    assert unit_of(75) == 150
    assert unit_of(3001) == 100, "else the file would have one split"


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        (("labels", "short"), "'labels' has 600 rows and 'short' has 7"),
        ("group", "has a group, not a dataset, 'group'; its datasets are group/flag"),
        ("nothing", "has no dataset 'nothing'"),
    ],
)
def test_a_dataset_that_cannot_be_served_is_named(digits: Path, leaves: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError, LookupError)) as raised:
        read(from_hdf5(digits / "digits-0.h5", leaves))
    assert message in str(raised.value)
    assert "digits-0.h5" in str(raised.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "the file is truncated: copy it again"),
        (lambda data: b"PK" + data[2:], "this is not an HDF5 file"),
        (lambda data: None, "no such file"),
    ],
)
def test_a_damaged_file_is_named_with_the_fix(digits: Path, damage: Any, message: str) -> None:
    path = digits / "digits-0.h5"
    damaged = damage(path.read_bytes())
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    with pytest.raises(OSError, match=message) as raised:
        read(from_hdf5(path))
    assert "digits-0.h5" in str(raised.value)


def test_a_locked_file_is_named_with_the_fix(digits: Path) -> None:
    path = digits / "digits-0.h5"
    code = "import h5py, sys; file = h5py.File(sys.argv[1], 'a'); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=-1, stdout=-1) as writer:
        assert writer.stdout is not None
        assert writer.stdin is not None
        writer.stdout.readline()
        with pytest.raises(OSError, match="another process has locked the file"):
            read(from_hdf5(path))
        writer.stdin.close()
    assert len(read(from_hdf5(path, locking=False))) == ROWS


def test_a_file_that_changes_is_an_error(digits: Path) -> None:
    path = digits / "digits-0.h5"
    feed = from_hdf5(path)
    split = feed.splits()[0]  # type: ignore[operator]
    with h5py.File(path, "a") as file:
        file["more"] = np.zeros(100_000)
    with pytest.raises(OSError, match=r"digits-0.h5 has changed: it had \d+ bytes"):
        list(feed.generate(split))  # type: ignore[operator]
    assert len(read(feed)) == ROWS, "the next epoch lists the file as it is now"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leaves": {}}, "leaves is empty"),
        ({"leaves": ["images"]}, "a tuple or a dict of names"),
        ({"files": []}, "files is an empty list"),
        ({"files": [3]}, "files must be paths"),
        ({"rows": (5, 5)}, "0 <= start < stop"),
        ({"rows": 5}, "rows must be"),
        ({"split_rows": 0}, "split_rows must be at least 1"),
        ({"splits": [1]}, "leave splits= out"),
        ({"locking": "no"}, "locking must be"),
        ({"shuffle": -1}, "shuffle must be"),
    ],
)
def test_an_option_that_cannot_work_is_refused_when_the_feed_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        from_hdf5(**{"files": "a.h5", **options})


@pytest.mark.parametrize("rows", [(0, 5000), (1200, None)])
def test_rows_beyond_the_end_are_an_error(digits: Path, rows: Any) -> None:
    with pytest.raises(ValueError, match="the files have 1200 rows"):
        read(from_hdf5(str(digits / "digits-*.h5"), rows=rows))
