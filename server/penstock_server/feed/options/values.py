"""Values for the options of a `Feed` that mean something only together. Each is checked when it is made.

A plain value in the place of one is short for it: `shuffle=1000` is `shuffle=Shuffle(1000)`. `of` of each class turns
what the user gave into the value.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from penstock_proto.messages import MAX_BUCKETS
from penstock_proto.value_text import shown

from .checks import whole
from .short_repr import short_repr

MAX_INTERLEAVE = 1024  # keeps a restart record, which has two numbers for each open split, within a message


@dataclass(frozen=True, repr=False)
class Shuffle:
    """How a feed mixes its samples: `Feed(..., shuffle=Shuffle(10_000, interleave=16))`.

    Attributes:
        samples: number of samples to mix (batches if the feed's `batch_size` is None); 0 keeps the order of the input.
        interleave: splits that a lane reads at once, 1 to 1024. By default 4 to 16: one for each 64 samples of the
            lane's block, which is `samples / lanes` samples. With `segment`, 4 segments. All of them are open in a
            worker at once, and after a fault they are read again from their starts. A mix opens `interleave` splits of
            each of its feeds: by default 4 of each, or more if all feeds together then have at most 16 open.
        block: for indexable objects with slow random access: permute blocks of `block` neighbouring samples, and then
            mix every `samples` consecutive samples (items if `batch_size` is None). By default None: all are permuted.

    Raises:
        TypeError, ValueError: a number is impossible, or needs `samples`, which is 0.
    """

    samples: int
    _: KW_ONLY
    interleave: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        whole("shuffle", self.samples, 0, 2**62)
        whole("interleave", self.interleave, 1, MAX_INTERLEAVE, optional=True)
        whole("block", self.block, 1, 2**62, optional=True)
        if self.samples:
            return
        if self.interleave not in (None, 1):
            raise ValueError(
                f"{self} keeps the order of the input, so nothing is interleaved: give the number of samples to mix, "
                f"such as Shuffle(10_000, interleave={self.interleave})"
            )
        if self.block is not None:
            raise ValueError(
                f"{self} keeps the order of the input: give the number of samples to mix. Shuffle(1, "
                f"block={self.block}) permutes blocks and keeps the order inside each"
            )

    def __repr__(self) -> str:
        return short_repr(self)

    @classmethod
    def of(cls, given: int | Shuffle) -> Shuffle:
        """Return what `Feed(shuffle=given)` means.

        Raises:
            TypeError, ValueError: it means nothing.
        """
        if isinstance(given, bool):
            instead = "give how many samples to mix, such as 10_000" if given else "leave it out"
            raise TypeError(f"shuffle must be a whole number, got {given}: {instead}")
        return given if isinstance(given, Shuffle) else cls(given)


NO_SHUFFLE = Shuffle(0)


@dataclass(frozen=True, repr=False, eq=False)
class Weights:
    """How often each item of an indexable object comes: `Feed(..., weights=Weights(values, replacement=False))`.

    Attributes:
        values: a number for each item, in proportion to which it is drawn; 0 leaves it out. float64.
        replacement: whether an item may come several times in an epoch.

    Raises:
        TypeError, ValueError: these are no such numbers.
    """

    values: Any
    _: KW_ONLY
    replacement: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.replacement, bool):
            raise TypeError(f"replacement must be True or False, got {self.replacement!r}")
        try:
            values = np.array(self.values, np.float64)
        except (TypeError, ValueError):
            raise TypeError(f"weights must be numbers, one for each item, got {shown(self.values)}") from None
        if values.ndim != 1 or not values.size:
            raise ValueError(f"weights must be a list of numbers, one for each item, got the shape {values.shape}")
        if not np.isfinite(values).all() or values.min() < 0:
            place = int(np.flatnonzero(~(np.isfinite(values) & (values >= 0)))[0])
            raise ValueError(f"weights must be 0 or more, and item {place} has {values[place]}")
        if not np.isfinite(values.sum()) or not values.sum():
            raise ValueError(f"the sum of all weights must be a number above 0, got {values.sum()}")
        values.flags.writeable = False
        object.__setattr__(self, "values", values)

    def __repr__(self) -> str:
        kind = "" if self.replacement else ", replacement=False"
        return f"Weights(<{len(self.values)} numbers>{kind})"

    @property
    def digest(self) -> str:
        """A hash of all of this, in hexadecimal."""
        return hashlib.blake2b(self.values.tobytes() + bytes([self.replacement]), digest_size=16).hexdigest()

    @classmethod
    def of(cls, given: Any) -> Weights:
        """Return what `Feed(weights=given)` means.

        Raises:
            TypeError, ValueError: it means nothing.
        """
        return given if isinstance(given, Weights) else cls(given)


@dataclass(frozen=True, repr=False, kw_only=True)
class Pad:
    """Batches of samples that are padded to one shape: `Feed(..., batching=Pad(value=-1))`.

    Attributes:
        value: the value of the padding, 0 by default: a number, or one for each leaf in a sample's structure.
        buckets: lengths, in ascending order, at most 256 of them. A batch is padded to the first of them that is long
            enough for its longest sample, so batches have only `len(buckets)` shapes. Samples of similar length are
            batched together, as far as the lane's part of `shuffle` allows, so the feed must shuffle, and its source
            cannot be an indexable object. By default None: a batch is padded to its longest sample.
        too_long: what happens to a sample that is longer than the last of `buckets`: "raise", the default, fails the
            stream, "drop" drops the sample, "cut" cuts it to the length of the last bucket.

    Raises:
        TypeError, ValueError: `buckets` are no such lengths, or `too_long` is none of these words or has no buckets.
    """

    value: Any = 0
    buckets: Sequence[int] | None = None
    too_long: str = "raise"

    def __post_init__(self) -> None:
        if self.too_long not in ("raise", "drop", "cut"):
            raise ValueError(f"too_long must be 'raise', 'drop' or 'cut', got {self.too_long!r}")
        if self.buckets is not None:
            object.__setattr__(self, "buckets", _checked_buckets(self.buckets))
        elif self.too_long != "raise":
            raise ValueError(f"too_long={self.too_long!r} needs buckets=: the last of them is the greatest length")

    def __repr__(self) -> str:
        return short_repr(self)


@dataclass(frozen=True, repr=False)
class Cache:
    """Where a feed keeps the samples that its source yielded: `Feed(..., cache=Cache("/scratch/cache", version=2))`.

    Attributes:
        directory: the path of the directory. A relative path starts at the directory in which the daemon was started.
        version: a number or a text that is part of the key of a cached split, 0 by default. Change it when the
            generator's code or the data of a split have changed.

    Raises:
        TypeError, ValueError: `directory` is not a path, or `version` is neither a whole number nor a text.
    """

    directory: str | os.PathLike[str]
    _: KW_ONLY
    version: int | str = 0

    def __post_init__(self) -> None:
        if type(self.version) not in (int, str):
            raise TypeError(f"the version of a cache must be a whole number or a text, got {shown(self.version)}")
        path = os.fspath(self.directory) if isinstance(self.directory, str | os.PathLike) else None
        if not isinstance(path, str) or not path:
            raise TypeError(
                f'cache must be the path of a directory, such as "/scratch/cache", got {shown(self.directory)}'
            )
        if "://" in path:
            raise ValueError(
                f"cache must be a directory that this host has mounted, as its files are mapped into memory, got {path}"
            )
        object.__setattr__(self, "directory", path)

    def __repr__(self) -> str:
        return short_repr(self)

    @classmethod
    def of(cls, given: str | os.PathLike[str] | Cache) -> Cache:
        """Return what `Feed(cache=given)` means.

        Raises:
            TypeError, ValueError: it means nothing.
        """
        return given if isinstance(given, Cache) else cls(given)


@dataclass(frozen=True, repr=False)
class OnError:
    """What happens to a split that fails: `Feed(..., on_error=OnError("skip", crashes=5))`.

    Attributes:
        action: "raise" fails the stream, "skip" skips the rest of the split, and "retry" reads the split again. `Feed`
            says more.
        crashes: how many times a split may end its worker process, 1 to 1000, 3 by default. After that the stream
            fails, or, with "skip", the split is skipped.

    Raises:
        TypeError, ValueError: `action` is none of these words, or `crashes` no such number.
    """

    action: str
    _: KW_ONLY
    crashes: int = 3

    def __post_init__(self) -> None:
        if self.action not in ("raise", "skip", "retry"):
            raise ValueError(f"on_error must be 'raise', 'skip' or 'retry', got {self.action!r}")
        whole("crashes", self.crashes, 1, 1000)

    def __repr__(self) -> str:
        return short_repr(self)

    @classmethod
    def of(cls, given: str | OnError) -> OnError:
        """Return what `Feed(on_error=given)` means.

        Raises:
            TypeError, ValueError: it means nothing.
        """
        return given if isinstance(given, OnError) else cls(given)


FAIL = OnError("raise")


def batching_of(given: str | Pad) -> str | Pad:
    """Return what `Feed(batching=given)` means: "stack", "ragged" or a `Pad`.

    Raises:
        ValueError: it means nothing.
    """
    if isinstance(given, Pad) or given in ("stack", "ragged"):
        return given
    if given == "pad":
        return Pad()
    raise ValueError(f"batching must be 'stack', 'pad', 'ragged' or Pad(...), got {given!r}")


def _checked_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
    if isinstance(buckets, str) or not isinstance(buckets, Sequence):
        raise TypeError(f"buckets must be a list of lengths, such as (64, 128), got {shown(buckets)}")
    if not 1 <= len(buckets) <= MAX_BUCKETS:
        raise ValueError(f"buckets must be 1 to {MAX_BUCKETS} lengths, got {len(buckets)}")
    for length in buckets:
        whole("each of buckets", length, 1, 2**40)
    if list(buckets) != sorted(set(buckets)):
        raise ValueError(f"buckets must be in ascending order, got {list(buckets)}")
    return tuple(buckets)
