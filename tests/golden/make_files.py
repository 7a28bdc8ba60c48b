"""Writes the data files of feeds.py: `python make_files.py` in this folder. They are recorded, so that every stream
reads the same bytes whatever the versions of h5py, pyarrow and TensorFlow. Never write a recorded file again."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import tensorflow as tf
import zarr
from PIL import Image
from pyarrow import parquet

ROWS = 100
FILES = Path(__file__).parent / "files"


def example(i: int) -> bytes:
    features = {
        "id": tf.train.Feature(int64_list=tf.train.Int64List(value=[i])),
        "more": tf.train.Feature(int64_list=tf.train.Int64List(value=range(i % 6))),
    }
    if i % 5:
        features["x"] = tf.train.Feature(float_list=tf.train.FloatList(value=[i, i + 0.25, i + 0.5]))
    whole: bytes = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
    return whole


def array_file(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def main() -> None:
    """Write all files."""
    if FILES.exists():
        sys.exit(f"{FILES} exists: give new files other names, and write only these")
    FILES.mkdir()
    label = np.arange(ROWS, dtype="int64")
    image = (np.arange(ROWS * 12) % 251).astype("uint8").reshape(ROWS, 3, 4)
    with h5py.File(FILES / "rows.h5", "w") as h5:
        h5.create_dataset("image", data=image, chunks=(4, 3, 4), compression="gzip")
        h5.create_dataset("label", data=label)
    table = pa.table({"label": label, "text": [f"row {i}" for i in range(ROWS)]})
    parquet.write_table(table, FILES / "rows.parquet", row_group_size=12)
    with pa.ipc.new_stream(str(FILES / "rows.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=12)
    (FILES / "rows.csv").write_text("label,text\n" + "".join(f"{i},row {i}\n" for i in range(ROWS)))
    lines = [json.dumps({"label": i, "text": f"row {i}"}) for i in range(ROWS)]
    (FILES / "rows.jsonl").write_text("\n".join(lines) + "\n")
    store = zarr.open_group(store=str(FILES / "rows.zarr"), mode="w")
    for name, rows in {"image": image, "label": label}.items():
        made = store.create_array(name, shape=rows.shape, dtype=rows.dtype, chunks=(20, *rows.shape[1:]))
        made[:] = rows
    for i in range(20):
        path = FILES / "classes" / "ab"[i % 2] / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((3, 4, 3), i, np.uint8)).save(path)
    np.save(FILES / "image.npy", image)
    np.save(FILES / "label.npy", label)
    np.savez_compressed(FILES / "rows.npz", image=image, label=label)
    with tf.io.TFRecordWriter(str(FILES / "rows.tfrecord")) as writer:
        for i in range(ROWS):
            writer.write(example(i))
    for first, name in enumerate("ab"):
        with tarfile.open(FILES / f"{name}.tar", "w") as tar:
            for i in range(first, 20, 2):
                for extension, data in (("image.npy", array_file(image[i])), ("cls", str(i).encode())):
                    info = tarfile.TarInfo(f"{i:04}.{extension}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    main()
