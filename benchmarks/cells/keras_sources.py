"""Sources of people who use Keras: whole batches by number."""

import keras
import numpy as np
from sources import BATCH, SAMPLES, sample, stacked


class Shuffled(keras.utils.PyDataset):
    """Shuffles its rows in `on_epoch_end`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.order = np.arange(SAMPLES)

    def __len__(self):
        return SAMPLES // BATCH

    def __getitem__(self, number):
        rows = self.order[number * BATCH : (number + 1) * BATCH]
        return (stacked([sample(int(row)) for row in rows]),)

    def on_epoch_end(self):
        np.random.shuffle(self.order)


class Endless(keras.utils.PyDataset):
    """Has a batch for any number: its `num_batches` is None."""

    @property
    def num_batches(self):
        return None

    def __getitem__(self, number):
        return (stacked([sample(number * BATCH + row) for row in range(BATCH)]),)
