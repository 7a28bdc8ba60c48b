"""A stream as a `tf.data.Dataset`. Only this module and keras.py import TensorFlow.

A slab comes out of `from_generator` as one uint8 tensor, which aliases its slot. By slice and bitcast, the graph cuts
this tensor into leaves, each with all batches of the slab. Then `from_tensor_slices` cuts the leaves into batches. So a
slab costs TensorFlow one component, however many leaves it has, and a batch costs next to nothing.

Slices alias if they begin and end at a multiple of 64. So if a slab is one batch, a large leaf that ends elsewhere is a
component of its own, and so is a large leaf that is the only one. If a feed is not fixed, each of its leaves is.

While no data has arrived, the generator yields elements without batches, so that TensorFlow notices a `break`.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from penstock_proto import PenstockError
from penstock_proto.batches.columns import Column
from penstock_proto.batches.layout import ALIGN, HEADER, LeafPlace
from penstock_proto.messages import End
from penstock_proto.spec import Leaf, leaf_list, unflatten

from .._state.build_reads import BuildReads
from .._state.consumer_state import Received, Refused
from .._state.memory import Gone, Root, address_of
from .._stream.handoff import STEP
from .._stream.renewed_error import renewed
from .._stream.stream_handle import StreamHandle, datasets
from .._transport.ragged import Ragged
from .._transport.slab_views import SlabViews
from . import interrupts, keras_calls

logger = logging.getLogger("penstock")

LENGTH = (
    "%s: this epoch had %d batches. Keras could not know that before, and warns that its input ran out of data, which "
    "is harmless here: Feed(samples=%s) tells it the number of steps from the start"
)
OWN_COMPONENT = 16 * 1024
"""A leaf of this many bytes or more is a component of its own if it is the only leaf, or if the graph would copy it."""
AGAIN = 0.25
"""Seconds before an error comes again. Then the time doubles, up to `MOST_AGAIN`."""
MOST_AGAIN = 30.0
LATE = 8
"""An iteration that takes more slabs than this after Keras has built a model was not read to build it."""
_FIRST, _BATCHES = 4, 5
"""The words of a slab's first header that tell the graph the slab's place in the slot and its number of batches."""


def dataset(handle: StreamHandle, ahead: int) -> tf.data.Dataset:
    """Return the dataset of `handle`'s stream. It, and everything made from it, keeps the handle alive. TensorFlow
    takes `ahead` slabs ahead."""
    form = _form(handle)
    datasets.add(handle)

    running: deque[tf.data.Dataset] = deque(maxlen=8)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def slabs(token: tf.Tensor) -> tf.data.Dataset:
        made = tf.data.Dataset.from_generator(_begin, args=(token,), output_signature=form.signature())
        # In tf.data's debug mode this runs for each iteration, and TensorFlow holds the generator only weakly.
        if tf.executing_eagerly():
            running.append(made)
        return made

    # The token is an element, because what a traced function captures lives until the next garbage collection.
    taken = tf.data.Dataset.from_tensors(_token(handle, form)).flat_map(slabs)
    result = form.structured((taken.prefetch(ahead) if ahead else taken).flat_map(form.batches))
    if handle.info.endless:
        result = result.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    elif handle.cardinality is not None:
        # Keras counts its steps by the cardinality. With `assert_cardinality` the first epoch after a resume, which is
        # shorter, would be an error. An empty dataset, repeated forever, counts as infinite, and adds no batch.
        nothing = form.structured(tf.data.Dataset.from_tensors(form.nothing()).flat_map(form.batches)).repeat()
        counted = tf.data.Dataset.zip(result.concatenate(nothing), tf.data.Dataset.range(handle.cardinality))
        result = counted.map(lambda batch, _: batch)  # TensorFlow runs this without a function call
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # The autotuner's thread can delay the end of an iterator, so that `break` sometimes takes seconds, in plain tf.data
    # too.
    options.autotune.enabled = False
    return result.with_options(options)


def cached(dataset: tf.data.Dataset, count: int, cardinality: int | float | None) -> tf.data.Dataset:
    """Return a dataset that repeats copies of the next `count` batches. An epoch has `cardinality` batches, or `count`
    if that is None."""
    if cardinality is not None:
        count = int(min(count, cardinality))
    bare = not isinstance(dataset.element_spec, tuple)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def copied(*batch: Any) -> Any:
        # The consumer may keep and write the batches that were handed over, so the cache needs copies.
        return tf.nest.map_structure(
            lambda leaf: tf.raw_ops.DeepCopy(x=leaf), batch[0] if bare else batch, expand_composites=True
        )

    copies = dataset.take(count).map(copied).cache()
    for _ in copies:  # a cache replays only what was read to its end
        pass
    endless = copies.repeat()
    return endless if cardinality == math.inf else endless.take(count if cardinality is None else int(cardinality))


def replayed(batches: list[Any], element_spec: Any) -> tf.data.Dataset:
    """Return a dataset that repeats batches of NumPy arrays without end, from TensorFlow's own cache."""
    tensors = [tf.nest.map_structure(_tensor, batch) for batch in batches]
    source = tf.data.Dataset.from_generator(lambda: tensors, output_signature=element_spec)
    return cached(source, len(batches), math.inf)


