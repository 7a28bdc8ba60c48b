"""`penstock peek` shows the contents of a feed or a data file. The command and the module that it prints serve a file
as they are."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import json
import math
import os
import re
import shlex
import struct
import subprocess
import sys
import tarfile
import textwrap
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner, Result

import penstock
from penstock_command import main
from penstock_proto.status.status_shape import Status
from penstock_server.peeking.files.proposal import MODULE
from penstock_server.peeking.files.sampling import limited
from penstock_server.peeking.leaves.contact_sheet import contact_sheet
from penstock_server.peeking.leaves.contact_sheet import png as png_file
from penstock_server.peeking.leaves.histogram import bars
from penstock_server.peeking.leaves.leaf_report import leaf_lines, leaves_json
from penstock_server.peeking.leaves.reservoir import Reservoir
from penstock_server.peeking.leaves.summary import Summary
from penstock_server.sources.tfrecord.crc32c import crc32c, masked
from penstock_server.sources.tfrecord.example import example_class
from penstock_server.targets.file_target import load_target, make_target
from tests.conftest import Daemon, DaemonLauncher, Serve
from tests.fakes.statuses import of
from tests.processes.free_ports import free_port

ROWS = 400
NUMBERS = np.arange(ROWS)
RAGGED = [np.arange(number % 7 + 1) for number in range(ROWS)]


def digits() -> Any:
    """Return grey images whose first pixel is their number, modulo 256."""
    images = np.random.default_rng(0).integers(0, 256, (ROWS, 28, 28), dtype=np.uint8)
    images[:, 0, 0] = NUMBERS % 256
    return images


def discs() -> tuple[Any, Any]:
    """Return RGB images from 0 to 1 with a red disc, and masks where the disc is 3. One pixel is NaN."""
    y, x = np.mgrid[:40, :50]
    disc = (x - 20) ** 2 + (y - 15) ** 2 < 100
    images = np.zeros((ROWS, 40, 50, 3), np.float32)
    images[:, disc] = [1.0, 0.25, 0.0]
    images[0, 39, 49, 0] = np.nan
    return images, np.where(disc, 3, 0).astype(np.uint8)[None].repeat(ROWS, axis=0)


def png(pixels: Any, kind: str = "png") -> bytes:
    image = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    image.fromarray(pixels).save(stream, kind)
    return stream.getvalue()


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def h5_file(folder: Path) -> list[str]:
    with h5py.File(folder / "digits.h5", "w") as file:
        file.create_dataset("images", data=digits(), chunks=(50, 28, 28), compression="gzip")
        file["labels"] = NUMBERS
        file["text/names"] = [f"näme {number}" for number in NUMBERS]
        file["a=b"] = NUMBERS
        file["mean"] = np.zeros((28, 28))
        file["created"] = 7
        file["table"] = np.zeros(ROWS, [("a", "i4"), ("b", "f4")])
    return ["digits.h5"]


def ragged_h5_file(folder: Path) -> list[str]:
    with h5py.File(folder / "tokens.h5", "w") as file:
        tokens = file.create_dataset("tokens", (ROWS,), h5py.vlen_dtype(np.int32))
        for number, row in enumerate(RAGGED):
            tokens[number] = row
        file["label"] = NUMBERS
    return ["tokens.h5"]


def npz_file(folder: Path) -> list[str]:
    images, masks = discs()
    np.savez(folder / "discs.npz", image=images, mask=masks, label=NUMBERS, classes=np.arange(4))
    return ["discs.npz"]


def compressed_npz_file(folder: Path) -> list[str]:
    np.savez_compressed(folder / "discs.npz", image=digits(), label=NUMBERS)
    return ["discs.npz"]


def npy_file(folder: Path) -> list[str]:
    np.save(folder / "label.npy", NUMBERS.astype(">i4"))
    return ["label.npy"]


def several_files(folder: Path) -> list[str]:
    for number, part in enumerate(np.array_split(NUMBERS, 4)):
        np.savez(folder / f"part {number}.npz", label=part)
    return [f"part {number}.npz" for number in range(4)]


def pattern(folder: Path) -> list[str]:
    several_files(folder)
    return ["part *.npz"]


def parquet_file(folder: Path) -> list[str]:
    pa = pytest.importorskip("pyarrow")
    images = pa.FixedShapeTensorArray.from_numpy_ndarray(digits())
    holes = [None if number % 3 else 1.5 for number in NUMBERS]
    deeper = [[number, None] for number in NUMBERS]
    dates = pa.array(NUMBERS, pa.timestamp("s"))
    table = pa.table(
        {"image": images, "label": NUMBERS, "text": ["x"] * ROWS, "holes": holes, "deeper": deeper, "date": dates}
    )
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "digits.parquet", row_group_size=50)
    return ["digits.parquet"]


def ragged_parquet_file(folder: Path) -> list[str]:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"tokens": [row.tolist() for row in RAGGED], "label": NUMBERS})
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "tokens.parquet")
    return ["tokens.parquet"]


def write_tar(path: Path, members: dict[str, bytes], mode: Any = "w") -> None:
    with tarfile.open(path, mode) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def tar_file(folder: Path) -> list[str]:
    members: dict[str, bytes] = {}
    for number, pixels in enumerate(digits()):
        members[f"{number:04}.{'jpg' if number % 2 else 'png'}"] = png(pixels, "jpeg" if number % 2 else "png")
        members[f"{number:04}.cls"] = b"%d" % number
        members[f"{number:04}.json"] = b'{"size": [28, 28], "who": "me"}'
        members[f"{number:04}.pkl"] = b"?"
        members[f"{number:04}.id"] = b"not a number"
        if number % 5 == 0:
            members[f"{number:04}.txt"] = b"sometimes"
    write_tar(folder / "digits.tar", members)
    return ["digits.tar"]


def compressed_tar_file(folder: Path) -> list[str]:
    members = {f"{number:04}.{name}": data for number in NUMBERS for name, data in (("cls", b"%d" % number),)}
    write_tar(folder / "labels.tar.gz", members, "w:gz")
    return ["labels.tar.gz"]


def tar_file_of_arrays(folder: Path) -> list[str]:
    members = {}
    for number in NUMBERS:
        members[f"{number:04}.tokens.npy"] = npy(RAGGED[number])
        members[f"{number:04}.scan.npy"] = npy(np.zeros((number % 3 + 8, 9)))
        members[f"{number:04}.cls"] = b"%d" % number
    write_tar(folder / "arrays.tar", members)
    return ["arrays.tar"]


def example(number: int, pixels: Any) -> bytes:
    message = example_class()()
    feature = message.features.feature
    feature["image"].bytes_list.value.append(pixels.tobytes())
    feature["label"].int64_list.value.append(number)
    feature["scores"].float_list.value.extend([0.5, number])
    feature["raw"].bytes_list.value.append(np.linspace(0, number + 1, 20, dtype=np.float32).tobytes())
    feature["name"].bytes_list.value.append(b"number %d" % number)
    feature["either"].bytes_list.value.append(b"x") if number % 2 else feature["either"].int64_list.value.append(1)
    feature["words"].bytes_list.value.extend([b"a"] * (number % 3 + 1))
    return bytes(message.SerializeToString())


def write_records(path: Path, records: list[bytes], opener: Callable[..., Any] = open) -> None:
    crc = crc32c()
    with opener(path, "wb") as file:
        for data in records:
            length = struct.pack("<Q", len(data))
            file.write(length + struct.pack("<I", masked(crc(length))) + data + struct.pack("<I", masked(crc(data))))


def tfrecord_file(folder: Path) -> list[str]:
    pytest.importorskip("google.protobuf")
    write_records(folder / "digits.tfrecord", [example(number, one) for number, one in enumerate(digits())])
    return ["digits.tfrecord"]


def ragged_tfrecord_file(folder: Path) -> list[str]:
    pytest.importorskip("google.protobuf")
    records = []
    for number, row in enumerate(RAGGED):
        message = example_class()()
        message.features.feature["tokens"].int64_list.value.extend(row.tolist())
        message.features.feature["label"].int64_list.value.append(number)
        if number % 2:
            message.features.feature["weight"].float_list.value.append(number)
        records.append(message.SerializeToString())
    write_records(folder / "tokens.tfrecord-00000-of-00001.gz", records, gzip.open)
    return ["tokens.tfrecord-00000-of-00001.gz"]


KINDS: list[tuple[Callable[[Path], list[str]], set[str], dict[str, str]]] = [
    (
        h5_file,
        {"images", "labels", "names", "a_b", "a", "b"},
        {"mean": "has 28 rows, not 400", "created": "is a single value"},
    ),
    (ragged_h5_file, {"tokens", "label"}, {}),
    (npz_file, {"image", "mask", "label"}, {"classes": "has 4 rows, not 400"}),
    (compressed_npz_file, {"image", "label"}, {}),
    (npy_file, set(), {}),
    (several_files, {"label"}, {}),
    (pattern, {"label"}, {}),
    (
        parquet_file,
        {"image", "label", "text"},
        {"holes": "holds 266 nulls", "date": "timestamp", "deeper": "cannot be read: .* holds 50 nulls"},
    ),
    (ragged_parquet_file, {"tokens", "label"}, {}),
    (
        tar_file,
        {"image", "label", "meta"},
        {"pkl": "is a pickle", "txt": "is in only 13 of 64 samples", "id": "cannot be decoded"},
    ),
    (compressed_tar_file, {"label"}, {}),
    (tar_file_of_arrays, {"tokens", "label"}, {"scan.npy": "its shape varies"}),
    (
        tfrecord_file,
        {"image", "label", "scores", "raw", "name"},
        {"either": "is bytes and int64", "words": "has 1 to 3 strings"},
    ),
    (ragged_tfrecord_file, {"tokens", "label", "weight"}, {}),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let peek look at all of the first samples, however slow the machine is."""
    monkeypatch.setattr("penstock_server.sources.webdataset.describe._SECONDS", 100)
    monkeypatch.setattr("penstock_server.sources.tfrecord.describe._SECONDS", 100)


