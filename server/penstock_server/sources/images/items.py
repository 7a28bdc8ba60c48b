"""The images of a folder by index: an indexable object, so any worker can make any batch, and the order is exact."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reader import ReadAtImport
from ..structure import Columns
from .decoder import ImageDecoder
from .listing import Listing, Part, list_images

COLUMNS = ("image", "label", "path")
"""The columns: pixels, the number of the class (int32), and the path inside the folder (text)."""


class FolderImages(ReadAtImport):
    """The images of a folder, and their classes.

    The folder is listed at the first use.

    Args:
        folder: the folder's path.
        leaves: names of `COLUMNS` in the structure of a sample, as for `Columns`; by default ("image", "label"), or
            "image" if the folder has no subfolders.
        part: which of the images are served.
        decoder: reads the images.
        same_size: whether an image whose size differs from that of the first one is an error.
    """

    def __init__(
        self,
        folder: str,
        leaves: Any,
        part: Part,
        decoder: ImageDecoder,
        *,
        same_size: bool,
    ) -> None:
        self._folder = folder
        self._leaves = leaves
        self._part = part
        self._decoder = decoder
        self._same_size = same_size and decoder.size is None

    @cached_property
    def listing(self) -> Listing:
        """The list of the images.

        Raises:
            OSError, ValueError: see `list_images`.
        """
        return list_images(self._folder, self._part)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label."""
        return self.listing.classes

    @property
    def contents(self) -> str:
        """See `ReadAtImport`: a digest of the names of all images."""
        return self.listing.digest

    @property
    def labels(self) -> npt.NDArray[np.int32]:
        """The labels of all images, by index. No image is read."""
        return np.repeat(np.arange(len(self.listing.counts), dtype=np.int32), self.listing.counts)

    def __len__(self) -> int:
        return len(self.listing)

    def __getitem__(self, index: int) -> Any:
        """Return the sample of an image.

        Raises:
            ImportError, OSError: see `ImageDecoder`.
            ValueError: see there; or the image has another size than the first one.
        """
        index = range(len(self))[index]
        columns, path = self._columns, self.listing.path(index)
        return columns.maker()([self._value(name, index, path) for name in columns.names])

    @cached_property
    def _columns(self) -> Columns:
        leaves = self._leaves
        if leaves is None:
            leaves = ("image", "label") if self.classes else "image"
        columns = Columns(leaves, "column of the folder")
        for name in columns.names:
            if name not in COLUMNS:
                raise ValueError(f"a folder of images has the columns {', '.join(COLUMNS)}, got {name!r} in leaves=")
        if "label" in columns.names and not self.classes:
            raise ValueError(
                f"{self._folder} has no subfolders, so its images have no labels: leave 'label' out, or put the images "
                "of each class into a folder"
            )
        return columns

    def _value(self, name: str, index: int, path: str) -> Any:
        if name == "label":
            return np.int32(self.listing.label(index))
        if name == "path":
            return os.path.relpath(path, self._folder)
        pixels = self._decoder.read(path)
        if self._same_size and pixels.shape != self._first[1]:
            first, (first_height, first_width, _) = self._first
            height, width, _ = pixels.shape
            raise ValueError(
                f"{path} is {height} x {width} pixels (height x width), and {first} is {first_height} x "
                f"{first_width}: give a size for all, such as size=(224, 224), or --size 224x224"
            )
        return pixels

    @cached_property
    def _first(self) -> tuple[str, tuple[int, ...]]:
        """The path and the shape of the first image that can be read. With on_error="skip" others are left out."""
        for index in range(len(self) - 1):
            path = self.listing.path(index)
            with suppress(OSError, ValueError):
                return path, self._decoder.read(path).shape
        path = self.listing.path(len(self) - 1)
        return path, self._decoder.read(path).shape
