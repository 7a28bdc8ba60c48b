"""Reads samples of a feed outside of its lanes: the first one, which tells the spec, and others to compare with it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from penstock_proto import FeedError, GeneratorError, PenstockError
from penstock_proto.messages import FirstSample
from penstock_proto.spec import Spec

from ..activity import ActivityPage
from ..feed import batch_warning
from ..importing import user_traceback
from ..transforms import checked_transforms
from .failures import describe
from .indexed import item_failed
from .lane_splits import MAX_EMPTY
from .loaded_feed import LoadedFeed
from .randomness import GlobalRandomness
from .restart_record import MAX_SKIPPED
from .sample_spec import digests_of, infer_spec, nbytes_of
from .splits import SplitOpener
from .transforming import SampleTransform

_MOST_DIGESTED = 64 << 20
"""Bytes of a sample beyond which making its digest takes too long."""


class Probe:
    """Reads single samples of a feed.

    Args:
        feed: the feed to read.
        randomness: the random numbers of this process.
        page: where user code is announced, for `run`.
        run: the daemon's number of the run.
    """

    def __init__(self, feed: LoadedFeed, randomness: GlobalRandomness, page: ActivityPage, run: int) -> None:
        self._feed = feed
        self._randomness = randomness
        self._page = page
        self._run = run

    def look_at_splits(self, splits: Sequence[Any], epoch: int) -> tuple[Spec | None, int]:
        """Read the first sample of a feed with splits, unless its spec and its size are known.

        Where the feed skips splits in which user code raises, so does the look.

        Returns:
            The spec, or None if it was known; and the bytes of a sample (or ready batch), or 0 if they vary.

        Raises:
            FeedError: no split yields a sample.
            GeneratorError: user code raised.
            SpecError: the sample cannot be served.
        """
        feed, plan = self._feed, self._feed.plan
        feed.set_first(None)
        if not feed.needs_a_look:
            return None, feed.declared_nbytes
        opener = SplitOpener(feed.declared, plan, self._randomness, self._page, self._run)
        raised: list[GeneratorError] = []
        for index, split in enumerate(splits[:MAX_EMPTY] if plan.endless else splits):
            began = time.monotonic()
            try:
                opened = opener.open(split, index, epoch)
                try:
                    for sample in opened.first():
                        return self._seen(sample, opened.place, index, time.monotonic() - began)
                finally:
                    opened.close()
            except GeneratorError as error:
                raised.append(error)
                if plan.on_error != "skip" or len(raised) > MAX_SKIPPED:
                    break
        if raised:
            raise raised[0]
        if plan.endless:
            raise FeedError(f"the feed yields nothing: the first {MAX_EMPTY} segments ended without a sample")
        raise FeedError(
            f"the feed yields nothing: all of its {len(splits)} {plan.piece}s were read, and none yielded a sample"
        )

    def look_at_item(self) -> tuple[Spec | None, int]:
        """`look_at_splits` for an indexable feed."""
        feed = self._feed
        if feed.plan.length == 0:
            raise FeedError("the feed yields nothing: the indexable object has no items (its len() is 0)")
        feed.set_first(None)
        if not feed.needs_a_look:
            return None, feed.declared_nbytes
        began = time.monotonic()
        feed.set_warm()
        sample = self.item(0)
        return self._seen(sample, "item 0", 0, time.monotonic() - began)

    def warm_up(self) -> None:
        """Read item 0 of an indexable feed before any other, once in each process, and drop it.

        An object that draws at its first use, as Keras' ImageDataGenerator.flow() does its permutation, then draws the
        same in every worker. An error of the item is raised again when its batch is made.
        """
        if self._feed.warm or not self._feed.plan.length:
            return
        self._feed.set_warm()
        with contextlib.suppress(PenstockError):
            self.item(0)

    def item(self, index: int) -> Any:
        """An item of an indexable feed, transformed, read with the same random numbers in every process.

        Raises:
            GeneratorError: user code raised.
        """
        seed = self._feed.plan.seed
        self._randomness.seed(seed, 0, index)
        source: Any = self._feed.declared.generate
        self._page.enter(self._run, -1, f"item {index}")
        try:
            sample = source[index]
            transform = SampleTransform(checked_transforms(self._feed.declared.transform), seed, self._randomness)
            return transform(sample, 0, 0, index)
        except BaseException as error:
            raise item_failed(index, error) from error
        finally:
            self._page.leave()

    def _seen(self, sample: Any, place: str | None, index: int, seconds: float) -> tuple[Spec | None, int]:
        feed, plan = self._feed, self._feed.plan
        try:
            spec = feed.spec or infer_spec(sample, plan.batch_size, plan.batching)
            nbytes = nbytes_of(spec, sample)
            digests = digests_of(sample) if nbytes <= _MOST_DIGESTED else b""
        except PenstockError as error:
            error.split = place
            raise
        except BaseException as error:  # a sample's __array__ or keys() is user code as well
            raise GeneratorError(
                f"looking at the first sample {describe(error)}", split=place, remote_traceback=user_traceback(error)
            ) from error
        found = spec if feed.spec is None else None
        warning = batch_warning(plan.name, spec, plan.batch_size)
        feed.set_first(FirstSample(index, digests, seconds, () if warning is None else (warning,)))
        feed.learn(spec)
        return found, nbytes
