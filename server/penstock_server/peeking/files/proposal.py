"""The proposal of `penstock peek`: a command and a module that serve data files."""

from __future__ import annotations

import glob
import itertools
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...sources import registry
from ...sources.description import Column, Description
from ...sources.features import Feature, FixedLenSequence, VarLen
from ..leaves import images
from ..leaves.summary import LeafSummary
from .data_files import PeekedFile

_BATCH = 32
_BATCH_NBYTES = 32 << 20
_SHUFFLE = 10_000
_SHUFFLE_NBYTES = 64 << 20
_WIDTH = 80
_DECODER_MODES = {"RGB", "RGBA", "L", "I;16"}
"""The modes of `ImageDecoder`."""

MODULE = "feed.py"
"""The file name that the proposed command gives the module."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """How data files can be served.

    Attributes:
        command: a shell command.
        module: the text of a module with a feed of the same files.
        command_needs_module: whether the command serves the module, because its options cannot express the feed.
        notes: further hints, a sentence each.
    """

    command: str
    module: str
    command_needs_module: bool
    notes: tuple[str, ...]


def propose(peeked: PeekedFile) -> Proposal | None:
    """Return a proposal, or None if no column can be served."""
    description, summary = peeked.description, peeked.summary
    left_out = unfit(peeked)
    columns = [column for column in description.columns if column.name not in left_out]
    if not columns:
        return None
    nbytes = max(1, summary.nbytes // summary.samples)
    batch_size = max(1, min(_BATCH, _BATCH_NBYTES // nbytes))
    most = min(_SHUFFLE, (description.rows or _SHUFFLE) * peeked.count, max(2 * batch_size, _SHUFFLE_NBYTES // nbytes))
    options = {"batch_size": str(batch_size), "shuffle": str(_round(most))}
    features = {column.name: (description.features or {}).get(column.name) for column in columns}
    pad = any(isinstance(feature, VarLen | FixedLenSequence) for feature in features.values())
    if pad or any(leaf.varies for column in columns for leaf in _leaves(peeked, column).values()):
        options["batching"] = '"pad"'
    if (
        any(_needs_spec(leaf) for column in columns for leaf in _leaves(peeked, column).values())
        and not peeked.description.features
    ):
        structure = peeked.summary.structure
        options["spec"] = _dict([(column.leaf, _spec_of(structure[column.leaf], peeked)) for column in columns])
    if any(isinstance(feature, FixedLenSequence) and feature.shape for feature in features.values()):
        options["spec"] = _dict([(name, _leaf(feature)) for name, feature in features.items() if feature])
    decoded = [column for column in columns if _can_be_decoded(peeked, column)]
    files = _as_pattern(peeked.files)
    direct = (
        not peeked.format.needs_module and "batching" not in options and not {*description.options} - {"size", "images"}
    )
    if direct:
        leaves = [f"--leaf {_for_shell(f'{column.leaf}={column.name}')}" for column in columns]
        words = [*map(_for_shell, files), *(leaves if _names_leaves(description, left_out) else ())]
        words += [f"--batch-size {batch_size}", f"--shuffle {options['shuffle']}"]
        if (side := description.options.get("size")) is not None:
            assert isinstance(side, tuple)
            words.append(f"--size {side[0]}x{side[1]}")
        if (column := description.options.get("images")) is not None:
            words.append(f"--images {_for_shell(str(column))}")
        command = _wrapped(["penstock serve", *words])
    else:
        command = f"penstock serve {MODULE}:feed"
    module = _module(peeked, files, columns, decoded, options, names_leaves=_names_leaves(description, left_out))
    return Proposal(command, module, not direct, tuple(_notes(peeked, columns, decoded, options, direct)))


def unfit(peeked: PeekedFile) -> dict[str, str]:
    """Return why some columns cannot be served, by name. The reasons come from the file or from its samples."""
    problems = peeked.summary.problems()
    found = dict(peeked.description.left_out)
    for column in peeked.description.columns:
        for path, leaf in _leaves(peeked, column).items():
            where = "" if path == column.leaf else f"{path}: "
            if path in problems:
                found[column.name] = where + problems[path]
            elif _varies_inside(leaf) and not _is_sequence(peeked, column) and not _needs_spec(leaf):
                found[column.name] = (
                    f"{where}its shape varies: give all samples one shape with a function in decode= or transform="
                )
    return found


def _names_leaves(description: Description, left_out: Mapping[str, str]) -> bool:
    """Return whether a feed has to name its leaves: without `leaves=` it would read what is left out, too."""
    return description.names_leaves and (description.needs_leaves or bool(left_out))


def _varies_inside(leaf: LeafSummary) -> bool:
    """Return whether more than the length of a list varies."""
    return leaf.varies and (leaf.low is None or len(leaf.low) > 1)


def _needs_spec(leaf: LeafSummary) -> bool:
    """Return whether a leaf varies in a way that only a spec can declare: in several dimensions, as boxes and lists of
    lists do, or in its number of strings. Images are brought to one size instead."""
    if leaf.low is None or leaf.high is None or (any(tile is not None for tile in leaf.tiles) and not leaf.text):
        return False
    return leaf.varies and (leaf.text or len(leaf.low) > 1)


def _is_sequence(peeked: PeekedFile, column: Column) -> bool:
    return isinstance((peeked.description.features or {}).get(column.name), FixedLenSequence)


def _leaves(peeked: PeekedFile, column: Column) -> dict[str, LeafSummary]:
    """Return the leaves that a column makes, by path: several if it holds JSON."""
    name = column.leaf
    return {path: leaf for path, leaf in peeked.summary.leaves.items() if path == name or path.startswith(f"{name}[")}


def _can_be_decoded(peeked: PeekedFile, column: Column) -> bool:
    """Return whether `decode=` can turn a column's files into arrays of one shape."""
    if not column.image or not peeked.format.takes("decode"):
        return False
    pictures = peeked.summary.leaves[column.leaf].pictures
    return len(pictures) == 1 and None not in pictures


