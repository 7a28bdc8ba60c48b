"""TFRecord files as a feed. The workers read them without TensorFlow.

    python tfrecord.py

Writes two compressed files to the current directory with TensorFlow, and reads one epoch of them.
"""

import numpy as np

import penstock
from penstock_server import Feed, FixedLen

feed = Feed.from_tfrecord(
    "digits-*.tfrecord",
    {
        "image": FixedLen((8, 8), "bytes", decode="uint8"),  # as tf.io.decode_raw(image, tf.uint8) does
        "label": FixedLen((), "int64"),
    },
    batch_size=32,
    shuffle=1000,
    seed=7,
)


def write(path, count):
    """Write random images and labels as GZIP-compressed Examples."""
    import tensorflow as tf  # here, so that workers do not import it

    rng = np.random.default_rng(0)
    with tf.io.TFRecordWriter(path, "GZIP") as writer:
        for _ in range(count):
            image, label = rng.integers(0, 17, (8, 8), dtype=np.uint8), rng.integers(0, 10)
            feature = {
                "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image.tobytes()])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


if __name__ == "__main__":
    for number in range(2):
        write(f"digits-{number}.tfrecord", 1000)
    with penstock.connect(f"{__file__}:feed", workers=2) as connection:
        samples = sum(len(batch["label"]) for batch in connection.batches())
    print(f"{samples} samples of {connection.element_spec}")
