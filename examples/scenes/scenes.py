"""A data class such as many projects have. It knows nothing about Penstock, and needs no change for it.

Its generator never ends: it reads its HDF5 files again and again, in a new order each time, and crops at random.
"""

import random

import h5py
import numpy as np


class SceneGenerator:
    def __init__(self, files, batch_size=8, size=24):
        self.files = files
        self.batch_size = batch_size
        self.size = size
        random.shuffle(self.files)

    def crop(self, image):
        top, left = np.random.randint(0, image.shape[0] - self.size, 2)
        return image[top : top + self.size, left : left + self.size].astype("float32") / 255

    def generate_data(self):
        while True:
            for path in self.files:
                with h5py.File(path) as file:
                    images, labels = file["images"], file["labels"]
                    rows = np.sort(np.random.choice(len(images), self.batch_size, replace=False))
                    yield np.stack([self.crop(image) for image in images[rows]]), labels[rows]
            random.shuffle(self.files)
