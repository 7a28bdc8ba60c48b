"""Small real files of every format, and files that are like them but damaged or hostile."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import random
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from penstock_server.sources.tfrecord.crc32c import crc32c, masked
from penstock_server.sources.tfrecord.example import example_class

_NUMBERS = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


class Seed(NamedTuple):
    """A file of a format.

    Attributes:
        name: a name for it, with the ending of its format.
        data: its bytes.
        repaired: makes the checksums of damaged bytes right again, so that a reader looks at what they protect.
        packed: compresses the damaged bytes.
    """

    name: str
    data: bytes
    repaired: Callable[[bytes], bytes] = bytes
    packed: Callable[[bytes], bytes] = bytes


def seeds(folder: Path) -> Iterator[Seed]:
    """Yield a small file of each format. `folder` is for libraries that write only files."""
    yield from _arrays()
    yield from _hdf5(folder)
    yield from _parquet()
    table = "id,name,price\n" + "".join(f'{number},"na ""{number}"" me",{number / 3}\n' for number in range(20))
    yield Seed("table.csv", table.encode())
    rows = "".join(json.dumps({"id": number, "t": f"row {number}", "l": [number, 0.5]}) + "\n" for number in range(20))
    yield Seed("rows.jsonl", rows.encode())
    yield Seed("packed.jsonl.gz", rows.encode(), packed=gzip.compress)
    yield from _arrow()
    yield from _matlab(folder)
    plain = b"".join(map(_record, _examples()))
    yield Seed("records.tfrecord", plain, _with_crcs)
    yield Seed("gzip.tfrecord.gz", plain, _with_crcs, gzip.compress)
    yield Seed("zlib.tfrecord.zlib", plain, _with_crcs, zlib.compress)
    yield Seed("stored.tfrecord.gz", gzip.compress(plain))
    for kind in ("gnu", "pax"):
        yield Seed(f"{kind}.tar", _tar(kind), _with_sums)
    yield Seed("gzip.tar.gz", _tar("gnu"), _with_sums, lambda data: gzip.compress(data, 1))
    yield Seed("stored.tgz", gzip.compress(_tar("pax"), 0))
    yield Seed("xz.tar.xz", _tar("gnu"), _with_sums, lambda data: lzma.compress(data, preset=0))


def _arrow() -> Iterator[Seed]:
    import pyarrow as pa

    table = pa.table({"id": range(20), "t": [f"row {number}" for number in range(20)], "l": [[1, 2, 3]] * 20})
    for name, opened in {"file.arrow": pa.ipc.new_file, "stream.arrow": pa.ipc.new_stream}.items():
        sink = io.BytesIO()
        with opened(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
        yield Seed(name, sink.getvalue())


def _matlab(folder: Path) -> Iterator[Seed]:
    import scipy.io

    arrays = {"x": np.arange(60, dtype=np.float32).reshape(20, 3), "y": np.arange(20)[:, None], "t": "text"}
    for name, packed in (("plain.mat", False), ("packed.mat", True)):
        stream = io.BytesIO()
        scipy.io.savemat(stream, arrays, do_compression=packed)
        yield Seed(name, stream.getvalue())
    with h5py.File(folder / "new.mat", "w", userblock_size=512) as file:
        for name in "xy":
            dataset = file.create_dataset(name, data=arrays[name].T, chunks=True, compression="gzip")
            dataset.attrs["MATLAB_class"] = np.bytes_("single" if name == "x" else "int64")
    yield Seed("new.mat", (folder / "new.mat").read_bytes())


def damaged(seed: Seed, draw: random.Random) -> bytes:
    """Return the file with some damage."""
    data = bytearray(seed.data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        draw.choice(_DAMAGES)(data, draw)
    repaired = seed.repaired(bytes(data)) if draw.random() < 0.8 else bytes(data)
    return seed.packed(repaired)


def _truncate(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data) + 1) :]


def _flip(data: bytearray, draw: random.Random) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _overwrite(data: bytearray, draw: random.Random) -> None:
    size = draw.choice((1, 2, 4, 8))
    at = draw.randrange(len(data) + 1)
    number = draw.choice(_NUMBERS) & ((1 << 8 * size) - 1)
    data[at : at + size] = number.to_bytes(size, draw.choice(("little", "big")))


def _digits(data: bytearray, draw: random.Random) -> None:
    """Make a number in text another one."""
    places = [place for place, byte in enumerate(data) if 48 <= byte <= 57]
    if places:
        data[draw.choice(places)] = draw.choice(b"0123456789-")


def _splice(data: bytearray, draw: random.Random) -> None:
    start, at = draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)
    piece = data[start : start + draw.choice((1, 16, 512, 4096))]
    data[at : at + draw.choice((0, len(piece)))] = piece


def _remove(data: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(data) + 1)
    del data[at : at + draw.choice((1, 16, 512))]


_DAMAGES = (_truncate, _flip, _flip, _overwrite, _overwrite, _digits, _splice, _remove)


def _arrays() -> Iterator[Seed]:
    for name, array in (("c.npy", np.arange(60, dtype="<f4").reshape(20, 3)), ("f.npy", np.ones((9, 4), order="F"))):
        yield Seed(name, _npy(array))
    for name, save in (("stored.npz", np.savez), ("packed.npz", np.savez_compressed)):
        stream = io.BytesIO()
        save(stream, x=np.arange(40).reshape(20, 2), y=np.arange(20, dtype=np.float32))
        yield Seed(name, stream.getvalue())


def _hdf5(folder: Path) -> Iterator[Seed]:
    with h5py.File(folder / "cells.h5ad", "w") as file:
        matrix = file.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "shape": (20, 3)})
        matrix["data"], matrix["indices"], matrix["indptr"] = np.ones(20), np.zeros(20, np.int32), np.arange(21)
        file["table"] = np.zeros(20, [("a", "f4"), ("b", "i8")])
    yield Seed("cells.h5ad", (folder / "cells.h5ad").read_bytes())
    for name, options in (("plain.h5", {}), ("packed.h5", {"chunks": (5, 3), "compression": "gzip", "shuffle": True})):
        with h5py.File(folder / name, "w") as file:
            file.create_dataset("x", data=np.arange(60, dtype=np.float32).reshape(20, 3), **options)
            file["y"] = np.arange(20)
            file["text"] = [f"text {number}" for number in range(20)]
            ragged = file.create_dataset("ragged", (20,), h5py.vlen_dtype(np.int32))
            for number in range(20):
                ragged[number] = np.arange(number % 3)
        yield Seed(name, (folder / name).read_bytes())


def _parquet() -> Iterator[Seed]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        return
    table = pa.table(
        {"x": np.arange(40), "text": [f"text {n}" for n in range(40)], "ids": [list(range(n % 3)) for n in range(40)]}
    )
    for name, options in (("snappy.parquet", {}), ("gzip.parquet", {"compression": "gzip", "use_dictionary": False})):
        stream = io.BytesIO()
        parquet.write_table(table, stream, row_group_size=20, **options)
        yield Seed(name, stream.getvalue())


def _examples() -> Iterator[bytes]:
    for number in range(6):
        message: Any = example_class()()
        message.features.feature["label"].int64_list.value.append(number)
        message.features.feature["ids"].int64_list.value.extend(range(number))
        message.features.feature["x"].float_list.value.extend([0.5, number])
        message.features.feature["image"].bytes_list.value.append(bytes(64))
        for _ in range(number):
            message.feature_lists.feature_list["steps"].feature.add().float_list.value.extend([1, 2])
        yield message.SerializeToString()


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _crc(length) + data + _crc(data)


def _crc(data: bytes) -> bytes:
    return struct.pack("<I", masked(crc32c()(data)))


def _with_crcs(data: bytes) -> bytes:
    """Make the CRCs of records right, as far as their lengths lead."""
    found = bytearray(data)
    at = 0
    while at + 12 <= len(found):
        (length,) = struct.unpack_from("<Q", found, at)
        found[at + 8 : at + 12] = _crc(bytes(found[at : at + 8]))
        end = at + 12 + length
        if end + 4 > len(found):
            break
        found[end : end + 4] = _crc(bytes(found[at + 12 : end]))
        at = end + 4
    return bytes(found)


def _npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def _tar(kind: str) -> bytes:
    stream = io.BytesIO()
    format = tarfile.GNU_FORMAT if kind == "gnu" else tarfile.PAX_FORMAT
    with tarfile.open(fileobj=stream, mode="w", format=format) as tar:
        for number in range(3):
            array = _npy(np.arange(number + 2))
            packed = io.BytesIO()
            np.savez_compressed(packed, x=np.arange(number + 2))
            members = {"txt": b"hello", "cls": b"%d" % number, "json": b'{"a": [1, 2]}', "npy": array}
            members["npz"] = packed.getvalue()
            for name, data in members.items():
                info = tarfile.TarInfo(f"{'long/' * 25}{number}.{name}")
                info.size, info.mtime = len(data), 1.5 if kind == "pax" else 1
                tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def _with_sums(data: bytes) -> bytes:
    """Make the checksums of headers right."""
    found = bytearray(data)
    for at in range(0, len(found) - 511, 512):
        if found[at + 257 : at + 262] == b"ustar":
            found[at + 148 : at + 156] = b" " * 8
            found[at + 148 : at + 156] = b"%06o\0 " % sum(found[at : at + 512])
    return bytes(found)
