"""The source of a feed from `Feed.zip`, which yields samples of other feeds side by side.

A pair of splits is itself a split, and a pair of segments a segment. So a zipped feed is an ordinary feed, whose
generator runs the generators of its parts in step. Indexable objects become one object whose items are pairs. This file
runs no generators: `worker/reading/generators.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock_proto.value_text import shown

from ..objects.indexables import as_structure, is_torch, length_of
from ..options.feed_options import FeedOptions
from ..options.generator_call import Wants

NAME = "Feed.zip"


class Form:
    """The form of a zipped sample: a dict with these keys, or a tuple if they are None."""

    def __init__(self, keys: tuple[str, ...] | None) -> None:
        self._keys = keys

    def joined(self, samples: Sequence[Any]) -> Any:
        """Join the parts' samples to one sample."""
        return tuple(samples) if self._keys is None else dict(zip(self._keys, samples, strict=True))

    def apart(self, sample: Any) -> list[Any]:
        """Take a sample apart into the parts' samples."""
        return list(sample) if self._keys is None else [sample[key] for key in self._keys]


class Zipped:
    """The generators of a zipped feed, which has this instead of a generator.

    Attributes:
        parts: the feeds, by label.
        wants: the arguments that the generators take, as those of a `GeneratorCall`. Each part has its own `rng`.
        form: the form of a sample.
        uneven: as in `Feed.zip`.
        name: its name, for errors.
    """

    def __init__(self, parts: Mapping[str, FeedOptions], wants: Wants, form: Form, uneven: str) -> None:
        self.name = self.__name__ = NAME
        self.parts = dict(parts)
        self.wants = wants
        self.form = form
        self.uneven = uneven


class ZippedSplits:
    """Lists pairs of splits; the function for `splits=` of a zipped feed.

    Attributes:
        warnings: warnings about the latest list.
    """

    def __init__(self, parts: Mapping[str, Any], uneven: str) -> None:
        self.__name__ = NAME
        self.warnings: tuple[str, ...] = ()
        self._parts = parts
        self._uneven = uneven

    def __call__(self) -> list[tuple[Any, ...]]:
        """List the splits of each part, and pair them.

        Raises:
            ValueError: a part has none, or, with uneven="raise", the parts have different numbers of them.
            Exception: any exception of the parts' functions.
        """
        lists = {label: self._listed(label, splits) for label, splits in self._parts.items()}
        nested = [w for splits in self._parts.values() if isinstance(splits, ZippedSplits) for w in splits.warnings]
        self.warnings = (*nested, *check_lengths("splits", {k: len(v) for k, v in lists.items()}, self._uneven))
        return list(zip(*lists.values(), strict=False))

    @staticmethod
    def _listed(label: str, splits: Any) -> list[Any]:
        answer = splits() if callable(splits) else splits
        if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
            raise ValueError(f"the function given as splits= of {label} must return a list, got {shown(answer)}")
        found = list(answer)
        if not found:
            raise ValueError(f"{label} has no splits to read: does a path or a pattern match nothing?")
        return found


class ZippedItems:
    """The items of several indexable objects, side by side, as one indexable object.

    Attributes:
        parts: the feeds, by label.
        form: the form of a sample.
        warnings: warnings about their lengths.
    """

    def __init__(self, parts: Mapping[str, FeedOptions], form: Form, uneven: str) -> None:
        self.parts = dict(parts)
        self.form = form
        self._sources = [feed.generate for feed in parts.values()]
        lengths = {label: length_of(feed.generate) or 0 for label, feed in parts.items()}
        self._length = min(lengths.values())
        self.warnings = check_lengths("samples", lengths, uneven)
        if any(getattr(source, "__getitems__", None) for source in self._sources):
            self.__getitems__ = self._several

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self.form.joined([_item(source, index) for source in self._sources])

    def _several(self, indices: list[int]) -> list[Any]:
        columns = [_items(source, indices) for source in self._sources]
        return [self.form.joined(row) for row in zip(*columns, strict=True)]


class StaticPairs(list[Any]):
    """Pairs of splits that are known in advance, with warnings about them."""

    def __init__(self, splits: Callable[[], list[Any]]) -> None:
        super().__init__(splits())
        self.warnings: tuple[str, ...] = getattr(splits, "warnings", ())


def zip_warnings(feed: FeedOptions, name: str) -> tuple[str, ...]:
    """Return warnings about the latest list of splits, or about the items, of the feed `name`, if it is zipped."""
    source = feed.generate if isinstance(feed.generate, ZippedItems) else feed.splits
    found = source.warnings if isinstance(source, ZippedItems | ZippedSplits | StaticPairs) else ()
    return tuple(f"feed {name}: {text}"[:1024] for text in found)


def check_lengths(what: str, lengths: Mapping[str, int], uneven: str) -> tuple[str, ...]:
    """Return warnings about parts with different lengths.

    Raises:
        ValueError: they differ, and `uneven` is "raise".
    """
    if len(set(lengths.values())) == 1 or uneven == "allow":
        return ()
    listed = ", ".join(f"{label} has {length}" for label, length in lengths.items())
    if uneven == "raise":
        raise ValueError(
            f"the parts of Feed.zip have different numbers of {what} ({listed}), and it has uneven='raise'"
        )
    least = min(lengths.values())
    return (
        f"the parts of Feed.zip have different numbers of {what}: {listed}. It ends with the shortest, so only the "
        f"first {least} of each are read. If that is meant, give uneven='allow'; uneven='raise' makes it an error",
    )


def _item(source: Any, index: int) -> Any:
    return as_structure(source[index]) if is_torch(source) else source[index]


def _items(source: Any, indices: list[int]) -> list[Any]:
    several = getattr(source, "__getitems__", None)
    if several is None:
        return [_item(source, index) for index in indices]
    found = list(several(indices))
    if len(found) != len(indices):
        raise ValueError(
            f"__getitems__ of {type(source).__name__} returned {len(found)} samples for {len(indices)} indices: it "
            "must return a list with one sample for each index, in the same order"
        )
    return [as_structure(item) for item in found] if is_torch(source) else found
