"""Describes HDF5 files: the datasets that share a length, their chunks and filters."""

from __future__ import annotations

import os
import re
from typing import Any

from penstock_proto.status.figures import size

from ..description import Column, Description, leaf_names, other_length, together
from ..recipes import recipe
from ..splits.row_ranges import RowRange, Table, divide
from .opening import opened
from .outside import outside_files
from .reader import chunk_rows, damage_of, is_compressed, row_nbytes, servable
from .views import CsrRows, Field, attribute, fields_of, is_table_index, parts_of

_MANY = 1000
"""Datasets that are looked at, at most. A file with a dataset for each sample has many more."""

_LINKS = 10 * _MANY
"""Objects and links that are looked at, at most."""

_ALIKE = 20
"""Datasets whose names differ only in numbers, from which on each is hardly a leaf."""

_LEAVES = 100
"""Datasets that are proposed as leaves, at most. If more of them share a length, they are hardly leaves."""


def describe(file: str) -> Description:
    """Describe an HDF5 file.

    Raises:
        OSError: the file cannot be read; the message names it.
        ValueError: too many datasets share a length; the message says what to do.
    """
    with opened(file, None) as h5:
        with damage_of(file):
            names, more = _names(h5)
        datasets: dict[str, Any] = {}
        left_out: dict[str, str] = {}
        others: dict[str, None] = {}
        for name in names:
            try:
                with damage_of(file):
                    others |= dict.fromkeys(filter(os.path.exists, outside_files(h5, file, [name])))
                    dataset = servable(h5, file, name)
                    if why := _pandas_part(h5, name):
                        raise TypeError(why)
            except (TypeError, ValueError, OSError, LookupError) as error:
                left_out[name] = str(error).removeprefix(f"{file}: ").removeprefix(f"{name!r} ")
                continue
            datasets[name] = dataset
            if len(datasets) == _MANY:
                more = True
                break
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
        if alike := _one_for_each_sample(proposed):
            raise ValueError(
                f"{file} has {len(alike)} datasets such as {alike[0]!r} and {alike[1]!r}, as if each were a sample: "
                f"write a generator that yields them (see {recipe('Groups of an HDF5 file')}), and give its feed as "
                "MODULE:ATTR. "
                "Otherwise name those to serve: penstock serve FILE --leaf NAME=DATASET ..."
            )
        short = leaf_names(proposed)
        columns = tuple(
            Column(name, short[name], _storage(datasets[name]) + _categories(h5.get(name))) for name in proposed
        )
        facts = _splits(file, [datasets[name] for name in proposed], rows or 0)
        facts += _pandas_facts(h5, proposed)
        with damage_of(file):
            if "keras_version" in h5.attrs or "layer_names" in h5.attrs or "model_weights" in h5:
                facts.append(
                    "it holds the weights of a Keras model, not a dataset: load it with keras.saving.load_model"
                )
    if others:
        names = [os.path.relpath(other, os.path.dirname(os.path.abspath(file))) for other in others]
        facts.append(f"depends on {len(names)} other {'file' if len(names) == 1 else 'files'}: {_some(names)}")
    if more:
        facts.append(f"only the first {_MANY} datasets were looked at")
    return Description(columns, left_out, tuple(facts), rows)


