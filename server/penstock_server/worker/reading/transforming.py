"""Applies a feed's transforms to its samples.

The random numbers of a transform depend on the seed, the epoch and the place of the sample in its source. They do not
depend on the worker, the batch, or whether earlier samples were transformed too. So samples that are read again after a
fault, only to be dropped, need no transform. A transform that returns `DROP` leaves its sample out, and a generator
function may yield any number of samples for one: they are all made before the first is used. A transform does not see
what the generator holds while it yields, such as `decimal.localcontext()` or another working directory.

This file knows nothing of lanes or runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from penstock_proto import FeedError, GeneratorError
from penstock_proto.drop import DROP

from ...feed.combined.component_options import seed_of
from ...feed.combined.zipped import Form, Zipped, ZippedItems
from ...feed.options.feed_options import FeedOptions
from ...feed.options.transforms import Transform, checked_transforms
from ...targets.importing import user_traceback
from ..failures import describe
from ..isolation.randomness import GlobalRandomness, GlobalState, seeds
from ..isolation.sample_generators import SampleGenerators
from ..lane.restart_record import SourcePlace


class TransformFailed(Exception):
    """The transform of this name raised `error`, or made no sample (`error` is None).

    `user_error` describes it with the place of the sample, which the caller knows.
    """

    def __init__(self, name: str, error: BaseException | None) -> None:
        super().__init__(name, error)
        self.name = name
        self.error = error

    def user_error(self, place: str | None, which: str = "") -> GeneratorError:
        """Return the error to report for the sample `which`, such as "sample 3 of its split, from 0"."""
        did = "returned None: did you forget to `return` the sample?" if self.error is None else describe(self.error)
        return GeneratorError(
            f"transform {self.name} {did}{f' ({which})' if which else ''}",
            split=place,
            remote_traceback=None if self.error is None else user_traceback(self.error),
        )


class _NotOne(TransformFailed):
    """A transform made no sample of one, or several, where each must give one. `keras`: of a Keras dataset's batch."""

    def __init__(self, *, keras: bool) -> None:
        super().__init__("transform=", None)
        self.keras = keras

    def user_error(self, place: str | None, which: str = "") -> GeneratorError:
        if self.keras:
            return GeneratorError(
                "transform= left a batch out, or made several of one, and the epochs of this feed have as many batches "
                "as the Keras dataset says: give Feed(fixed_length=False), and the length of an epoch is no longer "
                "known",
                split=place,
            )
        return GeneratorError(
            "transform= left a sample out, or made several of one, and the epochs of this feed have as many samples as "
            "the indexable object has items: give Feed(drops=True), and the length of an epoch is no longer known",
            split=place,
        )


def one_sample(made: Any, *, keras: bool = False) -> Any:
    """Return what a transform has made, if it is one sample. `keras`: it is a batch of a Keras dataset.

    Raises:
        TransformFailed: it is not.
    """
    if made is DROP or type(made) is Several:
        raise _NotOne(keras=keras)
    return made


@dataclass(frozen=True)
class Several:
    """What a transform that yields has made of one sample, if that is not one sample: `samples`, two or more."""

    samples: list[Any]


class SampleTransform:
    """Transforms single samples.

    Args:
        transforms: applied in turn.
        seed: the feed's seed.
        randomness: the random numbers of this process.
    """

    def __init__(self, transforms: Sequence[Transform], seed: int, randomness: GlobalRandomness) -> None:
        self._transforms = transforms
        self._seed = seed
        self._randomness = randomness
        self._generators = SampleGenerators("transform rng", seed)
        self._takes_rng = any(transform.takes_rng for transform in transforms)
        self._draws_globally = not all(transform.takes_rng for transform in transforms)
        self._yields = any(transform.yields for transform in transforms)
        self._own = [randomness.of(transform.function) for transform in transforms]

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._transforms)

    def __call__(self, sample: Any, epoch: int, split: int, number: int) -> Any:
        """Return the transformed sample, `DROP`, or `Several`. The caller must then restore the source's own settings,
        and its global random state, if it has one.

        Args:
            sample: as the source yielded it.
            epoch: from 0.
            split: index of the split in the list, or number of the segment; 0 if there are none.
            number: the sample's number in its split, or an item's index.

        Raises:
            TransformFailed: user code raised, or returned None.
        """
        if sample is DROP:
            return DROP
        rng = None
        if self._takes_rng:
            rng = self._generators.of(epoch, split, number)
        if self._draws_globally:
            self._randomness.seed_for_call(seeds("transform", self._seed, epoch, split, number))
        if self._yields:
            return self._several(sample, rng)
        for transform, (settings, variables) in zip(self._transforms, self._own, strict=True):
            self._randomness.use_settings(settings)
            try:
                if transform.takes_rng:
                    sample = variables.run(transform.function, sample, rng=rng)
                else:
                    sample = variables.run(transform.function, sample)
            except BaseException as error:  # a StopIteration would look like the end of the split
                raise TransformFailed(transform.name, error) from error
            if sample is None:
                raise TransformFailed(transform.name, None)
            if sample is DROP:
                return DROP
        return sample

    def _several(self, sample: Any, rng: np.random.Generator | None) -> Any:
        samples = [sample]
        for transform, (settings, variables) in zip(self._transforms, self._own, strict=True):
            self._randomness.use_settings(settings)
            samples = [made for one in samples for made in _made_of(transform, variables, one, rng) if made is not DROP]
        if len(samples) == 1:
            return samples[0]
        return Several(samples) if samples else DROP


