"""Describes CSV files: the kinds of their columns, and which of them hold paths of images, or classes."""

from __future__ import annotations

import os
import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..description import Column, Description, leaf_names
from ..images.options import ENDINGS
from ..images.pixels import header_of
from .patterns import matches
from .table import Table, read_table

_LEAVES = 100
"""Columns that are leaves, at most."""

_GROUP = 8
"""Columns with the same name and a number, such as pixel0, that are proposed as one array."""

_LOOKED_AT = 64
_CLASSES = 1000
_ROWS = 100_000
"""Rows that are looked at, at most."""

_SIZE = (224, 224)


_KINDS_OF_TEXT = {
    r"[-+]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?": ", as numbers have commas between thousands: write them without",
    r"[-+]?[0-9]+,[0-9]+": ", as numbers have a decimal comma: write them with a point",
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9:.]+(Z|[+-][0-9:]+)?)?": (
        ", as it holds times: a transform= can make numbers of them, or write seconds since 1970"
    ),
}
"""What columns of text hold that are meant as numbers, by the form of a cell."""


def describe(file: str) -> Description:
    """Describe a CSV file.

    Raises:
        OSError, ValueError: it cannot be read; the message says what to do.
    """
    table = read_table(file, most_rows=_ROWS)
    options: dict[str, object] = {}
    left_out: dict[str, str] = {}
    columns: list[Column] = []
    numbered: list[str] = []
    try:
        names, patterns = _grouped(table.names)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    short = leaf_names([*names, *patterns])
    for name in names:
        try:
            values = table.values(name)
        except ValueError as error:
            left_out[name] = str(error).removeprefix(f"{table.file}: ")
            continue
        storage = ""
        if not isinstance(values, np.ndarray):
            distinct = len({*values})
            if sizes := _sizes(table, name):
                storage = "paths of images"
                options["images"] = name
                if len(sizes) > 1:
                    options["size"] = _SIZE
            elif why := _looks_like(values):
                storage = f"text{why}"
            elif distinct <= min(_CLASSES, table.rows // 2):
                storage = f"text of {distinct} values, which become numbers in their sorted order"
                numbered.append(name)
        columns.append(Column(name, short[name], storage))
    if numbered:
        options["classes"] = tuple(numbered) if len(numbered) > 1 else numbered[0]
    for pattern, count in patterns.items():
        columns.append(Column(pattern, pattern.removesuffix("*"), f"{count} columns as one array"))
    more = table.rows == _ROWS
    facts = (f"only the first {_ROWS} rows were looked at",) if more else ()
    return Description(tuple(columns), left_out, facts, None if more else table.rows, options=options)


def _grouped(names: tuple[str, ...]) -> tuple[list[str], dict[str, int]]:
    """Return the names that stay single, and a pattern for each group of numbered names, with their number.

    Raises:
        ValueError: too many names stay single.
    """
    groups = Counter(name.rstrip(string.digits) for name in names if name[-1:].isdigit())
    patterns = {f"{start}*": count for start, count in groups.items() if start and count >= _GROUP}
    patterns = {one: count for one, count in patterns.items() if sum(matches(name, one) for name in names) == count}
    single = [name for name in names if not any(matches(name, one) for one in patterns)]
    if len(single) > _LEAVES:
        raise ValueError(
            f"it has {len(single)} columns, too many for leaves: name those to serve, or a pattern with * for columns "
            'that are one array, such as Feed.from_csv(FILE, {"x": "pixel*", "y": "label"}, batch_size=32)'
        )
    return single, patterns


def _looks_like(cells: Sequence[str]) -> str:
    """Return what else the cells of a column of text can be, and what to do; "" for plain text."""
    some = [cell for cell in cells[:_LOOKED_AT] if cell]
    for pattern, what in _KINDS_OF_TEXT.items():
        if some and all(re.fullmatch(pattern, cell.strip()) for cell in some):
            return what
    return ""


def _sizes(table: Table, name: str) -> set[tuple[int, int]]:
    """Return the sizes of the images that a column names; none if its cells are not the paths of images."""
    cells = table.columns[name]
    step = max(1, len(cells) // _LOOKED_AT)
    folder = os.path.dirname(table.file)
    sizes = set()
    for cell in cells[::step][:_LOOKED_AT]:
        if not cell.lower().endswith(ENDINGS):
            return set()
        try:
            sizes.add(header_of(os.path.join(folder, cell))[0])
        except (OSError, ImportError):
            continue
    return sizes
