"""Describes .npy and .npz files: the arrays that share a length."""

from __future__ import annotations

import zipfile
from contextlib import ExitStack

from penstock_proto.status.figures import size

from .. import files as fs
from ..bounds import COLUMNS
from ..description import Column, Description, leaf_names, other_length, together
from .reader import Archive, NumpySource, is_npz

_LEAVES = 100
"""Arrays that are proposed as leaves, at most. If more of them share a length, they are hardly leaves."""


def describe(file: str) -> Description:
    """Describe a .npy or .npz file, by the headers of its arrays.

    Raises:
        OSError: the file cannot be read; the message names it.
        TypeError: the file is a single array that cannot be served.
        ValueError: too many arrays share a length; the message says what to do.
    """
    if not is_npz(file):
        with ExitStack() as stack:
            (array,), _ = NumpySource(file, None).open((file,), stack)
            mapped = "memory-mapped" if array.seekable and not fs.is_url(file) else "read in pieces"
            return Description(
                (Column("sample", "sample", mapped),), rows=array.rows, names_leaves=False, kind="NumPy array"
            )
    lengths: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    storage: dict[str, str] = {}
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        archive = Archive(file, stack)
        for name, info in list(archive.members.items())[:COLUMNS]:
            try:
                array = archive.array(name)
            except (TypeError, ValueError, OSError) as error:
                left_out[name] = str(error).partition(f"{name!r}")[2].lstrip(": ") or str(error)
                continue
            lengths[name], nbytes[name] = array.rows, array.rows * array.row_nbytes
            stored = info.compress_type == zipfile.ZIP_STORED
            how = "memory-mapped" if stored else f"compressed {nbytes[name] / max(1, info.compress_size):.1f} times"
            storage[name] = f"array {name!r}, {size(nbytes[name])}, {how}"
        many = len(archive.members)
    rows = together(lengths, nbytes)
    left_out |= {name: other_length(length, rows or 0) for name, length in lengths.items() if length != rows}
    proposed = [name for name in lengths if name not in left_out]
    if len(proposed) > _LEAVES:
        raise ValueError(
            f"{file} has {many:,} arrays, and {len(proposed)}{' or more' if many > COLUMNS else ''} of length {rows}: "
            "if each is a sample, write a generator that yields them, and give its feed as MODULE:ATTR. Otherwise name "
            "those to serve: penstock serve FILE --leaf NAME=ARRAY ..."
        )
    short = leaf_names(proposed)
    columns = tuple(Column(name, short[name], storage[name]) for name in proposed)
    facts = []
    if any("compressed" in column.storage for column in columns):
        facts.append("compressed, so it is a single split: only one worker at a time can read it")
    if many > COLUMNS:
        facts.append(f"only the first {COLUMNS} arrays were looked at")
    return Description(columns, left_out, tuple(facts), rows, kind="NumPy archive")
