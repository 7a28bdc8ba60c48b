"""The cases of formats.py: how data are written, how a program reads them by hand, and Penstock's feed of them.

A reader by hand yields the batches of an epoch as arrays in memory, with a common library of the format. It may do what
a feed does: read slabs of any size, and cut batches from them. Libraries are imported where they are used.
"""

import io
import json
import os
import struct
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from penstock_server import Feed, FixedLen, ImageDecoder

Batches = Iterator[Any]
SIDE, JPEG_SIDE, NUMBERS, GENES = 64, 224, 256, 2000
SHARDS = 16
"""Files of the formats that cannot be divided."""

TIMES = 40
"""How often Penstock's feeds read the same files in an epoch, so that splits are as large as those of several GB. (An
LMDB store cannot be read several times in an epoch, so it is larger.)"""


@dataclass(frozen=True)
class Case:
    """A format, and a kind of data.

    Attributes:
        label: what the table calls it.
        rows, batch_size: of an epoch.
        by: the reader by hand, in words.
        write: writes the data to a folder, given the number of rows.
        read: yields the batches of an epoch, given the folder.
        feed: returns Penstock's feed, given the folder.
        needs: modules without which it cannot be measured.
    """

    label: str
    rows: int
    batch_size: int
    by: str
    write: Callable[[Path, int], None]
    read: Callable[[Path], Batches]
    feed: Callable[[str], Feed]
    needs: tuple[str, ...] = ()


# The data


def images(rows: int) -> np.ndarray:
    """Return small images that can be compressed a little."""
    small = np.random.default_rng(0).integers(0, 256, (rows, SIDE // 4, SIDE // 4, 3), dtype=np.uint8)
    return small.repeat(4, axis=1).repeat(4, axis=2)


def labels(rows: int) -> np.ndarray:
    return np.arange(rows) % 1000


def numbers(rows: int, width: int = NUMBERS) -> np.ndarray:
    return np.random.default_rng(0).random((rows, width), dtype=np.float32)


@cache
def photographs() -> list[bytes]:
    """Return the bytes of some JPEG files."""
    from PIL import Image

    found = []
    for seed in range(16):
        small = np.random.default_rng(seed).integers(0, 256, (28, 28, 3), dtype=np.uint8)
        data = io.BytesIO()
        Image.fromarray(small).resize((JPEG_SIDE, JPEG_SIDE)).save(data, "JPEG", quality=90)
        found.append(data.getvalue())
    return found


def decode_jpeg(data: Any) -> np.ndarray:
    """Decode a photograph as a program does by hand."""
    from PIL import Image

    with Image.open(data) as image:
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))  # convert() always copies


