"""`Feed.from_webdataset`: samples of tar files."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_server import Feed
from tests.conftest import Serve
from tests.reference.one_stream import one_stream


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def write(path: Path, members: list[tuple[str, bytes]], mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def sample(number: int) -> list[tuple[str, bytes]]:
    image = npy(np.full((3, 4), number, np.float32))
    members = {"x.npy": image, "cls": b"%d" % number, "json": json.dumps({"number": number}).encode()}
    return [(f"data/{number:04}.{name}", data) for name, data in members.items()]


def shard(path: Path, numbers: range, mode: str = "w") -> Path:
    return write(path, [member for number in numbers for member in sample(number)], mode)


def from_webdataset(files: Any, leaves: Any = "cls", **options: Any) -> Feed:
    return Feed.from_webdataset(files, leaves, batch_size=4, **options)


def read(feed: Feed) -> list[Any]:
    return [sample for split in feed.splits() for sample in feed.generate(split)]  # type: ignore[operator]


def test_the_stream_is_the_same_with_any_workers_through_a_kill_and_a_resume(tmp_path: Path, serve: Serve) -> None:
    for number in range(8):
        shard(tmp_path / f"{number}.tar", range(number * 50, (number + 1) * 50))
    source = """
        import os
        from penstock_server import Feed
        feed = Feed.from_webdataset(os.environ["DATA"] + "/*.tar", {"x": "x.npy", "y": "cls"}, batch_size=32,
                                    shuffle=100, seed=3)
        """
    batches = one_stream(serve, source, tmp_path)
    assert sorted(np.concatenate([batch["y"] for batch in batches])) == list(range(400))
    assert all((batch["x"] == batch["y"][:, None, None]).all() for batch in batches)


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
def test_files_of_one_name_are_a_sample(tmp_path: Path, mode: str) -> None:
    path = shard(tmp_path / "a.tar", range(20), mode)
    found = read(from_webdataset(path, ("x.npy", "cls", "json", "json;txt")))
    assert [label for _, label, _, _ in found] == list(range(20))
    assert found[3][2] == found[3][3] == {"number": 3}
    assert found[3][0].tolist() == [[3] * 4] * 3


def test_files_are_decoded_by_their_extension(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.tar",
        [("__meta__/", b""), ("a.TXT", "é".encode()), ("a.jpg", b"\xff\0"), ("a.y.bin", b"ab"), (".hidden", b"")],
    )
    feed = from_webdataset(path, ("txt", "jpg", "y.bin"), decode={"bin": bytes.upper})
    assert read(feed) == [("é", b"\xff\0", b"AB")]


@pytest.mark.parametrize(
    ("members", "leaves", "message"),
    [
        ([("a.cls", b"1"), ("b.txt", b"x")], "cls", "a.tar: sample 'b' has no .cls file"),
        ([("a.cls", b"1")], "jpg;png", "a.tar: sample 'a' has no .jpg and no .png file"),
        ([("a.cls", b"one")], "cls", "a.tar: sample 'a': cannot decode its .cls file: ValueError"),
        ([("a.npy", npy(np.array([{}])))], "npy", "cannot decode its .npy file"),
        ([("a.cls", b"1"), ("a.cls", b"2")], "cls", "a.tar: a.cls is there twice"),
    ],
)
def test_a_sample_that_cannot_be_served_is_named(tmp_path: Path, members: Any, leaves: str, message: str) -> None:
    with pytest.raises((LookupError, ValueError)) as raised:
        read(from_webdataset(write(tmp_path / "a.tar", members), leaves))
    assert message in str(raised.value)


def names(*found: str) -> list[tuple[str, bytes]]:
    return [(name, b"1") for name in found]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (names("a.txt", "b.txt", "a.cls", "b.cls"), "sample 'a' has no .cls file: a.cls is in the archive, but not be"),
        (names("x/a.txt", "y/a.cls"), "sample 'x/a' has no .cls file: y/a.cls is in another folder of the archive"),
        (
            names("frame.01.cls", "frame.01.txt"),
            "sample 'frame' has no .cls file: 'frame.01.cls' is the file .01.cls of",
        ),
        (names("a.txt", "a.json"), "sample 'a' has no .cls file, only .txt, .json: correct leaves="),
    ],
)
@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_where_a_missing_file_is_is_told(tmp_path: Path, members: Any, message: str, mode: str) -> None:
    with pytest.raises(LookupError) as raised:
        read(from_webdataset(write(tmp_path / "a.tar", members, mode), "cls"))
    assert f"a.tar: {message}" in str(raised.value)


def test_a_flipped_byte_in_gzip_data_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    plain = write(tmp_path / "a.tar", [("a.txt", b"hello"), ("b.txt", b"there")]).read_bytes()
    stored = bytearray(gzip.compress(plain, 0))  # not compressed, so the byte is one of the text
    stored[stored.index(b"hello")] ^= 1
    path.write_bytes(stored)
    with pytest.raises(OSError, match=r"a.tar.gz: the tar file is truncated or damaged: .*incorrect data check"):
        read(from_webdataset(path, "txt"))


def test_gzip_data_may_have_several_members_and_something_behind_them(tmp_path: Path) -> None:
    plain = shard(tmp_path / "a.tar", range(20)).read_bytes()
    parts = [gzip.compress(plain[start : start + 5000]) for start in range(0, len(plain), 5000)]
    (tmp_path / "a.tar.gz").write_bytes(b"".join(parts) + bytes(100) + b"signature")
    assert read(from_webdataset(tmp_path / "a.tar.gz")) == list(range(20))


def header(name: str, kind: bytes, nbytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, nbytes
    return info.tobuf(tarfile.GNU_FORMAT)


def sparse(name: str, nbytes: int) -> bytes:
    """Return the header of a member that claims `nbytes` bytes and stores none."""
    found = bytearray(header(name, tarfile.GNUTYPE_SPARSE, 0))
    found[386:398] = found[483:495] = b"\x80" + nbytes.to_bytes(11, "big")
    found[398:410] = b"\x80" + bytes(11)
    found[148:156] = b" " * 8
    found[148:156] = b"%06o\0 " % sum(found)
    return bytes(found)


def test_sizes_that_an_archive_claims_are_compared_with_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(sparse("a.txt", 6 << 30) + bytes(10240))
    with pytest.raises(ValueError, match=r"a.tar: sample 'a' has files of 6.0 GiB, and more than 2.0 GiB"):
        read(from_webdataset(path, "txt"))
    for kind in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE):
        path.write_bytes(header("a.txt", kind, 6 << 30) + bytes(10240))
        with pytest.raises(OSError, match=r"a.tar: the tar file is .*damaged.*a name of 6.0 GiB"):
            read(from_webdataset(path, "txt"))
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    write(path, [("a.npy", head.getvalue())])
    with pytest.raises(ValueError, match=r"its header says float32\[1099511627776\], which is 4.0 TiB"):
        read(from_webdataset(path, "npy"))


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_truncated_file_is_an_error_wherever_it_ends(tmp_path: Path, mode: str) -> None:
    data = shard(tmp_path / "a.tar", range(20), mode).read_bytes()
    whole = 512 if mode == "w" else 400
    ends = range(whole, whole + 3000 if mode == "w" else len(data) - 200, 256)
    for end in [0, *ends]:
        (tmp_path / "a.tar").write_bytes(data[:end])
        with pytest.raises(OSError, match=r"a\.tar: the tar file is truncated or damaged"):
            read(from_webdataset(tmp_path / "a.tar"))


def test_pickles_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\.pkl files are pickles, which run any code"):
        from_webdataset("a.tar", {"x": "pkl"})
    with pytest.raises(TypeError, match="decode must be a dict of functions"):
        from_webdataset("a.tar", decode={"jpg": "rgb"})


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_in_place_of_a_file_is_an_error(tmp_path: Path, kind: bytes) -> None:
    path = write(tmp_path / "a.tar", [("1.cls", b"1"), ("1.x.npy", npy(np.ones(2)))])
    with tarfile.open(path, "a") as tar:
        for name in ("2.cls", "latest.d"):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "1.cls"
            tar.addfile(info)
    with pytest.raises(ValueError, match=r"a.tar: 2.cls is a link to 1.cls, and links are not followed: write .* tar"):
        read(from_webdataset(path))
    assert len(read(from_webdataset(path, "x.npy"))) == 1