def _holds_images(peeked: PeekedFile, column: Column) -> bool:
    pictures = peeked.summary.leaves[column.leaf].pictures if column.leaf in peeked.summary.leaves else ()
    return column.image or (bool(pictures) and None not in pictures)


def _notes(
    peeked: PeekedFile, columns: list[Column], decoded: list[Column], options: dict[str, str], direct: bool
) -> list[str]:
    found = []
    if decoded and direct:
        names = " and ".join(repr(column.leaf) for column in decoded)
        found.append(f"The command serves {names} as the files' bytes; the module decodes them.")
    palettes = [
        column.leaf
        for column in decoded
        if any(header and header.mode == "P" for header in peeked.summary.leaves[column.leaf].headers)
    ]
    for leaf in palettes:
        found.append(
            f"Images in {leaf!r} have a palette; the module makes colours of its indices. If the indices are classes, "
            "decode them with np.asarray(Image.open(io.BytesIO(data)))."
        )
    encoded = [column for column in columns if _holds_images(peeked, column) and column not in decoded]
    for column in encoded:
        how = "a function in decode=, such as ImageDecoder(size=(224, 224)),"
        if not peeked.format.takes("decode"):
            how = "a function in transform=, with ImageDecoder(size=(224, 224)),"
        found.append(f"{column.leaf!r} is served as encoded bytes: {how} makes arrays of them, all of one shape.")
    if encoded and not images.has_decoder():
        found.append("Pillow would decode them: pip install pillow")
    if "batching" in options:
        how = 'batching="ragged", with ragged=True in their leaves,' if "spec" in options else 'batching="ragged"'
        found.append(f"Lengths vary, so batches are padded; {how} keeps the lengths.")
    return found


def _module(
    peeked: PeekedFile,
    files: list[str],
    columns: list[Column],
    decoded: list[Column],
    options: dict[str, str],
    *,
    names_leaves: bool,
) -> str:
    description = peeked.description
    head: list[str] = []
    functions: list[str] = []
    names = {"Feed"}
    arguments = [_quoted(files[0]) if len(files) == 1 else f"[{', '.join(map(_quoted, files))}]"]
    if description.features is not None:
        features = [description.features[column.name] for column in columns]
        names |= {type(feature).__name__ for feature in features}
        arguments.append(
            _dict([(column.name, _declared(feature)) for column, feature in zip(columns, features, strict=True)])
        )
    elif names_leaves:
        arguments.append(_dict([(column.leaf, _quoted(column.name)) for column in columns]))
    if "spec" in options:
        names.add("Leaf")
    if decoded:
        targets = {peeked.summary.leaves[column.leaf].target for column in decoded}
        if targets & _DECODER_MODES:
            names.add("ImageDecoder")
        if targets - _DECODER_MODES:
            head = ["import io", "", "import numpy as np", "from PIL import Image", ""]
            functions = ["", "def pixels(data):", "    return np.asarray(Image.open(io.BytesIO(data)))", "", ""]
        decoders = {
            name: _decoder(peeked.summary.leaves[column.leaf].target)
            for column in decoded
            for name in column.name.split(";")
        }
        options = {**options, "decode": f"{{{', '.join(f'{_quoted(name)}: {one}' for name, one in decoders.items())}}}"}
    lines = [*head, f"from penstock_server import {', '.join(sorted(names))}", "", *functions]
    if peeked.format.constructor == "from_files" and registry.by_ending(files[0]) is not peeked.format:
        options = {"format": _quoted(peeked.format.name), **options}
    for name, value in description.options.items():
        options = {**options, name: _quoted(value) if isinstance(value, str) else repr(value)}
    arguments += [f"{name}={value}" for name, value in options.items()]
    call = f"feed = Feed.{peeked.format.constructor}("
    one = f"{call}{', '.join(arguments)})"
    if len(one) <= 100 and "\n" not in one:
        return "\n".join([*lines, one]) + "\n"
    body = [f"    {argument},".replace("\n", "\n    ") for argument in arguments]
    return "\n".join([*lines, call, *body, ")"]) + "\n"


