"""Train a small network on the digits that a Penstock daemon serves.

    python train.py tcp://127.0.0.1:5555

Exits with 0 if more than 97 % of the test digits are classified correctly, otherwise with 1.
"""

import argparse
import sys
import time

import keras
from keras import layers

import penstock
from penstock.keras import Feeding


def network():
    """Return a convolutional network with about 190,000 weights: images (n, 8, 8, 1) to logits (n, 10)."""
    model = keras.Sequential([keras.Input((8, 8, 1))])
    for filters in (32, 64, 64):
        model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization())
        model.add(layers.ReLU())
    model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dropout(0.4))
    model.add(layers.Dense(128, activation="relu"))
    model.add(layers.Dense(10))
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="URL of the daemon, without a feed's name")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="for the initial weights of the network")
    options = parser.parse_args()

    keras.utils.set_random_seed(options.seed)
    model = network()
    # The learning rate falls to zero, so that the last epochs have about the same accuracy.
    rate = keras.callbacks.LearningRateScheduler(lambda epoch: 2e-3 * (1 - epoch / options.epochs))

    # Training needs only a dataset. The connection is for the statistics. Feeding shows how long training waits for
    # data, and says at the end what limits it.
    val = penstock.dataset(f"{options.url}/val")
    with penstock.connect(f"{options.url}/train") as train:
        start = time.perf_counter()
        model.fit(
            train.dataset(),
            epochs=options.epochs,
            validation_data=val,
            callbacks=[rate, Feeding()],
            shuffle=False,  # the feed shuffles; Keras would warn that it cannot
        )
        seconds = time.perf_counter() - start
        stats = train.stats()

    _, accuracy = model.evaluate(val, verbose=0)
    print(f"test accuracy           {accuracy:.4f}")
    print(f"batches per second      {stats['batches'] / seconds:.0f}")
    print(f"time to first batch     {stats['first_batch_seconds']:.3f} s")
    return 0 if accuracy > 0.97 else 1


if __name__ == "__main__":
    sys.exit(main())
