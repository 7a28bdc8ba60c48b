"""`Feed.from_webdataset`: samples of tar files."""

from __future__ import annotations

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
