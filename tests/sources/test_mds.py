"""MDS datasets, as mosaicml-streaming writes them: `Feed.from_files` and `penstock peek`."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from penstock_command import main
from penstock_server import Feed
from penstock_server.sources.mds.format import Mds
from penstock_server.sources.mds.values import decoder
from penstock_server.targets.file_target import make_target
from tests.conftest import Serve
from tests.reference.one_stream import one_stream
from tests.sources.damaged_files import Seed, damaged

ROWS = 90
COLUMNS = {"id": ("int", 8), "text": ("str", None), "x": ("ndarray:float32:2,3", 24)}


def sample(number: int) -> dict[str, bytes]:
    x = np.full((2, 3), number, "<f4")
    return {"id": struct.pack("<q", number), "text": f"row {number} ü".encode(), "x": x.tobytes()}


def shard(samples: list[dict[str, bytes]], columns: Any = COLUMNS) -> bytes:
    """Return the bytes of a shard."""
    names = sorted(columns)
    config = {
        "version": 2,
        "format": "mds",
        "column_names": names,
        "column_encodings": [columns[name][0] for name in names],
        "column_sizes": [columns[name][1] for name in names],
    }
    head = json.dumps(config).encode()
    packed = []
    for one in samples:
        sizes = [len(one[name]) for name in names if columns[name][1] is None]
        packed.append(np.array(sizes, "<u4").tobytes() + b"".join(one[name] for name in names))
    offsets = np.cumsum([4 + 4 * (len(samples) + 1) + len(head), *map(len, packed)]).astype("<u4")
    return struct.pack("<I", len(samples)) + offsets.tobytes() + head + b"".join(packed)


def dataset(
    folder: str = "data", columns: Any = COLUMNS, rows: Any = None, compression: str = "", hashes: tuple[str, ...] = ()
) -> str:
    """Write a dataset of shards of 20 samples."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    rows = [sample(number) for number in range(ROWS)] if rows is None else rows
    shards = []
    for number, first in enumerate(range(0, len(rows), 20)):
        raw = shard(rows[first : first + 20], columns)
        name = f"shard.{number:05}.mds"
        data = {"": bytes, "gz": gzip.compress, "bz2": bz2.compress, "zstd": zstd}[compression](raw)
        stored = f"{name}.{compression}" if compression else name
        Path(folder, stored).write_bytes(data)
        told = {"basename": stored, "bytes": len(data), "hashes": {}}
        told["hashes"] = {one: hashlib.new(one, data).hexdigest() for one in hashes}
        names = sorted(columns)
        shards.append(
            {
                "version": 2,
                "format": "mds",
                "samples": len(rows[first : first + 20]),
                "column_names": names,
                "column_encodings": [columns[one][0] for one in names],
                "column_sizes": [columns[one][1] for one in names],
                "compression": f"{compression}:3" if compression else None,
                "raw_data": {"basename": name, "bytes": len(raw), "hashes": {}} if compression else told,
                "zip_data": told if compression else None,
            }
        )
    Path(folder, "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def zstd(data: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    return bytes(pyarrow.compress(data, codec="zstd", asbytes=True))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def feed_of(*args: Any, **options: Any) -> Feed:
    return Feed.from_files(*args, batch_size=4, **options)


def read(*args: Any, **options: Any) -> list[Any]:
    feed = feed_of(*args, **options)
    splits: Any = feed.splits
    generate: Any = feed.generate
    return [one for split in splits() for one in generate(split)]


def test_the_stream_is_the_same_with_any_workers_through_a_kill_and_a_resume(folder: Path, serve: Serve) -> None:
    dataset()
    source = """
        import os
        from penstock_server import Feed
        feed = Feed.from_files(os.environ["DATA"] + "/data", {"n": "id", "x": "x"}, batch_size=8, shuffle=40, seed=3)
        """
    batches = one_stream(serve, source, folder)
    assert sorted(np.concatenate([batch["n"] for batch in batches])) == list(range(ROWS))
    for batch in batches:
        np.testing.assert_array_equal(batch["x"][:, 0, 0], batch["n"])


@pytest.mark.parametrize("compression", ["", "gz", "bz2", "zstd"])
@pytest.mark.parametrize("rows", [None, (15, 47)])
def test_samples_are_those_that_were_written(compression: str, rows: Any) -> None:
    found = read(dataset(compression=compression, hashes=("sha1",)), rows=rows)
    start, stop = rows or (0, ROWS)
    assert [one["id"] for one in found] == list(range(start, stop))
    assert [one["text"] for one in found] == [f"row {number} ü" for number in range(start, stop)]
    np.testing.assert_array_equal(found[3]["x"], np.full((2, 3), start + 3))
    assert found[0]["x"].dtype == np.float32


def test_shards_are_divided_unless_they_are_compressed() -> None:
    splits: Any = feed_of(dataset(), split_rows=7).splits
    assert len(splits()) == 14
    assert repr(splits()[1]) == "data/shard.00000.mds samples 7 to 13"
    splits = feed_of(dataset("packed", compression="gz"), split_rows=7).splits
    assert len(splits()) == 5


def array(values: Any, dtype: str) -> bytes:
    """Return an array with its dtype and shape in its bytes."""
    codes = {"<u2": 16, "<f8": 66, "|i1": 9}
    made = np.array(values, dtype)
    return bytes([codes[dtype], made.ndim << 2]) + bytes(made.shape) + made.tobytes()


PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)