def peek(*words: object) -> Result:
    """Return the command's result. With a number of samples, the command has no time limit."""
    limit = () if "--samples" in words else ("--samples", "256")
    return CliRunner().invoke(main, ["peek", *map(str, words), *limit])


def said(*words: object) -> str:
    found = peek(*words)
    assert found.exit_code == 0, found.output
    return str(found.output)


def copied(text: str) -> tuple[str, str]:
    """Return the command and the module, as a user would copy them from the terminal."""
    command = re.search(r"^(penstock serve (?:.*\\\n)*.*)$", text, re.MULTILINE)
    module = re.search(rf"^(# {MODULE},.*?^feed = (?:[^\n]*\)|.*?^\)))$", text, re.MULTILINE | re.DOTALL)
    assert command
    assert module
    return command[1], module[1] + "\n"


def labels(batches: Any) -> list[int]:
    """Return the labels of all batches, sorted."""
    found: list[int] = []
    for batch in batches:
        leaf = batch if not isinstance(batch, dict) else batch["labels" if "labels" in batch else "label"]
        found += leaf.tolist()
    return sorted(found)


@pytest.fixture
def run(tmp_path: Path, daemon_launchers: list[DaemonLauncher]) -> Iterator[Callable[[str], Daemon]]:
    """`run(command)` runs a command of penstock in the folder, with the words that a shell makes of it, and returns the
    daemon that it starts on a free port."""
    daemons: list[Daemon] = []

    def start(command: str) -> Daemon:
        split = ["bash", "-c", f"printf '%s\\0' {command}"]
        listed = subprocess.run(split, cwd=tmp_path, capture_output=True, check=True)
        program, *words = listed.stdout.decode().split("\0")[:-1]
        assert program == "penstock"
        code = "import runpy, sys\nrunpy.run_module('penstock_command', run_name='__main__', alter_sys=True)"
        words = [code, *words, "--workers", "1", "--bind", "tcp://127.0.0.1:0"]
        daemons.append(Daemon(words, tmp_path, tmp_path / "log", dict(os.environ), launcher=daemon_launchers[0]))
        daemons[-1].wait_ready(1)
        return daemons[-1]

    yield start
    for daemon in daemons:
        assert daemon.stop() == 0, daemon.stderr()


