"""A session's stream as a `tf.data.Dataset`. Only this file and keras.py import TensorFlow.

A slab comes out of `from_generator` as one uint8 tensor, which aliases its slot. The graph cuts it into leaves, each of
all of its batches, by slice and bitcast, and those into batches by `from_tensor_slices`. So a slab costs TensorFlow one
component however many leaves it has, and a batch next to nothing. Slices alias where they begin and end at a multiple
of 64; so a large leaf that does not end at one comes as a component of its own, where a slab is one batch, and so does
one that is alone. Leaves of a feed that is not fixed all do. While no data is there the generator yields elements of no
batches, which is how TensorFlow notices a `break`.
"""

from __future__ import annotations

import atexit
import copy
import itertools
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from penstock_proto import PenstockError
from penstock_proto.layout import ALIGN, HEADER, LeafPlace
from penstock_proto.messages import End
from penstock_proto.spec import Leaf, Spec, leaf_list, unflatten

from . import _interrupts
from ._consumer_state import Received, Refused
from ._handoff import STEP
from ._memory import Gone, Root, address_of
from ._stream_handle import StreamHandle

OWN_COMPONENT = 16 * 1024
"""From so many bytes on a leaf that is alone, or that the graph could not cut without a copy, is a component."""
_FIRST, _BATCHES = 4, 5
"""The words of a slab's first header in which the graph finds its place in the slot and how many batches it has."""


