"""The sources and structures of the rows of `compatibility.py`, as users write them. None knows a loader.

Each source calls `made` when it makes a sample. `made` notes the process, and sleeps as long as reading a small file
takes.
"""

import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

FOLDER = Path(os.environ.get("COMPATIBILITY_DATA", "."))
PATHS = [str(FOLDER / f"numbers-{part}.npy") for part in range(8)]
SAMPLES = 192
LONG = 640  # samples of an epoch in which a worker is killed
BATCH = 8
SECONDS = 0.01  # the time to make a sample
BUCKETS = (8, 16, 32)


def made() -> None:
    """Note that this process makes a sample, and spend the time that this takes."""
    time.sleep(SECONDS)
    log = os.environ.get("COMPATIBILITY_LOG")
    if log:
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")


def a_maker() -> int:
    """Return the process that made the last sample, other than this one."""
    log = Path(os.environ["COMPATIBILITY_LOG"]).read_text().split()
    return next(int(line) for line in reversed(log) if int(line) != os.getpid())


def sample(number: int) -> dict[str, Any]:
    made()
    return {"image": np.full((4, 4), number, np.float32), "label": np.int64(number)}


def seen(value: Any) -> Any:
    """Note that this process handles a sample of a file that the loader itself reads."""
    made()
    return value


# A plain generator over a list of files


def of_files(paths: Iterable[str]) -> Iterator[Any]:
    for path in paths:
        for number in np.load(path):
            yield sample(int(number))


# A generator that cannot be divided: each value depends on the one before


def readings() -> Iterator[np.int64]:
    value = 1
    for _ in range(SAMPLES):
        value = value * 6364136223846793005 % 2**61
        yield np.int64(value)


def spectrum(value: Any) -> dict[str, Any]:
    """The expensive transform."""
    made()
    return {"value": np.int64(value), "image": np.full((4, 4), float(value), np.float32)}


# The class of examples/scenes

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "scenes"))
from scenes import SceneGenerator  # noqa: E402  (it is in the parent folder)


class Scenes(SceneGenerator):
    """The class unchanged, except that it notes which process makes a crop."""

    def crop(self, image: Any) -> Any:
        made()
        return super().crop(image)


def scene_files() -> list[str]:
    return sorted(map(str, FOLDER.glob("scenes-*.h5")))


# What can be indexed


class Table:
    def __init__(self, length: int = SAMPLES, item: Callable[[int], Any] = sample) -> None:
        self.length, self.item = length, item

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < self.length:
            raise IndexError(number)
        return self.item(int(number))


class OpenTable:
    """An HDF5 file that the constructor opens."""

    def __init__(self) -> None:
        import h5py

        self.file = h5py.File(FOLDER / "rows.h5")

    def __len__(self) -> int:
        return len(self.file["label"])

    def __getitem__(self, number: int) -> Any:
        made()
        return {"image": self.file["image"][number], "label": self.file["label"][number]}


def augmented(number: int) -> dict[str, Any]:
    """A sample with random numbers from NumPy's global generator."""
    made()
    return {"noise": np.random.normal(size=4), "label": np.int64(number)}


# Structures


def nested(number: int) -> Any:
    made()
    inner = {"y": np.full(3, number, np.float32), "b": np.int32(number)}
    return {"z": np.int64(number), "a": (inner, np.full(2, number, np.int16))}


def text(number: int) -> Any:
    made()
    return {"text": b"%d\0 a\0b" % number + b"\0" * (number % 4), "label": np.int64(number)}


def length_of(number: int) -> int:
    return 1 + number * 7 % 32


def ragged(number: int) -> Any:
    made()
    return np.full(length_of(number), number + 1, np.int32)


def rare(number: int) -> Any:
    made()
    half = np.full(3, number, ml_dtypes.bfloat16)
    return {"half": half, "wave": np.full(3, number + 2j, np.complex64), "mask": np.arange(3) < number % 4}


def weighted(number: int) -> Any:
    made()
    return (np.full(3, number, np.float32), np.int64(number), np.float32(number / 4))


def bucket(length: int) -> int:
    return next(bound for bound in BUCKETS if length <= bound)


def by_bucket(order: Iterable[int]) -> Iterator[list[int]]:
    """Yield batches of the numbers of rows whose lengths are in one bucket."""
    for bound in BUCKETS:
        some = [row for row in order if bucket(length_of(row)) == bound]
        yield from (some[first : first + BATCH] for first in range(0, len(some), BATCH))


def padded(rows: list[Any]) -> Any:
    """Return a batch of rows, filled with zeros up to the bucket of the longest."""
    width = bucket(max(map(len, rows)))
    return np.stack([np.pad(row, (0, width - len(row))) for row in rows])


