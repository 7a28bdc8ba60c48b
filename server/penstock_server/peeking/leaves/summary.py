"""Summarizes samples, leaf by leaf, in bounded memory. Knows nothing of files and feeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_proto import SpecError
from penstock_proto.batches.inferring import as_array, as_text, is_nested
from penstock_proto.spec import MAX_DIMS

from ...sources.image_encodings import encoding
from . import images
from .lists import Lists
from .numbers import Numbers
from .reservoir import Reservoir
from .tiles import LARGEST, Tile, tile

_DISTINCT = 40
"""The most different values of a leaf that are counted. If there are more, none are counted."""

_LENGTHS = 100_000
"""The most different lengths of a leaf that are counted; further ones are ignored."""

_EXAMPLES = 12
_TILES = 64
_SHOWN = 200
"""Characters of a text that are kept as an example."""


class LeafSummary:
    """The summary of one leaf.

    Attributes:
        samples: how many samples have the leaf.
        dtype: the dtype's name, "string" for text; several names are joined with slashes.
        low, high: the least and the greatest size of each dimension; None if the number of dimensions differs, or
            all lists are empty.
        numbers: the range of the values; None for text.
        values: if the leaf is a single value, how often each value occurs; None if there are too many.
        examples: some values, as text.
        tiles: small pictures of some samples, if the leaf is an image.
        encoded: how often each format of an encoded image occurs.
        headers: how often each header of encoded images occurs; None counts images that cannot be read. Empty if Pillow
            is not installed.
        problem: why the leaf cannot be served, or "".
    """

    def __init__(self) -> None:
        self.samples = 0
        self.low: tuple[int, ...] | None = None
        self.high: tuple[int, ...] | None = None
        self.numbers: Numbers | None = None
        self._lengths: Counter[int] = Counter()
        self.values: Counter[Any] | None = Counter()
        self.encoded: Counter[str] = Counter()
        self.headers: Counter[images.Header | None] = Counter()
        self.problem = ""
        self._dtypes: set[str] = set()
        self._empty: Counter[tuple[int, ...]] = Counter()
        self._examples: Reservoir[str] = Reservoir(_EXAMPLES)
        self._tiles: Reservoir[Tile | None] = Reservoir(_TILES)

    @property
    def lengths(self) -> Counter[int]:
        """How often each length occurs: for text in bytes, otherwise of the first dimension."""
        found = Counter(self._lengths)
        for shape, count in () if self.text else self._empty.items():
            found[shape[0]] += count
        return found

    @property
    def is_empty(self) -> bool:
        """Whether no sample holds anything."""
        return self.low is None and bool(self._empty)

    @property
    def dtype(self) -> str:
        """The name of the leaf's dtype."""
        return "/".join(sorted(self._dtypes))

    @property
    def target(self) -> str:
        """The mode to which all encoded images can be converted; "" if there is none."""
        return images.common_target([header for header in self.headers if header])

    @property
    def pictures(self) -> Counter[str | None]:
        """How often each dtype and shape of decoded images, such as "uint8[28, 28, 3]", occurs. None counts images that
        cannot be read."""
        found: Counter[str | None] = Counter()
        for header, count in self.headers.items():
            found[header.array_in(self.target or header.target) if header else None] += count
        return found

    @property
    def text(self) -> bool:
        """Whether the leaf holds text or other bytes."""
        return self._dtypes == {"string"}

    @property
    def varies(self) -> bool:
        """Whether samples differ in shape."""
        return self.low is None or self.low != self.high

    @property
    def examples(self) -> list[str]:
        """Some values."""
        return self._examples.kept()

    @property
    def tiles(self) -> list[Tile | None]:
        """A picture of each of some samples; None for a sample that is not an image."""
        return self._tiles.kept()

    def add(self, value: Any, path: str) -> None:
        """Add the value of one sample. If it cannot be served, set `problem`."""
        self.samples += 1
        try:
            if is_nested(value):
                self._add_lists(value, path)
                return
            text = as_text(value)
            array = as_array(value, path) if text is None else text
            if array.ndim > MAX_DIMS:
                raise SpecError(f"it has {array.ndim} dimensions; up to {MAX_DIMS} can be served")
        except SpecError as error:
            self.problem = self.problem or error.message
            return
        if not isinstance(value, list) or array.size:
            self._add_dtype(array, text)
        if not array.size:
            self._empty[array.shape[: array.shape.index(0) + 1]] += 1
            self._add_empty()
            return
        self._add_shape(array.shape, array.shape)
        if text is not None:
            self._add_text(text)
            return
        self._add_numbers(array)
        if array.ndim:
            self._count_length(len(array))
        elif array.dtype.kind != "c":
            self._count_value(array.item())
        self._examples.offer(lambda: shown_numbers(array))
        self._tiles.offer(lambda: tile(images.channels_last(array)) if images.is_pixels(array) else None)

    def _add_lists(self, value: list[Any], path: str) -> None:
        """Add lists of lists of different lengths."""
        lists = Lists(value, path)
        if not lists.innermost:
            self._empty[len(value),] += 1
            self._add_empty()
            return
        for text, array in lists.innermost:
            self._add_dtype(array, text)
            if text is not None:
                self._add_text(text)
            else:
                self._add_numbers(array)
        self._add_shape(lists.low, lists.high)
        if not self.text:
            self._count_length(len(value))
        self._examples.offer(lambda: shown_list(value))
        self._tiles.offer(lambda: None)

    def _add_dtype(self, array: npt.NDArray[Any], text: npt.NDArray[Any] | None) -> None:
        self._dtypes.add(array.dtype.name if text is None else "string")
        if len(self._dtypes) > 1:
            self.problem = f"its dtype differs from sample to sample: {self.dtype}"

    def _add_numbers(self, array: npt.NDArray[Any]) -> None:
        self.numbers = self.numbers or Numbers()
        self.numbers.add(array)

    def _add_shape(self, low: tuple[int, ...], high: tuple[int, ...]) -> None:
        if self.low is None and not self.problem:
            self.low, self.high = low, high
        elif self.low is None or self.high is None or len(low) != len(self.low):
            self.low = self.high = None
            self.problem = self.problem or "its number of dimensions differs from sample to sample"
        else:
            self.low = tuple(map(min, self.low, low))
            self.high = tuple(map(max, self.high, high))
        self._add_empty()

    def _add_empty(self) -> None:
        """Take the lengths of lists without items into account, which say nothing of further dimensions."""
        for shape in self._empty:
            if self.low is not None and self.high is not None:
                self.low = (*map(min, self.low, shape), *self.low[len(shape) :])
                self.high = (*map(max, self.high, shape), *self.high[len(shape) :])

    def _add_text(self, text: npt.NDArray[Any]) -> None:
        if text.ndim:
            for item in text.reshape(-1)[:_EXAMPLES]:
                self._examples.offer(lambda item=item: shown_text(item))  # type: ignore[misc]
            for item in text.reshape(-1):
                self._count_length(len(item))
            return
        data = text.item()
        self._count_length(len(data))
        self._examples.offer(lambda: shown_text(data))
        if name := encoding(data):
            self.values = None
            self.encoded[name] += 1
            if images.has_decoder():
                self.headers[images.header_of(data)] += 1
            self._tiles.offer(lambda: _decoded_tile(data))
        else:
            self._count_value(data[:_SHOWN])
            self._tiles.offer(lambda: None)

    def _count_length(self, length: int) -> None:
        if length in self._lengths or len(self._lengths) < _LENGTHS:
            self._lengths[length] += 1

    def _count_value(self, value: Any) -> None:
        if self.values is None:
            return
        self.values[value] += 1
        if len(self.values) > _DISTINCT:
            self.values = None


