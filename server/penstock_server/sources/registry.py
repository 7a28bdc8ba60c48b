"""Finds the format of a file: one of Penstock's own, or one that an installed package has registered.

A package registers a format with an entry point of the group `penstock.formats`. Entry points are looked up only if
no format of Penstock's own has the file's ending.
"""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Iterable
from functools import cache

from penstock_proto import StartError

from . import files as fs
from .arrow.format import Arrow
from .format import Format
from .hdf5.format import Hdf5
from .images.format import ImageFolder
from .json_lines.format import JsonLines
from .lmdb_stores.format import Lmdb
from .matlab.format import Matlab
from .mds.format import Mds
from .npy.format import Numpy
from .parquet.format import Parquet
from .remote import urls
from .tables.format import Csv
from .tfrecord.format import TFRecord
from .webdataset.format import WebDataset
from .zarr_stores.format import Zarr

BUILT_IN: tuple[Format, ...] = (
    Hdf5(),
    Numpy(),
    Parquet(),
    Arrow(),
    WebDataset(),
    TFRecord(),
    Zarr(),
    Csv(),
    JsonLines(),
    Matlab(),
    Mds(),
    Lmdb(),
    ImageFolder(),
)

GROUP = "penstock.formats"
"""The group of entry points."""

_HEAD = 512
"""Bytes by which a file is recognized."""

_LOOKED_AT = 10_000
"""Files by which a folder is recognized, at most."""


def by_ending(name: str) -> Format | None:
    """Return the format that a file name, a pattern or a URL has by its ending.

    Raises:
        StartError: a registered format cannot be loaded.
    """
    if name.startswith("tcp://"):  # a feed may have such a name
        return None
    name = urls.without_query(name)
    return _first(name, BUILT_IN) or (None if _is_module(name) else _first(name, installed()))


def format_of(name: str) -> Format | None:
    """Return the format of a file, a pattern or a URL: by its ending or, for a local file, by its first bytes. A folder
    has a format if most files in it are those of such a format's folders.

    Raises:
        StartError: a registered format cannot be loaded.
    """
    found = by_ending(name)
    if found is not None or fs.is_url(name):
        return found
    if os.path.isdir(name):
        return _format_of_folder(name)
    if not os.path.isfile(name):
        return None
    try:
        with open(name, "rb") as opened:
            head = opened.read(_HEAD)
    except OSError:
        return None
    return next((one for one in (*BUILT_IN, *installed()) if one.recognizes(head)), None)


def _format_of_folder(folder: str) -> Format | None:
    of_folders = [one for one in BUILT_IN if one.folder_of]
    counts: Counter[Format | None] = Counter()
    for _, _, names in os.walk(folder, followlinks=True):
        for name in names:
            if not name.startswith("."):
                whole = (one for one in of_folders if name.lower().endswith(one.folder_of))
                counts[next(whole, None) or by_ending(name)] += 1
        if counts.total() > _LOOKED_AT:
            break
    del counts[None]
    most = max(counts, key=counts.__getitem__, default=None)
    return most if most in of_folders else None


def similar_file(name: str) -> str:
    """Return the data file whose name is most similar to that of a missing file; "" if none is."""
    folder, base = os.path.split(name)
    try:
        known = [other for other in os.listdir(folder or ".") if by_ending(other)]
    except OSError:
        return ""
    near = difflib.get_close_matches(base, known, 1, 0.8)
    return os.path.join(folder, near[0]) if near else ""


def by_name(name: str) -> Format:
    """Return the format with this name.

    Raises:
        StartError: a registered format cannot be loaded.
        ValueError: there is no such format.
    """
    for one in BUILT_IN:
        if one.name == name:
            return one
    for one in installed():
        if one.name == name:
            return one
    names = ", ".join(one.name for one in (*BUILT_IN, *installed()))
    raise ValueError(f"there is no format {name!r}: install the package that has it, or give one of {names}")


def all_endings() -> str:
    """Return the endings of all formats, for messages."""
    return ", ".join(ending for one in (*BUILT_IN, *installed()) for ending in one.endings)


@cache
def installed() -> tuple[Format, ...]:
    """Return the formats that installed packages have registered, sorted by the names of their entry points.

    Raises:
        StartError: one cannot be loaded, or has the name or an ending of another; the message names the package.
    """
    from importlib import metadata  # 30 ms that commands without such files need not wait

    found: list[Format] = []
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
        where = f"the data file format {entry.name!r} of {package} ({entry.value})"
        try:
            made = entry.load()()
        except Exception as error:
            raise StartError(
                f"{where} cannot be loaded: {type(error).__name__}: {error}. Correct or uninstall the package"
            ) from error
        if not isinstance(made, Format):
            raise StartError(f"{where} is not a subclass of penstock_server.formats.Format: correct the package")
        if problem := _problem(made, (*BUILT_IN, *found)):
            raise StartError(f"{where} {problem}. Correct or uninstall the package")
        found.append(made)
    return tuple(found)


def _problem(made: Format, others: Iterable[Format]) -> str:
    if not isinstance(getattr(made, "name", None), str) or not isinstance(getattr(made, "endings", None), tuple):
        return "has no name or no endings: they are attributes, such as name = 'XYZ' and endings = ('.xyz',)"
    for other in others:
        if other.name == made.name:
            return f"is named {made.name}, and so is another one"
        for ending in made.endings:
            if other.matches(f"name{ending}"):
                return f"has the ending {ending}, which is that of {other.name}"
    return ""


def _first(name: str, formats: Iterable[Format]) -> Format | None:
    return next((one for one in formats if one.matches(name.lower().rstrip("/"))), None)  # a format may be a folder's


def _is_module(name: str) -> bool:
    """Return whether a name is MODULE:ATTR."""
    module, _, attribute = name.rpartition(":")
    return bool(module) and attribute.isidentifier() and not os.path.exists(name)