def _one_for_each_sample(names: list[str]) -> list[str]:
    """Return the datasets that have one name but for a number in it, if they are many; else an empty list."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub("[0-9]+", "0", name), []).append(name)
    most = max(alike.values(), key=len, default=[])
    return most if len(most) >= _ALIKE else []


def _names(h5: Any) -> tuple[list[str], bool]:
    """Return the names of up to `_LINKS` datasets, damaged objects and external links, in the order of the file, and
    whether there are more. Links are not followed: they may lead to any file."""
    found: list[str] = []
    seen = {_address(h5)}
    stack = [(h5, "", iter(h5))]
    while stack:
        group, prefix, parts = stack[-1]
        part = next(parts, None)
        if part is None:
            stack.pop()
            continue
        if len(seen) + len(found) > _LINKS:
            return found, True
        link = group.get(part, getlink=True)
        if hasattr(link, "filename"):
            found.append(prefix + part)
        if hasattr(link, "path"):
            continue
        try:
            item = group[part]
        except (KeyError, OSError, RuntimeError):
            found.append(prefix + part)
            continue
        address = _address(item)
        if address in seen:  # under another name
            continue
        seen.add(address)
        if parts_of(item):
            found.append(prefix + part)
        elif hasattr(item, "visititems"):
            if not is_table_index(item):
                stack.append((item, f"{prefix}{part}/", iter(item)))
        elif fields := fields_of(item):
            found += [f"{prefix}{part}/{field}" for field in fields]
        elif hasattr(item, "chunks"):
            found.append(prefix + part)
    return found, False


def _address(item: Any) -> int:
    import h5py

    return int(h5py.h5o.get_info(item.id).addr)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _splits(file: str, found: list[Any], rows: int) -> list[str]:
    """Return whether the chunks of compressed datasets make few splits, or splits that decompress chunks twice."""
    found = [dataset for dataset in found if is_compressed(dataset)]
    if not found or not rows or any(isinstance(dataset, CsrRows) for dataset in found):  # whose chunks hold any rows
        return []
    try:
        table = Table(file, None, rows, sum(map(row_nbytes, found)), *chunk_rows(found))
        splits = divide([table], (0, None), None)
    except ValueError:  # too many splits
        return []
    facts = []
    if len(splits) < 16 and table.chunk * table.row_nbytes > 64 << 20:
        facts.append(
            f"{'1 split' if len(splits) == 1 else f'{len(splits)} splits'}, as {table.chunk} rows share chunks: no "
            "more workers can read it at once, so write chunks of fewer rows"
        )
    once = sum(rows * row_nbytes(dataset) for dataset in found)
    more = sum(_twice(dataset, splits) * row_nbytes(dataset) for dataset in found)
    if more * 20 > once:
        chunks = " and ".join(map(str, sorted({dataset.chunks[0] for dataset in found})))
        facts.append(
            f"{len(splits)} splits that share chunks (of {chunks} rows): reading all decompresses "
            f"{1 + more / once:.1f} times the data. Chunks with the same, smaller number of rows would cost less"
        )
    return facts


def _twice(dataset: Any, splits: list[RowRange]) -> int:
    """Return how many rows are decompressed once more, in whole chunks."""
    rows = dataset.chunks[0]
    read = sum(-(-split.stop // rows) - split.start // rows for split in splits)
    return int((read - -(-len(dataset) // rows)) * rows)


def _storage(dataset: Any) -> str:
    if isinstance(dataset, CsrRows):
        return dataset.storage
    if isinstance(dataset, Field):
        return f"{dataset.storage}, {_dtype(dataset.dtype)}{[*dataset.shape]}"
    dtype, inner = dataset.dtype.subdtype or (dataset.dtype, ())
    words = [f"dataset {dataset.name.lstrip('/')!r}, {_dtype(dtype)}{[*dataset.shape, *inner]}"]
    if len(dataset) and not (dataset.id.get_storage_size() or dataset.is_virtual or dataset.external):
        words.append("never written, so all rows are its fill value")
    if dataset.chunks is None:
        return ", ".join([*words, "contiguous"])
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


def _categories(item: Any) -> str:
    """Return the categories whose codes a column of anndata holds, in words."""
    names: Any = item.get("categories") if hasattr(item, "visititems") else None
    if not hasattr(names, "chunks") or names.ndim != 1:
        return ""
    some = ", ".join(repr(name.decode(errors="replace") if isinstance(name, bytes) else name) for name in names[:5])
    return f"; codes of {len(names)} categories: {some}{', ...' if len(names) > 5 else ''}"


def _pandas_part(h5: Any, name: str) -> str:
    """Return why a dataset of a DataFrame that pandas wrote is no column, or ""."""
    item, above = h5.get(name), h5.get(name.rpartition("/")[0] or "/")
    if hasattr(item, "chunks") and attribute(item, "PSEUDOATOM") == "object":
        return (
            "holds pickled Python objects: write the DataFrame with to_hdf(format='table', data_columns=True), or as "
            "Parquet"
        )
    if hasattr(above, "attrs") and attribute(above, "pandas_type") == "frame":
        part = name.rpartition("/")[2]
        if part == "axis0" or part.endswith("_items"):
            return "holds names of columns"
    return ""


def _pandas_facts(h5: Any, names: list[str]) -> list[str]:
    """Return which columns of a DataFrame the blocks hold into which pandas has put them."""
    facts = []
    blocks = [name for name in names if name.rpartition("/")[2].startswith("values_block_")]
    if blocks:
        facts.append(
            f"{blocks[0]!r}{f' and {len(blocks) - 1} more' if blocks[1:] else ''} hold columns of one type as arrays: "
            "to_hdf(format='table', data_columns=True) writes each column with its name"
        )
    for name in names:
        short = name.rpartition("/")[2]
        items = h5.get(name.replace("_values", "_items"))
        if short.startswith("block") and short.endswith("_values") and hasattr(items, "chunks") and items.ndim == 1:
            some = [one.decode(errors="replace") if isinstance(one, bytes) else str(one) for one in items[:10]]
            facts.append(f"{name!r} holds the columns {', '.join(some)}{', ...' if len(items) > 10 else ''}")
    return facts


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
