"""Describes tar files in the layout of WebDataset: the extensions that their first samples have."""

from __future__ import annotations

import itertools
import tarfile
import time
from collections import Counter

from .. import files as fs
from ..description import Column, Description
from ..image_encodings import encoding
from .reader import PICKLED, decoded, key_and_extension, tar_samples

_SAMPLES = 64
"""The most samples that are read to find the extensions."""

_SECONDS = 1.0
"""The longest time that is spent on these samples, and the longest time that is spent on counting samples."""

_NAMES = {"cls": "label", "txt": "text", "text": "text", "json": "meta"}
_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")


def describe(file: str) -> Description:
    """Describe a tar file by its first samples.

    Raises:
        OSError: the file cannot be read; the message names it.
        ValueError: the tar file holds a file twice.
    """
    often: Counter[str] = Counter()
    encoded: Counter[str] = Counter()
    alone: Counter[tuple[str, ...]] = Counter()  # the image extensions of each sample
    unread: dict[str, str] = {}  # why files cannot be decoded, by extension
    count = 0
    deadline = time.monotonic() + _SECONDS
    with fs.open_binary(file) as opened:
        for _, members in itertools.islice(tar_samples(file, opened, None), _SAMPLES):
            count += 1
            for name, data in members.items():
                if name not in unread and name.rpartition(".")[2] not in PICKLED:
                    try:
                        decoded(name, data)
                    except Exception as error:
                        unread[name] = (
                            f"cannot be decoded ({type(error).__name__}: {error}): give a function in decode="
                        )
                often[name] += 1
                encoded[name] += bool(encoding(data))
            alone[tuple(sorted(name for name in members if name in _IMAGES))] += 1
            if time.monotonic() > deadline:
                break
    groups: dict[str, tuple[str, ...]] = {name: (name,) for name in often}
    mixed = [name for name in often if name in _IMAGES]
    if len(mixed) > 1 and all(len(names) == 1 for names in alone):  # each sample has one image, of either format
        for name in mixed:
            del groups[name]
        groups = {mixed[0]: tuple(mixed), **groups}
    left_out: dict[str, str] = {}
    columns = []
    for name, names in groups.items():
        if name.rpartition(".")[2] in PICKLED:
            left_out[name] = "is a pickle, which runs any code when it is read: store .npy or .json instead"
        elif name in unread:
            left_out[name] = unread[name]
        elif sum(often[one] for one in names) < count:
            left_out[name] = f"is in only {often[name]} of {count} samples"
        else:
            words = " or ".join(f".{one}" for one in names)
            image = all(encoded[one] == often[one] for one in names)
            columns.append(Column(";".join(names), _leaf(names, groups), f"{words} files", image))
    facts, rows = _counted(file)
    facts.append(f"extensions as in its first {count} samples" if count > 1 else "extensions as in its first sample")
    return Description(tuple(columns), left_out, tuple(facts), rows)


def _leaf(names: tuple[str, ...], groups: dict[str, tuple[str, ...]]) -> str:
    def short(names: tuple[str, ...]) -> str:
        return "image" if names[0] in _IMAGES else _NAMES.get(names[0], names[0].partition(".")[0])

    mine = short(names)
    return mine if [short(others) for others in groups.values()].count(mine) == 1 else names[0]


def _counted(file: str) -> tuple[list[str], int | None]:
    """Return facts about the number of samples, and that number; None if it is unknown."""
    if fs.is_url(file):
        return [], None
    deadline = time.monotonic() + _SECONDS
    count, last = 0, ""
    try:
        with tarfile.open(file, "r:") as tar:
            for info in tar:
                found = key_and_extension(info)
                if found and found[0] != last:
                    count, last = count + 1, found[0]
                if time.monotonic() > deadline:
                    return [f"more than {count} samples"], None
    except tarfile.ReadError:  # the file is compressed, or damaged: the sampling reports that
        return [], None
    return [], count
