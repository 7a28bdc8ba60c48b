"""What the blocks of the documentation need and do not define: data files, modules, functions of the reader's own.

The process that runs the blocks executes this file first, in an empty folder. `names` returns the names that blocks
use, and `OF_PAGE` has those that mean something else on one page.
"""

from __future__ import annotations

import io
import math
import tarfile
from pathlib import Path
from typing import Any

import h5py
import keras
import lmdb
import numpy as np
import pyarrow
import pyarrow.parquet
import scipy.io
import tensorflow as tf
import zarr
from PIL import Image

import penstock
from penstock_server import Feed, Leaf

ROWS = 200


def write_data(scenes: str) -> None:
    """Write the files that blocks read. `scenes`: the text of the modules `scenes` and `feed`."""
    images, labels = np.zeros((ROWS, 28, 28), np.uint8), np.arange(ROWS) % 10
    Path("scenes").mkdir()
    Path("train").mkdir()
    for name in ("digits.h5", "scenes/0.h5", "scenes/1.h5"):
        with h5py.File(name, "w") as file:
            file["images"], file["labels"] = images, labels
    cells = zarr.open_group(store="cells.zarr", mode="w")
    for name, values in {"images": images, "labels": labels}.items():
        cells.create_array(name, shape=values.shape, chunks=(50, *values.shape[1:]), dtype=values.dtype)[:] = values
    np.savez("digits.npz", images=images, labels=labels)
    scipy.io.savemat("faces.mat", {"X": images, "y": labels})
    np.save("images.npy", images)
    np.save("labels.npy", labels)
    for number in range(4):
        np.save(f"part-{number}.npy", images)
    pixels = pyarrow.array(images.reshape(ROWS, -1).tolist())
    pyarrow.parquet.write_table(pyarrow.table({"pixels": pixels, "label": labels}), "train/0.parquet")
    Path("saved/train").mkdir(parents=True)
    saved = pyarrow.table({"image": pixels, "label": labels})
    with pyarrow.ipc.new_stream("saved/train/data-00000-of-00001.arrow", saved.schema) as stream:
        stream.write_table(saved, max_chunksize=50)
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "png")
    with lmdb.open("words.lmdb", map_size=1 << 24) as env, env.begin(write=True) as transaction:
        for number in range(40):
            transaction.put(b"image-%05d" % number, picture.getvalue())
            transaction.put(b"label-%05d" % number, b"word")
    for number in range(40):
        photo = Path("photos", "ab"[number % 2], f"{number}.png")
        photo.parent.mkdir(parents=True, exist_ok=True)
        photo.write_bytes(picture.getvalue())
    Path("reviews-0.jsonl").write_text('{"review": {"text": "good"}, "stars": 5}\n' * 40)
    Path("houses.csv").write_text("area,rooms,price\n" + "80.5,3,200\n" * 40)
    Path("digits.csv").write_text("label,pixel0,pixel1\n" + "7,0,255\n" * 40)
    Path("pets.csv").write_text("file,breed\n" + "photos/a/0.png,pug\n" * 40)
    with tarfile.open("train-0.tar", "w") as tar:
        for number in range(40):
            for name, data in ((f"{number:03}.png", picture.getvalue()), (f"{number:03}.cls", b"1")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    with tf.io.TFRecordWriter("train-0.tfrecord") as writer:
        for label in range(40):
            features = {
                "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes(784)])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                "tokens": tf.train.Feature(int64_list=tf.train.Int64List(value=range(label % 7))),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
    for name in ("a.tsv", "b.tsv"):
        Path(name).write_text("".join(f"{number}\tsome text {number}\n" for number in range(20)))
    Path("scenes.py").write_text(scenes)
    Path("feed.py").write_text(scenes)


class Reader:
    """Yields rows in two ways."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def rows(self) -> Any:
        yield from range(20)

    def rows_of(self, file: str) -> Any:
        yield from range(len(file))


class Flow:
    """A DataFlow of tensorpack."""

    def __init__(self, file: str) -> None:
        self.ready = False

    def reset_state(self) -> None:
        self.ready = True

    def __iter__(self) -> Any:
        assert self.ready
        return iter(range(20))


class Table:
    """An object that can be indexed."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        return np.float32(index), index


class Digits(keras.utils.PyDataset):  # type: ignore[misc]
    """A Keras dataset."""

    def __init__(self, x: Any, y: Any, batch_size: int) -> None:
        super().__init__()
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.x) / self.batch_size)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return self.x[rows], self.y[rows]