STRUCTURES = {"nested": nested, "text": text, "ragged": ragged, "buckets": ragged, "rare": rare, "weights": weighted}
TWELVE = 12  # rows of a batch of the next source


def of_batches(paths: Iterable[str]) -> Iterator[Any]:
    """Yield batches whose size the generator's code fixes at twelve rows."""
    for path in paths:
        rows = [sample(int(number)) for number in np.load(path)]
        for first in range(0, len(rows), TWELVE):
            yield stacked(rows[first : first + TWELVE])


def stacked(rows: list[Any]) -> Any:
    """Return the batch of these rows, leaf by leaf, as a user's code makes it by hand."""
    first = rows[0]
    if isinstance(first, dict):
        return {key: stacked([row[key] for row in rows]) for key in first}
    if isinstance(first, tuple):
        return tuple(stacked(list(leaves)) for leaves in zip(*rows, strict=True))
    if isinstance(first, bytes):
        return np.array(rows, object)
    return np.stack(rows)


# A notebook's cell: it is in no module, so it cannot be imported by name

CELL = """
from sources import made, sample
import numpy as np

scale = lambda row: {**row, "image": row["image"] * 2}

def cell_rows(paths):
    for path in paths:
        for number in np.load(path):
            yield scale(sample(int(number)))
"""


def in_notebook() -> Any:
    """Run the cell in `__main__`, without a file, as a notebook does, and return `cell_rows`."""
    main = sys.modules["__main__"]
    vars(main).pop("__file__", None)
    main.__spec__ = None
    exec(compile(CELL, "<cell>", "exec"), vars(main))
    return vars(main)["cell_rows"]


# Files


def prepare(folder: Path) -> None:
    """Write the files of all rows. This does not need TensorFlow."""
    import h5py
    import prepare as scenes
    import pyarrow
    import pyarrow.parquet

    numbers = np.arange(SAMPLES).reshape(8, -1)
    scenes.main(folder)
    for part, some in enumerate(numbers):
        np.save(folder / f"numbers-{part}.npy", some)
        columns = {"value": some.astype(np.float32), "label": some}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"rows-{part}.parquet", row_group_size=12)
        with tarfile.open(folder / f"shard-{part}.tar", "w") as tar:
            for number in some:
                for name, data in (("npy", npy(number)), ("json", json.dumps({"label": int(number)}).encode())):
                    info = tarfile.TarInfo(f"{number:04}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    with h5py.File(folder / "rows.h5", "w") as file:
        images = np.repeat(np.arange(SAMPLES, dtype=np.float32), 16).reshape(-1, 4, 4)
        file.create_dataset("image", data=images, chunks=(16, 4, 4), compression="gzip")
        file["label"] = np.arange(SAMPLES)


def npy(number: int) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.full((4, 4), number, np.float32))
    return stream.getvalue()


def write_tfrecords(folder: Path) -> None:
    """Write a GZIP TFRecord set with TensorFlow, in a separate process."""
    import tensorflow as tf

    for part, some in enumerate(np.arange(SAMPLES).reshape(8, -1)):
        with tf.io.TFRecordWriter(str(folder / f"rows-{part}.tfrecord.gz"), "GZIP") as writer:
            for number in some:
                feature = {
                    "image": tf.train.Feature(float_list=tf.train.FloatList(value=[number] * 16)),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(example.SerializeToString())


def tar_sample(members: dict[str, bytes]) -> dict[str, Any]:
    """Decode a sample of a tar shard, as the user's code does."""
    made()
    image = np.load(io.BytesIO(members["npy"]))
    return {"image": image, "label": np.int64(json.loads(members["json"])["label"])}


def of_tar(paths: Iterable[str]) -> Iterator[Any]:
    """Read tar shards by hand."""
    for path in paths:
        with tarfile.open(path) as tar:
            members = iter(tar)
            for member in members:
                other = next(members)
                files = {one.name.partition(".")[2]: tar.extractfile(one).read() for one in (member, other)}
                yield tar_sample(files)


def of_parquet(paths: Iterable[str]) -> Iterator[Any]:
    """Read Parquet files by hand."""
    import pyarrow.parquet

    for path in paths:
        with pyarrow.parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                columns = file.read_row_group(group, use_threads=False)
                values, labels = (columns[name].to_numpy() for name in ("value", "label"))
                for value, label in zip(values, labels, strict=True):
                    made()
                    yield {"value": value, "label": label}


def parts(pattern: str) -> list[str]:
    return sorted(map(str, FOLDER.glob(pattern)))


if __name__ == "__main__":  # sources.py FOLDER
    prepare(Path(sys.argv[1]))
    write_tfrecords(Path(sys.argv[1]))
