"""`Feed`: a user's declaration, checked when it is made, and what follows from it before any data is read.

A feed runs nothing itself. This file must not know workers, slots or streams.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from penstock_proto.layout import SlotLayout, fixed_layout
from penstock_proto.messages import MAX_BUCKETS, FeedPlan
from penstock_proto.spec import (
    Spec,
    shown,
)

from . import environment
from .declared_spec import checked_spec
from .endless_items import EndlessItems
from .feed_warnings import batch_warning
from .from_files import FromFiles
from .generator_call import GeneratorCall
from .indexables import is_indexable, is_keras, is_torch_iterable, is_torch_loader, length_of
from .torch_iterable import TorchIterable
from .transforms import checked_transforms

INTERLEAVE = 4
"""Default of splits that a lane reads at once when it shuffles."""

SHARED_TURN = 4
"""Default of `turn` where every lane runs the whole generator: it has to pass over the turns of all other lanes."""

MAX_INTERLEAVE = 1024  # so that a restart record, two numbers for each open split, fits its message

ENDLESS = 2**62
"""The number of segments of an endless feed: more than are ever read."""


@dataclass(frozen=True, eq=False)
class Feed(FromFiles):
    """A named source of batches: a generator and a list of splits, or anything that can be indexed.

    `generate` yields one sample at a time: nested dicts and tuples of arrays and numbers, each of one dtype and shape.
    It runs in worker processes, once for each split, and receives the arguments that its parameters name:

        the first positional parameter   the split, one item of `splits`
        rng                              a `numpy.random.Generator`, seeded from the feed's seed, the epoch, the split
        epoch                            the number of the epoch, from 0
        shard                            (index, count), for a generator without `splits` that divides itself

    A generator without `rng` finds `random` and `numpy.random` seeded in the same way. In place of a generator, an
    object with `__len__` and `__getitem__` serves its items, each once an epoch. If it also has `__getitems__`, that is
    given the list of indices of a batch. The items of a Keras `PyDataset` are whole batches, and its `on_epoch_begin`
    and `on_epoch_end` are called. A torch `IterableDataset` is divided by its `get_worker_info()`.

    A generator that makes its samples up, perhaps endlessly, has no splits. With `segment` it runs again and again, for
    segment 0, 1, 2, ..., each time with other random numbers, and is ended after `segment` samples. Workers share
    segments as they share splits, and after a fault they read a segment again from its start. The generator may take
    the segment's number as its first parameter. If it neither does so nor draws random numbers, every segment has the
    same samples, and the daemon logs a warning. Without `samples` such a feed is endless: its first epoch never ends.

    With `method`, `generate` is a class, which need not know of Penstock. Each run constructs an object of it and then
    runs the method. `random`, `numpy.random` and, if it is loaded, torch are seeded before the object is constructed.

    With `transform`, a function makes each sample of one that the source yields. It runs in the workers, in parallel
    also where the generator itself cannot be divided: then every lane runs the whole generator, which should be cheap,
    and transforms its share of the samples. Without `shuffle` the stream of such a feed is in the generator's order.

    Attributes:
        generate: the generator function, the indexable object, or, with `method`, a class.
        method: name of the method of the class that yields the samples.
        args: positional arguments of the function, or of the class's constructor, after the split. Each run gets copies
            of lists, dicts, arrays and random generators in `args` and `kwargs`, so that it may change them.
        kwargs: keyword arguments of the function, or of the class's constructor.
        transform: a function `f(sample)` or `f(sample, rng)` that returns the sample to serve, perhaps of another
            structure, or a list of such functions, applied in turn. `rng` is a `numpy.random.Generator` of the sample's
            own. A function without it finds `random` and `numpy.random` seeded for the sample. With `batch_size` None,
            it gets whole batches.
        splits: the list of splits, such as files, or a function without parameters that returns it (called once per
            epoch). Its items must be picklable.
        batch_size: samples in a batch. None: `generate` yields whole batches (the items of an indexable object are
            whole batches), and their numbers of rows may differ.
        name: the feed's name in its URL; by default the name of the module's attribute.
        shuffle: number of samples to mix (batches if `batch_size` is None); 0 keeps the order of the input.
        block: for indexable objects with slow random access: permute blocks of so many neighbours, and then mix each
            `shuffle` samples that follow each other (items if `batch_size` is None). Without it `shuffle` permutes all.
        interleave: splits that a lane reads at once when it shuffles; 4 by default.
        seed: 0 to 2**62. The stream is a function of the feed and its seed.
        epochs: number of epochs in a stream; None: no limit.
        samples: samples in an epoch, if known beforehand; then the number of steps is known too.
        segment: samples after which a generator without `splits` is ended and run again (batches if `batch_size` is
            None). It may end sooner. With `samples` an epoch has as many segments as that takes, and the last one may
            be shorter; without, the epoch is endless, and `epochs` cannot be given.
        drop_remainder: drop the last batch of an epoch if it is not full.
        lanes: number of sequences that the splits of an epoch are dealt to; at most this many workers can run at once.
            Part of the order.
        turn: batches that the order takes from one lane before it goes to the next; by default as many as make about
            4 MiB, or 2 MiB if lanes are shuffled, and at most 256; 4 if every lane runs the whole generator.
        order: "exact", the same order with any number of workers, or "fast", whatever is ready first.
        spec: dtypes and shapes of a sample (of a batch if `batch_size` is None); by default those of the first. It has
            the structure of a sample: `{"x": Leaf(np.float32, (28, 28)), "y": Leaf("int64", ())}`.
        batching: how samples of different shapes become a batch. "stack": all samples have one shape; another one is an
            error. "pad": they are filled up with `pad_value` to the largest of the batch. "ragged": they lie one
            behind the other, and a batch is a `tf.RaggedTensor` (`penstock.Ragged` without TensorFlow). `spec` says
            which dimensions vary, by None. Without `spec` the length of each array with one dimension does. Text
            needs no `batching`.
        pad_value: the value of the padding, 0 by default: a number, or one for each leaf in a sample's structure.
        buckets: with "pad": lengths, in ascending order. A batch is filled up to the first of them that is long enough
            for its longest sample, so there are only so many shapes. Samples of similar length come together, as far
            as the lane's part of `shuffle` allows, so `shuffle` must be given, and the object cannot be indexable.
        too_long: what happens to a sample that is longer than the last of `buckets`: "raise" fails the stream, "drop"
            leaves the sample out, "cut" drops what is behind the last bucket.
        on_error: what to do with a split in which `generate` raises. "raise": fail the stream. "skip": leave out the
            rest of the split, log it and count it in the status. "retry": read the split again and again, with growing
            pauses; the list of splits and, at the daemon's start, the first sample are retried too. A split that ends
            its worker process `attempts` times fails the stream, or is left out with "skip". A sample that does not
            fit the spec always fails the stream.
        attempts: how often a split may end its worker process before that.
        env: environment variables of the worker processes, such as {"OMP_NUM_THREADS": "4"}, set before any module is
            imported; None as a value removes one. They take the place of the daemon's own and of the defaults, which
            give each library one thread and no GPU. Feeds of one daemon share its workers, so theirs must agree.

    Raises:
        TypeError, ValueError: an option cannot work; the message says what to do.
    """

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

    def __post_init__(self) -> None:
        self._adapt()
        _whole("block", self.block, 1, 2**62, optional=True)
        _whole("batch_size", self.batch_size, 1, 2**31, optional=True)
        _whole("shuffle", self.shuffle, 0, 2**62)
        _whole("interleave", self.interleave, 1, MAX_INTERLEAVE, optional=True)
        _whole("seed", self.seed, 0, 2**62)
        _whole("epochs", self.epochs, 1, 2**62, optional=True)
        _whole("samples", self.samples, 1, 2**62, optional=True)
        _whole("segment", self.segment, 1, 2**62, optional=True)
        _whole("lanes", self.lanes, 1, 2**16)
        _whole("turn", self.turn, 1, 2**16, optional=True)
        _whole("attempts", self.attempts, 1, 1000)
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
        if self.spec is not None:
            object.__setattr__(self, "spec", checked_spec(self.spec, self.batch_size, self.batching))
        object.__setattr__(self, "env", environment.checked(self.env, "env="))
        if self.block is not None:
            self._check_block()
        if is_indexable(self.generate):
            self._check_indexable()
        else:
            object.__setattr__(self, "splits", _checked_splits(self.splits))
            self._check_segment()
            generator_call(self)
        checked_transforms(self.transform)

    def _check_batching(self) -> None:
        if self.batching not in ("stack", "pad", "ragged"):
            raise ValueError(f"batching must be 'stack', 'pad' or 'ragged', got {self.batching!r}")
        if self.too_long not in ("raise", "drop", "cut"):
            raise ValueError(f"too_long must be 'raise', 'drop' or 'cut', got {self.too_long!r}")
        if self.batching != "stack" and self.batch_size is None:
            raise ValueError(
                f"batching={self.batching!r} needs a batch_size=: with None, the feed's batches are ready. Pad them "
                "yourself, or yield samples"
            )
        if self.buckets is None:
            if self.too_long != "raise":
                raise ValueError(f"too_long={self.too_long!r} needs buckets=: the last of them is the greatest length")
            return
        buckets = tuple(self.buckets)
        object.__setattr__(self, "buckets", buckets)
        if self.batching != "pad":
            raise ValueError('buckets= needs batching="pad": they are the lengths to which samples are filled up')
        if not self.shuffle or is_indexable(self.generate):
            what = "an indexable object has its own order" if is_indexable(self.generate) else "give shuffle= too"
            raise ValueError(f"buckets= brings samples of similar length together in the shuffle block: {what}")
        if not 1 <= len(buckets) <= MAX_BUCKETS:
            raise ValueError(f"buckets must be 1 to {MAX_BUCKETS} lengths, got {len(buckets)}")
        for length in buckets:
            _whole("each of buckets", length, 1, 2**40)
        if list(buckets) != sorted(set(buckets)):
            raise ValueError(f"buckets must be in ascending order, got {list(buckets)}")
        if self.too_long == "drop" and self.samples is not None:
            raise ValueError(
                "samples= promises the length of an epoch, and too_long='drop' cannot keep it: leave one of them out"
            )

    def _adapt(self) -> None:
        """Take a source that neither is a generator function nor has a last item as a generator function."""
        source = self.generate
        if is_torch_loader(source):
            raise TypeError(
                "expected a dataset, got a torch DataLoader, which starts workers of its own: give its dataset, "
                "Feed(loader.dataset, batch_size=..., shuffle=...)"
            )
        if is_torch_iterable(source):
            object.__setattr__(self, "generate", TorchIterable(source))
        if not is_keras(source):
            return
        if self.batch_size is not None:
            raise ValueError(
                f"{type(source).__name__} is a Keras dataset, whose items are whole batches, so batch_size must be "
                f"None, got {self.batch_size}: set the size of a batch in the dataset itself"
            )
        if length_of(source) is None:
            if self.splits is not None or self.segment is not None or self.samples is not None:
                raise ValueError(
                    f"{type(source).__name__} is an endless Keras dataset: leave splits=, segment= and samples= out"
                )
            object.__setattr__(self, "segment", 1)
            object.__setattr__(self, "generate", EndlessItems(source))

    def _check_block(self) -> None:
        if not is_indexable(self.generate):
            raise ValueError("block= is for indexable objects: leave it out, and let splits= be what is read together")
        if not self.shuffle:
            raise ValueError(
                "block= needs shuffle=, the number of samples to mix: 1 permutes blocks and keeps the order inside each"
            )

    def _check_segment(self) -> None:
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

    def plan(self, default_name: str) -> FeedPlan:
        """Return the plan for the daemon; the feed is named `default_name` if it has no name of its own.

        Raises:
            ValueError: `default_name` cannot be part of a URL, or the indexable object has too many samples.
        """
        name = self.name if self.name is not None else check_name(default_name)
        length = length_of(self.generate) if is_indexable(self.generate) else None
        samples, lanes, warnings = self.samples, self.lanes, []
        interleave = self.interleave or (INTERLEAVE if self.shuffle else 1)
        turn = 1 if self.batch_size is None else self.turn
        if length is not None:
            if length > ENDLESS:
                raise ValueError(f"len() of the indexable object must be at most {ENDLESS}, got {length}")
            lanes = 1
            samples = length if self.batch_size is not None else None
        elif is_shared(self):
            interleave = 1  # a lane has one split, its share
            turn = turn or SHARED_TURN
        elif self.segment is None and self.splits is None and not generator_call(self).wants.shard:
            lanes = 1
            warnings.append(
                f"feed {name} cannot be divided, so one worker does all the work: give splits= (a list of files or "
                "ranges; the generator gets them one by one), or segment=N if it makes up random samples (it runs "
                "again for every N samples), or let it take `shard` and yield every count-th sample from index on, "
                "where index, count = shard. If the generator is cheap and what comes after it is not, move that to a "
                "function and give it as transform="
            )
        if self.spec is not None and (text := batch_warning(name, self.spec, self.batch_size)):
            warnings.append(text)
        endless = self.segment is not None and self.samples is None
        return FeedPlan(
            name=name,
            spec=self.spec,
            batch_size=self.batch_size,
            turn=turn,
            lanes=lanes,
            order=self.order,
            shuffle=self.shuffle,
            interleave=interleave,
            seed=self.seed,
            epochs=self.epochs,
            samples=samples,
            length=length,
            drop_remainder=self.drop_remainder or (endless and self.batch_size is not None),  # none is ever smaller
            static_splits=not callable(self.splits),
            on_error=self.on_error,
            attempts=self.attempts,
            warnings=tuple(warnings),
            segment=self.segment,
            batching=self.batching,
            buckets=tuple(self.buckets or ()),
            block=self.block,
        )


def generator_call(feed: Feed) -> GeneratorCall:
    """Return how the generator of `feed`, which is not indexable, is called.

    Raises:
        TypeError, ValueError: as `GeneratorCall`.
    """
    return GeneratorCall(
        feed.generate,
        method=feed.method,
        args=feed.args,
        kwargs=feed.kwargs,
        has_splits=feed.splits is not None,
        segments=feed.segment is not None,
    )


def is_shared(feed: Feed) -> bool:
    """Whether every lane runs the whole generator of `feed` and keeps its share of the samples: it cannot be divided,
    but its `transform` runs in parallel."""
    return (
        bool(checked_transforms(feed.transform))
        and not is_indexable(feed.generate)
        and feed.splits is None
        and feed.segment is None
        and not generator_call(feed).wants.shard
    )


def check_name(name: str) -> str:
    """Return `name` if it can be the path of a URL.

    Raises:
        ValueError: it cannot.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", name):
        raise ValueError(f"name must be 1 to 128 letters, digits, '_', '-' and '.', got {name!r}")
    return name


