"""Describes .npy and .npz files: the arrays that share a length."""

from __future__ import annotations

import zipfile
from contextlib import ExitStack

from penstock_proto.status.figures import size

from .. import files as fs
from ..description import Column, Description, leaf_names, other_length, together
from .reader import NumpySource


def describe(file: str) -> Description:
    """Describe a .npy or .npz file, by the headers of its arrays.

    Raises:
        OSError: the file cannot be read; the message names it.
        TypeError: the file is a single array that cannot be served.
    """
    if not file.lower().endswith(".npz"):
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
    for name, compressed in _members(file).items():
        try:
            with ExitStack() as stack:
                (array,), _ = NumpySource(file, name).open((file,), stack)
                lengths[name], nbytes[name] = array.rows, array.rows * array.row_nbytes
        except TypeError as error:
            left_out[name] = str(error).partition(f"{name!r} ")[2] or str(error)
            continue
        how = f"compressed {nbytes[name] / compressed:.1f} times" if compressed else "memory-mapped"
        storage[name] = f"array {name!r}, {size(nbytes[name])}, {how}"
    rows = together(lengths, nbytes)
    left_out |= {name: other_length(length, rows or 0) for name, length in lengths.items() if length != rows}
    proposed = [name for name in lengths if name not in left_out]
    short = leaf_names(proposed)
    columns = tuple(Column(name, short[name], storage[name]) for name in proposed)
    facts: tuple[str, ...] = ()
    if any("compressed" in column.storage for column in columns):
        facts = ("compressed, so it is a single split: only one worker at a time can read it",)
    return Description(columns, left_out, facts, rows, kind="NumPy archive")


def _members(file: str) -> dict[str, int]:
    """Return the compressed bytes of each array in an archive, by name; 0 if the array is not compressed."""
    with fs.open_binary(file) as opened:
        try:
            infos = zipfile.ZipFile(opened).infolist()
        except zipfile.BadZipFile as error:
            raise OSError(f"{file}: it is not a .npz file, or is truncated ({error}): copy it again") from None
    return {
        info.filename.removesuffix(".npy"): 0 if info.compress_type == zipfile.ZIP_STORED else info.compress_size
        for info in infos
    }
