"""An unchanged Keras PyDataset in worker processes. Only the argument of `fit` changes.

python keras_dataset.py
"""

import keras
import numpy as np

import penstock
from penstock_server import Feed


class Digits(keras.utils.PyDataset):
    """Batches of image pairs, and whether the second image is the brighter one, in a new order in each epoch."""

    def __init__(self, samples, batch_size):
        super().__init__()
        self.images = np.random.default_rng(0).random((samples, 8, 8), np.float32)
        self.images *= np.linspace(0.5, 1, samples, dtype=np.float32)[:, None, None]
        self.pairs = np.random.default_rng(1).integers(samples, size=(samples, 2))
        self.batch_size = batch_size

    def __len__(self):
        return len(self.pairs) // self.batch_size

    def on_epoch_end(self):
        np.random.shuffle(self.pairs)  # Penstock seeds np.random, so all workers have the same order

    def __getitem__(self, index):
        left, right = self.pairs[index * self.batch_size : (index + 1) * self.batch_size].T
        brighter = self.images[right].mean((1, 2)) > self.images[left].mean((1, 2))
        return [self.images[left], self.images[right]], brighter.astype(np.float32)


feed = Feed(Digits(samples=6400, batch_size=32), batch_size=None)


def main():
    inputs = [keras.Input((8, 8)) for _ in range(2)]
    flat = [keras.layers.Flatten()(one) for one in inputs]
    output = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Concatenate()(flat))
    model = keras.Model(inputs, output)
    model.compile(keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"])
    # model.fit(Digits(samples=6400, batch_size=32), epochs=3) would read the same batches in this process.
    history = model.fit(penstock.dataset(f"{__file__}:feed", workers=2), epochs=3, shuffle=False, verbose=2)
    return history.history["accuracy"][-1]


if __name__ == "__main__":
    accuracy = main()
    assert accuracy > 0.9, accuracy
    print(f"accuracy {accuracy:.3f}")