@pytest.mark.parametrize(("write", "leaves", "left_out"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_command_and_the_module_that_it_prints_serve_the_file(
    write: Callable[[Path], list[str]],
    leaves: set[str],
    left_out: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[str], Daemon],
) -> None:
    monkeypatch.chdir(tmp_path)
    files = write(tmp_path)
    before = {path: hashlib.sha256(path.read_bytes()).digest() for path in tmp_path.glob("*.*")}
    text = said(*files)
    assert {path: hashlib.sha256(path.read_bytes()).digest() for path in tmp_path.glob("*.*")} == before
    rest = text.partition("Left out:")[2]
    for name, why in left_out.items():
        assert re.search(rf"{re.escape(repr(name))} .*{why}", rest.replace("\n   ", "")), text
    command, module = copied(text)
    (tmp_path / MODULE).write_text(module)
    daemon = run(command)
    with penstock.connect(daemon.url) as connection:
        spec: Any = connection.element_spec
        assert set(getattr(spec, "keys", ())) == leaves
        assert labels(connection.batches()) == NUMBERS.tolist()
    with penstock.connect(f"{tmp_path / MODULE}:feed", workers=0) as connection:
        spec = connection.element_spec
        assert set(getattr(spec, "keys", ())) == leaves
        assert labels(connection.batches()) == NUMBERS.tolist()


def test_encoded_images_of_one_size_are_decoded_by_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = said(*tar_file(tmp_path))
    assert "image: bytes, PNG images and JPEG images" in text
    assert "decoded: uint8[28, 28, 1]" in text
    assert "The command serves 'image' as the files' bytes" in text
    (tmp_path / "decoded_images.py").write_text(copied(text)[1])
    with penstock.connect(f"{tmp_path}/decoded_images.py:feed", workers=0) as connection:
        batch = next(connection.batches())
    assert batch["image"].shape == (32, 28, 28, 1)


def test_the_layout_of_an_archive_is_explained_where_it_is_not_that_of_webdataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    numbers = range(70)
    sorted_by_kind = {f"{number}.{kind}": b"1" for kind in ("txt", "cls") for number in numbers}
    write_tar(tmp_path / "apart.tar", sorted_by_kind)
    found = peek("apart.tar")
    assert found.exit_code == 1
    assert "'cls' is not beside the other files of its samples, such as 0.cls." in found.output
    assert "0.txt is in the archive, but not beside its other files" in found.output
    write_tar(tmp_path / "dots.tar", {f"frame.{number:04}.txt": b"1" for number in range(5)})
    assert "a sample's name ends at the first dot of a file's name" in said("dots.tar")
    write_tar(tmp_path / "many.tar", {f"frame.{number:04}.txt": b"1" for number in range(1001)})
    assert "many.tar: sample 'frame' has more than 1000 files: 'frame.1000.txt'" in peek("many.tar").output
    write_tar(tmp_path / "packed.tar", {f"{number}.txt.gz": gzip.compress(b"hello") for number in range(5)})
    text = said("packed.tar")
    assert "txt_gz: text" in text
    assert ".txt.gz files, compressed: served as they are, unless a function in" in text
    with tarfile.open(tmp_path / "again.tar", "w") as tar:  # two shards in one, whose samples have the same names
        for number in (0, 1, 0, 1):
            for kind in ("cls", "txt"):
                info = tarfile.TarInfo(f"{number}.{kind}")
                info.size = 1
                tar.addfile(info, io.BytesIO(b"1"))
    text = said("again.tar")
    assert "4 samples" in text
    assert "Left out" not in text


def test_feature_lists_are_proposed_as_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("google.protobuf")
    monkeypatch.chdir(tmp_path)
    records = []
    for number in range(40):
        message = example_class()()
        message.features.feature["label"].int64_list.value.append(number)
        for step in range(number % 5 + 1):
            lists = message.feature_lists.feature_list
            lists["audio"].feature.add().float_list.value.extend([step, 0.5, 1])
            lists["words"].feature.add().bytes_list.value.append(b"w")
            lists["boxes"].feature.add().float_list.value.extend([1] * (step + 1))
        records.append(message.SerializeToString())
    write_records(tmp_path / "a.tfrecord", records)
    text = said("a.tfrecord")
    assert "audio: float32[1..5, 3]" in text
    assert "'boxes' is a feature list whose steps have 1 to 5 values" in text
    assert "'words' is a feature list of strings" in text
    (tmp_path / "sequences.py").write_text(copied(text)[1])
    with penstock.connect(f"{tmp_path}/sequences.py:feed", workers=0) as connection:
        batch = next(connection.batches())
    assert batch["audio"].shape == (32, 5, 3)


def test_the_module_makes_colours_of_palettes_and_inks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    red = image.new("RGB", (40, 30), (250, 10, 20))
    members = {}
    for number in range(6):
        for kind, mode in (("jpg", ("CMYK", "L", "RGB")[number % 3]), ("palette.png", "P"), ("grey.png", "L")):
            stream = io.BytesIO()
            red.convert(mode).save(stream, "jpeg" if kind == "jpg" else "png")
            members[f"{number}.{kind}"] = stream.getvalue()
    write_tar(tmp_path / "images.tar", members)
    text = said("images.tar")
    assert "decoded: uint8[30, 40, 3] (mode CMYK, L, RGB converted to RGB)" in text
    assert "decoded: uint8[30, 40, 3] (mode P converted to RGB)" in text
    assert "decoded: uint8[30, 40, 1]\n" in text
    assert "Images in 'palette' have a palette; the module makes colours" in text
    assert 'decode={"jpg": ImageDecoder(), "palette.png": ImageDecoder(), "grey.png": ImageDecoder(mode="L")}' in text
    (tmp_path / "colours.py").write_text(copied(text)[1])
    with penstock.connect(f"{tmp_path}/colours.py:feed", workers=0) as connection:
        batch = next(connection.batches())
    assert batch["grey"].shape == (6, 30, 40, 1)
    wanted = np.array([250, 10, 20])
    assert np.abs(batch["palette"][:, 5, 5].astype(int) - wanted).max() < 60, "the nearest colour of the palette"
    red_ones = np.abs(batch["image"][:, 5, 5].astype(int) - wanted).max(axis=1) < 60
    assert red_ones.sum() == 4, "all but the grey ones"


def test_numbers_have_a_range_a_mean_and_a_share_of_nan() -> None:
    summary = Summary()
    for number in range(10):
        summary.add({"x": np.array([number, np.nan, np.inf, -1], np.float32), "big": np.uint64(2**64 - 1 - number)})
    x, big = summary.leaves["x"].numbers, summary.leaves["big"].numbers
    assert x is not None
    assert (x.low, x.high, x.count, x.nans, x.infinities) == (-1, 9, 40, 10, 10)
    assert x.mean == pytest.approx((45 - 10) / 20)
    assert big is not None
    assert (big.low, big.high) == (2**64 - 10, 2**64 - 1), "not rounded, as floats are"


def test_integers_are_images_if_they_have_16_bits_and_masks_if_they_have_areas() -> None:
    rng = np.random.default_rng(0)
    summary = Summary()
    for _ in range(3):
        classes = np.zeros((32, 32), np.int64)
        classes[5:20, 7:30] = rng.integers(1, 9)
        scan = rng.integers(-1000, 3000, (32, 32), dtype=np.int16)
        summary.add({"scan": scan, "mask": classes, "tokens": rng.integers(0, 50_000, (32, 32))})
    images = {path: leaf["image"] for path, leaf in leaves_json(summary).items()}
    assert images == {"scan": True, "mask": True, "tokens": False}
    assert "mask: int64[32, 32], a mask" in [*leaf_lines(summary, {}, blocks=True)]


def test_a_leaf_with_text_and_numbers_or_complex_numbers_can_be_shown() -> None:
    summary = Summary()
    for number in range(8):
        summary.add({"mixed": "a" if number % 2 else 1, "c": complex(number % 2, 1)})
    lines = [*leaf_lines(summary, {}, blocks=True)]
    assert "  cannot be served: its dtype differs from sample to sample: int64/string" in lines
    assert "  2 values: 1 (4), 'a' (4)" in lines


def test_a_large_array_is_not_copied() -> None:
    shape = (3000, 3000, 3)
    array = np.broadcast_to(np.arange(3, dtype=np.float32), shape)  # 103 MiB, if it were copied
    summary = Summary()
    tracemalloc.start()
    try:
        summary.add({"x": array})
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert summary.leaves["x"].numbers is not None
    assert summary.leaves["x"].numbers.high == 2
    assert most < 16 << 20


def test_the_report_of_an_hdf5_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = said(*h5_file(tmp_path))
    assert text.startswith("digits.h5: HDF5, ")
    assert "256 samples read" in text
    assert "from 4 places of the file" in text, "it has 4 splits"
    assert re.search(r"labels: int64\n  0 to 3\d\d, mean", text), "not only those of the first rows"
    assert "images: uint8[28, 28], an image\n  0 to 255, mean 12" in text
    assert "chunks [50, 28, 28] of 38.3 KiB, gzip" in text
    assert "names: text" in text
    assert "'näme 2'" in text
    assert max(map(len, text.partition("Serve it")[0].splitlines())) <= 80


def test_row_groups_of_parquet_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = said(*parquet_file(tmp_path))
    assert "digits.parquet: Parquet" in text
    assert "8 row groups of 50 rows" in text
    assert "column 'image', tensors of uint8[28, 28], snappy" in text


def test_bytes_of_a_tfrecord_file_are_guessed_and_called_a_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = said(*tfrecord_file(tmp_path))
    assert "digits.tfrecord: TFRecord" in text
    assert "400 samples" in text
    assert '"image": FixedLen((28, 28), "bytes", decode="uint8")' in text
    assert '"raw": FixedLen((20,), "bytes", decode="float32")' in text
    assert '"scores": FixedLen((2,), "float32")' in text
    assert text.count("that is a guess") == 2


def test_masks_ragged_leaves_and_nan_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = said(*npz_file(tmp_path))
    assert "image: float32[40, 50, 3], an image" in text
    assert "less than 0.01 % NaN" in text
    assert "mask: uint8[40, 50], a mask\n  0 to 3" in text
    text = said(*ragged_parquet_file(tmp_path))
    assert "tokens: int64[1..7]" in text
    assert re.search(r"lengths:\n +1  █+", text)
    assert 'batching="pad"' in text


def test_several_files_are_counted_and_the_first_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = said(*several_files(tmp_path))
    assert "part 0.npz: NumPy archive" in text
    assert "the first of 4 files, and the only one that was read" in text
    assert copied(text)[0].startswith("penstock serve 'part *.npz' --leaf label=label"), "the shell had expanded it"


def test_samples_bounds_how_many_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (file,) = h5_file(tmp_path)
    assert json.loads(said(file, "--json", "--samples", 10))["read"] == 10
    assert json.loads(said(file, "--json", "--samples", 10_000))["read"] == ROWS


def test_samples_end_after_a_time_but_there_is_at_least_one() -> None:
    assert list(limited(range(10), 3, math.inf)) == [0, 1, 2]
    assert list(limited(range(10), 3, -1)) == [0]


def test_without_a_number_of_samples_256_are_read_at_most(tmp_path: Path) -> None:
    (file,) = npy_file(tmp_path)
    found = CliRunner().invoke(main, ["peek", str(tmp_path / file), "--json"])
    assert 1 <= json.loads(found.output)["read"] <= 256


def test_json_has_what_the_text_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = json.loads(said(*npz_file(tmp_path), "--json"))
    assert found["samples"] == ROWS
    assert found["leaves"]["image"]["shape"] == [40, 50, 3]
    assert found["leaves"]["mask"]["max"] == 3
    assert 0 < found["leaves"]["image"]["nan_share"] < 0.001
    assert found["left_out"] == {"classes": "has 4 rows, not 400"}
    assert found["command"].startswith("penstock serve discs.npz --leaf image=image")


def pixels_of(sheet: Path) -> Any:
    return np.asarray(pytest.importorskip("PIL.Image").open(sheet))


def test_the_contact_sheet_shows_images_beside_their_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = said(*npz_file(tmp_path), "--out", "sheet.png")
    columns = re.search(r"^sheet.png: 64 samples, image beside mask, (\d+) to a row, (\d+) x (\d+) pixels$", text, re.M)
    assert columns
    sheet = pixels_of(tmp_path / "sheet.png")
    assert sheet.shape == (int(columns[3]), int(columns[2]), 3)
    assert sheet[8 + 15, 8 + 20].tolist() == [255, 64, 0], "the disc"
    assert sheet[8, 8].tolist() == [0, 0, 0]
    mask = 8 + 50 + 2
    assert sheet[8, mask].tolist() == [0, 0, 0], "class 0"
    assert len(set(sheet[8 + 15, mask + 20].tolist())) > 1, "class 3 has a colour"
    assert (sheet[:, 8 + 102 : 8 + 110] == 88).all(), "a gap between two samples"


@pytest.mark.parametrize(
    ("image", "pixel", "shown"),
    [
        (np.full((10, 10), 16, np.uint8), (0, 0), 255),
        (np.full((200, 300), 128, np.uint8), (0, 0), 128),
        (np.full((10, 10, 1), 0.5, np.float32), (0, 0), 128),
        (np.full((10, 10, 3), 128.0, np.float64), (0, 0), 128),
        (np.stack([np.full((10, 10), -2.0), np.full((10, 10), 2.0)]).reshape(20, 10), (0, 0), 0),
        (np.full((3, 300, 300), 0.5, np.float16), (0, 0), 128),
        (np.full((10, 10, 4), [255, 255, 255, 0], np.uint8), (0, 0), 88),
        (np.full((10, 10), np.nan, np.float32), (0, 0), 0),
    ],
    ids=["few greys", "bytes", "unit floats", "large floats", "signed floats", "channels first", "alpha", "nan"],
)
def test_the_range_of_a_leaf_decides_how_bright_it_is(
    image: Any, pixel: tuple[int, int], shown: int, tmp_path: Path
) -> None:
    summary = Summary()
    rng = np.random.default_rng(0)
    noise = (
        rng.integers(0, 2, image.shape[:2], dtype=np.uint8) if image.dtype == np.uint8 and image.max() > 20 else None
    )
    summary.add({"x": image})
    if noise is not None and image.ndim == 2:
        summary.add({"x": noise * 255})  # otherwise one grey would be a mask of one class
    if image.max() == 16:
        summary.add({"x": rng.integers(0, 17, image.shape, dtype=np.uint8)})
    picture, _ = contact_sheet([summary.leaves["x"].tiles])
    (tmp_path / "sheet.png").write_bytes(png_file(picture))
    assert pixels_of(tmp_path / "sheet.png")[8 + pixel[0], 8 + pixel[1], 0] == shown


def test_encoded_images_are_on_the_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    red = np.zeros((200, 400, 3), np.uint8)
    red[..., 0] = 200
    write_tar(tmp_path / "red.tar", {"0.png": png(red), "0.cls": b"1", "1.png": png(red[:100]), "1.cls": b"2"})
    text = said("red.tar", "--out", "sheet.png")
    assert "decoded: uint8[200, 400, 3], uint8[100, 400, 3]" in text
    assert "a function in decode=, such as ImageDecoder(size=(224, 224)), makes arrays" in text.replace("\n  ", " ")
    assert pixels_of(tmp_path / "sheet.png")[20, 20].tolist() == [200, 0, 0]


def test_without_a_block_character_or_utf8_the_report_is_ascii(tmp_path: Path) -> None:
    ragged_h5_file(tmp_path)
    with h5py.File(tmp_path / "tokens.h5", "a") as file:
        file["na\x07me"] = ["nä\x07me"] * ROWS
    command = [sys.executable, "-m", "penstock_command", "peek", "tokens.h5"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, env=environment, timeout=60)
    assert found.returncode == 0, found.stderr
    text = found.stdout.decode("ascii")
    assert "####" in text
    assert "\x07" not in text, "a terminal would obey it"


def test_a_histogram_has_ten_ranges_at_most() -> None:
    lines = list(bars(Counter({1: 1, 500: 3, 1000: 2}), blocks=False))
    assert len(lines) == 10
    assert lines[0] == f"   1 to  100  {'#' * 13}  1"
    assert lines[4] == f" 401 to  500  {'#' * 40}  3"
    assert all(len(line) <= 64 for line in lines)


def test_data_that_repeat_are_drawn_from_all_phases() -> None:
    first: Reservoir[int] = Reservoir(64)
    second: Reservoir[int] = Reservoir(64)
    for number in range(1000):
        first.offer(lambda number=number: number)  # type: ignore[misc]
        second.offer(lambda number=number: number)  # type: ignore[misc]
    kept = first.kept()
    assert kept == sorted(set(kept))
    assert len(kept) == 64
    assert kept == second.kept(), "the tiles of two leaves are from the same samples"
    assert {number % 4 for number in kept} == {0, 1, 2, 3}
    assert 300 < kept[32] < 700


FEEDS = """
    import numpy as np
    from penstock_server import Feed, Leaf

    def samples(split):
        for number in range(100):
            length = number % 9 + 1
            yield {"ids": np.arange(length), "text": "wörd", "pair": (np.float32(split), number % 2 == 0)}

    def fails(split):
        for number in range(40):
            if number == 30:
                raise ValueError("no such scene")
            yield number

    def batches(split):
        for _ in range(3):
            yield np.zeros((20, 28, 28), np.uint8), np.arange(20)

    def lists(split):
        for number in range(9):
            yield [np.arange(k) for k in range(number % 3)], [["a"] * k for k in range(number % 4)], ["b"] * number

    SPEC = (
        Leaf("int64", (None, None), ragged=True), Leaf(str, (None, None), ragged=True),
        Leaf(str, (None,), ragged=True),
    )
    lists = Feed(lists, splits=range(4), batch_size=5, batching="ragged", spec=SPEC)
    padded = Feed(samples, splits=range(4), batch_size=25, batching="pad")
    ragged = Feed(samples, splits=range(4), batch_size=25, batching="ragged")
    fails = Feed(fails, splits=range(2), batch_size=4)
    whole = Feed(batches, splits=range(2), batch_size=None)
    numbers = Feed(range(1000), batch_size=10)
"""


@pytest.fixture
def feeds(tmp_path: Path) -> Path:
    path = tmp_path / "peeked.py"
    path.write_text("\n".join(line[4:] for line in FEEDS.splitlines()))
    return path


def test_a_feed_is_read_in_this_process(feeds: Path) -> None:
    text = said(f"{feeds}:ragged")
    assert "feed ragged, batches of 25" in " ".join(text.split())  # lines break where the path lets them
    assert "the first 256 samples of epoch 0" in text
    assert "ids: int64[1..9]" in text
    assert "pair[1]: bool" in text
    assert "text: text\n  each 5 bytes\n  always 'wörd'" in text
    padded = said(f"{feeds}:padded")
    assert "ids: int64[9]" in padded
    assert "padded: the shapes are those of whole batches" in padded


def test_lists_of_lists_are_shown_with_the_least_and_the_greatest_length_at_each_level(feeds: Path) -> None:
    text = said(f"{feeds}:lists")
    assert "sample[0]: int64[0..2, 0..1]" in text
    assert "sample[1]: text[0..3, 0..2]" in text
    assert "sample[2]: text[0..8]" in text
    assert "cannot be served" not in text


def test_lists_that_are_all_empty_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": [], "y": 1, "z": [[], [[]]]}\n' * 3)
    text = said(tmp_path / "a.jsonl")
    assert "x: nothing\n  cannot be served: all its lists are empty" in text
    assert "'z' all its lists are empty, so nothing says what others would" in text
    assert "--leaf y=y" in text


def test_empty_lists_count_as_lengths_and_hide_no_dimension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"t": [[1], [2, 3]]}\n{"t": [[]]}\n{"t": [[], []]}\n{"t": []}\n')
    found = json.loads(said("a.jsonl", "--json"))["leaves"]["t"]
    assert found["lengths"] == {"0": 1, "1": 1, "2": 2}
    assert (found["shape"], found["largest_shape"]) == ([0, 0], [2, 2])

    nothing = pa.array([[], [], []], pa.list_(pa.list_(pa.int64())))
    table = pa.table({"p": [[[[1.0, 2.0], [3.0, 4.0]]], [[[1.0, 2.0]]], []], "e": nothing})
    pytest.importorskip("pyarrow.parquet").write_table(table, "a.parquet")
    text = said("a.parquet")
    assert 'spec={"p": Leaf("float64", (None, None, 2))}' in text
    assert "e: int64, always empty\n" in text
    assert "'e' all its lists are empty" in text


