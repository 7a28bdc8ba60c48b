"""The index of an MDS dataset, index.json: its shards, and how they are stored."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from .. import files as fs

_LARGEST = 256 << 20
"""Bytes of an index, at most."""

NAME = "index.json"


@dataclass(frozen=True, slots=True)
class Stored:
    """A shard as the index has it.

    Attributes:
        file: the path or URL of the file that is read.
        samples: the number of its samples.
        nbytes: bytes of the shard when it is not compressed.
        size: bytes of the file.
        compression: the name of the algorithm, such as "zstd"; "" if the file is not compressed.
        hashes: the hashes of the file, by the name of the algorithm.
        columns: the names and the encodings of the columns.
    """

    file: str
    samples: int
    nbytes: int
    size: int
    compression: str
    hashes: tuple[tuple[str, str], ...]
    columns: tuple[tuple[str, str], ...]


def shards_of(folder: str) -> list[Stored]:
    """Read the index of a dataset.

    Raises:
        OSError: there is no index, or it cannot be read; the message names it.
        ValueError: it is not the index of an MDS dataset.
    """
    folder = folder.removesuffix(NAME).rstrip("/") or "."
    path = f"{folder}/{NAME}"
    if not fs.is_url(folder) and not os.path.exists(path):
        raise FileNotFoundError(_no_index(folder))
    with fs.open_binary(path) as opened:
        data = opened.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"{path} has more than {_LARGEST >> 20} MiB: write fewer, larger shards")
    try:
        index = json.loads(data)
        return [_stored(folder, shard) for shard in index["shards"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not the index of an MDS dataset, or is damaged ({type(error).__name__}: {error}): copy it again"
        ) from None


def _stored(folder: str, shard: Any) -> Stored:
    if shard["format"] != "mds" or shard["version"] != 2:
        raise ValueError(f"a shard of format {shard['format']!r}, version {shard['version']}, not 'mds', version 2")
    raw, packed = shard["raw_data"], shard.get("zip_data")
    name, compression = str(raw["basename"]), ""
    if packed and not (not fs.is_url(folder) and os.path.exists(f"{folder}/{name}")):
        name, compression = str(packed["basename"]), str(shard["compression"]).partition(":")[0]
    if os.path.isabs(name) or ".." in name.split("/"):
        raise ValueError(f"a shard outside the folder, {name!r}")
    file = packed if compression else raw
    if min(shard["samples"], raw["bytes"], file["bytes"]) < 0:
        raise ValueError("a negative size")
    names, encodings = map(str, shard["column_names"]), map(str, shard["column_encodings"])
    return Stored(
        f"{folder}/{name}",
        int(shard["samples"]),
        int(raw["bytes"]),
        int(file["bytes"]),
        compression,
        tuple(sorted((str(key), str(value)) for key, value in file["hashes"].items())),
        tuple(zip(names, encodings, strict=True)),
    )


def _no_index(folder: str) -> str:
    where = "" if os.path.isabs(folder) else f" in {os.getcwd()}"
    if not os.path.isdir(folder):
        return f"{folder}: no such folder{where}"
    below = [name for name in sorted(os.listdir(folder)) if os.path.exists(os.path.join(folder, name, NAME))]
    if below:
        return f"{folder} has no {NAME}, but its folders have: give one, such as {os.path.join(folder, below[0])}"
    return f"{folder} has no {NAME}, so its shards are not known: copy the whole folder"
