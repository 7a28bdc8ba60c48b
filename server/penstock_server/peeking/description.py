"""What the file of one format says about itself, before any sample is read."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..features import FixedLen, VarLen
from ..sources import files as fs


@dataclass(frozen=True, slots=True)
class Column:
    """A dataset, an array, a column, a feature or the files of an extension: what can be a leaf.

    Attributes:
        name: in the file.
        leaf: the name proposed for the leaf.
        storage: how the file stores it, for people; or "".
        image: whether it holds encoded images, which `decode=` can make arrays of.
    """

    name: str
    leaf: str
    storage: str = ""
    image: bool = False


@dataclass(frozen=True, slots=True)
class Description:
    """A data file.

    Attributes:
        kind: the format's name.
        constructor: that of `Feed` which reads it.
        columns: those that are proposed as leaves, in the order of the file.
        left_out: why others are not, by name.
        facts: what else there is to say about the file, a line each.
        rows: its samples; None if that is not known.
        features: the features of a TFRecord file, by name.
        names_leaves: False if the file is one array, whose rows are the samples.
    """

    kind: str
    constructor: str
    columns: tuple[Column, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    facts: tuple[str, ...] = ()
    rows: int | None = None
    features: dict[str, FixedLen | VarLen] | None = None
    names_leaves: bool = True


def leaf_names(names: Iterable[str]) -> dict[str, str]:
    """Return a short name for each column: what follows the last slash, unless two columns share that.

    `--leaf NAME=DATASET` ends the name at the first equals sign, so names have none.
    """
    names = list(names)
    short = {name: name.strip("/").rpartition("/")[2].replace("=", "_") or name for name in names}
    often = Counter(short.values())
    return {name: short[name] if often[short[name]] == 1 else name.replace("=", "_") for name in names}


def together(lengths: dict[str, int], nbytes: dict[str, int]) -> int | None:
    """Return the length that most columns share; of several such lengths that of the columns with the most bytes.

    Columns of length 0 do not count. None: there are no others.
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
    """Return the bytes of a local file, None of a URL."""
    return None if fs.is_url(file) else os.stat(file).st_size