@pytest.mark.parametrize(
    ("encoding", "data", "value"),
    [
        ("bytes", b"ab", b"ab"),
        ("uint16", b"\1\2", np.uint16(513)),
        ("float32", struct.pack("<f", 0.5), np.float32(0.5)),
        ("str_int", b"-12", -12),
        ("str_float", b"0.5", 0.5),
        ("str_decimal", b"0.10", "0.10"),
        ("json", b'{"a": [1, 2]}', {"a": [1, 2]}),
        ("jpeg", b"\xff\xd8", b"\xff\xd8"),
        ("ndarray", array([[1, 2]], "<u2"), np.array([[1, 2]], np.uint16)),
        ("ndarray:float64", array([0.5], "<f8")[1:], np.array([0.5])),
        ("pil", struct.pack("<III", 4, 2, 3) + b"RGB" + PIXELS.tobytes(), PIXELS),
        ("list[png]", struct.pack("<IIII", 0, 2, 1, 2) + b"abc", np.array([b"a", b"bc"], object)),
        ("jpegarray", struct.pack("<III", 2, 1, 2) + b"abc", np.array([b"a", b"bc"], object)),
    ],
)
def test_values_of_each_encoding(encoding: str, data: bytes, value: Any) -> None:
    found = decoder(encoding)(data)
    np.testing.assert_equal(found, value)
    assert getattr(found, "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize(
    "lengths", ["one length", "one sum of lengths", "another length in one sample", "many lengths"]
)
def test_samples_that_are_decoded_many_at_once_are_those_that_are_decoded_one_by_one(lengths: str) -> None:
    """Most columns have values of one length, and lie at the same places if the others do. There are more samples than
    are read at once."""
    columns = {
        "any": ("bytes", None),
        "array": ("ndarray", None),
        "half": ("float16", 2),
        "int": ("int", 8),
        "narrow": ("ndarray:uint16", None),
        "shaped": ("ndarray:float64:2,1", 16),
        "text": ("str", None),
        "wide": ("ndarray:int32:20000", 80_000),
    }
    rng = np.random.default_rng(0)
    rows = []
    for number in range(35):
        odd = number == 17
        any_length = {"one length": 5, "many lengths": number}.get(lengths, 5 + odd)
        text = f"{number:02}" if odd and lengths == "one sum of lengths" else f"{number:03}"
        rows.append(
            {
                "any": rng.bytes(any_length),
                "array": array(rng.integers(0, 9, (2, 3)), "<f8"),
                "half": rng.bytes(2),
                "int": rng.bytes(8),
                "narrow": array(rng.integers(0, 9, (2, 3)), "<u2")[1:],
                "shaped": rng.bytes(16),
                "text": text.encode(),
                "wide": rng.bytes(80_000),
            }
        )
    dataset(columns=columns, rows=rows)
    found = read("data")
    assert len(found) == len(rows)
    for sample, row in zip(found, rows, strict=True):
        for name, (encoding, _) in columns.items():
            wanted = decoder(encoding)(row[name])
            assert type(sample[name]) is type(wanted), name
            assert getattr(sample[name], "dtype", None) == getattr(wanted, "dtype", None), name
            np.testing.assert_array_equal(sample[name], wanted, name)


