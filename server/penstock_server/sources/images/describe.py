"""Describes folders of images: classes, sizes and modes."""

from __future__ import annotations

import os
from collections import Counter

from ..description import Column, Description
from .listing import Listing, list_images, other_files
from .pixels import header_of

_HEADERS = 64
"""Images whose headers are read, spread over the folder."""

_CLASSES = 12
"""Classes that are named."""

_KINDS = {"annotations", "images", "imgs", "labels", "masks", "data"}
"""Names of folders that are no classes, in lower case."""

_SIZE = (224, 224)
"""The size that is proposed for images of different sizes: that of ImageNet's models."""

_MODES = {
    "1": "black and white",
    "L": "grey",
    "LA": "grey with transparency",
    "RGB": "colour",
    "RGBA": "colour with transparency",
    "P": "palette",
    "I;16": "grey of 16 bits",
}


def describe(folder: str) -> Description:
    """Describe a folder of images.

    Raises:
        ImportError: Pillow is missing.
        OSError: the folder cannot be read, or no image in it.
        ValueError: it has no images; the message says what to do.
    """
    listing = list_images(folder)
    sizes: Counter[tuple[int, int]] = Counter()
    modes: Counter[str] = Counter()
    unreadable = []
    count = min(_HEADERS, len(listing))
    for place in range(count):
        try:
            size, mode = header_of(listing.path(place * len(listing) // count))
        except OSError as error:
            unreadable.append(str(error))
            continue
        sizes[size] += 1
        modes[mode] += 1
    if not sizes:
        raise OSError(unreadable[0])
    deep = any(mode.startswith("I") for mode in modes)
    options: dict[str, object] = {"mode": "I;16"} if deep else {}
    if len(sizes) > 1:
        options["size"] = _SIZE
    columns = [Column("image", storage=_sizes(sizes))]
    if listing.classes:
        columns.append(Column("label", storage="the class, by its place among the sorted folders"))
    facts = [*_classes(listing), f"pixels as in the files: {_modes(modes)}"]
    if {name.lower() for name in listing.classes} <= _KINDS and listing.classes:
        kinds = [name for name, count in zip(listing.classes, listing.counts, strict=True) if count]
        facts.append(
            f"these look like kinds of files, not like classes: give the folder of images, such as "
            f"{os.path.join(folder, kinds[0])}, or a CSV file with a column of paths"
        )
    if listing.loose:
        facts.append(f"left out: images beside the folders of the classes, {listing.loose}")
    if listing.others:
        facts.append(f"left out: files that are no images, {other_files(listing.others)}")
    facts += [f"damaged: {one}" for one in unreadable[:3]]
    return Description(tuple(columns), facts=tuple(facts), rows=len(listing), options=options, needs_leaves=False)


def _classes(listing: Listing) -> list[str]:
    if not listing.classes:
        return ["no folders inside, so no labels"]
    pairs = [f"{name} ({count})" for name, count in zip(listing.classes, listing.counts, strict=True)]
    more = f" and {len(pairs) - _CLASSES} more" if len(pairs) > _CLASSES else ""
    head = f"{len(pairs)} classes, one for each folder" if len(pairs) > 1 else "one class, as there is one folder"
    found = [f"{head}: {', '.join(pairs[:_CLASSES])}{more}"]
    empty = [name for name, count in zip(listing.classes, listing.counts, strict=True) if not count]
    if empty:
        found.append(f"classes without images, which keep their labels: {', '.join(empty[:_CLASSES])}")
    return found


def _sizes(sizes: Counter[tuple[int, int]]) -> str:
    if len(sizes) == 1:
        height, width = next(iter(sizes))
        return f"all {height} x {width} (height x width)" if sizes.total() > 1 else f"{height} x {width}"
    heights, widths = zip(*sizes, strict=True)
    return f"{_range(heights)} high, {_range(widths)} wide"


def _range(values: tuple[int, ...]) -> str:
    return f"{min(values)} to {max(values)}" if len({*values}) > 1 else str(values[0])


def _modes(modes: Counter[str]) -> str:
    return ", ".join(f"{count} {_MODES.get(mode, mode)}" for mode, count in modes.most_common())
