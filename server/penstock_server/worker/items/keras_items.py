"""A Keras dataset, read item by item, in any epoch and any order, with the same result in every process.

`on_epoch_begin` and `on_epoch_end` change the object, often by shuffling a list of indices. So the worker keeps the
object's attributes as they are when an epoch begins:

    epoch 0        the object as it was imported, then on_epoch_begin()
    epoch e + 1    the object at the beginning of epoch e, then on_epoch_end() and on_epoch_begin()

`random` and `numpy.random` are seeded before each call, from the feed's seed and the epoch. Items are read from a copy,
so reading them changes nothing in the next epoch. A worker that begins at epoch e first makes the calls of all earlier
epochs.

An object may also draw random numbers at its first use. So in each epoch a worker first reads item 0, and drops it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock_proto import FeedError, GeneratorError

from ...feed.objects.indexables import as_structure, is_keras_base, length_of
from ...feed.objects.object_states import State, copied, read_only, share_equal
from ...targets.importing import user_traceback
from ..failures import describe
from ..isolation.randomness import put_states, seed_all, seeds, take_states

_LIVE = 8
"""How many epochs' objects are kept, for streams that read different epochs in turn."""

_IMPORTED: dict[int, tuple[object, State]] = {}
"""By `id`: objects, and their attributes as they were imported, which nobody changes. Several feeds may share an
object."""


class KerasItems:
    """The items of a Keras dataset.

    Args:
        source: the dataset.
        seed: the feed's seed.
        varies: whether its length may differ from epoch to epoch.

    Attributes:
        item: the index of the item that was read last, or is being read.
    """

    item: int | None = 0

    def __init__(self, source: Any, seed: int, *, varies: bool = False) -> None:
        self._source = source
        self._seed = seed
        self._hooks = any(_overrides(source, name) for name in ("on_epoch_begin", "on_epoch_end"))
        self._counts = hasattr(source, "total_batches_seen")  # ImageDataGenerator.flow() takes its seeds from it
        self._length = length_of(source)
        self._varies = varies
        self._shares_large = True
        """Whether copies share large arrays. False once on_epoch_begin or on_epoch_end has failed, perhaps by writing
        to one."""
        self._at: int | None = None
        self._began: dict[int, State] = {}
        """By epoch: the object's attributes when it began. Holds epoch 0 and the last two epochs."""
        self._live: dict[int, State] = {}
        """By epoch: copies of these, from which items are read. The most recently used one is the last."""

    def is_at(self, epoch: int) -> bool:
        """Whether the next items to be read are those of `epoch`."""
        if not self._hooks:
            return self._at is not None
        return self._at == epoch and vars(self._source) is self._live[epoch]  # another feed may use the object too

    def enter(self, epoch: int, *, warm: bool = True) -> None:
        """Switch to an epoch. Keep the states of the global random generators.

        Args:
            epoch: from 0.
            warm: read item 0 first, if the epoch is entered for the first time. If False, the caller does so.

        Raises:
            GeneratorError: on_epoch_begin or on_epoch_end raised.
            FeedError: they changed the number of batches.
        """
        if self.is_at(epoch):
            return
        states = take_states()
        try:
            self._at = None
            fresh = self._go_to(epoch) if self._hooks else True
            self._at = epoch
            if fresh and warm:
                seed_all(seeds("batch", self._seed, epoch if self._hooks else 0, 0))
                with contextlib.suppress(BaseException):  # it is raised again when the batch of the item is made
                    self._read(epoch, 0)
        finally:
            put_states(states, seeds("hooks", self._seed, epoch))

    def read(self, indices: Sequence[int]) -> Iterator[Any]:
        """Yield these items of the epoch, as nested tuples and dicts."""
        epoch = self._at
        assert epoch is not None
        for index in indices:
            self.item = index
            yield self._read(epoch, index)

    def count(self) -> int:
        """Return the number of items of the epoch.

        Raises:
            FeedError: it has none, or the object does not say it.
        """
        try:
            count = length_of(self._source)
        except Exception as error:
            raise GeneratorError(
                f"the length of the Keras dataset in epoch {self._at} {describe(error)}",
                remote_traceback=user_traceback(error),
            ) from error
        if not count or count < 0:
            raise FeedError(f"the Keras dataset has {count} batches in epoch {self._at}: an epoch needs one or more")
        return count

    def _read(self, epoch: int, index: int) -> Any:
        if self._counts and self._length is not None:
            self._source.total_batches_seen = epoch * self._length + index  # as if all items before had been read here
        item = as_structure(self._source[index], batch=True)
        if isinstance(item, tuple):
            while len(item) > 1 and item[-1] is None:  # no sample weights
                item = item[:-1]
        return item

    def _go_to(self, epoch: int) -> bool:
        """Give the object the attributes that it has in `epoch`. Return whether they are a new copy."""
        state = self._live.pop(epoch, None)
        fresh = state is None
        if state is None:
            state, _ = copied(self._beginning(epoch), self._source, share_large=True)
            while len(self._live) >= _LIVE:
                del self._live[next(iter(self._live))]
        self._live[epoch] = state
        self._become(state)
        return fresh

    def _beginning(self, epoch: int) -> State:
        """Return the object's attributes at the beginning of `epoch`. Nobody may change them."""
        if not self._began:
            _, imported = _IMPORTED.setdefault(id(self._source), (self._source, vars(self._source)))
            self._began[0] = self._changed(imported, 0, "on_epoch_begin")
        at = max(known for known in self._began if known <= epoch)
        state = self._began[at]
        for number in range(at, epoch):
            state = self._changed(state, number, "on_epoch_end")
            state = self._changed(state, number + 1, "on_epoch_begin")
            self._began[number + 1] = state
            self._began = {known: self._began[known] for known in sorted({0, *sorted(self._began)[-2:]})}
        self._become(state)
        if not self._varies and (length := length_of(self._source)) != self._length:
            raise FeedError(
                f"the Keras dataset has {length} batches in epoch {epoch}, and had {self._length} when it was "
                "imported: give Feed(fixed_length=False) if on_epoch_begin and on_epoch_end change the number"
            )
        return state

    def _changed(self, state: State, epoch: int, name: str) -> State:
        """Return the attributes after a call of `name`. `state` does not change."""
        hook = getattr(type(self._source), name, None)
        if hook is None or not _overrides(self._source, name):
            return state
        if self._shares_large:
            try:
                return self._after(hook, state, seeds(name, self._seed, epoch))
            except BaseException:  # perhaps because it writes to a large array
                self._shares_large = False
        try:
            return self._after(hook, state, seeds(name, self._seed, epoch))
        except BaseException as error:
            raise GeneratorError(
                f"{name}() of epoch {epoch} {describe(error)}", remote_traceback=user_traceback(error)
            ) from error

    def _after(self, hook: Callable[[Any], object], state: State, sequence: np.random.SeedSequence) -> State:
        """Call `hook` on a copy of the attributes, and return the copy."""
        changed, shared = copied(state, self._source, share_large=self._shares_large)
        self._become(changed)
        seed_all(sequence)
        try:
            with read_only(shared):
                hook(self._source)
            changed = dict(vars(self._source))
        finally:
            self._become(state)
        if not self._shares_large:
            share_equal(changed, state)
        return changed

    def _become(self, state: State) -> None:
        """Give the object these attributes."""
        object.__setattr__(self._source, "__dict__", state)


def _overrides(source: Any, name: str) -> bool:
    """Whether a class of `source` defines the method, other than Keras' `PyDataset`, where it does nothing."""
    found = next((base for base in type(source).__mro__ if name in vars(base)), None)
    return found is not None and not is_keras_base(found)
