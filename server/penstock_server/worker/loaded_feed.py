"""A feed as a worker knows it: its options, its spec once that is known, and the look at its first sample.

Nothing here knows runs, slots or messages.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from penstock_proto import FeedError, GeneratorError, PenstockError, layout
from penstock_proto.messages import FeedPlan, FirstSample
from penstock_proto.spec import Spec, leaf_list

from ..activity import ActivityPage
from ..feed import Feed, batch_warning, fixed_slots
from ..importing import user_traceback
from .collate import Collate, ReadyBatches, Rows, digests_of, infer_spec, nbytes_of
from .failures import describe
from .indexed import item_failed
from .lane import MAX_EMPTY, MAX_SKIPPED
from .randomness import GlobalRandomness
from .splits import SplitOpener

_MOST_DIGESTED = 64 << 20
"""Bytes of a sample beyond which making its digest takes too long."""


class LoadedFeed:
    """A feed of this process, its options, and, once it is known, its spec and what follows from that."""

    def __init__(self, declared: Feed, plan: FeedPlan) -> None:
        self.declared = declared
        self.plan = plan
        self.spec: Spec | None = None
        self.layout: layout.SlotLayout | None = None
        """That of its slots; None where batches vary."""
        self.first: FirstSample | None = None
        """What was seen of the feed's first sample in this process."""
        self.warm = False
        """Whether item 0 of an indexable feed was read in this process."""
        self._collate: Collate | None = None
        if plan.spec is not None:
            self.learn(plan.spec)

    def learn(self, spec: Spec) -> None:
        """The spec, declared or inferred, here or in another worker."""
        if spec == self.spec:
            return
        self.spec = spec
        self._collate = None
        self.layout = None
        if self.plan.batch_size is not None:
            self.layout = fixed_slots(self.plan, spec, self.plan.batch_size)

    @property
    def needs_a_look(self) -> bool:
        """Whether only a first sample can tell the spec, or how large a batch is."""
        return self.spec is None or (self.plan.spec is not None and not self._is_static(self.plan.spec))

    @property
    def declared_nbytes(self) -> int:
        """Bytes of a sample (or ready batch) where they are declared, else 0."""
        declared = self.plan.spec
        return nbytes_of(declared, None) if declared is not None and self._is_static(declared) else 0

    @staticmethod
    def _is_static(spec: Spec) -> bool:
        return all(leaf.static for leaf in leaf_list(spec))

    @property
    def collate(self) -> Collate:
        """Checks and stacks the feed's samples.

        Raises:
            FeedError: the spec is not known.
        """
        if self._collate is None:
            if self.spec is None:
                raise FeedError("the daemon started to read the feed before its spec was known")
            if self.plan.batch_size is not None:
                self._collate = Rows(self.spec)
            else:
                self._collate = ReadyBatches(self.spec, copy=self.plan.shuffle > 0, one_length=self.plan.spec is None)
        return self._collate

    def warm_up(self, randomness: GlobalRandomness, page: ActivityPage, run: int) -> None:
        """Read item 0 of an indexable feed before any other, once in each process, and drop it.

        An object that draws at its first use, as Keras' ImageDataGenerator.flow() does its permutation, then draws the
        same in every worker. What the item raises is met again when its batch is made.
        """
        if self.warm or not self.plan.length:
            return
        with contextlib.suppress(PenstockError):
            first_item(self, randomness, page, run)


def look_at_splits(
    loaded: LoadedFeed, splits: Sequence[Any], epoch: int, randomness: GlobalRandomness, page: ActivityPage, run: int
) -> tuple[Spec | None, int]:
    """Read the first sample of a feed, unless what it tells is known.

    Where the feed leaves out splits in which user code raises, so does the look. `page` says what is looked at.

    Returns:
        The spec by that sample, or None if it was known; and the bytes of a sample (or ready batch), or 0 if they were.

    Raises:
        FeedError: no split yields a sample.
        GeneratorError, SpecError: user code raised, or what it yields cannot be served.
    """
    loaded.first = None
    if not loaded.needs_a_look:
        return None, loaded.declared_nbytes
    opener = SplitOpener(loaded.declared, loaded.plan, randomness, page, run)
    raised: list[GeneratorError] = []
    for index, split in enumerate(splits[:MAX_EMPTY] if loaded.plan.endless else splits):
        began = time.monotonic()
        try:
            opened = opener.open(split, index, epoch)
            try:
                for sample in opened.first():
                    return _seen(loaded, sample, opened.place, index, time.monotonic() - began)
            finally:
                opened.close()
        except GeneratorError as error:
            raised.append(error)
            if loaded.plan.on_error != "skip" or len(raised) > MAX_SKIPPED:
                break
    if raised:
        raise raised[0]
    if loaded.plan.endless:
        raise FeedError(f"the feed yields nothing: the first {MAX_EMPTY} segments ended without a sample")
    raise FeedError(
        f"the feed yields nothing: all of its {len(splits)} {loaded.plan.piece}s were read, and none yielded a sample"
    )


def look_at_item(
    loaded: LoadedFeed, randomness: GlobalRandomness, page: ActivityPage, run: int
) -> tuple[Spec | None, int]:
    """`look_at_splits` for an indexable feed."""
    if loaded.plan.length == 0:
        raise FeedError("the feed yields nothing: the indexable object has no items (its len() is 0)")
    loaded.first = None
    if not loaded.needs_a_look:
        return None, loaded.declared_nbytes
    began = time.monotonic()
    sample = first_item(loaded, randomness, page, run)
    return _seen(loaded, sample, "item 0", 0, time.monotonic() - began)


def first_item(loaded: LoadedFeed, randomness: GlobalRandomness, page: ActivityPage, run: int) -> Any:
    """Item 0 of an indexable feed, read with the same random numbers in each process.

    Raises:
        GeneratorError: user code raised.
    """
    loaded.warm = True
    return read_item(loaded, 0, randomness, page, run)


def read_item(loaded: LoadedFeed, index: int, randomness: GlobalRandomness, page: ActivityPage, run: int) -> Any:
    """An item of an indexable feed, read with random numbers of its own.

    Raises:
        GeneratorError: user code raised.
    """
    randomness.seed(loaded.plan.seed, 0, index)
    source: Any = loaded.declared.generate
    page.enter(run, -1, f"item {index}")
    try:
        return source[index]
    except BaseException as error:
        raise item_failed(index, error) from error
    finally:
        page.leave()


def _seen(loaded: LoadedFeed, sample: Any, place: str | None, index: int, seconds: float) -> tuple[Spec | None, int]:
    try:
        spec = loaded.spec or infer_spec(sample, loaded.plan.batch_size)
        nbytes = nbytes_of(spec, sample)
        digests = digests_of(sample) if nbytes <= _MOST_DIGESTED else b""
    except PenstockError as error:
        error.split = place
        raise
    except BaseException as error:  # a sample's __array__ or keys() is user code as well
        raise GeneratorError(
            f"looking at the first sample {describe(error)}", split=place, remote_traceback=user_traceback(error)
        ) from error
    found = spec if loaded.spec is None else None
    warning = batch_warning(loaded.plan.name, spec, loaded.plan.batch_size)
    loaded.first = FirstSample(index, digests, seconds, () if warning is None else (warning,))
    loaded.learn(spec)
    return found, nbytes
