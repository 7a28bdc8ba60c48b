"""Describes HDF5 files: the datasets that share a length, their chunks and filters."""

from __future__ import annotations

from typing import Any

from penstock_proto.status.figures import size

from ..description import Column, Description, leaf_names, other_length, together
from .reader import check_servable, opened, row_nbytes

_MANY = 1000
"""Datasets that are looked at, at most. A file with a dataset for each sample has many more."""

_LEAVES = 100
"""Datasets that are proposed as leaves, at most. If more of them share a length, they are hardly leaves."""


def describe(file: str) -> Description:
    """Describe an HDF5 file.

    Raises:
        OSError: the file cannot be read; the message names it.
        ValueError: too many datasets share a length; the message says what to do.
    """
    with opened(file, None) as h5:
        datasets, more = _datasets(h5)
        left_out: dict[str, str] = {}
        for name, dataset in list(datasets.items()):
            try:
                check_servable(dataset, file, name)
            except TypeError as error:
                left_out[name] = str(error).removeprefix(f"{file}: {name!r} ")
                del datasets[name]
        lengths = {name: len(dataset) for name, dataset in datasets.items()}
        nbytes = {name: len(dataset) * row_nbytes(dataset) for name, dataset in datasets.items()}
        rows = together(lengths, nbytes)
        for name, length in lengths.items():
            if length != rows:
                left_out[name] = other_length(length, rows or 0)
        proposed = [name for name in datasets if name not in left_out]
        if len(proposed) > _LEAVES:
            raise ValueError(
                f"{file} has {len(proposed)} datasets{' or more' if more else ''} of length {rows}: if each is a "
                "sample, write a generator that yields them, and give its feed as MODULE:ATTR. Otherwise name those to "
                "serve: penstock serve FILE --leaf NAME=DATASET ..."
            )
        short = leaf_names(proposed)
        columns = tuple(Column(name, short[name], _storage(datasets[name])) for name in proposed)
    facts = []
    if more:
        facts.append(f"only the first {_MANY} datasets were looked at")
    return Description(columns, left_out, tuple(facts), rows)


def _datasets(h5: Any) -> tuple[dict[str, Any], bool]:
    """Return up to `_MANY` datasets by name, and whether there are more."""
    found: dict[str, Any] = {}

    def note(name: str, item: Any) -> bool | None:
        if hasattr(item, "chunks"):
            if len(found) == _MANY:
                return True  # ends `visititems`
            found[name] = item
        return None

    more = h5.visititems(note)
    return found, bool(more)


def _storage(dataset: Any) -> str:
    words = [f"dataset {dataset.name.lstrip('/')!r}, {_dtype(dataset.dtype)}{list(dataset.shape)}"]
    if dataset.chunks is None:
        return f"{words[0]}, contiguous"
    chunk = dataset.dtype.itemsize
    for dim in dataset.chunks:
        chunk *= dim
    words.append(f"chunks {list(dataset.chunks)} of {size(chunk)}")
    filters = _filters(dataset)
    words.append(", ".join(filters) or "not compressed")
    stored, whole = dataset.id.get_storage_size(), dataset.nbytes
    if filters and stored and dataset.dtype.kind != "O":
        words.append(f"{whole / stored:.1f} times smaller")
    return ", ".join(words)


def _dtype(dtype: Any) -> str:
    import h5py

    if h5py.check_string_dtype(dtype):
        return "text"
    items = h5py.check_vlen_dtype(dtype)
    return str(dtype) if items is None else f"arrays of {items} "


def _filters(dataset: Any) -> list[str]:
    properties = dataset.id.get_create_plist()
    found = []
    for number in range(properties.get_nfilters()):
        code, _, _, name = properties.get_filter(number)
        found.append({1: "gzip", 2: "byte shuffle", 3: "checksum", 4: "szip", 32000: "lzf"}.get(code, name.decode()))
    return found