@pytest.mark.parametrize("name", ["array", "shaped"])
def test_arrays_of_one_length_and_different_shapes_keep_their_shapes(name: str) -> None:
    columns = {"array": ("ndarray", None), "shaped": ("ndarray:uint16", None)}
    values = [np.arange(6).reshape(shape) for shape in ((2, 3), (3, 2), (2, 3))]
    rows = [{"array": array(one, "<u2"), "shaped": array(one, "<u2")[1:]} for one in values]
    dataset(columns=columns, rows=rows)
    assert [one.tolist() for one in read("data", name)] == [one.tolist() for one in values]


def test_the_samples_before_one_that_cannot_be_decoded_are_read() -> None:
    def decode(data: bytes) -> int:
        return {b"row %d" % number: number for number in range(7)}[data]

    rows = [{"id": bytes(8), "text": b"row %d" % number} for number in range(9)]
    dataset(columns={"id": ("int", 8), "text": ("bytes", None)}, rows=rows)
    feed = feed_of("data", ("id", "text"), decode={"text": decode})
    splits: Any = feed.splits
    generate: Any = feed.generate
    samples, found = generate(splits()[0]), []
    with pytest.raises(ValueError, match=r"shard\.00000\.mds sample 7: 'text' cannot be decoded: KeyError"):
        found.extend(samples)
    assert found == [(0, number) for number in range(7)]


def test_a_function_decodes_a_column() -> None:
    rows = [{"image": bytes([number])} for number in range(30)]
    dataset(columns={"image": ("jpeg", None)}, rows=rows)
    assert read("data", "image", decode={"image": lambda data: data[0]}) == list(range(30))


def test_a_pickled_column_is_refused_unless_a_function_decodes_it() -> None:
    dataset(columns={"x": ("pkl", None), "y": ("int", 8)}, rows=[{"x": b"p", "y": bytes(8)}])
    with pytest.raises(TypeError, match=r"data/shard\.00000\.mds: 'x' is pickled, and a pickle can run any code"):
        read("data")
    assert read("data", "y") == [0]
    assert read("data", "x", decode={"x": len}) == [1]
    text = CliRunner().invoke(main, ["peek", "data"]).output
    assert "'x' is pickled" in " ".join(text.split())


@pytest.mark.parametrize("compression", ["", "gz"])
def test_a_flipped_byte_is_found_by_the_hash_of_the_index(compression: str) -> None:
    dataset(compression=compression, hashes=("sha1",))
    path = next(Path("data").glob("shard.00002*"))
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)
    with pytest.raises(OSError, match=r"shard\.00002\.mds.* is damaged: its sha1 is not that of the index"):
        read("data", "id")


def change(at: int, data: bytes) -> Any:
    def changed(raw: bytes) -> bytes:
        return raw[:at] + data + raw[at + len(data) :]

    return changed


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-10], r"shard\.00000\.mds has 1,\d+ bytes, and 1,\d+ in the index: copy the dataset again"),
        (change(0, b"\xff\xff\xff\x7f"), r"the shard is damaged \(2,147,483,647 samples in"),
        (change(8, b"\xff\xff\xff\x7f"), r"the offsets of its samples do not ascend, or go beyond its end"),
        (change(88, b"?"), r"its columns cannot be read: JSONDecodeError"),
    ],
)
def test_a_damaged_shard_is_named(damage: Any, message: str) -> None:
    dataset()
    path = Path("data/shard.00000.mds")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(OSError, match=message):
        read("data", "id")


