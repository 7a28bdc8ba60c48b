"""`Feed.from_numpy`: rows of .npy and .npz files."""

from __future__ import annotations

import os
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_server import Feed
from penstock_server.sources.npy import reader
from penstock_server.sources.npy.describe import describe
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
    with pytest.raises(ValueError, match=r"b-3.npy belongs to no file of another leaf: none matches a-\*.npy with '3'"):
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


def flip(file: str, data: bytes) -> None:
    """Change a byte of a file where it has these bytes."""
    changed = bytearray(Path(file).read_bytes())
    changed[changed.find(data) + len(data) // 2] ^= 1
    Path(file).write_bytes(changed)


def test_a_flipped_byte_of_a_mapped_member_is_an_error_before_any_row() -> None:
    flip("stored.npz", IMAGES[200:210].tobytes())
    with pytest.raises(OSError, match=r"stored.npz: 'images': the data are damaged \(Bad CRC-32"):
        from_numpy("stored.npz").splits()  # type: ignore[operator]
    assert read(from_numpy("stored.npz", "labels")) == IDS.tolist(), "only the arrays that are served are compared"


def test_the_checksums_of_a_file_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = from_numpy("stored.npz")
    first = feed.splits()  # type: ignore[operator]
    monkeypatch.setattr(zipfile.ZipExtFile, "read1", None)
    monkeypatch.setattr(reader, "_read_to_the_end", None)
    assert feed.splits() == first  # type: ignore[operator]


@pytest.mark.parametrize("rows", [None, (3, 9)])
def test_the_checksum_of_a_compressed_member_is_compared_to_its_end(rows: Any) -> None:
    data = bytearray(Path("packed.npz").read_bytes())
    for place in (data.find(b"PK\1\2") + 16, 14):  # the CRC in the directory, and in the member's header
        data[place] ^= 1
    Path("packed.npz").write_bytes(data)
    with pytest.raises(OSError, match=r"packed.npz: 'images': the data are damaged \(Bad CRC-32"):
        read(from_numpy("packed.npz", rows=rows))


def header(shape: str, dtype: str = "<f4", length: int | None = None) -> bytes:
    """Return the first bytes of a .npy file of version 2."""
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\2\0" + (len(text) if length is None else length).to_bytes(4, "little") + text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header("(1,)", length=(1 << 32) - 8), "its header claims 4,294,967,288 bytes"),
        (header("(-1, 2)"), r"its shape is \(-1, 2\)"),
        (header("(4, 4294967296)"), "rows of 16.0 GiB, and more than 2.0 GiB are not read at once"),
        (header("(1 << 40,)"), "not a .npy file"),
        (header(f"({1 << 62}, 2)"), "truncated"),
        (header(f"({1 << 62}, 0)"), "4,611,686,018,427,387,904 rows without values"),
        (header("-" * 5000 + "1"), "not a .npy file"),
        (header("(2,)", "<f3"), "not a .npy file"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_what_a_header_claims_is_compared_with_a_bound(data: bytes, message: str, packed: bool) -> None:
    if packed:
        with zipfile.ZipFile("a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.npy", data)
    else:
        Path("a.npy").write_bytes(data)
    name = "a.npz" if packed else "a.npy"
    tracemalloc.start()
    try:
        with pytest.raises((OSError, ValueError), match=message) as raised:
            read(from_numpy(name))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert name in str(raised.value)
    assert most < 8 << 20


def mark_encrypted(file: str) -> None:
    data = bytearray(Path(file).read_bytes())
    data[6] |= 1
    data[data.find(b"PK\1\2") + 8] |= 1
    Path(file).write_bytes(data)


def set_method(file: str) -> None:
    data = bytearray(Path(file).read_bytes())
    data[8] = data[data.find(b"PK\1\2") + 10] = 93
    Path(file).write_bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (mark_encrypted, "'images': it is encrypted: write the file without a password"),
        (set_method, "'images': it is compressed with the ZIP method 93, which Python cannot read"),
    ],
)
def test_a_member_that_zipfile_cannot_read_is_named(change: Any, message: str) -> None:
    change("packed.npz")
    with pytest.raises(OSError, match=message):
        read(from_numpy("packed.npz"))
    described = describe("packed.npz")
    assert [column.name for column in described.columns] == ["labels"]
    assert message.partition(": ")[2] in described.left_out["images"]


def test_an_archive_without_arrays_or_with_damaged_places_is_named() -> None:
    with zipfile.ZipFile("none.npz", "w"):
        pass
    with pytest.raises(ValueError, match=r"none.npz has no arrays"):
        read(from_numpy("none.npz"))
    data = bytearray(Path("packed.npz").read_bytes())
    data[data.find(b"PK\5\6") + 16 : data.find(b"PK\5\6") + 20] = b"\0\0\0\x70"  # where the directory begins
    Path("packed.npz").write_bytes(data)
    with pytest.raises(OSError, match=r"packed.npz: .* damaged|packed.npz: it is not a .npz file"):
        read(from_numpy("packed.npz"))


def test_thousands_of_arrays_are_not_opened() -> None:
    with zipfile.ZipFile("many.npz", "w") as archive:
        for number in range(3000):
            archive.writestr(f"{number}.npy", b"")
        archive.writestr("last.npy", Path("y.npy").read_bytes())
    with pytest.raises(ValueError, match=r"many.npz has 3,001 arrays: name those to serve"):
        from_numpy("many.npz").splits()  # type: ignore[operator]
    assert read(from_numpy("many.npz", "last")) == IDS.tolist()
    assert describe("many.npz").facts == ("only the first 1000 arrays were looked at",)


def test_a_file_that_changes_is_an_error() -> None:
    feed = from_numpy("y.npy")
    split = feed.splits()[0]  # type: ignore[operator]
    np.save("y.npy", IDS[:30])
    with pytest.raises(OSError, match=r"y.npy has changed"):
        list(feed.generate(split))  # type: ignore[operator]