class Summary:
    """The summary of the samples of one source.

    Attributes:
        samples: the number of samples.
        structure: that of the first sample, with the leaves' paths as leaves.
        nbytes: bytes of all their arrays and text.
        leaves: the leaves by path, such as "image" or "meta['size'][0]". If a sample is a single leaf or a tuple, the
            path is "sample" or, say, "sample[0]".
    """

    def __init__(self) -> None:
        self.samples = 0
        self.structure: Any = {}
        self.nbytes = 0
        self.leaves: dict[str, LeafSummary] = {}

    def add(self, sample: Any) -> None:
        """Add one sample. The summary keeps only copies of small parts of it."""
        if not self.samples:
            self.structure = _structure(sample, "")
        self.samples += 1
        for path, value in leaves(sample):
            self.leaves.setdefault(path, LeafSummary()).add(value, f"[{path!r}]")
            self.nbytes += _nbytes(value)

    def problems(self) -> dict[str, str]:
        """Return why some leaves cannot be served, by path."""
        found = {path: leaf.problem for path, leaf in self.leaves.items() if leaf.problem}
        for path, leaf in self.leaves.items():
            if leaf.is_empty and path not in found:
                found[path] = "all its lists are empty, so nothing says what others would hold: leave it out"
            if leaf.samples < self.samples:
                found[path] = f"only {leaf.samples} of {self.samples} samples have it"
        return found