def dataset(handle: StreamHandle) -> tf.data.Dataset:
    """The dataset of `handle`'s stream; the handle lives until it, and all made from it, are gone."""
    form = _form(handle)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def slabs(token: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(_begin, args=(token,), output_signature=form.signature())

    # The token is an element, as what a traced function captures lives until the next garbage collection.
    result = tf.data.Dataset.from_tensors(_token(handle, form)).flat_map(slabs).flat_map(form.batches)
    if handle.info.endless:
        result = result.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    elif handle.cardinality is not None:
        # Keras counts its steps by the cardinality. That of `assert_cardinality` would make the first epoch after a
        # resume, which is shorter, an error. Nothing, repeated for ever, counts as infinite, and adds nothing.
        nothing = tf.data.Dataset.from_tensors(form.nothing()).flat_map(form.batches).repeat()
        counted = tf.data.Dataset.zip(result.concatenate(nothing), tf.data.Dataset.range(handle.cardinality))
        result = counted.map(lambda batch, _: batch)  # which TensorFlow does without a call
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # Its thread holds up the end of an iterator: `break` then takes seconds now and then, also in plain tf.data.
    options.autotune.enabled = False
    return result.with_options(options)


def cached(dataset: tf.data.Dataset, count: int, cardinality: int | float | None) -> tf.data.Dataset:
    """Copies of the next `count` batches, over and over, `cardinality` in each epoch; `count` if that is None."""
    if cardinality is not None:
        count = int(min(count, cardinality))
    bare = not isinstance(dataset.element_spec, tuple)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def copied(*batch: Any) -> Any:
        # What was handed over stays the consumer's, who may hold and write it: the cache has memory of its own.
        return tf.nest.map_structure(lambda leaf: tf.raw_ops.DeepCopy(x=leaf), batch[0] if bare else batch)

    copies = dataset.take(count).map(copied).cache()
    for _ in copies:  # a cache replays what was read to its end, and only that
        pass
    endless = copies.repeat()
    return endless if cardinality == math.inf else endless.take(count if cardinality is None else int(cardinality))


def replayed(batches: list[Any], element_spec: Any) -> tf.data.Dataset:
    """Batches of NumPy arrays over and over, without end, out of TensorFlow's own cache."""
    source = tf.data.Dataset.from_generator(lambda: batches, output_signature=element_spec)
    return cached(source, len(batches), math.inf)


@dataclass(frozen=True, slots=True)
class _Form:
    """How the batches of a feed pass through TensorFlow.

    Attributes:
        spec: the spec of a batch.
        leaves: its leaves, with the batch dimension where there is one.
        places: where they lie in a slot of a fixed feed, else empty.
        own: which leaves are components of their own.
    """

    spec: Spec
    leaves: list[Leaf]
    places: tuple[LeafPlace, ...]
    own: tuple[bool, ...]

    def signature(self) -> Any:
        """The components: the slot from the slab's first header on if any leaf is cut from it, then the leaves of their
        own. One alone comes without a tuple around it, which saves TensorFlow a fifth of its time."""
        specs = [] if all(self.own) else [tf.TensorSpec([None], tf.uint8)]
        for leaf, own in zip(self.leaves, self.own, strict=True):
            if own:
                specs.append(tf.TensorSpec([None, *leaf.shape], leaf.dtype))
        return _alone(specs)

    def nothing(self) -> Any:
        """The components of no batch."""
        parts = []
        if not all(self.own):
            parts.append(np.zeros(HEADER, np.uint8))
            parts[0].view(np.int64)[0] = self.leaves[0].shape[0] or 0  # where TensorFlow knows how many rows there are
        for leaf, own in zip(self.leaves, self.own, strict=True):
            if own:
                parts.append(np.zeros([0, *(dim or 0 for dim in leaf.shape)], tf.as_dtype(leaf.dtype).as_numpy_dtype))
        return _alone(parts)

    def components(self, item: Received) -> Any:
        """The components of a slab, over its memory."""
        slab, slot = item.slab, np.asarray(item.root)
        parts = []
        if not all(self.own):
            parts.append(slot[HEADER * slab.first :])
            # The header is the consumer's now, and has room to tell the graph where in the slot it is.
            parts[0][:HEADER].view(np.int64)[_FIRST : _BATCHES + 1] = slab.first, slab.batches
        if any(self.own):
            for leaf, own in zip(item.layout.leaves(slot), self.own, strict=True):
                if own:
                    parts.append(leaf[:, : slab.rows] if self.places else leaf)
        return _alone(parts)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def batches(self, *parts: tf.Tensor) -> tf.data.Dataset:
        """The batches of a slab, in the feed's structure, out of its components."""
        rest = iter(parts)
        places = [place for place, own in zip(self.places, self.own, strict=False) if not own]
        cut = iter(_cut(next(rest), places) if places else ())
        flat = []
        for leaf, own in zip(self.leaves, self.own, strict=True):
            tensor = next(rest if own else cut)
            tensor.set_shape([None, *leaf.shape])
            flat.append(tensor)
        return tf.data.Dataset.from_tensor_slices(unflatten(self.spec, flat))


def _alone(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else tuple(parts)


def _cut(slot: tf.Tensor, places: list[LeafPlace]) -> Iterator[tf.Tensor]:
    """Leaves of all batches of a slab out of its slot, of which `slot` begins with the slab's first header.

    No copy of those that begin and end at a multiple of 64 bytes. Four operations for each, whatever their number.
    """
    header = tf.bitcast(tf.reshape(slot[:HEADER], [HEADER // 8, 8]), tf.int64)
    rows, first, batches = header[0], header[_FIRST], header[_BATCHES]
    outer = tf.stack([batches, rows])

    def constant(values: Iterable[int]) -> tf.Tensor:
        return tf.constant([*values], tf.int64)

    starts = constant(p.offset for p in places) + first * constant(p.nbytes - HEADER for p in places)
    sizes = batches * rows * constant(p.nbytes // p.shape[0] for p in places)
    starts = tf.split(tf.minimum(batches, 1) * starts, len(places))  # the slot of no batch is a header alone
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
        return _Form(handle.views.spec, leaves, (), (True,) * len(leaves))
    own = tuple(
        handle.info.turn == 1
        and place.nbytes >= OWN_COMPONENT
        and (place.nbytes % ALIGN != 0 or leaf.dtype == "bool" or len(leaves) == 1)
        for leaf, place in zip(leaves, layout.places, strict=True)
    )
    return _Form(handle.views.spec, leaves, layout.places, own)


class _Epoch:
    """The generator of one iteration. A class, as a generator function's locals would pin a slot while it waits."""

    def __init__(self, handle: StreamHandle, form: _Form) -> None:
        self._form = form
        handle.by_dataset = True
        self._handoff = handle.handoff
        self._nothing = form.nothing()
        self._heard: int | None = None
        self._interrupted = False
        self._begin()

    def _begin(self) -> None:
        try:
            self._epoch = self._handoff.begin()
            return
        except Refused as refused:
            error = refused.error
        raise copy.copy(error)  # the text is all that TensorFlow passes on

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:
        if self._heard is None:  # interrupts that came before this wait have been handled by Python
            self._heard = _interrupts.heard()
        item: Received | End | PenstockError | None
        try:
            item = self._handoff.take(self._epoch, STEP)
        except Refused as refused:
            item = refused.error
        if isinstance(item, PenstockError):
            raise copy.copy(item)
        if isinstance(item, Received):
            self._heard = None
            return self._form.components(item)
        if isinstance(item, End):
            if not self._handoff.nothing_left(self._epoch):
                raise StopIteration
            self._begin()
            return self._nothing
        if self._interrupted or _interrupts.heard() != self._heard:
            self._interrupted = True
            raise KeyboardInterrupt("Ctrl-C while waiting for data")
        return self._nothing

    def __del__(self) -> None:
        if hasattr(self, "_epoch"):
            self._handoff.mailbox.leave(self._epoch)


_read: dict[int, tuple[StreamHandle, _Form]] = {}
"""What datasets read, by the number in their token, while that lives."""
_numbers = itertools.count()


def _begin(token: npt.NDArray[np.uint8]) -> _Epoch:
    # A module's function, since from_generator never lets go of its generator.
    return _Epoch(*_read[int(token.view(np.int64)[0])])


def _token(handle: StreamHandle, form: _Form) -> tf.Tensor:
    """A tensor that lives as long as any TensorFlow object that can read the stream, and keeps the reader for so long.

    Weak references on a dataset do not do: a traced function or another dataset can hold its C++ half alone. That half
    holds this tensor, as the generator's argument, and the memory under it tells when it is gone. It has to be made by
    a dataset's numpy_function, since that takes memory as it is, where tf.constant would copy.
    """
    number = next(_numbers)
    memory = np.zeros(2 * ALIGN, np.uint8)
    start = -address_of(memory) % ALIGN
    memory[start : start + 8].view(np.int64)[0] = number
    box = [np.asarray(Root(memory, address_of(memory) + start, ALIGN, _let_go, number))]
    take: Callable[[], npt.NDArray[np.uint8]] = box.pop
    made = tf.data.Dataset.range(1).map(lambda _: tf.numpy_function(lambda: take(), [], tf.uint8))
    _interrupts.listen()
    _read[number] = handle, form
    token = next(iter(made))
    token.set_shape([ALIGN])
    return token


@atexit.register
def _at_exit() -> None:
    # A thread of TensorFlow that is in Python when the interpreter ends dies there, and whoever waits for it hangs (any
    # from_generator has that fault). After the end TensorFlow calls Python no more. So all are sent home, and what they
    # still ask (they do so a few times after an error, to fill their buffers) is waited for.
    for handle, _ in list(_read.values()):
        handle.close()
    quiet, deadline = 0, time.monotonic() + 1
    while quiet < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
        quiet = 0 if _calls() else quiet + 1


def _calls() -> int:
    """How many threads TensorFlow has in Python now."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    outermost = [list(traceback.walk_stack(frame))[-1][0] for frame in frames.values()]
    return sum(frame.f_code.co_filename.endswith("script_ops.py") for frame in outermost)


def _let_go(gone: Gone) -> None:
    if _read.pop(gone.token, None) is not None:
        _interrupts.unlisten()
