"""The options of a `Feed`, and their checks. Each error says what to do instead.

A feed is checked when it is made, before any data is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from penstock_proto.messages import MAX_BUCKETS
from penstock_proto.reprs import shown

from ..objects.endless_items import EndlessItems
from ..objects.indexables import is_indexable, is_keras, length_of
from ..objects.torch_iterable import TorchIterable
from .generator_call import GeneratorCall

MAX_INTERLEAVE = 1024  # keeps a restart record, which has two numbers for each open split, within a message


@dataclass(frozen=True, eq=False)
class FeedOptions:
    """The options of a `Feed`, whose docstring describes them."""

    generate: Callable[..., Any] | Sequence[Any]
    _: KW_ONLY
    method: str | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    transform: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    splits: Sequence[Any] | Callable[[], Iterable[Any]] | None = None
    batch_size: int | None
    name: str | None = None
    shuffle: int = 0
    interleave: int | None = None
    seed: int = 0
    epochs: int | None = None
    samples: int | None = None
    segment: int | None = None
    drop_remainder: bool = False
    lanes: int = 16
    turn: int | None = None
    order: str = "exact"
    spec: Any = None
    batching: str = "stack"
    pad_value: Any = 0
    buckets: Sequence[int] | None = None
    too_long: str = "raise"
    on_error: str = "raise"
    attempts: int = 3
    block: int | None = None
    env: Mapping[str, str | None] | None = None
    rebatch: int | None = None
    cache: str | os.PathLike[str] | None = None
    cache_version: int | str = 0

    def _check_options(self) -> None:
        """Check the options that every kind of source has.

        Raises:
            TypeError, ValueError: they cannot work.
        """
        whole("block", self.block, 1, 2**62, optional=True)
        whole("batch_size", self.batch_size, 1, 2**31, optional=True)
        whole("shuffle", self.shuffle, 0, 2**62)
        whole("interleave", self.interleave, 1, MAX_INTERLEAVE, optional=True)
        whole("seed", self.seed, 0, 2**62)
        whole("epochs", self.epochs, 1, 2**62, optional=True)
        whole("samples", self.samples, 1, 2**62, optional=True)
        whole("segment", self.segment, 1, 2**62, optional=True)
        whole("lanes", self.lanes, 1, 2**16)
        whole("turn", self.turn, 1, 2**16, optional=True)
        whole("attempts", self.attempts, 1, 1000)
        if self.name is not None:
            check_name(self.name)
        if self.order not in ("exact", "fast"):
            raise ValueError(f"order must be 'exact' or 'fast', got {self.order!r}")
        if self.on_error not in ("raise", "skip", "retry"):
            raise ValueError(f"on_error must be 'raise', 'skip' or 'retry', got {self.on_error!r}")
        if self.on_error == "skip" and self.samples is not None:
            raise ValueError(
                "samples= promises the length of an epoch, and on_error='skip' cannot keep it: leave one of them out"
            )
        if not isinstance(self.drop_remainder, bool):
            raise TypeError(f"drop_remainder must be True or False, got {self.drop_remainder!r}")
        if self.interleave not in (None, 1) and not self.shuffle:
            raise ValueError("interleave= needs shuffle=: without it the order of the input is kept")
        if self.batch_size is None:
            if self.drop_remainder:
                raise ValueError("drop_remainder= needs a batch_size=: with None, `generate` makes the batches")
            if self.turn not in (None, 1):
                raise ValueError("turn= must be 1 with batch_size=None: batches of unknown size are sent one by one")
        if self.drop_remainder and self.samples is not None and self.samples < (self.batch_size or 0):
            raise ValueError(_never_full(self.samples, self.batch_size))
        self._check_batching()
        self._check_block()
        self._check_cache()

    def _check_rebatch(self) -> None:
        whole("rebatch", self.rebatch, 1, 2**31, optional=True)
        if self.batch_size not in (None, self.rebatch):
            raise ValueError(
                f"rebatch={self.rebatch} is for a generator that yields whole batches, so batch_size must be None, got "
                f"{self.batch_size}: if it yields samples, leave rebatch= out"
            )
        if is_indexable(self.generate) or is_keras(self.generate):
            raise ValueError(
                "rebatch= is for generators: set the size of a batch in the indexable object itself, or let its items "
                "be samples and give batch_size="
            )

    def _check_batching(self) -> None:
        if self.batching not in ("stack", "pad", "ragged"):
            raise ValueError(f"batching must be 'stack', 'pad' or 'ragged', got {self.batching!r}")
        if self.too_long not in ("raise", "drop", "cut"):
            raise ValueError(f"too_long must be 'raise', 'drop' or 'cut', got {self.too_long!r}")
        if self.batching != "stack" and self.batch_size is None:
            raise ValueError(
                f"batching={self.batching!r} needs a batch_size=: with None, `generate` makes the batches. Pad "
                "them yourself, or yield samples"
            )
        self._check_buckets()

    def _check_buckets(self) -> None:
        if self.buckets is None:
            if self.too_long != "raise":
                raise ValueError(f"too_long={self.too_long!r} needs buckets=: the last of them is the greatest length")
            return
        if self.batching != "pad":
            raise ValueError('buckets= needs batching="pad": they are the lengths to which samples are filled up')
        if not self.shuffle or is_indexable(self.generate):
            what = "an indexable object has its own order" if is_indexable(self.generate) else "give shuffle= too"
            raise ValueError(f"buckets= brings samples of similar length together in the shuffle block: {what}")
        if not 1 <= len(self.buckets) <= MAX_BUCKETS:
            raise ValueError(f"buckets must be 1 to {MAX_BUCKETS} lengths, got {len(self.buckets)}")
        for length in self.buckets:
            whole("each of buckets", length, 1, 2**40)
        if list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"buckets must be in ascending order, got {list(self.buckets)}")
        if self.too_long == "drop" and self.samples is not None:
            raise ValueError(
                "samples= promises the length of an epoch, and too_long='drop' cannot keep it: leave one of them out"
            )

    def _check_block(self) -> None:
        if self.block is None:
            return
        if not is_indexable(self.generate):
            raise ValueError("block= is for indexable objects: leave it out; let each split be a range to read at once")
        if not self.shuffle:
            raise ValueError(
                "block= needs shuffle=, the number of samples to mix: 1 permutes blocks and keeps the order inside each"
            )

    def _check_cache(self) -> None:
        """Check the options of the cache, except for the generator's parameters.

        Raises:
            TypeError, ValueError: they cannot work.
        """
        if type(self.cache_version) not in (int, str):
            raise TypeError(f"cache_version must be a whole number or a text, got {shown(self.cache_version)}")
        if self.cache is None:
            if self.cache_version != 0:
                raise ValueError("cache_version= needs cache=, the directory of the cache")
            return
        path = os.fspath(self.cache) if isinstance(self.cache, str | os.PathLike) else None
        if not isinstance(path, str) or not path:
            raise TypeError(f'cache must be the path of a directory, such as "/scratch/cache", got {shown(self.cache)}')
        if "://" in path:
            raise ValueError(
                f"cache must be a directory that this host has mounted, as its files are mapped into memory, got {path}"
            )
        if is_indexable(self.generate) or isinstance(self.generate, EndlessItems):
            raise ValueError(
                "cache= keeps what a generator yields for a split, and an indexable object has neither: read ranges of "
                "it in a generator with splits=, or leave cache= out"
            )
        if isinstance(self.generate, TorchIterable):
            raise ValueError(
                "cache= keeps what is the same in each epoch, and a torch IterableDataset may change with the epoch: "
                "read its data in a generator with splits=, or leave cache= out"
            )
        if self.segment is not None:
            raise ValueError(
                "cache= keeps splits, and segment= makes other samples each time: leave one of the two out, or give "
                "what is to be read as splits="
            )

    def _check_segment(self) -> None:
        """Check the options of a generator with segments.

        Raises:
            TypeError, ValueError: they cannot work.
        """
        if self.segment is None:
            return
        if self.splits is not None:
            raise ValueError(
                "segment= is for generators without splits=, as segments take their place: leave one of the two out"
            )
        if self.samples is None and self.epochs is not None:
            raise ValueError(
                f"epochs={self.epochs} cannot work, as segment= without samples= makes one endless epoch: give "
                "samples= (the number in an epoch), or leave epochs= out"
            )

    def _check_indexable(self) -> None:
        """Check the options of an indexable object.

        Raises:
            TypeError, ValueError: they cannot work.
        """
        if self.method is not None or self.args or self.kwargs:
            kind = type(self.generate).__name__
            raise TypeError(
                f"method=, args= and kwargs= are for a generator function or a class, and got an instance of {kind}: "
                f"give the class {kind} itself if one of its methods yields the samples, and otherwise leave them out"
            )
        if isinstance(self.generate, Mapping | str | bytes):
            raise TypeError(f"expected a list of samples or a generator function, got {shown(self.generate)}")
        if isinstance(self.generate, tuple) and _are_columns(self.generate):
            raise TypeError(
                f"{shown(self.generate)} would be an epoch of {len(self.generate)} samples, one for each array: give "
                "list(zip(X, y)), or an object whose __len__ is the number of rows and whose __getitem__(i) returns "
                "(X[i], y[i]). If the arrays are the samples, give a list of them"
            )
        if self.splits is not None:
            raise ValueError("splits= is for generators; leave it out: an indexable object is divided by its indices")
        if self.segment is not None:
            raise ValueError("segment= is for generators; leave it out: an indexable object is divided by its indices")
        if self.on_error == "skip":
            raise ValueError(
                "on_error='skip' leaves out splits, and an indexable object has none: let its __getitem__ return "
                "another sample, or use a generator with splits="
            )
        length = length_of(self.generate)
        if self.samples is not None and self.samples != length:
            raise ValueError(f"samples={self.samples}, but the indexable object has {length}: leave samples= out")
        if length and self.drop_remainder and length < (self.batch_size or 0):
            raise ValueError(_never_full(length, self.batch_size))


def checked_splits(splits: Any) -> Any:
    """Return `splits` as a list, or unchanged if it is a function.

    Raises:
        TypeError: `splits` is neither.
    """
    if splits is None or callable(splits) or (isinstance(splits, Sequence) and not isinstance(splits, str | bytes)):
        return splits
    if isinstance(splits, str | bytes | Mapping) or not isinstance(splits, Iterable):
        raise TypeError(f"splits must be a list (of files, say) or a function that returns one, got {shown(splits)}")
    return list(splits)


def check_cached(call: GeneratorCall) -> None:
    """Check that a generator can be cached, that is, that it yields the same samples in each epoch.

    Raises:
        ValueError: it takes `rng` or `epoch`.
    """
    for taken, name in ((call.wants.rng, "rng"), (call.wants.epoch, "epoch")):
        if taken:
            raise ValueError(
                f"cache= keeps what {call.name} yields for a split and serves it in all epochs, so it must not take "
                f"{name}: move what differs between epochs to a function, and give that as transform=, which runs "
                "after the cache"
            )


def check_name(name: str) -> str:
    """Return `name` if it can be part of a URL.

    Raises:
        ValueError: it cannot.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", name):
        raise ValueError(f"name must be 1 to 128 letters, digits, '_', '-' and '.', got {name!r}")
    return name


def whole(option: str, value: Any, low: int, high: int, *, optional: bool = False) -> None:
    """Check that an option is a whole number from `low` to `high`.

    Raises:
        TypeError, ValueError: it is not.
    """
    if value is None and optional:
        return
    if type(value) is not int:
        raise TypeError(f"{option} must be a whole number{' or None' if optional else ''}, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{option} must be {low} to {high}{' or None' if optional else ''}, got {value}")


def _never_full(samples: int, batch_size: int | None) -> str:
    return (
        f"drop_remainder=True would drop the whole epoch: it has {samples} samples, and a batch takes {batch_size}. "
        "Make batch_size= smaller, or leave drop_remainder= out"
    )


def _are_columns(source: tuple[Any, ...]) -> bool:
    """Return whether these look like the columns of a table, (X, y), and not like samples: a few arrays of many rows
    each."""
    shapes = [getattr(item, "shape", None) for item in source]
    rows = {shape[0] for shape in shapes if isinstance(shape, tuple) and shape}
    return all(shapes) and len(rows) == 1 and 2 <= len(source) < rows.pop()
