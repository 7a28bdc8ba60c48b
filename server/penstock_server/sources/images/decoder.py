"""`ImageDecoder`: turns the bytes of an image file into an array."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from typing import Any

from ..names_on_disk import on_disk_as
from .options import checked_pixels


@on_disk_as("penstock_server.ImageDecoder")
@dataclass(frozen=True)
class ImageDecoder:
    """Turns the bytes of an image file, such as JPEG or PNG, into an array. It can be pickled, and needs Pillow.

    It is a function for `decode=` of a feed of files, and for transforms of your own: `decode={"jpg": ImageDecoder()}`.

    Attributes:
        size: (height, width) of the array in pixels, to which images are resized with bilinear interpolation; by
            default that of the image. Large JPEG files are decoded at a half, a quarter or an eighth of their size if
            that is enough.
        mode: "RGB", "RGBA", "L" (grey) or "I;16" (grey of 16 bits). All images are converted to it.
        resize: what `size` does to images of another shape: "stretch", "crop" (the middle) or "pad" (with black).
        upright: turn images as their EXIF data say, as viewers do.

    Raises:
        TypeError, ValueError: an option means nothing.
    """

    size: tuple[int, int] | None = None
    mode: str = "RGB"
    resize: str = "stretch"
    upright: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", checked_pixels(self.size, self.mode, self.resize, self.upright))

    def __call__(self, data: bytes) -> Any:
        """Return an image as an array [height, width, channels] of uint8, or of uint16 for mode "I;16".

        Raises:
            ImportError: Pillow is missing.
            OSError: the bytes are no image, are damaged, or claim more than 100 million pixels.
            ValueError: the image has too many, or too few, bits for `mode`.
        """
        return self._read(io.BytesIO(data), f"an image of {len(data)} bytes")

    def read(self, file: str) -> Any:
        """Return an image file as an array, as `__call__` does; errors name the file."""
        try:
            with open(file, "rb") as opened:
                return self._read(opened, file)
        except FileNotFoundError:
            where = "" if os.path.isabs(file) else f" in {os.getcwd()}"
            raise FileNotFoundError(f"{file}: no such file{where}") from None

    def _read(self, source: io.BytesIO | io.BufferedReader, name: str) -> Any:
        from .pixels import read_pixels

        return read_pixels(source, name, self.mode, self.size, self.resize, upright=self.upright)