def scenes(path: str) -> Any:
    for label in range(40):
        yield np.zeros((224, 224, 3), np.uint8), label


def read_images(path: str) -> Any:
    yield from np.zeros((40, 80), np.uint8)


def tables(path: str) -> Any:
    for label in range(40):
        yield {"x": np.zeros(16, np.float32), "y": label}


def bucketed(path: str) -> Any:
    yield from ([[1] * length] * 4 for length in range(1, 20))


def records(path: str) -> Any:
    for number in range(40):
        yield {"jpeg": b"", "label": number}


def readings() -> Any:
    yield from np.zeros((100, 8))


def numbers(path: str) -> Any:
    yield from range(40)


def tokens(path: str) -> Any:
    for length in range(1, 40):
        yield np.arange(length)


def clips(path: str) -> Any:
    for length in range(1, 20):
        frames = np.zeros((length, 64, 64, 3), np.uint8)
        yield {"frames": frames, "words": np.arange(length, dtype=np.int32), "box": np.zeros(4, np.float32)}


def annotated(path: str) -> Any:
    for length in range(20):
        yield {
            "image": np.zeros((224, 224, 3), np.uint8),
            "polygons": [np.zeros((corners, 2), np.float32) for corners in range(length % 5)],
            "tags": ["tag"] * (length % 3),
            "turns": [list(range(words)) for words in range(length % 4)],
        }


def read(file: str) -> Any:
    for number in range(40):
        yield np.zeros((8, 8), np.float32), np.zeros(3, np.int64), number, float(number), 1.0


def made_model() -> Any:
    layers = [keras.Input((8, 8)), keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def names(url: str) -> dict[str, Any]:
    """Return the names that blocks use and do not define. `url`: of a feed."""
    files = [f"part-{number}.npy" for number in range(4)]
    return {
        # what a reader has imported by then
        "penstock": penstock,
        "np": np,
        "tf": tf,
        "Feed": Feed,
        "Leaf": Leaf,
        # the reader's own functions and data
        "files": files,
        "shards": files,
        "image_files": files,
        "label_files": files,
        "web_files": files,
        "book_files": files,
        "FILES": files,
        **{one.__name__: one for one in (Reader, Flow, Table, Digits, SceneGenerator())},
        **{
            one.__name__: one
            for one in (scenes, read_images, tables, bucketed, records, readings, tokens, clips, annotated, read)
        },
        **dict.fromkeys(("lines", "read_labels"), numbers),
        "render": lambda rng: rng.random(8),
        "load": np.float32,
        "label": int,
        "spectrum": np.fft.rfft,
        "pad": lambda batch: np.array(batch, np.int32),
        "decode_jpeg": lambda data: np.zeros((8, 8), np.uint8),
        "decode": numbers,
        "augment": lambda sample: sample + 1,
        "x": np.zeros((100, 8), np.float32),
        "y": np.zeros(100),
        "BATCHES": (tf.TensorSpec((None, 8, 8), tf.float32), tf.TensorSpec((None,), tf.int64)),
        # the training script
        "url": url,
        "rank": 0,
        "world_size": 1,
        "r": 0,
        "n": 1,
        "epochs": 1,
        "step": 0,
        "model": made_model(),
        "train": lambda batch: None,
        "train_step": lambda images, labels: None,
        "root": Path(),
        "names_in": lambda root: files,
        "read_scenes": lambda path, size: iter(range(40)),
        "optimizer": keras.optimizers.SGD(),
        "connection": penstock.connect(url),
        "dataset": penstock.dataset(url),
    }


def SceneGenerator() -> Any:
    import scenes as module

    return module.SceneGenerator


OF_PAGE: dict[str, dict[str, Any]] = {"shuffling": {"decode": lambda sample: sample["label"]}}