@pytest.mark.parametrize(
    ("compression", "name"), [("", "shard.00000.mds"), ("gz", "shard.00000.mds.gz"), ("", "index.json")]
)
def test_any_damage_is_an_error_that_names_the_file(compression: str, name: str) -> None:
    dataset(compression=compression)
    path, index = Path("data", name), Path("data/index.json")
    whole, listed = path.read_bytes(), index.read_text()
    for number in range(60):
        data = damaged(Seed(name, whole), random.Random(number))
        path.write_bytes(data)
        if path != index:  # so that its size is the one that the index has
            changed = json.loads(listed)
            changed["shards"][0]["zip_data" if compression else "raw_data"]["bytes"] = len(data)
            index.write_text(json.dumps(changed))
        said = "data"
        try:
            Mds().describe("data")
            read("data")
        except (OSError, LookupError, TypeError, ValueError) as error:
            said = str(error)
        assert "data" in said, number


def test_lengths_of_columns_that_do_not_fit_are_named() -> None:
    dataset(rows=[sample(1)])
    path = Path("data/shard.00000.mds")
    raw = bytearray(path.read_bytes())
    at = struct.unpack_from("<I", raw, 4)[0]
    raw[at : at + 4] = struct.pack("<I", 1000)
    path.write_bytes(raw)
    with pytest.raises(OSError, match=r"the columns of sample 0 are longer than the sample"):
        read("data", "id")


def test_the_samples_before_a_damaged_one_are_read() -> None:
    dataset(rows=[sample(number) for number in range(5)])
    path = Path("data/shard.00000.mds")
    raw = bytearray(path.read_bytes())
    at = struct.unpack_from("<I", raw, 4 + 4 * 3)[0]
    raw[at : at + 4] = struct.pack("<I", 1)
    path.write_bytes(raw)
    feed = feed_of("data", "id")
    splits: Any = feed.splits
    generate: Any = feed.generate
    samples, found = generate(splits()[0]), []
    with pytest.raises(OSError, match=r"the columns of sample 3 are shorter than the sample"):
        found.extend(samples)
    assert found == [0, 1, 2]


def test_a_missing_column_folder_or_index_is_named(folder: Path) -> None:
    with pytest.raises(LookupError, match=r"shard\.00000\.mds has no column 'y'; its columns are id, text, x"):
        read(dataset(), "y")
    dataset("all/train")
    with pytest.raises(FileNotFoundError, match=r"all has no index\.json, but its folders have: .*all/train"):
        read("all")
    Path("data/index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"data/index\.json is not the index of an MDS dataset"):
        read("data")
    Path("data/index.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"data has no index\.json"):
        read("data")


@pytest.mark.parametrize("name", ["../other.mds", "/etc/passwd"])
def test_a_shard_outside_the_folder_is_refused(name: str) -> None:
    dataset()
    index = json.loads(Path("data/index.json").read_text())
    index["shards"][0]["raw_data"]["basename"] = name
    Path("data/index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"a shard outside the folder"):
        read("data")


def test_peek_proposes_what_serves_the_dataset() -> None:
    image: Any = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    image.new("RGB", (4, 4)).save(stream, "png")
    columns = {"image": ("png", None), "label": ("int", 8)}
    rows = [{"image": stream.getvalue(), "label": struct.pack("<q", number)} for number in range(60)]
    dataset(columns=columns, rows=rows, hashes=("sha256",))
    text = CliRunner().invoke(main, ["peek", "data"]).output
    assert "data: MDS, 60 samples" in text
    assert "penstock serve data --batch-size 32" in text
    assert 'decode={"image": ImageDecoder()}' in text
    names: dict[str, Any] = {}
    exec(text[text.index("from penstock_server import Feed") : text.index("\n\nThe command serves")], names)
    splits, generate = names["feed"].splits, names["feed"].generate
    assert next(generate(splits()[0]))["image"].shape == (4, 4, 3)
    assert make_target(["data"], [], name=None, batch_size=2)