def _made_of(transform: Transform, variables: Context, sample: Any, rng: np.random.Generator | None) -> list[Any]:
    """Call a transform. Return the sample that it returns, or those that it yields.

    Raises:
        TransformFailed: it raised, or returned or yielded None.
    """
    keywords = {"rng": rng} if transform.takes_rng else {}
    try:
        made = variables.run(transform.function, sample, **keywords)
        found = variables.run(list, made) if transform.yields else [made]
    except BaseException as error:  # a StopIteration would look like the end of the split
        raise TransformFailed(transform.name, error) from error
    if any(one is None for one in found):
        raise TransformFailed(transform.name, None)
    return found


class ZippedTransform:
    """Transforms the parts of zipped samples, each part with its own transforms and random numbers, and then the whole.

    So a zipped sample that is read again only to be dropped is not transformed either.
    """

    def __init__(self, form: Form, parts: dict[str, Transforms], whole: SampleTransform) -> None:
        self._form = form
        self._parts = parts
        self._whole = whole
        self._any_part = any(parts.values())

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return self._any_part or bool(self._whole)

    def __call__(self, sample: Any, epoch: int, split: int, number: int) -> Any:
        """Return the transformed sample; see `SampleTransform`. It is dropped as a whole if one of its parts is."""
        if sample is DROP:
            return DROP
        if self._any_part:
            samples = self._form.apart(sample)
            for place, (label, transform) in enumerate(self._parts.items()):
                if transform:
                    try:
                        samples[place] = transform(samples[place], epoch, split, number)
                    except TransformFailed as failed:
                        raise TransformFailed(f"{failed.name} of {label}", failed.error) from failed.error
                    if samples[place] is DROP:
                        return DROP
            sample = self._form.joined(samples)
        return self._whole(sample, epoch, split, number) if self._whole else sample


Transforms: TypeAlias = SampleTransform | ZippedTransform


def transform_of(
    feed: FeedOptions, seed: int, randomness: GlobalRandomness, also: Sequence[Transform] = ()
) -> Transforms:
    """Return the transforms of a feed's samples. `also` is applied after the feed's own transforms."""
    own = SampleTransform((*checked_transforms(feed.transform), *also), seed, randomness)
    source = feed.generate
    if not isinstance(source, Zipped | ZippedItems):
        return own
    parts = {label: transform_of(part, seed_of(seed, label), randomness) for label, part in source.parts.items()}
    return ZippedTransform(source.form, parts, own)


class TransformedSamples(Iterator[Any]):
    """The samples of an open split, transformed one by one.

    Args:
        samples: the source's samples.
        transform: applied to each.
        epoch: from 0.
        split: index of the split.
        place_of: turns a sample's number in this iterator into its number in the source.
        state: the global state of the source; None if the source puts it in force itself.
        randomness: the random numbers of this process.
        first: how many of the first samples are transformed already.
        leaves_out: called with the number of a sample in this iterator and the error if its transform fails. Returns
            whether to leave that sample out.
        counted: whether the feed promises its number of samples, so that each must give one.

    Attributes:
        number: how many samples were taken from `samples` so far.
        dropped: how many of them gave no sample.
    """

    def __init__(
        self,
        samples: Iterator[Any],
        transform: Transforms,
        epoch: int,
        split: int,
        place_of: Callable[[int], int],
        state: GlobalState | None,
        randomness: GlobalRandomness,
        first: int = 0,
        leaves_out: Callable[[int, TransformFailed], bool] = lambda number, error: False,
        counted: bool = False,
    ) -> None:
        self.number = self.dropped = 0
        self._several: list[Any] = []
        self._given = 0
        """How many of the samples `_several` were given, which were made of one. None are left if it is empty."""
        self._leaves_out = leaves_out
        self._counted = counted
        self._first = first
        self._samples = samples
        self._transform = transform
        self._epoch = epoch
        self._split = split
        self._place_of = place_of
        self._state = state
        self._randomness = randomness

    def on_skipped(self, number: int) -> None:
        """Note that samples were taken from `samples` directly, so that `number` were taken in all."""
        self.number = number

    @property
    def place(self) -> SourcePlace:
        """The place behind the last sample that was given."""
        if self._several:
            return SourcePlace(self.number - 1, self._given, self.dropped)
        return SourcePlace(self.number, 0, self.dropped)

    def go_to(self, place: SourcePlace) -> bool:
        """Go on from `place`, after its `read` samples were taken from `samples`. Return False if the next one does
        not give enough."""
        self.number, self.dropped = place.read, place.dropped
        return all(next(self, DROP) is not DROP and self.number == place.read + 1 for _ in range(place.within))

    def __next__(self) -> Any:
        while True:
            if self._several:
                return self._next_of_several()
            if self._state is not None:
                self._randomness.use(self._state)
            sample = next(self._samples)
            number = self._place_of(self.number)
            self.number += 1
            if self.number <= self._first:
                return sample
            try:
                made = self._transform(sample, self._epoch, self._split, number)
            except TransformFailed as error:
                if not self._leaves_out(self.number - 1, error):
                    raise
                made = DROP
            if made is not DROP and type(made) is not Several:
                return made
            self._keep(made)

    def _next_of_several(self) -> Any:
        sample = self._several[self._given]
        self._given += 1
        if self._given == len(self._several):
            self._several, self._given = [], 0
        return sample

    def _keep(self, made: Any) -> None:
        """Note that a sample was dropped, or keep those that were made of it."""
        if self._counted:
            raise FeedError(
                "transform= left a sample out, or made several of one, and samples= promises the length of an epoch: "
                "leave samples= out"
            )
        if made is DROP:
            self.dropped += 1
        else:
            self._several, self._given = made.samples, 0
