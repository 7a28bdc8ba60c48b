"""`Feed.from_numpy`: rows of .npy and .npz files."""

from __future__ import annotations

import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_server import Feed
from tests.conftest import Daemon, Serve
from tests.reference.one_stream import one_stream

ROWS = 300
IDS = np.arange(ROWS)
IMAGES = np.arange(ROWS * 12, dtype=np.float32).reshape(ROWS, 3, 4)


@pytest.fixture(autouse=True)
def arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write x.npy, y.npy, stored.npz and packed.npz, and make their folder the current directory."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", IMAGES)
    np.save("y.npy", IDS)
    np.savez("stored.npz", images=IMAGES, labels=IDS)
    np.savez_compressed("packed.npz", images=IMAGES, labels=IDS)
    return tmp_path


def from_numpy(files: Any, leaves: Any = None, **options: Any) -> Feed:
    return Feed.from_numpy(files, leaves, batch_size=4, **options)


def read(feed: Feed) -> list[Any]:
    return [sample for split in feed.splits() for sample in feed.generate(split)]  # type: ignore[operator]


def test_the_stream_is_the_same_with_any_workers_through_a_kill_and_a_resume(arrays: Path, serve: Serve) -> None:
    source = """
        import os
        from penstock_server import Feed
        data = os.environ["DATA"]
        feed = Feed.from_numpy({"x": data + "/x.npy", "y": data + "/y.npy"}, batch_size=16, shuffle=100, seed=3)
        """
    batches = one_stream(serve, source, arrays)
    assert sorted(np.concatenate([batch["y"] for batch in batches])) == IDS.tolist()
    for batch in batches:
        np.testing.assert_array_equal(batch["x"], IMAGES[batch["y"]])


def test_files_are_served_from_the_command_line(arrays: Path) -> None:
    words = "stored.npz --batch-size 32 --rows :100 --workers 1 --bind tcp://127.0.0.1:0"
    command = [sys.executable, "-m", "penstock_server", "serve", *words.split()]
    daemon = Daemon(command, arrays, arrays / "log", dict(os.environ))
    try:
        daemon.wait_ready(1)
        with penstock.connect(f"{daemon.url}") as connection:
            batches = list(connection.batches())
    finally:
        status = daemon.stop()
    assert sorted(np.concatenate([batch["labels"] for batch in batches])) == list(range(100))
    assert status == 0


@pytest.mark.parametrize("file", ["stored.npz", "packed.npz"])
@pytest.mark.parametrize("leaves", [None, {"images": "images", "labels": "labels"}])
def test_an_npz_is_a_dict_of_its_arrays(file: str, leaves: Any) -> None:
    samples = read(from_numpy(file, leaves))
    assert [int(sample["labels"]) for sample in samples] == IDS.tolist()
    np.testing.assert_array_equal([sample["images"] for sample in samples], IMAGES)


def test_leaves_choose_arrays_and_their_structure() -> None:
    (image, label), *_ = read(from_numpy("stored.npz", ("images", "labels")))
    assert image.shape == (3, 4)
    assert label == 0
    assert read(from_numpy("stored.npz", "labels", rows=(7, 9))) == [7, 8]


def test_files_of_one_leaf_belong_to_those_of_another() -> None:
    for part in range(3):
        np.save(f"a-{part}.npy", IDS[part::3])
        np.save(f"b-{part}.npy", -IDS[part::3])
    samples = read(from_numpy(("a-*.npy", "b-*.npy")))
    assert sorted(a for a, _ in samples) == IDS.tolist()
    assert all(a == -b for a, b in samples)
    np.save("b-3.npy", IDS)
    with pytest.raises(ValueError, match=r"a-\*.npy matches 3 files and b-\*.npy matches 4"):
        read(from_numpy(("a-*.npy", "b-*.npy")))


@pytest.mark.parametrize("array", [IMAGES.astype(">f8"), np.asfortranarray(IMAGES), IMAGES[:, ::2], IMAGES > 7, IDS])
def test_rows_are_those_of_the_array_in_native_byte_order(array: Any) -> None:
    np.save("a.npy", array)
    samples = read(from_numpy("a.npy"))
    np.testing.assert_array_equal(samples, array)
    assert samples[0].dtype == array.dtype.newbyteorder("=")


def test_a_compressed_array_is_not_decompressed_whole() -> None:
    np.savez_compressed("large.npz", x=np.zeros((64, 1 << 17)), y=np.arange(64))  # 64 MiB
    feed = from_numpy("large.npz", ("x", "y"), rows=(5, None))
    (split,) = feed.splits()  # type: ignore[operator]
    tracemalloc.start()
    try:
        samples = feed.generate(split)  # type: ignore[operator]
        assert [int(y) for x, y in samples if x.shape == (1 << 17,)] == list(range(5, 64))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20


def test_files_are_divided_unless_they_are_compressed() -> None:
    assert len(from_numpy("x.npy", split_rows=30).splits()) == 10  # type: ignore[operator, arg-type]
    assert len(from_numpy("stored.npz", split_rows=30).splits()) == 10  # type: ignore[operator, arg-type]
    assert len(from_numpy("packed.npz", split_rows=30).splits()) == 1  # type: ignore[operator, arg-type]


def test_rows_are_counted_over_all_files() -> None:
    assert read(from_numpy(["y.npy", "y.npy"], rows=(290, 310))) == [*range(290, 300), *range(10)]


def save(file: str, array: Any) -> str:
    np.save(file, array, allow_pickle=True)
    return file


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_numpy({"x": "x.npy", "y": save("z.npy", IDS[:9])}), "x.npy has 300 rows and z.npy has 9"),
        (lambda: from_numpy(save("z.npy", np.array([{}, 1]))), "z.npy holds Python objects"),
        (lambda: from_numpy(save("z.npy", np.array(["a"]))), "z.npy has dtype <U1"),
        (lambda: from_numpy(save("z.npy", np.float32(3))), "z.npy is a single value"),
        (
            lambda: from_numpy("stored.npz", "nothing"),
            "stored.npz has no array 'nothing'; its arrays are images, labels",
        ),
        (lambda: from_numpy("y.npy", "labels"), "y.npy: leaves= names the arrays of .npz files"),
        (lambda: from_numpy({"x": "x.npy"}, "labels"), "leave it out"),
        (lambda: from_numpy("missing.npy"), "missing.npy: no such file"),
    ],
)
def test_what_cannot_be_served_is_named(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError, LookupError, OSError)) as raised:
        read(make())
    assert message in str(raised.value)


@pytest.mark.parametrize("file", ["x.npy", "stored.npz", "packed.npz"])
@pytest.mark.parametrize("keep", [40, 2000])
def test_a_truncated_file_is_named(file: str, keep: int) -> None:
    Path(file).write_bytes(Path(file).read_bytes()[:keep])
    with pytest.raises(OSError, match=rf"{file}: .*truncated"):
        read(from_numpy(file))


def test_a_damaged_member_is_named() -> None:
    data = bytearray(Path("packed.npz").read_bytes())
    data[500] ^= 255
    Path("packed.npz").write_bytes(data)
    with pytest.raises(OSError, match=r"packed.npz: 'images': .*damaged"):
        read(from_numpy("packed.npz"))


def test_a_file_that_changes_is_an_error() -> None:
    feed = from_numpy("y.npy")
    split = feed.splits()[0]  # type: ignore[operator]
    np.save("y.npy", IDS[:30])
    with pytest.raises(OSError, match=r"y.npy has changed"):
        list(feed.generate(split))  # type: ignore[operator]