def _decoder(target: str) -> str:
    """Return what decodes images to a mode, as code."""
    if target not in _DECODER_MODES:
        return "pixels"
    return "ImageDecoder()" if target == "RGB" else f"ImageDecoder(mode={_quoted(target)})"


def _declared(feature: Feature) -> str:
    if isinstance(feature, VarLen):
        return f'VarLen("{feature.dtype}")'
    decode = f', decode="{feature.decode}"' if feature.decode else ""
    return f'{type(feature).__name__}({feature.shape!r}, "{feature.dtype}"{decode})'


def _leaf(feature: Feature) -> str:
    """Return the spec of a feature's leaf. Without a spec, a feed takes only one-dimensional arrays to vary."""
    if isinstance(feature, VarLen):
        return f'Leaf("{feature.dtype}", (None,))'
    shape = (None, *feature.shape) if isinstance(feature, FixedLenSequence) else feature.shape
    dtype = feature.decode or feature.dtype
    return f"Leaf({'bytes' if dtype == 'bytes' else _quoted(dtype)}, {shape!r})"


def _spec_of(structure: Any, peeked: PeekedFile) -> str:
    """Return the spec of a column, with None for the dimensions that vary."""
    if isinstance(structure, dict):
        return _dict([(key, _spec_of(item, peeked)) for key, item in structure.items()])
    if isinstance(structure, tuple):
        return f"({', '.join(_spec_of(item, peeked) for item in structure)},)"
    leaf = peeked.summary.leaves[structure]
    assert leaf.low is not None
    assert leaf.high is not None
    shape = tuple(low if low == high else None for low, high in zip(leaf.low, leaf.high, strict=True))
    if leaf.text:
        return f"Leaf(bytes, {(None,) * len(shape)!r}, ragged=True)" if leaf.varies else f"Leaf(bytes, {shape!r})"
    return f"Leaf({_quoted(leaf.dtype)}, {shape!r})"


def _dict(items: list[tuple[str, str]]) -> str:
    one = f"{{{', '.join(f'{_quoted(name)}: {value}' for name, value in items)}}}"
    if len(one) <= 70:
        return one
    lines = [f"{_quoted(name)}: {value},".replace("\n", "\n    ") for name, value in items]
    return "\n".join(["{", *(f"    {line}" for line in lines), "}"])


def _quoted(text: str) -> str:
    """Return a string literal, with double quotes unless `text` has control characters or backslashes."""
    return json.dumps(text, ensure_ascii=False) if text.isprintable() and "\\" not in text else repr(text)


def _for_shell(text: str) -> str:
    """Return text as a word of a shell command. Control characters are escaped in $'...', which bash and zsh know."""
    if text.isprintable():
        return shlex.quote(text)
    shown = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in os.fsencode(text)
    )
    return f"$'{shown}'"


def _wrapped(words: list[str]) -> str:
    """Join the words of a command, and break lines that get too long."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) > _WIDTH - 3:
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


def _as_pattern(files: tuple[str, ...]) -> list[str]:
    """Return the pattern from which a shell may have expanded these files, if it matches just these; else the files."""
    start = _common_start(files)
    end = _common_start([file[len(start) :][::-1] for file in files])[::-1]
    pattern = f"{start}*{end}"
    if len(files) > 1 and not glob.has_magic(start + end) and sorted(glob.glob(pattern)) == sorted(files):
        return [pattern]
    return list(files)


def _common_start(texts: Sequence[str]) -> str:
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in same)


def _round(number: int) -> int:
    """Round a number down to 1, 2 or 5 times a power of ten."""
    power: int = 10 ** (len(str(number)) - 1)
    return next(step * power for step in (5, 2, 1) if step * power <= number)