def raw_image(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(SIDE, SIDE, 3)


def raw_label(data: bytes) -> np.int64:
    return np.int64(int.from_bytes(data, "little"))


def batched(rows: Iterator[tuple[Any, ...]], size: int) -> Batches:
    """Stack rows, and leave the last ones out."""
    held = []
    for row in rows:
        held.append(row)
        if len(held) == size:
            yield tuple(map(np.stack, zip(*held, strict=True)))
            held = []


def slabs(columns: list[Any], size: int, rows: int, copied: bool = False) -> Batches:
    """Cut batches from slabs of many rows."""
    for start in range(0, len(columns[0]), rows):
        read = [column[start : start + rows] for column in columns]
        for low in range(0, len(read[0]) - size + 1, size):
            cut = tuple(part[low : low + size] for part in read)
            yield tuple(map(np.array, cut)) if copied else cut


# HDF5 and its relatives


def write_hdf5(folder: Path, rows: int, **options: Any) -> None:
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("image", data=images(rows), **options)
        file.create_dataset("label", data=labels(rows))


def write_hdf5_chunks(folder: Path, rows: int) -> None:
    write_hdf5(folder, rows, chunks=(64, SIDE, SIDE, 3), compression="gzip", compression_opts=1)


def read_hdf5(folder: Path) -> Batches:
    import h5py

    with h5py.File(folder / "a.h5") as file:
        yield from slabs([file["image"], file["label"]], 64, 64)


def feed_hdf5(folder: str) -> Feed:
    return Feed.from_hdf5([f"{folder}/a.h5"] * TIMES, ("image", "label"), batch_size=64)


def write_dense_cells(folder: Path, rows: int) -> None:
    import h5py

    with h5py.File(folder / "a.h5ad", "w") as file:
        file.create_dataset("X", data=numbers(rows, GENES))


def read_dense_cells(folder: Path) -> Batches:
    import h5py

    with h5py.File(folder / "a.h5ad") as file:
        yield from slabs([file["X"]], 128, 128)


def feed_cells(folder: str) -> Feed:
    return Feed.from_files([f"{folder}/a.h5ad"] * TIMES, ("X",), batch_size=128, format="HDF5")


def write_sparse_cells(folder: Path, rows: int) -> None:
    import h5py

    rng = np.random.default_rng(0)
    counts = rng.integers(GENES // 20, GENES // 10, rows)
    starts = np.concatenate([[0], np.cumsum(counts)])
    columns = np.concatenate([np.sort(rng.permutation(GENES)[:count]) for count in counts]).astype(np.int32)
    with h5py.File(folder / "a.h5ad", "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (rows, GENES)})
        values = rng.random(len(columns), dtype=np.float32)
        for name, data in {"data": values, "indices": columns, "indptr": starts.astype(np.int64)}.items():
            group.create_dataset(name, data=data, chunks=(min(len(data), 65_536),), compression="gzip")


def read_sparse_cells(folder: Path) -> Batches:
    import h5py
    from scipy.sparse import csr_matrix

    with h5py.File(folder / "a.h5ad") as file:
        group = file["X"]
        starts, step = group["indptr"][:], 1024
        for first in range(0, len(starts) - 1, step):
            rows = starts[first : first + step + 1]
            parts = [group[name][rows[0] : rows[-1]] for name in ("data", "indices")]
            slab = csr_matrix((*parts, rows - rows[0]), shape=(len(rows) - 1, GENES))
            for low in range(0, slab.shape[0] - 127, 128):
                yield (slab[low : low + 128].toarray(),)


def write_matlab(folder: Path, rows: int) -> None:
    import h5py

    with h5py.File(folder / "a.mat", "w", userblock_size=512) as file:
        table = numbers(rows).round(1).T
        data = file.create_dataset("x", data=table, chunks=(NUMBERS, 256), compression="gzip", compression_opts=1)
        data.attrs["MATLAB_class"] = np.bytes_("single")
    with open(folder / "a.mat", "r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(116) + bytes(8) + b"\x00\x02IM")


def read_matlab(folder: Path) -> Batches:
    import h5py

    with h5py.File(folder / "a.mat") as file:
        data = file["x"]
        for start in range(0, data.shape[1], 1024):
            slab = data[:, start : start + 1024]
            for low in range(0, slab.shape[1] - 255, 256):
                yield (np.ascontiguousarray(slab[:, low : low + 256].T),)


def feed_matlab(folder: str) -> Feed:
    return Feed.from_files([f"{folder}/a.mat"] * TIMES, ("x",), batch_size=256, axis=0)


# NumPy and Zarr


def write_npy(folder: Path, rows: int) -> None:
    np.save(folder / "image.npy", images(rows))
    np.save(folder / "label.npy", labels(rows))
    for number in range(1, TIMES):
        for name in ("image", "label"):
            (folder / f"{name}{number}.npy").symlink_to(f"{name}.npy")


def read_npy(folder: Path) -> Batches:
    columns = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("image", "label")]
    return slabs(columns, 64, 64, copied=True)


def feed_npy(folder: str) -> Feed:
    return Feed.from_numpy((f"{folder}/image*.npy", f"{folder}/label*.npy"), batch_size=64)


def write_npz(folder: Path, rows: int) -> None:
    np.savez(folder / "a.npz", image=images(rows), label=labels(rows))


def read_npz(folder: Path) -> Batches:
    with np.load(folder / "a.npz") as file:
        columns = [file["image"], file["label"]]
    return slabs(columns, 64, 1024)


def feed_npz(folder: str) -> Feed:
    return Feed.from_numpy([f"{folder}/a.npz"] * TIMES, ("image", "label"), batch_size=64)


def write_zarr(folder: Path, rows: int) -> None:
    import zarr

    group = zarr.open_group(folder / "a.zarr", mode="w")
    group.create_array("image", data=images(rows), chunks=(64, SIDE, SIDE, 3))
    group.create_array("label", data=labels(rows), chunks=(4096,))


def read_zarr(folder: Path) -> Batches:
    import zarr

    group = zarr.open_group(folder / "a.zarr", mode="r")
    for start in range(0, group["label"].shape[0], 4096):
        read = group["label"][start : start + 4096]
        for low in range(0, len(read) - 63, 64):
            yield group["image"][start + low : start + low + 64], read[low : low + 64]


def feed_zarr(folder: str) -> Feed:
    return Feed.from_zarr([f"{folder}/a.zarr"] * TIMES, ("image", "label"), batch_size=64)


# Tables


def arrow_table(rows: int) -> Any:
    import pyarrow as pa

    items = pa.array(numbers(rows).reshape(-1))
    return pa.table({"x": pa.FixedSizeListArray.from_arrays(items, NUMBERS), "label": labels(rows)})


def write_parquet(folder: Path, rows: int) -> None:
    from pyarrow import parquet

    parquet.write_table(arrow_table(rows), folder / "a.parquet", row_group_size=8192)


def read_parquet(folder: Path) -> Batches:
    from pyarrow import parquet

    with parquet.ParquetFile(folder / "a.parquet", memory_map=True) as file:
        for slab in file.iter_batches(8192, use_threads=False):
            x = slab.column("x").flatten().to_numpy().reshape(-1, NUMBERS)
            yield from slabs([x, slab.column("label").to_numpy()], 256, 8192)


def feed_parquet(folder: str) -> Feed:
    return Feed.from_parquet([f"{folder}/a.parquet"] * TIMES, ("x", "label"), batch_size=256)


def write_parquet_scalars(folder: Path, rows: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    columns = {f"c{number}": column for number, column in enumerate(numbers(rows, 16).T)}
    parquet.write_table(pa.table(columns), folder / "a.parquet", row_group_size=10_240)


def read_parquet_scalars(folder: Path) -> Batches:
    from pyarrow import parquet

    with parquet.ParquetFile(folder / "a.parquet", memory_map=True) as file:
        for slab in file.iter_batches(10_240, use_threads=False):
            columns = [column.to_numpy() for column in slab.columns]
            yield from slabs(columns, 1024, 10_240)


def feed_parquet_scalars(folder: str) -> Feed:
    return Feed.from_parquet([f"{folder}/a.parquet"] * TIMES, batch_size=1024)


def write_arrow(folder: Path, rows: int) -> None:
    import pyarrow as pa

    table = arrow_table(rows)
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)  # as `datasets` does


def read_arrow(folder: Path) -> Batches:
    import pyarrow as pa

    with pa.memory_map(str(folder / "a.arrow")) as file:
        for slab in pa.ipc.open_stream(file):
            x = slab.column("x").flatten().to_numpy().reshape(-1, NUMBERS)
            yield from slabs([x, slab.column("label").to_numpy()], 250, 1000, copied=True)


def feed_arrow(folder: str) -> Feed:
    return Feed.from_files([f"{folder}/a.arrow"] * TIMES, ("x", "label"), batch_size=250)


def write_csv(folder: Path, rows: int) -> None:
    names = ",".join([*(f"x{number}" for number in range(64)), "label"])
    table = np.column_stack([numbers(rows, 64).round(3), labels(rows)])
    np.savetxt(folder / "a.csv", table, ["%.3f"] * 64 + ["%d"], ",", header=names, comments="")


@cache
def csv_columns(folder: Path) -> list[np.ndarray]:
    """Read the file once, as Penstock's worker does."""
    from pyarrow import csv

    table = csv.read_csv(folder / "a.csv")
    return [np.stack([column.to_numpy() for column in table.columns[:64]], axis=1), table["label"].to_numpy()]


def read_csv(folder: Path) -> Batches:
    columns = csv_columns(folder)
    order = np.random.default_rng(0).permutation(len(columns[0]))
    for low in range(0, len(order) - 255, 256):
        yield tuple(column[order[low : low + 256]] for column in columns)


def feed_csv(folder: str) -> Feed:
    return Feed.from_csv(f"{folder}/a.csv", ("x*", "label"), batch_size=256, shuffle=1)


def write_json(folder: Path, rows: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, (rows, 128))
    with open(folder / "a.jsonl", "w") as file:
        for number, row in enumerate(tokens.tolist()):
            file.write(json.dumps({"tokens": row, "label": number % 10}) + "\n")


def read_json(folder: Path) -> Batches:
    with open(folder / "a.jsonl", "rb") as file:
        parsed = map(json.loads, file)
        yield from batched(((np.array(one["tokens"]), one["label"]) for one in parsed), 128)


def feed_json(folder: str) -> Feed:
    return Feed.from_json_lines([f"{folder}/a.jsonl"] * TIMES, ("tokens", "label"), batch_size=128)


# Records


def write_tfrecord(folder: Path, rows: int) -> None:
    from penstock_server.sources.tfrecord.crc32c import crc32c, masked
    from penstock_server.sources.tfrecord.example import example_class

    crc_of = crc32c()
    for shard in range(SHARDS):
        with open(folder / f"{shard:02}.tfrecord", "wb") as file:
            for number, image in enumerate(images(rows // SHARDS)):
                example = example_class()()
                features = example.features.feature
                features["image"].bytes_list.value.append(image.tobytes())
                features["label"].int64_list.value.append(number)
                data = example.SerializeToString()
                head = struct.pack("<Q", len(data))
                file.write(head + struct.pack("<I", masked(crc_of(head))))
                file.write(data + struct.pack("<I", masked(crc_of(data))))


def read_tfrecord(folder: Path) -> Batches:
    import tensorflow as tf

    features = {"image": tf.io.FixedLenFeature((), tf.string), "label": tf.io.FixedLenFeature((), tf.int64)}

    def parsed(records: Any) -> Any:
        found = tf.io.parse_example(records, features)
        return tf.reshape(tf.io.decode_raw(found["image"], tf.uint8), (-1, SIDE, SIDE, 3)), found["label"]

    files = sorted(map(str, folder.glob("*.tfrecord")))
    dataset = tf.data.TFRecordDataset(files).batch(64, drop_remainder=True).map(parsed)
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    return dataset.with_options(options).as_numpy_iterator()


def feed_tfrecord(folder: str) -> Feed:
    features = {"image": FixedLen((SIDE, SIDE, 3), "bytes", decode="uint8"), "label": FixedLen((), "int64")}
    return Feed.from_tfrecord([f"{folder}/*.tfrecord"] * TIMES, features, batch_size=64)


def write_tar(folder: Path, rows: int) -> None:
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:02}.tar", "w") as tar:
            for number in range(rows // SHARDS):
                for ending, data in (("jpg", photographs()[number % 16]), ("cls", str(number).encode())):
                    info = tarfile.TarInfo(f"{number:05}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def read_tar(folder: Path) -> Batches:
    import webdataset

    files = sorted(map(str, folder.glob("*.tar")))
    samples = webdataset.WebDataset(files, shardshuffle=False, empty_check=False)
    rows = ((decode_jpeg(io.BytesIO(one["jpg"])), np.int64(one["cls"])) for one in samples)
    return batched(rows, 32)


def feed_tar(folder: str) -> Feed:
    return Feed.from_webdataset(
        [f"{folder}/*.tar"] * TIMES, ("jpg", "cls"), decode={"jpg": ImageDecoder()}, batch_size=32
    )


def write_folder(folder: Path, rows: int) -> None:
    for number in range(rows):
        above = folder / f"class{number % 10}"
        above.mkdir(exist_ok=True)
        (above / f"{number:05}.jpg").write_bytes(photographs()[number % 16])


def read_folder(folder: Path) -> Batches:
    files = [
        (file, number) for number, above in enumerate(sorted(folder.iterdir())) for file in sorted(above.iterdir())
    ]
    return batched(((decode_jpeg(file), np.int32(number)) for file, number in files), 32)


def feed_folder(folder: str) -> Feed:
    return Feed.from_folder(folder, batch_size=32)


def write_lmdb(folder: Path, rows: int) -> None:
    import lmdb

    with (
        lmdb.open(str(folder / "a.lmdb"), map_size=rows * 20_000 + (1 << 20)) as env,
        env.begin(write=True) as transaction,
    ):
        for number, image in enumerate(images(rows)):
            transaction.put(f"image-{number:06}".encode(), image.tobytes())
            transaction.put(f"label-{number:06}".encode(), number.to_bytes(8, "little"))


def read_lmdb(folder: Path) -> Batches:
    import lmdb

    def rows() -> Iterator[tuple[Any, ...]]:
        with (
            lmdb.open(str(folder / "a.lmdb"), readonly=True, lock=False, readahead=False) as env,
            env.begin(buffers=True) as transaction,
        ):
            for number in range(transaction.stat()["entries"] // 2):
                image = transaction.get(f"image-{number:06}".encode())
                yield raw_image(image), raw_label(transaction.get(f"label-{number:06}".encode()))

    return batched(rows(), 64)


def feed_lmdb(folder: str) -> Feed:
    decode = {"image-*": raw_image, "label-*": raw_label}
    return Feed.from_files(f"{folder}/a.lmdb", ("image-*", "label-*"), decode=decode, batch_size=64)


def write_mds(folder: Path, rows: int) -> None:
    """Write shards as mosaicml-streaming does."""
    nbytes = SIDE * SIDE * 3
    config = {
        "version": 2,
        "format": "mds",
        "column_names": ["image", "label"],
        "column_encodings": [f"ndarray:uint8:{SIDE},{SIDE},3", "int"],
        "column_sizes": [nbytes, 8],
    }
    head, count, shards = json.dumps(config).encode(), rows // SHARDS, []
    for number in range(SHARDS):
        offsets = 4 + 4 * (count + 1) + len(head) + np.arange(count + 1) * (nbytes + 8)
        parts = [one.tobytes() + struct.pack("<q", label) for label, one in enumerate(images(count))]
        data = struct.pack("<I", count) + offsets.astype("<u4").tobytes() + head + b"".join(parts)
        name = f"shard.{number:05}.mds"
        (folder / name).write_bytes(data)
        raw = {"basename": name, "bytes": len(data), "hashes": {}}
        shards.append({**config, "samples": count, "compression": None, "raw_data": raw, "zip_data": None})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    for time in range(1, TIMES):  # an index that is named twice is read once
        (folder / f"again{time}").mkdir()
        for name in ("index.json", *(shard["raw_data"]["basename"] for shard in shards)):
            (folder / f"again{time}" / name).symlink_to(f"../{name}")


def read_mds(folder: Path) -> Batches:
    def rows() -> Iterator[tuple[Any, ...]]:
        for shard in sorted(folder.glob("*.mds")):
            with open(shard, "rb") as file:
                count = int.from_bytes(file.read(4), "little")
                offsets = np.frombuffer(file.read(4 * count + 4), "<u4").tolist()
                file.seek(offsets[0])
                for low, high in pairwise(offsets):
                    data = file.read(high - low)
                    yield raw_image(data[:-8]), raw_label(data[-8:])

    return batched(rows(), 64)


def feed_mds(folder: str) -> Feed:
    stores = [f"{folder}/index.json", *(f"{folder}/again{time}/index.json" for time in range(1, TIMES))]
    return Feed.from_files(stores, ("image", "label"), batch_size=64, format="MDS")


PICTURES = f"uint8[{SIDE}, {SIDE}, 3] and a label"
PHOTOS = f"JPEG of {JPEG_SIDE} x {JPEG_SIDE}, decoded"
CASES = {
    "hdf5": Case(f"HDF5, contiguous: {PICTURES}", 8192, 64, "h5py", write_hdf5, read_hdf5, feed_hdf5, ("h5py",)),
    "hdf5-gzip": Case("HDF5, gzip chunks", 8192, 64, "h5py", write_hdf5_chunks, read_hdf5, feed_hdf5, ("h5py",)),
    "npy": Case(".npy", 8192, 64, "numpy, mapped", write_npy, read_npy, feed_npy),
    "npz": Case(".npz", 8192, 64, "numpy", write_npz, read_npz, feed_npz),
    "zarr": Case("Zarr, zstd chunks", 8192, 64, "zarr", write_zarr, read_zarr, feed_zarr, ("zarr",)),
    "tfrecord": Case("TFRecord", 8192, 64, "tf.data", write_tfrecord, read_tfrecord, feed_tfrecord, ("tensorflow",)),
    "lmdb": Case("LMDB", 131_072, 64, "lmdb", write_lmdb, read_lmdb, feed_lmdb, ("lmdb",)),
    "mds": Case("MDS", 8192, 64, "plain Python", write_mds, read_mds, feed_mds),
    "tar": Case(f"tar: {PHOTOS}", 2048, 32, "webdataset", write_tar, read_tar, feed_tar, ("webdataset", "PIL")),
    "folder": Case("folder of images: the same", 2048, 32, "Pillow", write_folder, read_folder, feed_folder, ("PIL",)),
    "parquet": Case(
        f"Parquet: float32[{NUMBERS}] and a label",
        65_536,
        256,
        "pyarrow",
        write_parquet,
        read_parquet,
        feed_parquet,
        ("pyarrow",),
    ),
    "arrow": Case(
        "Arrow, as saved by datasets", 65_000, 250, "pyarrow", write_arrow, read_arrow, feed_arrow, ("pyarrow",)
    ),
    "matlab": Case(
        f".mat 7.3: float32[{NUMBERS}]", 65_536, 256, "h5py", write_matlab, read_matlab, feed_matlab, ("h5py",)
    ),
    "h5ad": Case(
        f".h5ad, dense: float32[{GENES}]",
        12_288,
        128,
        "h5py",
        write_dense_cells,
        read_dense_cells,
        feed_cells,
        ("h5py",),
    ),
    "h5ad-csr": Case(
        ".h5ad, CSR, 7 % filled",
        12_288,
        128,
        "h5py, scipy",
        write_sparse_cells,
        read_sparse_cells,
        feed_cells,
        ("h5py", "scipy"),
    ),
    "parquet-scalars": Case(
        "Parquet: a dict of 16 numbers",
        102_400,
        1024,
        "pyarrow",
        write_parquet_scalars,
        read_parquet_scalars,
        feed_parquet_scalars,
        ("pyarrow",),
    ),
    "csv": Case(
        "CSV in memory, shuffled: float64[64] and a label",
        20_480,
        256,
        "numpy",
        write_csv,
        read_csv,
        feed_csv,
        ("pyarrow",),
    ),
    "json": Case("JSON lines: int64[128] and a label", 20_480, 128, "json", write_json, read_json, feed_json),
}


def chosen() -> tuple[Case, str]:
    """Return the case and the folder that the environment names."""
    return CASES[os.environ["FORMATS_CASE"]], os.environ["FORMATS_FOLDER"]
