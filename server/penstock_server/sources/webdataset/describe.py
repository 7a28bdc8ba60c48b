"""Describes tar files in the layout of WebDataset: the extensions that their first samples have."""

from __future__ import annotations

import itertools
import tarfile
import time
import zlib
from collections import Counter
from contextlib import suppress

from .. import files as fs
from ..description import Column, Description
from ..image_encodings import encoding
from .reader import PICKLED, TOGETHER, decoded, infos, key_and_extension, tar_samples

_SAMPLES = 64
"""The most samples that are read to find the extensions."""

_SECONDS = 1.0
"""The longest time that is spent on these samples, and the longest time that is spent on counting samples."""

_PACKED = ("gz", "bz2", "xz", "zst", "lz4")

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
            words = f"{' or '.join(f'.{one}' for one in names)} files"
            if name.rpartition(".")[2] in _PACKED:
                words += ", compressed: served as they are, unless a function in decode= decompresses them"
            image = all(encoded[one] == often[one] for one in names)
            columns.append(Column(";".join(names), _leaf(names, groups), words, image))
    facts, rows = [], None
    if not fs.is_url(file):
        walk = _Walk(file)
        if walk.complete:
            rows = walk.samples
        elif walk.samples > count:
            facts.append(f"more than {walk.samples} samples")
        for extension, name in walk.apart.items():
            left_out[extension] = f"is not beside the other files of its samples, such as {name}. {TOGETHER}"
        columns = [column for column in columns if column.name not in walk.apart]
    if _has_dots(left_out, often, count):
        facts.append(
            "a sample's name ends at the first dot of a file's name (the rule of WebDataset): if each of these files "
            "should be a sample, write names without other dots"
        )
    facts.append(f"extensions as in its first {count} samples" if count > 1 else "extensions as in its first sample")
    return Description(tuple(columns), left_out, tuple(facts), rows)


def _has_dots(left_out: dict[str, str], often: Counter[str], count: int) -> bool:
    """Return whether extensions seem to come from names that should be those of samples."""
    dotted: Counter[str] = Counter(name.rpartition(".")[2] for name in often if "." in name)
    return any(
        dotted[name.rpartition(".")[2]] > 2 and "." in name and (name in left_out or count == 1) for name in often
    )


def _leaf(names: tuple[str, ...], groups: dict[str, tuple[str, ...]]) -> str:
    def short(names: tuple[str, ...]) -> str:
        if names[0].rpartition(".")[2] in _PACKED:
            return names[0].replace(".", "_")
        return "image" if names[0] in _IMAGES else _NAMES.get(names[0], names[0].partition(".")[0])

    mine = short(names)
    return mine if [short(others) for others in groups.values()].count(mine) == 1 else names[0]


class _Walk:
    """The headers of an archive, as far as they are read.

    Attributes:
        samples: the number of samples.
        complete: whether they are all.
        apart: names of files that are not beside the others of their sample, by extension: one for each.
    """

    def __init__(self, file: str) -> None:
        self.samples = 0
        self.complete = False
        self.apart: dict[str, str] = {}
        last, has = "", set[str]()  # the sample that is read, and its extensions
        before: dict[str, set[str]] = {}
        deadline = time.monotonic() + _SECONDS
        with suppress(OSError, tarfile.TarError, EOFError, zlib.error):  # the sampling reports damage
            for info in infos(file):
                found = key_and_extension(info)
                if found and found[0] != last:
                    if last:
                        before.setdefault(last, set()).update(has)
                    self.samples, last, has = self.samples + 1, found[0], set()
                if found:
                    has.add(found[1])
                    if last in before and found[1] not in before[last]:  # else it is a sample of the same name
                        self.apart.setdefault(found[1], info.name)
                if time.monotonic() > deadline:
                    return
            self.complete = True