def leaves(sample: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a sample with their paths."""
    if isinstance(sample, Mapping):
        for key, value in sample.items():
            yield from leaves(value, f"{path}[{key!r}]" if path else str(key))
    elif isinstance(sample, tuple):
        for place, value in enumerate(sample):
            yield from leaves(value, f"{path or 'sample'}[{place}]")
    else:
        yield path or "sample", sample


def shown_list(value: list[Any]) -> str:
    """Show the first lists of a list, and what they hold."""
    shown = [_shown_item(item) for item in value[:8]]
    return f"[{', '.join(shown)}{', ...' if len(value) > 8 else ''}]"


def _shown_item(item: Any) -> str:
    if isinstance(item, str | bytes):
        return shown_text(item.encode() if isinstance(item, str) else item)
    if isinstance(item, list | tuple):
        return shown_list(list(item))
    return shown_numbers(np.asarray(item))


def _structure(sample: Any, path: str) -> Any:
    if isinstance(sample, Mapping):
        return {key: _structure(value, f"{path}[{key!r}]" if path else str(key)) for key, value in sample.items()}
    if isinstance(sample, tuple):
        return tuple(_structure(value, f"{path or 'sample'}[{place}]") for place, value in enumerate(sample))
    return path or "sample"


def _nbytes(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list):
        return sum(map(_nbytes, value))
    return int(getattr(value, "nbytes", 8))


def _decoded_tile(data: bytes) -> Tile | None:
    pixels = images.decoded(data, LARGEST)
    return None if pixels is None or not images.is_pixels(pixels) else tile(images.channels_last(pixels))


def shown_numbers(array: npt.NDArray[Any]) -> str:
    """Show the first values of an array of numbers."""
    if not array.ndim:
        return _shown_number(array.item())
    first = array.reshape(-1)[:8] if array.flags.c_contiguous else np.array(array[tuple([0] * (array.ndim - 1))][:8])
    more = ", ..." if array.size > len(first) else ""
    return f"[{', '.join(_shown_number(value.item()) for value in first)}{more}]"


def _shown_number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def shown_text(data: bytes) -> str:
    """Show bytes as text on one line or, if they are not text, their number and the first ones."""
    try:
        text = data[:_SHOWN].decode("utf-8", "strict" if len(data) <= _SHOWN else "ignore")
    except UnicodeDecodeError:
        return f"{len(data)} bytes: {data[:12].hex(' ')}{' ...' if len(data) > 12 else ''}"
    if "\0" in text:
        return f"{len(data)} bytes: {data[:12].hex(' ')}{' ...' if len(data) > 12 else ''}"
    return repr(text) + ("..." if len(data) > _SHOWN else "")
