"""The description of a data file, made before any sample is read for the summary."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import files as fs

if TYPE_CHECKING:
    from .features import FixedLen, FixedLenSequence, VarLen


@dataclass(frozen=True, slots=True)
class Column:
    """A part of a file that can be a leaf: a dataset, an array, a column, a feature, or the files of an extension.

    Attributes:
        name: its name in the file.
        leaf: the proposed name of the leaf; by default the same name.
        storage: how the file stores it, in words; or "".
        image: whether it holds encoded images, which `decode=` can turn into arrays.
    """

    name: str
    leaf: str = ""
    storage: str = ""
    image: bool = False

    def __post_init__(self) -> None:
        if not self.leaf:
            object.__setattr__(self, "leaf", self.name)


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a data file.

    Attributes:
        columns: the columns that are proposed as leaves, in the order of the file.
        left_out: why each other column is left out, by name.
        facts: other facts about the file, a line each.
        rows: the number of samples; None if it is unknown.
        features: the features of a TFRecord file, by name.
        names_leaves: False if the file is one array, whose rows are the samples.
        kind: the kind of file, if the format's name does not say it; or "".
        options: the options of the format that serving the columns takes, by name.
        needs_leaves: False if a feed without `leaves` serves the same columns.
    """

    columns: tuple[Column, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    facts: tuple[str, ...] = ()
    rows: int | None = None
    features: dict[str, FixedLen | FixedLenSequence | VarLen] | None = None
    names_leaves: bool = True
    kind: str = ""
    options: dict[str, object] = field(default_factory=dict)
    needs_leaves: bool = True


def leaf_names(names: Iterable[str]) -> dict[str, str]:
    """Return a short name for each column: the part after the last slash, unless two columns share it.

    In `--leaf NAME=DATASET` the name ends at the first equals sign, so short names have none.
    """
    names = list(names)
    short = {name: name.strip("/").rpartition("/")[2].replace("=", "_") or name for name in names}
    often = Counter(short.values())
    return {name: short[name] if often[short[name]] == 1 else name.replace("=", "_") for name in names}


def together(lengths: dict[str, int], nbytes: dict[str, int]) -> int | None:
    """Return the length that most columns share; in a tie, the length whose columns have the most bytes.

    Columns of length 0 do not count. Return None if there are no others.
    """
    often = Counter(length for length in lengths.values() if length)
    weight: Counter[int] = Counter()
    for name, length in lengths.items():
        weight[length] += nbytes[name]
    return max(often, key=lambda length: (often[length], weight[length]), default=None)


def other_length(length: int, wanted: int) -> str:
    """Return why a column of another length is left out."""
    return f"has {length} rows, not {wanted}" if length else "has no rows"


def local_size(file: str) -> int | None:
    """Return the size of a local file in bytes; None for a URL."""
    return None if fs.is_url(file) else os.stat(file).st_size