def test_lists_of_whole_numbers_and_others_are_read_as_one_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"m": [[1, 2.5], [3]], "f": [1.5, 2]}\n{"m": [[1, 2], [3, 4]], "f": [2, 3]}\n')
    text = said("a.jsonl")
    assert "dtypes={'m': 'float64', 'f': 'float64'}" in text
    (tmp_path / "of_lists.py").write_text(copied(text)[1])
    with penstock.connect(f"{tmp_path}/of_lists.py:feed", workers=0) as connection:
        (batch,) = connection.batches()
    assert sorted(batch["m"].tolist()) == [[[1, 2], [3, 4]], [[1, 2.5], [3, 0]]]


def test_a_thread_of_the_feeds_code_that_waits_forever_does_not_keep_peek(tmp_path: Path) -> None:
    code = """
        import queue, threading
        from penstock_server import Feed
        def rows(split):
            found = queue.Queue(2)
            threading.Thread(target=lambda: [found.put(n) for n in range(1000)]).start()
            for _ in range(1000):
                yield found.get()
        feed = Feed(rows, splits=range(4), batch_size=4)
    """
    (tmp_path / "threads.py").write_text(textwrap.dedent(code))
    command = [sys.executable, "-m", "penstock_command", "peek", "threads.py:feed", "--samples", "20"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "sample: int64" in ended.stdout


def test_whole_batches_are_taken_apart(feeds: Path) -> None:
    text = said(f"{feeds}:whole")
    assert "batches as its generator makes them" in text
    assert "the first 120 samples" in text
    assert "sample[0]: uint8[28, 28]" in text


def test_a_feed_that_fails_is_shown_up_to_there(feeds: Path) -> None:
    found = peek(f"{feeds}:fails")
    assert found.exit_code == 1
    assert "sample: int64\n  0 to 2" in found.output
    assert "samples: fails raised ValueError: no such scene" in found.output
    assert "Traceback" not in found.output


def test_a_look_at_a_running_feed_takes_no_batch_from_anybody(serve: Serve) -> None:
    daemon = serve(FEEDS, "numbers")
    with (
        penstock.connect(daemon.url, group="job") as one,
        penstock.connect(daemon.url, group="job") as other,
        penstock.connect(daemon.url) as alone,
    ):
        mine, theirs, own = one.batches(), other.batches(), alone.batches()
        seen = [*next(mine), *next(theirs)]
        first = [next(own)]
        text = said(daemon.url, "--samples", 500)
        assert "the first 500 samples of epoch 0" in text
        assert "sample: int64\n  0 to 499" in text
        other.close()  # batches that it was not handed go to the other member
        for batch in mine:
            seen += batch.tolist()
        assert sorted(seen) == list(range(1000))
        assert np.concatenate([*first, *own]).tolist() == list(range(1000))
    refused = peek(f"{daemon.url}?group=job")
    assert refused.exit_code == 1
    assert f"with a stream of its own: penstock peek {daemon.url}" in refused.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("absent.h5", "absent.h5: no such file"),
        ("absent-*.h5", "no file matches absent-*.h5"),
        ("notes.pdf", "expected a file that ends in .h5, .hdf5"),
        ("feed.py", "which feed in it? Write feed.py:ATTR"),
        ("empty.h5", "empty.h5 is empty (0 bytes)"),
        ("truncated.h5", "truncated.h5: the file is truncated: copy it again"),
        ("many.h5", "has 200 datasets of length 3: if each is a sample, write a generator"),
        ("odd.npz", "nothing in it can be served: 'x' holds Python objects"),
        ("none.npy", "no samples to read: none.npy has no rows"),
        ("junk.tfrecord", "junk.tfrecord: record at byte 0: its length is corrupt"),
        ("junk.tar", "junk.tar: the tar file is truncated or damaged"),
        ("photos", "photos/cats/1.jpg cannot be decoded: it is not an image of a known format, or is empty"),
        ("shards", "shards is a directory: give the files in it, such as 'shards/*.npy' (1)"),
        ("shards/a.npy truncated.h5", "the files have several formats"),
        ("feed.py:feed feed.py:other", "give one feed, or data files of one format"),
        ("nothing", "'nothing': no such file in "),
        ("tcp://127.0.0.1:5555", "names no feed"),
        ("ipc:///tmp/feed", "expected the URL of a daemon's feed, tcp://HOST:PORT/FEED"),
        ("shards/a.npy --out a.npy", "--out writes a PNG file: its name must end in .png"),
        ("shards/a.npy --out sheet.png", "sheet.png was not written, as no leaf is an image"),
    ],
)
def test_a_mistake_is_named(words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if words == "tcp://127.0.0.1:5555":
        monkeypatch.setattr("penstock_server.to_daemon.control.status", lambda url, timeout, keys: of(Status))
    (tmp_path / "notes.pdf").write_text("a,b")
    (tmp_path / "feed.py").write_text("feed = 1")
    (tmp_path / "empty.h5").touch()
    h5_file(tmp_path)
    (tmp_path / "truncated.h5").write_bytes((tmp_path / "digits.h5").read_bytes()[:-5000])
    if words == "many.h5":
        with h5py.File(tmp_path / "many.h5", "w") as file:
            for number in range(200):
                file[f"{number}"] = np.zeros(3)
    np.savez(tmp_path / "odd.npz", x=np.array([{}], object))
    np.save(tmp_path / "none.npy", np.zeros((0, 3)))
    (tmp_path / "junk.tfrecord").write_bytes(bytes(range(100)))
    (tmp_path / "junk.tar").write_bytes(b"junk")
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    (tmp_path / "photos" / "cats" / "1.jpg").touch()
    (tmp_path / "shards").mkdir()
    np.save(tmp_path / "shards" / "a.npy", NUMBERS)
    found = peek(*words.split())
    assert found.exit_code in (1, 2)
    assert message in found.output
    assert "Traceback" not in found.output
    assert not (tmp_path / "sheet.png").exists()


def test_a_folder_of_images_is_described_and_its_command_serves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    for name, count in {"cat": 30, "dog": 20}.items():
        (tmp_path / "my photos" / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.full((20, 30 + number % 2, 3), 3 * number, np.uint8)
            images.fromarray(pixels).save(tmp_path / "my photos" / name / f"{number}.png")
    (tmp_path / "my photos" / "none").mkdir()
    (tmp_path / "my photos" / "cat" / "about.txt").write_text("x")
    text = said("my photos")
    assert "my photos: folder of images, 50 samples" in text
    assert "3 classes, one for each folder: cat (30), dog (20), none (0)" in text
    assert "classes without images, which keep their labels: none" in text
    assert "left out: files that are no images, 1 .txt" in text
    assert "20 high, 30 to 31 wide" in text
    assert "label: int32\n  0 to 1" in text
    assert "penstock serve 'my photos' --batch-size 32 --shuffle 50 --size 224x224" in text
    assert 'Feed.from_folder("my photos", batch_size=32, shuffle=50, size=(224, 224))' in text
    command = shlex.split(text[text.index("penstock serve") :].partition("\n")[0])
    target = make_target(command[2:3], (), name=None, batch_size=32, shuffle=50, size=(224, 224))
    feed: Any = load_target(target, lambda name: None)
    assert [leaf.shape for leaf in feed.generate[0]] == [(224, 224, 3), ()]


def test_a_url_where_nobody_listens_is_named() -> None:
    port = free_port()
    found = peek(f"tcp://127.0.0.1:{port}/train")
    assert found.exit_code == 1
    assert f"no daemon answered at tcp://127.0.0.1:{port} within 5 s: is it running?" in found.output


def test_row_groups_that_are_too_large_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("penstock_server.sources.parquet.describe.AT_ONCE", 1000)
    found = peek(*parquet_file(tmp_path))
    assert found.exit_code == 1
    assert re.search(r"digits.parquet has row groups of up to [\d.]+ KiB, and each has to be read", found.output)


def test_a_file_without_anything_to_serve_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tar(tmp_path / "scans.tar", {f"{number}.npy": npy(np.zeros((number + 8, 9))) for number in range(3)})
    text = said("scans.tar")
    assert "npy: float64[8..10, 9], an image" in text
    assert "'npy' its shape varies: give all samples one shape with a function in decode=" in text
    assert "Nothing is left to serve as it is." in text


def test_damage_behind_the_first_samples_is_told_after_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (file,) = tfrecord_file(tmp_path)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 3])
    found = peek(file)
    assert found.exit_code == 1
    assert "label: int64\n  0 to 13" in found.output
    assert re.search(r"after 13\d samples: digits.tfrecord: record at byte \d+: the file is truncated", found.output)
    assert "penstock serve" not in found.output


