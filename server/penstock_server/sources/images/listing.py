"""Lists the images of a folder, and divides them into those to train on and those to validate with.

Each worker lists the folder for itself, so the order follows from names alone. A list of a million images takes some
30 MB.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .options import ENDINGS

_PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}
"""Names of folders that hold a part of a dataset each, not a class."""


@dataclass(frozen=True, slots=True)
class Part:
    """Which of a folder's images are served.

    Attributes:
        validation: the share of each class that is set aside for validation, 0 to 1.
        name: "train" or "validation"; "" if nothing is set aside.
        seed: decides which images these are.
    """

    validation: float = 0.0
    name: str = ""
    seed: int = 0

    def choose(self, names: Sequence[str]) -> Sequence[str]:
        """Return those names of a class that belong to this part, in the same order."""
        if not self.name:
            return names
        ranked = sorted(names, key=self._rank)
        aside = set(ranked[: round(self.validation * len(names))])
        return [name for name in names if (name in aside) is (self.name == "validation")]

    def _rank(self, name: str) -> bytes:
        return hashlib.blake2b(os.fsencode(f"{self.seed}/{name}"), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Listing:
    """The images of a folder.

    Attributes:
        classes: the names of the subfolders, sorted; empty if the images lie in the folder itself.
        counts: the number of images of each class; of all images if there are no classes.
        others: how many other files there are, by ending. Their names do not begin with a dot.
        loose: how many images lie beside the subfolders, and belong to no class.
    """

    folder: str
    classes: tuple[str, ...]
    counts: tuple[int, ...]
    others: Counter[str]
    loose: int
    _names: bytes = field(repr=False)
    _ends: npt.NDArray[np.int64] = field(repr=False)
    _class_ends: npt.NDArray[np.int64] = field(repr=False)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def digest(self) -> str:
        """A digest of the images' names, and of their classes."""
        found = hashlib.blake2b(self._names, digest_size=16)
        found.update(self._ends.tobytes())
        found.update(self._class_ends.tobytes())
        return found.hexdigest()

    def path(self, index: int) -> str:
        """Return the path of an image."""
        begin = self._ends[index - 1] if index else 0
        return os.path.join(self.folder, os.fsdecode(self._names[begin : self._ends[index]]))

    def label(self, index: int) -> int:
        """Return the number of an image's class."""
        return int(np.searchsorted(self._class_ends, index, "right"))


def list_images(folder: str, part: Part = Part()) -> Listing:
    """List the images of a folder: those of its subfolders, at any depth, or those in the folder itself if no subfolder
    has any. Files and folders whose names begin with a dot are left out.

    Raises:
        OSError: the folder is missing or cannot be read.
        ValueError: it has no images, or its subfolders are parts of a dataset; the message says what to do.
    """
    others: Counter[str] = Counter()
    loose: list[str] = []
    by_class: dict[str, list[str]] = {}
    for entry in sorted(_entries(folder), key=lambda entry: entry.name):
        if entry.is_dir():
            by_class[entry.name] = list(_walk(folder, entry.name, others, ()))
        elif _is_image(entry.name, others):
            loose.append(entry.name)
    if not any(by_class.values()):
        by_class = {"": loose}
        loose = []
    elif {name.lower() for name in by_class} <= _PARTS:
        first = next(iter(by_class))
        raise ValueError(
            f"the folders in {folder} look like parts of a dataset, not like classes ({', '.join(by_class)}): give one "
            f"of them, such as {os.path.join(folder, first)}"
        )
    if not any(by_class.values()):
        seen = f" It has {other_files(others)}." if others else ""
        raise ValueError(f"{folder} has no images, that is, no files that end in {', '.join(ENDINGS)}.{seen}")
    chosen = {name: [os.fsencode(one) for one in part.choose(sorted(names))] for name, names in by_class.items()}
    if not any(chosen.values()):
        raise ValueError(f"{folder}: no class has enough images for validation={part.validation}: give a larger share")
    counts = tuple(map(len, chosen.values()))
    names = [name for some in chosen.values() for name in some]
    return Listing(
        folder,
        () if "" in by_class else tuple(by_class),
        counts,
        others,
        len(loose),
        b"".join(names),
        np.cumsum([len(name) for name in names]),
        np.cumsum(counts),
    )


def other_files(others: Counter[str]) -> str:
    """Return numbers of files by ending as text, such as "3 .txt and 1 .csv"."""
    return " and ".join(f"{count} {ending}" for ending, count in others.most_common(4))


def _walk(folder: str, inside: str, others: Counter[str], above: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths of the images in a subfolder, relative to `folder`. Links are followed, but not in circles."""
    here = os.path.join(folder, inside)
    real = os.path.realpath(here)
    if real in above:
        return
    for entry in _entries(here):
        if entry.is_dir():
            yield from _walk(folder, os.path.join(inside, entry.name), others, (*above, real))
        elif _is_image(entry.name, others):
            yield os.path.join(inside, entry.name)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder whose names do not begin with a dot.

    Raises:
        OSError: it is missing, is no folder, or cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except FileNotFoundError:
        where = "" if os.path.isabs(folder) else f" in {os.getcwd()}"
        raise FileNotFoundError(f"{folder}: no such folder{where}") from None
    except OSError as error:
        raise OSError(f"{folder} cannot be listed: {error.strerror}") from None


def _is_image(name: str, others: Counter[str]) -> bool:
    """Return whether a file is an image by its name; otherwise count its ending."""
    if name.lower().endswith(ENDINGS):
        return True
    others[os.path.splitext(name)[1].lower() or "without an ending"] += 1
    return False
