"""Applies a feed's `batch_transform=` to whole batches.

A batch is collated from its samples in memory of its own, then transformed, and the result is copied to its slot. The
random numbers depend on the seed, the epoch and the place of the batch alone, so any worker makes the same batch. The
place is the number of the batch in the epoch of an indexable object. In lanes it is the lane and the number there, as
in the header of the batch: merged batches, and those of pools, count as lanes of their own.

This file knows nothing of slots or runs.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock_proto import GeneratorError, SpecError
from penstock_proto.batches.inferring import as_array, infer
from penstock_proto.batches.layout import POOL_LANE, TAIL_LANE
from penstock_proto.spec import Leaf, Spec, flatten, leaves, map_leaves, numpy_dtype, unflatten
from penstock_proto.value_text import shown

from ...feed.options.transforms import Transform
from ...targets.importing import user_traceback
from ..batch.collate import Rows
from ..batch.sample_spec import digests_of
from ..batch.variable_rows import VariableRows
from ..failures import describe
from ..isolation import breakpoints
from ..isolation.randomness import GlobalRandomness, seeds

if TYPE_CHECKING:
    from ..verification.transform_checks import TransformChecks

Place: TypeAlias = tuple[int] | tuple[int, int]
"""The place of a batch in its epoch: its number, or its lane and its number there."""


class BatchTransform:
    """Collates and transforms batches.

    Args:
        transforms: applied in turn.
        seed: the feed's seed.
        randomness: the random numbers of this process.
        sample_spec: of the samples, before this.
        batch_rows: rows of a full batch.
        rows: checks and copies the samples, and pads them if they differ in shape.
        checks: decides which batches are transformed twice; None: none is.

    Raises:
        SpecError: the samples have text, or become ragged.

    Attributes:
        rows: the argument.
        served: the spec of a row that is served, once it is known.
    """

    def __init__(
        self,
        transforms: Sequence[Transform],
        seed: int,
        randomness: GlobalRandomness,
        sample_spec: Spec,
        batch_rows: int,
        rows: Rows | VariableRows,
        checks: TransformChecks | None = None,
    ) -> None:
        for path, leaf in leaves(sample_spec):
            if leaf.text or leaf.ragged:
                raise SpecError(
                    f"sample{path} is {leaf}, and batch_transform= gets arrays of numbers: let transform= make numbers "
                    "of it, or leave it out"
                )
        self._transforms = transforms
        self._seed = seed
        self._randomness = randomness
        self._own = [randomness.of(transform.function) for transform in transforms]
        self._spec = sample_spec
        self._batch_rows = batch_rows
        self._checks = checks
        self._store: list[Any] | None = None
        self.rows = rows
        self.served: Spec | None = None

    def store(self) -> list[Any]:
        """Return a store for the samples of a batch. It is valid until the next call."""
        if self._store is None or isinstance(self.rows, VariableRows):
            self._store = self.rows.store(self._batch_rows)
        return self._store

    def arrays(self, store: list[Any], rows: int) -> list[npt.NDArray[Any]]:
        """Return the first rows of a store as arrays, padded if they differ in shape."""
        if isinstance(self.rows, Rows):
            return [leaf[:rows] for leaf in store]
        shapes = self.rows.shapes(store, rows)
        arrays = [np.empty(shape, numpy_dtype(name)) for name, shape in zip(self.rows.dtypes, shapes, strict=True)]
        self.rows.write(store, rows, arrays)
        return arrays

    def put(self, batch: Sequence[npt.NDArray[Any]], epoch: int, place: Place, target: Sequence[Any]) -> None:
        """Transform a batch, and copy the result to the first rows of `target`, a store for rows of the spec `served`.

        The caller must then restore the source's own settings.

        Args:
            batch: an array for each leaf.
            epoch: from 0.
            place: of the batch in its epoch.
            target: the arrays of a slot's batch, or lists of arrays where rows differ in shape.

        Raises:
            GeneratorError: user code raised, or returned no batch.
            SpecError: what it returned does not fit the spec.
        """
        rows, checks = len(batch[0]), self._checks
        copies = [leaf.copy() for leaf in batch] if checks is not None and checks.is_due else None
        began = time.monotonic()
        made = self(unflatten(self._spec, batch), epoch, place)
        if checks is not None:
            checks.on_transformed(time.monotonic() - began)
        assert self.served is not None
        try:
            self._copy(made, rows, target)
            if checks is not None and copies is not None:
                self._check(checks, made, copies, epoch, place)
        except SpecError as error:
            error.split = error.split or named(place)
            raise
        except Exception as error:  # an array's own conversion is user code as well
            raise GeneratorError(
                f"what {self._name} returned {describe(error)}",
                split=named(place),
                remote_traceback=user_traceback(error),
            ) from error

    def _check(
        self, checks: TransformChecks, made: Any, batch: Sequence[npt.NDArray[Any]], epoch: int, place: Place
    ) -> None:
        """Transform a batch once more, and report whether the result differs from `made`, the first one. What user code
        raises meanwhile does not matter: the batch is there."""
        began, differs = time.monotonic(), False
        with contextlib.suppress(Exception), breakpoints.ignored():
            first = digests_of(made)  # before the function runs again, as the arrays may be its own
            differs = digests_of(self(unflatten(self._spec, batch), epoch, place)) != first
        checks.on_checked(time.monotonic() - began, f"{self._name} for {named(place)}" if differs else "")

    def _copy(self, made: Any, rows: int, target: Sequence[Any]) -> None:
        """Copy a transformed batch to `target`; see `put`."""
        assert self.served is not None
        try:
            found = flatten(self.served, made)
        except SpecError as error:
            raise SpecError(
                f"{self._name} returned {shown(made)}, and the feed's spec has {self.served} for a row of it: "
                f"{error.message}"
            ) from None
        for value, (path, leaf), into in zip(found, leaves(self.served), target, strict=True):
            array = as_array(value, path)
            same = len(array.shape) == len(leaf.shape) + 1 and all(
                wanted in (dim, None) for dim, wanted in zip(array.shape, (rows, *leaf.shape), strict=True)
            )
            if array.dtype.name != leaf.dtype or not same:
                raise SpecError(
                    f"{self._name} returned {shown(value)} for batch{path} of {rows} rows, and the feed's spec has "
                    f"{leaf} for a row of it: return arrays of one dtype and shape, with as many rows as the batch has"
                )
            into[:rows] = list(np.array(array)) if isinstance(into, list) else array

    def made_of(self, sample: Any, rows: int) -> Any:
        """Return what becomes of a batch that has this sample `rows` times.

        Raises:
            GeneratorError: user code raised, or returned no batch.
        """
        store: list[Any] = self.rows.store(rows)
        self.rows.fill(store, 0, rows, itertools.repeat(sample))
        return self(unflatten(self._spec, self.arrays(store, rows)), 0, (0,))

    def look(self, made: Any, rows: int, *, varies: bool) -> tuple[Spec, int]:
        """Return the spec, and the bytes, of a row of `made`, a transformed batch of `rows` rows. `varies`: whether the
        length of rows with one dimension varies.

        Raises:
            SpecError: it cannot be served.
        """
        spec = infer(made)
        for (path, leaf), value in zip(leaves(spec), flatten(spec, made), strict=True):
            if leaf.text or not leaf.shape or leaf.shape[0] != rows:
                raise SpecError(
                    f"{self._name} returned {shown(value)} for batch{path} of {rows} rows: it must return arrays "
                    "of numbers with as many rows as the batch has"
                )
        nbytes = sum(as_array(value).nbytes for value in flatten(spec, made)) // rows
        return map_leaves(
            lambda leaf: Leaf(leaf.dtype, (None,) if varies and len(leaf.shape) == 2 else leaf.shape[1:]), spec
        ), nbytes

    @property
    def _name(self) -> str:
        return f"batch_transform {self._transforms[-1].name}"

    def __call__(self, batch: Any, epoch: int, place: Place) -> Any:
        """Return the transformed batch.

        Raises:
            GeneratorError: user code raised, or returned None.
        """
        rng = None
        if any(transform.takes_rng for transform in self._transforms):
            rng = np.random.default_rng(seeds("batch transform rng", self._seed, epoch, *place))
        self._randomness.seed_for_call(seeds("batch transform", self._seed, epoch, *place))
        for transform, (settings, variables) in zip(self._transforms, self._own, strict=True):
            self._randomness.use_settings(settings)
            keywords = {"rng": rng} if transform.takes_rng else {}
            try:
                batch = variables.run(transform.function, batch, **keywords)
            except BaseException as error:
                raise GeneratorError(
                    f"batch_transform {transform.name} {describe(error)}",
                    split=named(place),
                    remote_traceback=user_traceback(error),
                ) from error
            if batch is None:
                raise GeneratorError(
                    f"batch_transform {transform.name} returned None: did you forget to `return` the batch?",
                    split=named(place),
                )
        return batch


def named(place: Place) -> str:
    """Return a short text for the place of a batch, for errors."""
    if len(place) == 1:
        return f"batch {place[0]}"
    lane, number = place
    if lane == POOL_LANE:
        return f"batch {number}"
    return f"merged batch {number}" if lane == TAIL_LANE else f"batch {number} of lane {lane}"