def test_files_by_url_are_read_and_proposed_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.chdir(tmp_path)
    (file,) = h5_file(tmp_path)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        url = f"http://127.0.0.1:{serving.server_port}/{file}"
        words = [
            sys.executable,
            "-c",
            "from penstock_command import main; main()",
            "peek",
            f"{url}?signature=ohsosecret",
        ]
        environment = {**os.environ, "PENSTOCK_FILE_CACHE": str(tmp_path / "cache")}
        text = subprocess.check_output(words, text=True, timeout=60, env=environment)
        serving.shutdown()
        thread.join()
    assert text.startswith(f"{url}: HDF5")
    assert "ohsosecret" not in text
    command, module = copied(text)
    assert command.startswith(f"penstock serve {url} --leaf a_b=a=b ")
    assert f'"{url}"' in module


def test_lists_whose_lengths_vary_are_declared_by_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    boxes = [[[1.0, 2.0, 3.0, 4.0]] * (number % 4) for number in range(40)]
    objects = [[{"name": f"n{k}", "outline": [0.5] * k} for k in range(number % 3)] for number in range(40)]
    columns = {
        "boxes": boxes,
        "numbers": [[[1, 2], [3]]] * 40,
        "turns": [[[], ["a"]] * (number % 2) for number in range(40)],
        "objects": objects,
        "label": range(40),
    }
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), "boxes.parquet")
    text = said("boxes.parquet")
    assert "Left out" not in text
    assert "turns: text[0..2, 0..1]" in text
    assert "objects['outline']: float64[0..2, 0..1]" in text
    (tmp_path / "padded_boxes.py").write_text(copied(text)[1])
    with penstock.connect(f"{tmp_path}/padded_boxes.py:feed", workers=0) as connection:
        batch = next(connection.batches())
    assert batch["boxes"].shape == (32, 3, 4)
    assert batch["numbers"].shape == (32, 2, 2)
    assert {str(row) for row in batch["turns"].tolist()} == {"[]", "[[], [b'a']]"}
    assert {str(row) for row in batch["objects"]["name"].tolist()} == {"[]", "[b'n0']", "[b'n0', b'n1']"}
    assert batch["objects"]["outline"].shape == (32, 2, 1)
