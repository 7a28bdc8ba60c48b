"""Writes the contact sheet of a summary, and describes it in a line."""

from __future__ import annotations

from pathlib import Path

from penstock_proto import StartError

from ..leaves.contact_sheet import contact_sheet, png
from ..leaves.leaf_report import is_image
from ..leaves.summary import Summary


def write_sheet(path: Path, summary: Summary) -> str:
    """Write the images of some samples as a PNG file, and return a line that says what it shows.

    Raises:
        StartError: no leaf is an image, or the file cannot be written.
    """
    found = {name: leaf.tiles for name, leaf in summary.leaves.items() if is_image(leaf)}
    if not found:
        raise StartError(
            f"{path} was not written, as no leaf is an image: uint8, uint16 or floats of shape [height, width] or "
            "[height, width, 1 | 3 | 4], or encoded images where Pillow is installed"
        )
    picture, columns = contact_sheet(list(found.values()))
    try:
        path.write_bytes(png(picture))
    except OSError as error:
        raise StartError(f"cannot write {path}: {error.strerror or error}") from None
    count = min(len(tiles) for tiles in found.values())
    beside = f", {' beside '.join(found)}" if len(found) > 1 else f" of {next(iter(found))}"
    return f"{path}: {count} samples{beside}, {columns} to a row, {picture.shape[1]} x {picture.shape[0]} pixels"