def _tensor(leaf: Any) -> Any:
    if isinstance(leaf, Ragged):
        return tf.RaggedTensor.from_nested_row_splits(leaf.flat_values, leaf.nested_row_splits, validate=False)
    return leaf


@dataclass(frozen=True, slots=True)
class _Form:
    """How the batches of a feed pass through TensorFlow.

    Attributes:
        views: views the feed's slabs as batches.
        leaves: the leaves of a batch, with the batch dimension if there is one.
        places: the places of the leaves in a slot of a fixed feed, else empty.
        own: which leaves are components of their own.
    """

    views: SlabViews
    leaves: list[Leaf]
    places: tuple[LeafPlace, ...]
    own: tuple[bool, ...]

    def signature(self) -> Any:
        """Return the specs of the components: the slot from the slab's first header on if any leaf is cut from it, then
        the leaves that are components of their own. A single component has no tuple around it, which saves TensorFlow a
        fifth of its time."""
        specs = [] if all(self.own) else [tf.TensorSpec([None], tf.uint8)]
        for leaf, own, column in zip(self.leaves, self.own, self.views.columns, strict=True):
            if column.ragged:
                specs.append(tf.TensorSpec([None, None, *_inner(leaf, column)], leaf.dtype))
                specs += [tf.TensorSpec([None, None], tf.int64)] * column.ragged
            elif own:
                specs.append(tf.TensorSpec([None, *leaf.shape], leaf.dtype))
        return _alone(specs)

    def nothing(self) -> Any:
        """Return components without a batch."""
        parts = []
        if not all(self.own):
            parts.append(np.zeros(HEADER, np.uint8))
            parts[0].view(np.int64)[0] = self.leaves[0].shape[0] or 0  # if TensorFlow knows the number of rows
        for leaf, own, column in zip(self.leaves, self.own, self.views.columns, strict=True):
            dtype = tf.as_dtype(leaf.dtype).as_numpy_dtype
            if column.ragged:
                parts.append(np.zeros([0, 0, *(dim or 0 for dim in _inner(leaf, column))], dtype))
                parts.append(np.zeros([0, (leaf.shape[0] or 0) + 1], np.int64))
                parts += [np.zeros([0, 1], np.int64)] * (column.ragged - 1)
            elif own:
                parts.append(np.zeros([0, *(dim or 0 for dim in leaf.shape)], dtype))
        return _alone(parts)

    def components(self, item: Received) -> Any:
        """Return the components of a slab, over its memory."""
        slab, slot = item.slab, np.asarray(item.root)
        parts = []
        if not all(self.own):
            parts.append(slot[HEADER * slab.first :])
            # The header now belongs to the consumer, and has room to tell the graph the slab's place in the slot.
            parts[0][:HEADER].view(np.int64)[_FIRST : _BATCHES + 1] = slab.first, slab.batches
        if self.places:
            if any(self.own):
                for leaf, own in zip(item.layout.leaves(slot), self.own, strict=True):
                    if own:
                        parts.append(leaf[:, : slab.rows])
            return _alone(parts)
        for value in self.views.leaves_of([leaf[0] for leaf in item.layout.leaves(slot)]):
            arrays = (value.flat_values, *value.nested_row_splits) if isinstance(value, Ragged) else (value,)
            parts += [array[None] for array in arrays]
        return _alone(parts)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def batches(self, *parts: tf.Tensor) -> tf.data.Dataset:
        """Return the batches of a slab, in the feed's structure, from its components."""
        rest = iter(parts)
        places = [place for place, own in zip(self.places, self.own, strict=False) if not own]
        cut = iter(_cut(next(rest), places) if places else ())
        flat: list[Any] = []
        for leaf, own, column in zip(self.leaves, self.own, self.views.columns, strict=True):
            tensor = next(rest if own else cut)
            if column.ragged:
                splits = tuple(next(rest) for _ in range(column.ragged))
                splits[0].set_shape([None, leaf.shape[0] and leaf.shape[0] + 1])
                flat.append((tensor, splits))
            else:
                tensor.set_shape([None, *leaf.shape])
                flat.append(tensor)
        return tf.data.Dataset.from_tensor_slices(tuple(flat) if self.ragged else unflatten(self.views.spec, flat))

    def structured(self, flat: tf.data.Dataset) -> tf.data.Dataset:
        """Return the batches that `batches` yields, in the feed's structure."""
        return flat.map(self.joined) if self.ragged else flat

    @property
    def ragged(self) -> bool:
        """Whether a leaf is ragged. Then `batches` yields flat batches, and `joined` gives them their structure. A map
        for each slab would take TensorFlow longer than everything else."""
        return any(column.ragged for column in self.views.columns)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def joined(self, *flat: Any) -> Any:
        """Return a batch in the feed's structure. A ragged leaf comes as its values and its dimensions' splits."""
        leaves = [
            tf.RaggedTensor.from_nested_row_splits(*leaf, validate=False) if column.ragged else leaf
            for leaf, column in zip(flat, self.views.columns, strict=True)
        ]
        return unflatten(self.views.spec, leaves)


