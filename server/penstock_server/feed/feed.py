"""`Feed`: a user's declaration, which is checked when it is made, and the plan that the daemon derives from it before
it reads any data.

A feed runs nothing itself. This file must not know workers, slots or streams.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock_proto.messages import FeedPlan

from ..machine import environment
from ..sources.reader import ReadAtImport
from .combined.combining import Combining
from .combined.feed_kinds import generator_call, is_shared, leaves_out_items, wants_of
from .combined.mixed import Mixed
from .combined.zipped import zip_warnings
from .feed_warnings import batch_warning, shards_warning, undivided_warning
from .from_files import FromFiles
from .objects.class_names import classes_of
from .objects.endless_items import EndlessItems, VaryingItems
from .objects.indexables import is_indexable, is_keras, is_torch_iterable, is_torch_loader, length_of
from .objects.iterables import FilteredItems, ShardedDataset, WholeDataset, is_filtered, is_iterable, is_sharded
from .objects.tables import as_indexable
from .objects.torch_iterable import TorchIterable
from .options.cache_key import feed_directory
from .options.declared_spec import checked_spec
from .options.feed_options import TORCH_LOADER, FeedOptions, check_cached, check_name, checked_splits
from .options.plan_sizes import ENDLESS, FEWEST_OPEN, open_splits
from .options.transforms import checked_transforms
from .options.values import NO_SHUFFLE, OnError, Pad, Shuffle

SEGMENTS_OPEN = 4
"""Default number of segments that a lane runs at once when it shuffles. Segments differ only in their random numbers,
so more would gain little, and each one keeps an object of the user's in memory."""

SHARED_TURN = 4
"""Default of `turn` if every worker runs the whole generator, and the feed shuffles or has fast order. Each lane must
skip the turns of all others."""