def segment_count(plan: FeedPlan) -> int:
    """Return the number of segments in an epoch: ENDLESS if there is no last one."""
    assert plan.segment is not None
    return ENDLESS if plan.samples is None else -(-plan.samples // plan.segment)


def fixed_slots(plan: FeedPlan, spec: Spec, batch_size: int) -> SlotLayout:
    """Return the layout of the slots of a feed with fixed batches; a slot holds one turn.

    Long turns cost less per batch, but mix the lanes less. So turns are shorter if the feed shuffles.
    """
    one = fixed_layout(spec, batch_size, plan.turn or 1)
    if plan.turn is not None:
        return one
    about = (2 if plan.shuffle and plan.length is None else 4) << 20
    return fixed_layout(spec, batch_size, max(1, min(256, (about + one.nbytes // 2) // one.nbytes)))


def block_samples(shuffle: int, lanes: int, batch_size: int | None) -> int:
    """Return the number of samples in a lane's shuffle block: `shuffle / lanes`, rounded up to whole batches; 0 without
    shuffling.

    `lanes` counts the lanes that have any splits. With `batch_size` None, the unit is ready batches.
    """
    rows = batch_size or 1
    return -(-shuffle // (lanes * rows)) * rows


def _whole(option: str, value: Any, low: int, high: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if type(value) is not int:
        raise TypeError(f"{option} must be a whole number{' or None' if optional else ''}, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{option} must be {low} to {high}{' or None' if optional else ''}, got {value}")


def _checked_splits(splits: Any) -> Any:
    if splits is None or callable(splits) or (isinstance(splits, Sequence) and not isinstance(splits, str | bytes)):
        return splits
    if isinstance(splits, str | bytes | Mapping) or not isinstance(splits, Iterable):
        raise TypeError(f"splits must be a list (of files, say) or a function that returns one, got {shown(splits)}")
    return list(splits)


def _never_full(samples: int, batch_size: int | None) -> str:
    return (
        f"drop_remainder=True would drop the whole epoch: it has {samples} samples, and a batch takes {batch_size}. "
        "Make batch_size= smaller, or leave drop_remainder= out"
    )


def _are_columns(source: tuple[Any, ...]) -> bool:
    """Whether these look like the columns of a table, (X, y), and not like samples: a few arrays of many rows each."""
    shapes = [getattr(item, "shape", None) for item in source]
    rows = {shape[0] for shape in shapes if isinstance(shape, tuple) and shape}
    return all(shapes) and len(rows) == 1 and 2 <= len(source) < rows.pop()