def _inner(leaf: Leaf, column: Column) -> tuple[int | None, ...]:
    """Return the shape of the values within all ragged dimensions of a leaf of batches."""
    return leaf.shape[1 + column.ragged :]


def _alone(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else tuple(parts)


def _cut(slot: tf.Tensor, places: list[LeafPlace]) -> Iterator[tf.Tensor]:
    """Cut the leaves of all batches of a slab from `slot`, which begins with the slab's first header.

    Leaves that begin and end at a multiple of 64 bytes are not copied. Each leaf takes four operations, however many
    batches there are.
    """
    header = tf.bitcast(tf.reshape(slot[:HEADER], [HEADER // 8, 8]), tf.int64)
    rows, first, batches = header[0], header[_FIRST], header[_BATCHES]
    outer = tf.stack([batches, rows])

    def constant(values: Iterable[int]) -> tf.Tensor:
        return tf.constant([*values], tf.int64)

    starts = constant(p.offset for p in places) + first * constant(p.nbytes - HEADER for p in places)
    sizes = batches * rows * constant(p.nbytes // p.shape[0] for p in places)
    starts = tf.split(tf.minimum(batches, 1) * starts, len(places))  # without a batch the slot is a header alone
    for place, start, size in zip(places, starts, tf.split(sizes, len(places)), strict=True):
        part = tf.slice(slot, start, size)
        dtype, row = tf.as_dtype(place.dtype), place.shape[1:]
        word = () if dtype.size == 1 else (dtype.size,)
        part = tf.reshape(part, tf.concat([outer, constant((*row, *word))], 0))
        yield tf.cast(part, tf.bool) if dtype == tf.bool else tf.bitcast(part, dtype)


def _form(handle: StreamHandle) -> _Form:
    leaves = leaf_list(handle.views.spec)
    layout = handle.views.fixed
    if layout is None:
        return _Form(handle.views, leaves, (), (True,) * len(leaves))
    own = tuple(
        handle.info.room == 1
        and place.nbytes >= OWN_COMPONENT
        and (place.nbytes % ALIGN != 0 or leaf.dtype == "bool" or len(leaves) == 1)
        for leaf, place in zip(leaves, layout.places, strict=True)
    )
    return _Form(handle.views, leaves, layout.places, own)


class _Epoch:
    """The generator of one iteration. A class, because the locals of a generator function would hold a slot while it
    waits."""

    def __init__(self, handle: StreamHandle, form: _Form) -> None:
        self._form = form
        handle.reads_ahead = True
        if handle.begins_within and handle.cardinality is None:
            keras_calls.check_length(handle.handoff.url)
        self._tells_length = (
            handle.cardinality is None
            and not handle.shares
            and not handle.length_told
            and keras_calls.waits_for_the_end()
        )
        handle.length_told |= self._tells_length
        self._samples = "N" if handle.world_size > 1 or handle.info.batch_size is None else ""
        self._build = BuildReads() if keras_calls.builds_somewhere() else None
        self._late = 0
        self._handoff = handle.handoff
        self._nothing = form.nothing()
        self._waiting = False
        self._interrupted = False
        self._failed, self._pause = 0.0, 0.0
        self._length = handle.cardinality if isinstance(handle.cardinality, int) else None
        self._last: Received | None = None
        self._end: End | None = None
        unread, handle.unread = handle.unread[0], [0]
        self._begin(unread)
        self._left = None if self._length is None else self._length - handle.behind(self._epoch)

    def _begin(self, unread: int = 0) -> None:
        try:
            self._epoch = self._handoff.begin(unread, self._build)
            self._left = self._length
            return
        except Refused as refused:
            error = refused.error
        raise renewed(error)  # TensorFlow passes on only the text

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        if not self._waiting:
            self._waiting = True
            interrupts.begin_wait()
        if self._pauses():
            time.sleep(STEP)
            return self._nothing
        if self._interrupted or interrupts.pending():
            self._interrupted = True
            self._fail()
            raise KeyboardInterrupt("Ctrl-C while waiting for data")
        item = self._take()
        if isinstance(item, PenstockError):
            self._fail()
            raise renewed(item)
        if isinstance(item, Received):
            self._waiting = False
            if self._build is not None:
                self._check_build(self._build)
            return self._form.components(item)
        if isinstance(item, End):
            if not self._handoff.nothing_left(self._epoch):
                if self._tells_length:
                    self._tell_length(item)
                raise StopIteration
            self._begin()
            return self._nothing
        return self._nothing

    def _take(self) -> Received | End | PenstockError | None:
        """Take the next slab; or the epoch's End, an error, or None if none of them has come.

        The slab that completes the promised batches is held until the End or an error has come: TensorFlow and Keras
        ask for no more batches than that, so they would never learn that the epoch has others, or has failed.
        """
        item: Received | End | None = self._end
        if item is not None:
            return item
        try:
            item = self._handoff.take(self._epoch, STEP, self._build)
        except Refused as refused:
            self._last = None
            return refused.error
        if isinstance(item, Received) and self._left is not None:
            self._left -= item.slab.batches
            if self._left < 0:
                self._last = None
                return self._handoff.lose_too_long(self._epoch, self._length or 0)
            if not self._left:
                self._last, item = item, None
        elif isinstance(item, End) and self._last is not None:
            self._end, item, self._last = item, self._last, None
        return item

    def _pauses(self) -> bool:
        """Return whether an error does not come again yet. After an error TensorFlow asks on and on, until its buffers
        are full, and logs each answer with a traceback: thousands of lines for 256 small batches."""
        if not self._pause or _exiting:
            return False
        return time.monotonic() < self._failed + (AGAIN if interrupts.pending() else self._pause)

    def _fail(self) -> None:
        """Note that an error is about to be raised.

        Raises:
            StopIteration: the interpreter ends, and nobody reads any longer, or the error was raised already.
                TensorFlow does not log that, and does not ask again.
        """
        if _nobody_reads or (_exiting and self._pause):
            raise StopIteration
        self._failed = time.monotonic()
        self._pause = min(2 * self._pause or AGAIN, MOST_AGAIN)

    def _tell_length(self, end: End) -> None:
        # On a thread of its own, since logging would leave an object for this thread of TensorFlow behind.
        words = (LENGTH, self._handoff.url, end.batches, self._samples or end.rows)
        threading.Thread(target=logger.warning, args=words, name="penstock-log", daemon=True).start()

    def _check_build(self, build: BuildReads) -> None:
        """Stop keeping slabs if this iteration goes on after the model was built. (Then another thread has built one.)
        When Keras drops an iteration, TensorFlow may still take a few."""
        self._late += not keras_calls.builds_somewhere()
        if self._late > LATE and self._handoff.go_on(build):
            self._build = None

    def __del__(self) -> None:
        if hasattr(self, "_epoch") and self._build is None:
            self._handoff.mailbox.leave(self._epoch)


_read: dict[int, tuple[StreamHandle, _Form]] = {}
"""The handle and form of each dataset, by the number in its token, while the token lives."""
_numbers = itertools.count()


def _begin(token: npt.NDArray[np.uint8]) -> _Epoch:
    # A module-level function, because from_generator never releases its generator.
    return _Epoch(*_read[int(token.view(np.int64)[0])])


def _token(handle: StreamHandle, form: _Form) -> tf.Tensor:
    """Return a tensor that keeps the handle alive as long as any TensorFlow object can read the stream.

    Weak references to a dataset are not enough: a traced function or another dataset can hold its C++ half alone. That
    half holds this tensor, as the generator's argument, and the memory under the tensor reports when the tensor is
    gone. A dataset's numpy_function makes the tensor, because it uses the memory as it is. (tf.constant would copy.)
    """
    number = next(_numbers)
    memory = np.zeros(2 * ALIGN, np.uint8)
    start = -address_of(memory) % ALIGN
    memory[start : start + 8].view(np.int64)[0] = number
    box = [np.asarray(Root(memory, address_of(memory) + start, ALIGN, _let_go, number))]
    take: Callable[[], npt.NDArray[np.uint8]] = box.pop
    made = tf.data.Dataset.range(1).map(lambda _: tf.numpy_function(lambda: take(), [], tf.uint8))
    interrupts.listen()
    _read[number] = handle, form
    token = next(iter(made))
    token.set_shape([ALIGN])
    if number not in _read:  # in the debug mode of tf.data the token is a copy, so nobody knows when it is gone
        interrupts.listen()
        _read[number] = handle, form
    return token


@atexit.register
def _at_exit() -> None:
    # If a thread of TensorFlow runs Python when the interpreter ends, it dies there, and a thread that waits for it
    # hangs (every from_generator has this fault). Once a stream has ended, TensorFlow no longer calls Python for it. So
    # close all streams, and wait for the calls that still come: a few after each error, to fill TensorFlow's buffers.
    global _exiting, _nobody_reads
    _exiting = True
    _nobody_reads = not any(map(_may_read, threading.enumerate()))
    for handle, _ in list(_read.values()):
        handle.close()
    quiet, deadline = 0, time.monotonic() + 1
    while quiet < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
        quiet = 0 if _calls() else quiet + 1


_exiting = False
"""Whether the interpreter ends."""
_nobody_reads = False
"""Whether the interpreter ends and no thread is left that could take the end of an iteration for that of its epoch."""


def _may_read(thread: threading.Thread) -> bool:
    """Return whether a thread may still read a dataset while the interpreter ends: a daemon thread of the user's."""
    ours = thread.name.startswith("penstock-")
    return thread.daemon and not ours and not isinstance(thread, threading._DummyThread)


def _calls() -> int:
    """Return how many threads of TensorFlow run Python now."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    outermost = [list(traceback.walk_stack(frame))[-1][0] for frame in frames.values()]
    return sum(frame.f_code.co_filename.endswith("script_ops.py") for frame in outermost)


def _let_go(gone: Gone, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
    # With Python 3.13 a dataset may outlive the variables of this module, when the interpreter ends.
    if not is_ending() and _read.pop(gone.token, None) is not None:
        interrupts.unlisten()