@dataclass(frozen=True, eq=False, repr=False)
class Feed(FeedOptions, FromFiles, Combining):
    """A named source of batches: a generator and a list of splits, or any indexable object.

    `generate` yields one sample at a time: nested dicts and tuples of arrays and numbers, each of one dtype and shape.
    It runs in worker processes, once for each split. Penstock passes arguments according to its parameters:

        the first positional parameter   the split, one item of `splits`
        rng                              a `numpy.random.Generator`, seeded from the feed's seed, the epoch, the split
        epoch                            the number of the epoch, from 0
        shard                            (index, count), for a generator without `splits` that divides its own work

    For a generator without `rng`, `random` and `numpy.random` are seeded in the same way. Instead of a generator, you
    can give an object with `__len__` and `__getitem__`: each of its items is served once per epoch. If it also has
    `__getitems__`, Penstock calls that with the list of a batch's indices. A row of a table (a DataFrame of pandas or
    polars, a pyarrow Table, a structured array) is a dict of its columns. The items of a Keras `PyDataset` are whole
    batches, and its `on_epoch_begin` and `on_epoch_end` are called. A torch `IterableDataset` divides itself with
    `get_worker_info()`.

    A generator that makes up its samples, perhaps endlessly, has no splits. With `segment` it runs again and again, for
    segment 0, 1, 2, ..., each time with other random numbers, and is stopped after `segment` samples. Workers share
    segments as they share splits, and after a fault they read a segment again from its start. The generator may take
    the segment's number as its first parameter. If it neither does so nor draws random numbers, every segment has the
    same samples, and the daemon logs a warning. Without `samples` such a feed is endless: its first epoch never ends.

    With `method`, `generate` is a class, which need not know about Penstock. Each run constructs an object of that
    class and then runs the method. `random`, `numpy.random` and, if it is loaded, torch are seeded before the object is
    constructed.

    With `transform`, a function turns each sample that the source yields into the sample to serve. It runs in the
    workers, in parallel even if the generator itself cannot be divided. In that case every worker runs the whole
    generator, which should be cheap, and transforms its share of the samples. Without `shuffle` the stream of such a
    feed keeps the generator's order.

    Most feeds need only the first six options: the source, `splits`, `transform`, `batch_size`, `shuffle` and `seed`.
    Five options have a plain spelling and a longer one, a value that is checked when it is made: `shuffle`, `batching`,
    `on_error`, `cache` and `weights`. The feed keeps the value: with `shuffle=1000`, its attribute is `Shuffle(1000)`.

    Attributes:
        generate: the source: a generator function, an indexable object, or, with `method`, a class.
        splits: the list of splits, such as files, or a function without parameters that returns the list (called once
            per epoch). The items must be picklable.
        transform: a function `f(sample)` or `f(sample, rng)` that returns the sample to serve, perhaps with another
            structure, or a list of such functions, applied one after another. One that returns `penstock.DROP` leaves
            the sample out, and a generator function yields any number of samples for one. (For an indexable object see
            `drops`.) `rng` is a `numpy.random.Generator` for this sample alone. For a function without `rng`, `random`
            and `numpy.random` are seeded for each sample. With `batch_size` None, the function gets whole batches.
        batch_transform: a function `f(batch)` or `f(batch, rng)` of a whole batch (arrays whose first dimension is the
            row, in the structure of a sample) that returns the batch to serve, with as many rows and perhaps another
            structure, or a list of such functions. It runs in the workers, after `transform`, once for each batch, also
            if its rows come from several workers. `rng` is a `numpy.random.Generator` for this batch alone. The
            function may change the arrays that it gets, but not keep them. `spec` describes a row of its result.
        batch_size: samples in a batch. None: `generate` yields whole batches (or the items of the indexable object are
            whole batches), whose numbers of rows may differ.
        shuffle: number of samples to mix (batches if `batch_size` is None), or a `Shuffle`, which also says how. 0, the
            default, keeps the order of the input.
        seed: 0 to 2**62, 0 by default. The stream is a function of the feed and its seed.
        weights: for an indexable object: numbers in proportion to which its items are drawn, one for each, with
            replacement, or a `Weights`, which can draw without. An epoch has `samples` draws, by default as many as
            there are items. Each epoch draws other items. `shuffle` has no effect.
        name: the feed's name in its URL; by default the name of the module's attribute.
        epochs: number of epochs in a stream; None: no limit.
        samples: samples in an epoch, if known in advance. The number of steps is then known too.
        segment: samples after which a generator without `splits` is stopped and run again (batches if `batch_size` is
            None). It may end sooner. With `samples`, an epoch has as many segments as that takes, and the last one may
            be shorter. Without `samples`, the epoch is endless, and `epochs` cannot be given.
        method: name of the method, of the class `generate`, that yields the samples.
        args: positional arguments of the function, or of the class's constructor, after the split. Each run gets its
            own copies of the lists, dicts, arrays and random generators in `args` and `kwargs`, and may change them.
        kwargs: keyword arguments of the function, or of the class's constructor.
        drop_remainder: drop the last batch of an epoch if it is not full.
        drops: for an indexable object: True if it, or `transform`, may leave samples out by returning `penstock.DROP`.
            Then nobody knows how many samples an epoch has. `on_error="skip"`, or a transform that yields, means the
            same.
        fixed_length: False: the source is a Keras dataset whose number of batches may differ from epoch to epoch. Its
            length is then unknown to the trainer, as for most generators.
        rebatch: samples in a batch, if `generate` yields whole batches of other sizes and `batch_size` is None.
            Penstock takes those batches apart: everything else, such as `transform`, `shuffle`, `samples` and
            `segment`, works with their rows as if `generate` yielded them one by one. For generators only.
        spec: dtypes and shapes of a sample (of a batch if `batch_size` is None); by default those of the first one.
            `spec` has the structure of a sample: `{"x": Leaf(np.float32, (28, 28)), "y": Leaf("int64", ())}`.
        batching: how samples of different shapes become a batch. "stack", the default: all samples have the same shape,
            and a different one is an error. "pad": samples are padded with 0 to the largest of the batch; a `Pad` says
            with what, and to which lengths. "ragged": samples are concatenated, and a batch is a `tf.RaggedTensor`
            (`penstock.Ragged` without TensorFlow). In `spec`, None marks the dimensions that vary. Without `spec`, the
            length of each one-dimensional array varies. Text needs no `batching`.
        on_error: what to do with a split in which `generate` raises. "raise", the default: fail the stream. "skip":
            skip the rest of the split, log that, and count it in the status. "retry": read the split again and again,
            with growing pauses; the list of splits and, at the daemon's start, the first sample are retried too. A
            split that ends its worker process three times fails the stream, or is skipped with "skip"; an `OnError` has
            another number. A sample that does not fit the spec always fails the stream.
        cache: a directory that keeps each split as the source yields it, before `transform`, or a `Cache`, which also
            has a version. A worker writes a split when it reads it for the first time. From then on the generator does
            not run for it, in any epoch and in any daemon with this directory. The source must not take `rng` or
            `epoch`, be indexable, or have segments. If it draws from `random` or `numpy.random`, these are seeded from
            the split alone. The directory holds pickles: anyone who can write to it can run code in workers.
        lanes: number of sequences among which the splits of an epoch are divided, 16 by default. At most this many
            workers can run at once. Another number gives another order.
        turn: batches that the order takes from one lane before it goes to the next. By default one, and small batches
            of several lanes share their memory. In fast order, about 4 MiB of batches, at most 256. If lanes are
            shuffled, 2 MiB, and at most a lane's shuffle block, or 4 batches if lanes do not mix their samples. If
            every worker runs the whole generator, 4 in fast order and with `shuffle`. For an indexable object it does
            not change the stream: it is how many batches a worker makes in a row. By default as many as take about
            0.1 s, but at most 4 MiB, 256 batches and a 64th of the epoch.
        order: "exact", the same order with any number of workers, or "fast", the batches that are ready first. An
            indexable object always has the exact order: any worker can make any batch, so none waits long for another.
        env: environment variables of the worker processes, such as {"OMP_NUM_THREADS": "4"}, set before any module is
            imported; None as a value removes one. They override the daemon's own and the defaults, which give each
            library one thread and no GPU. The feeds of a daemon share its workers, so their `env` must agree.

    Raises:
        TypeError, ValueError: an option cannot work, or has become part of another one; the message says what to do.
    """

    def __post_init__(self) -> None:
        self._adapt()
        if self.rebatch is not None:
            self._check_rebatch()
            object.__setattr__(self, "batch_size", self.rebatch)
        self._make_values()
        self._check_options()
        if self.spec is not None:
            object.__setattr__(self, "spec", checked_spec(self.spec, self.batch_size, self.batching))
        object.__setattr__(self, "env", environment.checked(self.env, "env="))
        if is_indexable(self.generate):
            self._check_indexable()
        else:
            object.__setattr__(self, "splits", checked_splits(self.splits))
            self._check_segment()
            wants_of(self)
            if self.cache is not None:
                check_cached(generator_call(self))
        checked_transforms(self.transform)

    def _adapt(self) -> None:
        """Replace a table with an object of its rows, and a dataset that cannot be indexed, or is endless, with a
        generator function that yields its items."""
        object.__setattr__(self, "generate", as_indexable(self.generate))
        source = self.generate
        if is_torch_loader(source):
            raise TypeError(TORCH_LOADER)
        if is_torch_iterable(source):
            object.__setattr__(self, "generate", TorchIterable(source))
        elif is_sharded(source):
            object.__setattr__(self, "generate", ShardedDataset(source))
        elif is_iterable(source):
            object.__setattr__(self, "generate", WholeDataset(source))
        elif is_filtered(source) and self.splits is None:
            filtered = FilteredItems(source)
            object.__setattr__(self, "splits", filtered.splits)
            object.__setattr__(self, "generate", filtered)
        if not is_keras(source):
            return
        if self.batch_size is not None:
            raise ValueError(
                f"{type(source).__name__} is a Keras dataset, whose items are whole batches, so batch_size must be "
                f"None, got {self.batch_size}: set the size of a batch in the dataset itself. If its items are single "
                "samples, give Feed(range(len(dataset)), transform=dataset.__getitem__, ...)"
            )
        length = length_of(source)
        if length is not None and not self.fixed_length:
            if self.splits is not None or self.segment is not None or self.samples is not None:
                raise ValueError("fixed_length=False means that each epoch asks for its length: leave out samples=")
            varying = VaryingItems(source)
            object.__setattr__(self, "splits", varying.indices)
            object.__setattr__(self, "generate", varying)
        elif length is None:
            if self.splits is not None or self.segment is not None or self.samples is not None:
                raise ValueError(
                    f"{type(source).__name__} is an endless Keras dataset: leave splits=, segment= and samples= out"
                )
            object.__setattr__(self, "segment", 1)
            object.__setattr__(self, "generate", EndlessItems(source))

    def _interleave(self, shuffle: Shuffle) -> int:
        """Return how many splits a lane reads at once."""
        if shuffle.interleave is not None or not shuffle.samples:
            return shuffle.interleave or 1
        if self.segment is not None:
            return SEGMENTS_OPEN
        open_ = open_splits(shuffle.samples, self.lanes, self.batch_size)
        if isinstance(self.generate, Mixed):
            return max(FEWEST_OPEN, open_ // len(self.generate.parts))
        return open_

    def items_of_epoch(self) -> int:
        """Return how many items of the indexable object an epoch reads, or draws from it."""
        length = length_of(self.generate) or 0
        return length if self.weights is None else self._draws(length)

    def plan(self, default_name: str) -> FeedPlan:
        """Return the plan for the daemon. If the feed has no name of its own, name it `default_name`.

        Raises:
            ValueError: `default_name` cannot be part of a URL, or the indexable object has too many samples.
            TypeError: `cache` is given, here or in a feed of a mix, and the generator or its arguments cannot be
                pickled.
        """
        name = self.name if self.name is not None else check_name(default_name)
        in_parts = leaves_out_items(self)
        length = self.items_of_epoch() if is_indexable(self.generate) else None
        items = length if in_parts else None
        samples, lanes, warnings = self.samples, self.lanes, []
        static, mixed = not callable(self.splits), self.generate if isinstance(self.generate, Mixed) else None
        shuffle, on_error = Shuffle.of(self.shuffle), OnError.of(self.on_error)
        interleave = self._interleave(shuffle)
        turn = 1 if self.batch_size is None else self.turn
        if length is not None and length > ENDLESS:
            raise ValueError(f"len() of the indexable object must be at most {ENDLESS}, got {length}")
        if in_parts:
            shuffle, interleave, length, samples = NO_SHUFFLE, 1, None, None  # its splits follow the permuted order
        elif length is not None:
            lanes = 1
            samples = length if self.batch_size is not None else None
        elif mixed is not None:
            static = mixed.static_splits
        elif is_shared(self):
            interleave = 1  # a lane has one split, its share
            if turn is None and (shuffle.samples or self.order == "fast"):
                turn = SHARED_TURN
        elif self.segment is None and self.splits is None and not wants_of(self).shard:
            lanes = 1
            warnings.append(undivided_warning(name, self.generate))
        parts = self.generate.parts if isinstance(self.generate, TorchIterable | ShardedDataset) else None
        if parts is not None and parts < lanes:
            warnings.append(shards_warning(name, lanes, parts))
        if static:
            warnings += zip_warnings(self, name)
        if self.spec is not None and (text := batch_warning(name, self.spec, self.batch_size)):
            warnings.append(text)
        endless = self.segment is not None and self.samples is None
        return FeedPlan(
            name=name,
            spec=self.spec,
            batch_size=self.batch_size,
            turn=turn,
            lanes=lanes,
            order="exact" if is_indexable(self.generate) else self.order,  # a position in it allows no gaps
            shuffle=shuffle.samples,
            interleave=interleave,
            seed=self.seed,
            epochs=self.epochs,
            samples=samples,
            length=length,
            drop_remainder=self.drop_remainder or (endless and self.batch_size is not None),  # no batch is smaller
            static_splits=static,
            on_error=on_error.action,
            attempts=on_error.crashes,
            warnings=tuple(warnings),
            segment=self.segment,
            batching="pad" if isinstance(self.batching, Pad) else self.batching,
            buckets=tuple((isinstance(self.batching, Pad) and self.batching.buckets) or ()),
            block=shuffle.block,
            cache=None if self.cache is None else feed_directory(self),
            mixes=mixed is not None,
            part_caches=() if mixed is None else mixed.caches,
            weights="" if self.weights is None else self.weights.digest,
            items=items,
            classes=() if isinstance(self.generate, type) else classes_of(self.generate),
            permuted=in_parts and Shuffle.of(self.shuffle).samples > 0,
            contents=self.generate.contents if isinstance(self.generate, ReadAtImport) else "",
            undivided=is_shared(self),
        )
