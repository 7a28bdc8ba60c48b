"""The options of a `Feed`, and their checks. Each error says what to do instead.

A feed is checked when it is made, before any data is read.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Self

from penstock_proto.value_text import shown

from ..objects.endless_items import EndlessItems, VaryingItems
from ..objects.indexables import is_dataset, is_indexable, is_keras, is_torch_loader, length_of
from ..objects.iterables import FilteredItems, ShardedDataset, WholeDataset
from ..objects.torch_iterable import TorchIterable
from .checks import whole
from .generator_call import GeneratorCall
from .old_spellings import refuse_old_spellings
from .plan_sizes import ENDLESS
from .short_repr import arguments, call
from .transforms import checked_batch_transforms
from .values import FAIL, NO_SHUFFLE, Cache, OnError, Pad, Shuffle, Weights, batching_of

TORCH_LOADER = (
    "expected a dataset, got a torch DataLoader, which starts workers of its own: give its dataset, "
    "Feed(loader.dataset, batch_size=..., shuffle=...)"
)


@dataclass(frozen=True, eq=False, repr=False)
class FeedOptions:
    """The options of a `Feed`, whose docstring describes them. Those with a plain and a longer spelling are kept as the
    values of values.py."""

    generate: Callable[..., Any] | Sequence[Any]
    _: KW_ONLY
    splits: Sequence[Any] | Callable[[], Iterable[Any]] | None = None
    transform: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    batch_size: int | None
    batch_transform: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    shuffle: int | Shuffle = NO_SHUFFLE
    seed: int = 0
    weights: Any = None
    name: str | None = None
    epochs: int | None = None
    samples: int | None = None
    segment: int | None = None
    method: str | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    drop_remainder: bool = False
    drops: bool = False
    fixed_length: bool = True
    rebatch: int | None = None
    spec: Any = None
    batching: str | Pad = "stack"
    on_error: str | OnError = FAIL
    cache: str | os.PathLike[str] | Cache | None = None
    lanes: int = 16
    turn: int | None = None
    order: str = "exact"
    env: Mapping[str, str | None] | None = None

    def __new__(cls, *args: Any, **options: Any) -> Self:
        refuse_old_spellings(options)
        _refuse_unknown(options, [one.name for one in fields(cls)])
        if (args or options) and "batch_size" not in options:  # neither is given when it is copied
            raise TypeError(_needs_batch_size(args[0] if args else options.get("generate")))
        return super().__new__(cls)

    def __repr__(self) -> str:
        positional, keywords = arguments(self)
        if not self.env:
            keywords.pop("env", None)
        return call(type(self).__name__, positional, keywords)

    def _make_values(self) -> None:
        """Replace plain spellings with values.

        Raises:
            TypeError, ValueError: one means nothing.
        """
        object.__setattr__(self, "shuffle", Shuffle.of(self.shuffle))
        object.__setattr__(self, "batching", batching_of(self.batching))
        object.__setattr__(self, "on_error", OnError.of(self.on_error))
        if self.cache is not None:
            object.__setattr__(self, "cache", Cache.of(self.cache))
        if self.weights is not None:
            object.__setattr__(self, "weights", Weights.of(self.weights))

    def _check_options(self) -> None:
        """Check the options that every kind of source has.

        Raises:
            TypeError, ValueError: they cannot work.
        """
        whole("batch_size", self.batch_size, 1, 2**31, optional=True)
        whole("seed", self.seed, 0, 2**62)
        whole("epochs", self.epochs, 1, 2**62, optional=True)
        whole("samples", self.samples, 1, 2**62, optional=True)
        whole("segment", self.segment, 1, 2**62, optional=True)
        whole("lanes", self.lanes, 1, 2**16)
        whole("turn", self.turn, 1, 2**16, optional=True)
        if self.name is not None:
            check_name(self.name)
        if self.order not in ("exact", "fast"):
            raise ValueError(f"order must be 'exact' or 'fast', got {self.order!r}")
        if OnError.of(self.on_error).action == "skip" and self.samples is not None:
            raise ValueError(
                "samples= promises the length of an epoch, and on_error='skip' cannot keep it: leave one of them out"
            )
        if not isinstance(self.drop_remainder, bool):
            raise TypeError(f"drop_remainder must be True or False, got {self.drop_remainder!r}")
        if not isinstance(self.drops, bool):
            raise TypeError(f"drops must be True or False, got {self.drops!r}")
        if not isinstance(self.fixed_length, bool):
            raise TypeError(f"fixed_length must be True or False, got {self.fixed_length!r}")
        if not self.fixed_length and not isinstance(self.generate, VaryingItems):
            raise ValueError("fixed_length=False is for Keras datasets with a length: epochs of generators may differ")
        if self.batch_size is None:
            if self.drop_remainder:
                raise ValueError("drop_remainder= needs a batch_size=: with None, `generate` makes the batches")
            if self.turn not in (None, 1):
                raise ValueError("turn= must be 1 with batch_size=None: batches of unknown size are sent one by one")
        if self.drop_remainder and self.samples is not None and self.samples < (self.batch_size or 0):
            raise ValueError(_never_full(self.samples, self.batch_size))
        self._check_batching()
        self._check_block()
        if self.weights is not None and (not is_indexable(self.generate) or is_keras(self.generate)):
            raise ValueError(
                "weights= is for indexable objects whose items are samples: a generator decides itself what it yields. "
                "Feed.mix has weights for feeds"
            )
        self._check_cache()
        if self.batch_transform is not None:
            self._check_batch_transform()

    def _check_batch_transform(self) -> None:
        """Check `batch_transform=`.

        Raises:
            TypeError, ValueError: it is no function of a batch, or this feed cannot have one.
        """
        checked_batch_transforms(self.batch_transform)
        if self.batch_size is None and self.rebatch is None:
            raise ValueError(
                "batch_transform= gets batches that Penstock has made, and with batch_size=None the source makes them: "
                "transform= gets these whole batches"
            )
        if self.batching == "ragged":
            raise ValueError("batch_transform= gets arrays, which ragged batches are not: give batching='pad' instead")

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
        if self.batching == "stack":
            return
        if self.batch_size is None:
            raise ValueError(
                f"batching={self.batching!r} needs a batch_size=: with None, `generate` makes the batches. Pad "
                "them yourself, or yield samples"
            )
        if not isinstance(self.batching, Pad) or self.batching.buckets is None:
            return
        if not Shuffle.of(self.shuffle).samples or is_indexable(self.generate):
            what = "an indexable object has its own order" if is_indexable(self.generate) else "give shuffle= too"
            raise ValueError(f"buckets bring samples of similar length together in the shuffle block: {what}")
        if self.batching.too_long == "drop" and self.samples is not None:
            raise ValueError(
                "samples= promises the length of an epoch, and too_long='drop' cannot keep it: leave one of them out"
            )

    def _check_block(self) -> None:
        if Shuffle.of(self.shuffle).block is not None and not is_indexable(self.generate):
            raise ValueError(
                f"the block of shuffle={self.shuffle!r} is for indexable objects: leave it out; let each split be a "
                "range to read at once"
            )

    def _check_cache(self) -> None:
        """Check that the samples of this source can be cached, except for the generator's parameters.

        Raises:
            ValueError: they cannot.
        """
        if self.cache is None:
            return
        if is_indexable(self.generate) or isinstance(self.generate, EndlessItems):
            raise ValueError(
                "cache= keeps what a generator yields for a split, and an indexable object has neither: read ranges of "
                "it in a generator with splits=, or leave cache= out"
            )
        if isinstance(self.generate, TorchIterable | ShardedDataset | FilteredItems | WholeDataset):
            raise ValueError(
                f"cache= keeps what is the same in each epoch, and a {self.generate.__name__} may change with the "
                "epoch: read its data in a generator with splits=, or leave cache= out"
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
        if isinstance(self.generate, Mapping):
            if self.generate and all(is_dataset(value) for value in self.generate.values()):
                raise TypeError(_which_split(self.generate))
            raise TypeError(
                f"expected a list of samples or a generator function, got {shown(self.generate)}: a sample may be a "
                "dict, so give a list of dicts. If these are columns: [dict(zip(columns, row)) for row in "
                "zip(*columns.values())]"
            )
        if isinstance(self.generate, str | bytes):
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
        if is_keras(self.generate) and (self.drops or OnError.of(self.on_error).action == "skip"):
            raise ValueError(
                f"{type(self.generate).__name__} is a Keras dataset, which says how many batches an epoch has, so none "
                "can be left out with drops= or on_error='skip': give fixed_length=False too, and the length of an "
                "epoch is no longer known. Or serve the samples that it reads"
            )
        if self.drops and self.samples is not None:
            raise ValueError(
                "samples= promises the length of an epoch, and drops=True cannot keep it: leave one of them out"
            )
        length = length_of(self.generate)
        if length is not None and length > ENDLESS:
            raise ValueError(
                f"len() of the indexable object must be at most {ENDLESS}, got {length}: if it repeats its items for "
                "ever, as Grain's .repeat() does, leave that out, since a feed has epochs"
            )
        if self.weights is not None:
            assert length is not None
            length = self._draws(length)
        elif self.samples is not None and self.samples != length:
            raise ValueError(f"samples={self.samples}, but the indexable object has {length}: leave samples= out")
        if length and self.drop_remainder and length < (self.batch_size or 0):
            raise ValueError(_never_full(length, self.batch_size))

    def _draws(self, items: int) -> int:
        """Return how many samples an epoch draws from so many items.

        Raises:
            ValueError: the weights do not fit.
        """
        weights: Weights = self.weights
        if len(weights.values) != items:
            raise ValueError(f"weights= has {len(weights.values)} numbers, and the indexable object {items} items")
        if Shuffle.of(self.shuffle).block is not None:
            raise ValueError("the block of shuffle= reads neighbours together, and weights= draws single items")
        if weights.replacement:
            return self.samples or items
        drawable = int((weights.values > 0).sum())
        if self.samples is not None and self.samples > drawable:
            raise ValueError(
                f"samples={self.samples} cannot be drawn without replacement: {drawable} items have a weight above 0"
            )
        return self.samples or drawable


def checked_splits(splits: Any) -> Any:
    """Return `splits` as a list, or unchanged if it is a function.

    Raises:
        TypeError: `splits` is neither.
    """
    if splits is None or callable(splits) or (isinstance(splits, Sequence) and not isinstance(splits, str | bytes)):
        return splits
    if isinstance(splits, str | bytes | Mapping) or not isinstance(splits, Iterable):
        instead = f": range({splits}) has so many" if isinstance(splits, int) and splits > 0 else ""
        raise TypeError(
            f"splits must be a list (of files, say) or a function that returns one, got {shown(splits)}{instead}"
        )
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


def _refuse_unknown(options: Iterable[str], known: Sequence[str]) -> None:
    """Check that a feed has these options.

    Raises:
        TypeError: it has no such option; the message has the most similar one.
    """
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise TypeError(f"a feed has no option {name}=" + (f": did you mean {close[0]}=?" if close else ""))


def _needs_batch_size(source: Any) -> str:
    """Return the error for a feed without batch_size=."""
    if is_torch_loader(source):
        return TORCH_LOADER
    if is_keras(source):
        return (
            f"a feed needs batch_size=: the items of {type(source).__name__}, a Keras dataset, are whole batches, so "
            "give batch_size=None"
        )
    items = "its items are" if is_indexable(source) else "it yields"
    return (
        f"a feed needs batch_size=: give the number of samples in a batch, or batch_size=None if {items} whole batches"
    )


def _never_full(samples: int, batch_size: int | None) -> str:
    return (
        f"drop_remainder=True would drop the whole epoch: it has {samples} samples, and a batch takes {batch_size}. "
        "Make batch_size= smaller, or leave drop_remainder= out"
    )


def _which_split(splits: Mapping[Any, Any]) -> str:
    """Return the error for a dict of datasets, such as a DatasetDict."""
    named = [
        f"{key!r}" + (f" ({len(one):,} samples)" if hasattr(one, "__len__") else "") for key, one in splits.items()
    ]
    first = next(iter(splits))
    return (
        f"expected one dataset, got a {type(splits).__name__} of {len(splits)}, which are {', '.join(named)}: give one "
        f"of them, such as Feed(datasets[{first!r}], ...)"
    )


def _are_columns(source: tuple[Any, ...]) -> bool:
    """Return whether these look like the columns of a table, (X, y), and not like samples: a few arrays of many rows
    each."""
    shapes = [getattr(item, "shape", None) for item in source]
    rows = {shape[0] for shape in shapes if isinstance(shape, tuple) and shape}
    return all(shapes) and len(rows) == 1 and 2 <= len(source) < rows.pop()
