"""The report of `penstock peek` about each leaf: as lines of text, or as values for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from .contact_sheet import are_classes
from .histogram import bars
from .images import may_be_mask_only
from .numbers import Numbers
from .summary import LeafSummary, Summary
from .words import WIDTH, counted, plain, wrapped

_FEW = 20
"""The most values of a uint8 array that are listed, and the most texts that are listed with their counts."""

_NAME = 30
"""The most bytes of such a text."""


def leaf_lines(summary: Summary, notes: dict[str, str], *, blocks: bool) -> Iterator[str]:
    """Yield the lines of the report about each leaf, and the leaf's note from `notes`, which are by path."""
    for path, leaf in summary.leaves.items():
        yield ""
        yield from wrapped(f"{plain(path)}: {kind_of(leaf)}", "")
        for line in _about(leaf):
            yield from wrapped(line, "  ")
        if note := notes.get(path):
            yield from wrapped(note, "  ")
        if len(leaf.lengths) > 1:
            yield f"  lengths{' in bytes' if leaf.text else ''}:"
            yield from (f"    {line}" for line in bars(leaf.lengths, blocks=blocks))
        problem = summary.problems().get(path)
        if problem:
            yield from wrapped(f"cannot be served: {plain(problem)}", "  ")


def leaves_json(summary: Summary) -> dict[str, Any]:
    """Return the leaves by path, as values for JSON."""
    problems = summary.problems()
    found = {}
    for path, leaf in summary.leaves.items():
        numbers = leaf.numbers
        found[path] = {
            "dtype": leaf.dtype,
            "shape": None if leaf.low is None else list(leaf.low),
            "largest_shape": None if leaf.high is None else list(leaf.high),
            "image": is_image(leaf),
            "min": _finite(numbers.low) if numbers else None,
            "max": _finite(numbers.high) if numbers else None,
            "mean": _finite(numbers.mean) if numbers else None,
            "nan_share": numbers.nans / numbers.count if numbers and numbers.count else None,
            "infinite_share": numbers.infinities / numbers.count if numbers and numbers.count else None,
            "lengths": {str(length): count for length, count in sorted(leaf.lengths.items())},
            "examples": leaf.examples,
            "encoded": dict(leaf.encoded),
            "problem": problems.get(path, ""),
        }
    return found


def is_image(leaf: LeafSummary) -> bool:
    """Return whether a leaf is an image, so that contact sheets show it."""
    tiles = leaf.tiles
    return any(tile is not None for tile in tiles) and (not may_be_mask_only(leaf.dtype) or are_classes(tiles))


def kind_of(leaf: LeafSummary) -> str:
    """Return the kind of a leaf in words, such as "uint8[28, 28], an image"."""
    if leaf.is_empty or not leaf.dtype:
        return f"{leaf.dtype}, always empty" if leaf.dtype else "nothing"
    if leaf.low is None or leaf.high is None:
        shape = "[shapes of several dimensions]"
    else:
        dims = [str(low) if low == high else f"{low}..{high}" for low, high in zip(leaf.low, leaf.high, strict=True)]
        shape = f"[{', '.join(dims)}]" if dims else ""
    words = ["text" if leaf.text and not leaf.encoded else "bytes" if leaf.text else leaf.dtype]
    words[0] += shape
    if leaf.encoded:
        words.append(" and ".join(f"{name} images" for name in leaf.encoded))
    elif is_image(leaf):
        words.append("a mask" if are_classes(leaf.tiles) else "an image")
    return ", ".join(words)


def _about(leaf: LeafSummary) -> Iterator[str]:
    if leaf.numbers is not None and not (leaf.values and len(leaf.values) == 1):
        yield range_of(leaf.numbers, leaf.dtype)
    pictures = [array for array in leaf.pictures if array is not None]
    if pictures:
        shown = ", ".join(array for array, _ in leaf.pictures.most_common(3) if array is not None)
        many = f"{len(pictures)} shapes, such as {shown}" if len(pictures) > 3 else shown
        modes = sorted({header.mode for header in leaf.headers if header})
        target = leaf.target
        converted = f" (mode {', '.join(modes)} converted to {target})" if target and modes != [target] else ""
        yield f"decoded: {many}{converted}"
    if leaf.pictures.get(None):
        yield f"{counted(leaf.pictures[None], 'image')} cannot be decoded"
    if leaf.text and len(leaf.lengths) == 1:
        yield f"each {counted(next(iter(leaf.lengths)), 'byte')}"
    values = leaf.values
    if values and (2 * len(values) <= leaf.samples or len(values) == 1) and (not leaf.text or _are_names(values)):
        shown = ", ".join(f"{_value(value)} ({count})" for value, count in sorted(values.items(), key=_order))
        yield f"{len(values)} values: {shown}" if len(values) > 1 else f"always {_value(next(iter(values)))}"
    elif leaf.examples and not leaf.encoded and not is_image(leaf):
        yield f"such as {', '.join(_examples(leaf))}"


def range_of(numbers: Numbers, dtype: str) -> str:
    """Return the range of numbers of this dtype in words, and the share of NaN and infinite values."""
    if not numbers.count:
        return "always empty"
    strange = [
        f"{_percent(count / numbers.count)} {name}"
        for count, name in ((numbers.nans, "NaN"), (numbers.infinities, "infinite"))
        if count
    ]
    if numbers.low is None or numbers.high is None or numbers.mean is None:
        return ", ".join(strange)
    if dtype == "bool":
        return f"{_percent(numbers.mean)} True"
    if numbers.low == numbers.high and not strange:
        return f"always {_number(numbers.low)}"
    what = "magnitudes " if dtype.startswith("complex") else ""
    text = f"{what}{_number(numbers.low)} to {_number(numbers.high)}, mean {_number(numbers.mean)}"
    text = ", ".join([text, *(strange or (["no NaN"] if "float" in dtype else []))])
    if numbers.present is not None and 1 < (few := int(numbers.present.sum())) <= _FEW and dtype != "bool":
        text += f"; {few} values: {' '.join(str(value) for value in numbers.present.nonzero()[0])}"
    return text


def _examples(leaf: LeafSummary) -> Iterator[str]:
    """Yield as many examples as fit on two lines."""
    left = 2 * WIDTH - 20
    for example in dict.fromkeys(leaf.examples):
        text = example if len(example) <= WIDTH - 12 else example[: WIDTH - 15] + "..."
        left -= len(text) + 2
        if left < 0:
            return
        yield text


def _are_names(values: Iterable[bytes]) -> bool:
    """Return whether texts are as few and as short as the names of classes."""
    values = list(values)
    return len(values) <= _FEW and all(len(value) <= _NAME for value in values)


def _order(item: tuple[Any, int]) -> tuple[bool, Any]:
    """Return a sort key that puts numbers before text, as a leaf may have both."""
    return isinstance(item[0], bytes), item[0]


def _value(value: Any) -> str:
    return repr(value.decode(errors="backslashreplace")) if isinstance(value, bytes) else _number(value)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _percent(share: float) -> str:
    if 0 < share < 0.0001:
        return "less than 0.01 %"
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"
