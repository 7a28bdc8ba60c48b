"""Train on `SceneGenerator`, in this process or with Penstock. Only one line differs.

python prepare.py /tmp/scenes
SCENES_DIR=/tmp/scenes python train.py              # from_generator: the class runs in the trainer
SCENES_DIR=/tmp/scenes python train.py --penstock   # the class runs in worker processes
"""

import sys

import keras
import tensorflow as tf
from feed import FILES
from scenes import SceneGenerator

import penstock

BATCHES = (tf.TensorSpec((None, 24, 24, 1), tf.float32), tf.TensorSpec((None,), tf.int64))


def main():
    if "--penstock" in sys.argv:
        dataset = penstock.dataset("feed.py:feed", workers=2)
    else:
        dataset = tf.data.Dataset.from_generator(SceneGenerator(FILES).generate_data, output_signature=BATCHES)

    model = keras.Sequential([keras.Input((24, 24, 1)), keras.layers.Flatten(), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    history = model.fit(dataset, steps_per_epoch=30, epochs=2, verbose=0, shuffle=False).history
    print(f"accuracy {history['accuracy'][-1]:.2f}")


if __name__ == "__main__":
    main()
