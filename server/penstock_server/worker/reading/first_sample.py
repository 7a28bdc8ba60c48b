"""Reads samples of a feed outside of its lanes: the first one, which gives the spec, and others to compare with it."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Sequence
from typing import Any

from penstock_proto import FeedError, GeneratorError, PenstockError
from penstock_proto.messages import FirstSample
from penstock_proto.spec import Spec

from ...feed.feed_warnings import batch_warning, names_warning
from ...feed.options.plan_sizes import ENDLESS
from ...targets.importing import user_traceback
from ...targets.pickled import dumps
from ...worker_state.activity import ActivityPage
from ..batch.sample_spec import digests_of, infer_spec, nbytes_of
from ..failures import describe
from ..isolation import held_locks, shared_objects, shared_settings
from ..isolation.randomness import GlobalRandomness
from ..items.keras_items import KerasItems
from ..lane.lane_splits import MAX_EMPTY
from ..lane.restart_record import MAX_SKIPPED
from . import returned_iterator
from .batch_transforming import BatchTransform
from .indexed import enter_epoch, item_failed
from .lane_batches import batch_transform_of
from .loaded_feed import LoadedFeed
from .opening import opener_of
from .transforming import one_sample, transform_of

_MOST_DIGESTED = 64 << 20
"""Largest sample to make a digest of, in bytes. Larger ones would take too long."""


class Probe:
    """Reads single samples of a feed.

    Args:
        feed: the feed to read.
        randomness: the random numbers of this process.
        page: the activity page, on which calls of user code are announced for `run`.
        run: the daemon's number of the run.
    """

    def __init__(self, feed: LoadedFeed, randomness: GlobalRandomness, page: ActivityPage, run: int) -> None:
        self._feed = feed
        self._randomness = randomness
        self._page = page
        self._run = run

    def look_at_splits(self, splits: Sequence[Any], epoch: int) -> tuple[Spec | None, int]:
        """Read the first sample of a feed with splits, unless its spec and its size are known.

        If the feed skips splits in which user code raises, skip them here too. If the sample took long, its split
        stays open, so that the lane that reads it need not make the sample again.

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
        told: list[str] = []
        dropped = 0

        def report(number: int, index: int, samples: int, why: str) -> None:
            told.append(why)
            feed.first_split.report(number, index, samples, why)

        opener = opener_of(feed, self._randomness, self._page, self._run, on_uneven=report)
        once = shared_objects.read_once(feed.declared.generate)
        raised: list[GeneratorError] = []
        for index, split in enumerate(splits[:MAX_EMPTY] if plan.endless else splits):
            settings, state = shared_settings.shared(), shared_objects.state_of(feed.declared.generate)
            began = time.monotonic()
            try:
                opened, kept = opener.open(_copy_of(split), index, epoch), False
                try:
                    for sample in opened.first():
                        seconds = time.monotonic() - began
                        if locks := held_locks.held_locks(feed.declared.generate):
                            raise FeedError(held_locks.error(plan.name, locks))
                        warnings = self._shared(settings, state)
                        if once:
                            warnings += (shared_objects.read_once_warning(plan.name, once),)
                        if opened.held:
                            seconds = math.inf  # it is not made again
                            warnings += (returned_iterator.warning(plan.name, opener.name, opened.held),)
                        found = self._describe(sample, opened.place, index, seconds, warnings)
                        if feed.cache is None:  # a lane writes the split to the cache, from its start
                            kept = feed.first_split.keep(split, index, epoch, opened, sample, seconds)
                        return found
                    dropped += opened.source_place.dropped
                finally:
                    if not kept:
                        opened.close()
            except GeneratorError as error:
                raised.append(error)
                if plan.on_error != "skip" or len(raised) > MAX_SKIPPED:
                    break
        if raised:
            raise raised[0]
        if plan.endless:
            raise FeedError(f"the feed yields nothing: the first {MAX_EMPTY} segments ended without a sample")
        if told:
            raise FeedError(f"the feed yields nothing: no item could be read. At its beginning {told[0]}")
        raise FeedError(
            f"the feed yields nothing: all of its {len(splits)} {plan.piece}s were read, and none yielded a sample"
            + (f", as all {dropped} samples were dropped" if dropped else "")
        )

    def look_at_item(self) -> tuple[Spec | None, int]:
        """Do the same as `look_at_splits`, for an indexable feed."""
        feed = self._feed
        if feed.plan.length == 0:
            raise FeedError("the feed yields nothing: the indexable object has no items (its len() is 0)")
        feed.set_first(None)
        if not feed.needs_a_look:
            return None, feed.declared_nbytes
        began = time.monotonic()
        sample = self.item(0, warm=False)
        return self._describe(sample, "item 0", 0, time.monotonic() - began)

    def item(self, index: int, *, warm: bool = True) -> Any:
        """Read an item of the first epoch of an indexable feed, and transform it, with the same random numbers in every
        process.

        Args:
            index: the item's index.
            warm: whether to read item 0 before any other; False if this is item 0.

        Raises:
            GeneratorError: user code raised.
        """
        items = self._feed.items
        if not items.is_at(0):
            enter_epoch(items, 0, self._randomness, self._page, self._run, warm=warm)
        seed = self._feed.plan.seed
        transform = transform_of(self._feed.declared, seed, self._randomness)
        state, variables = self._randomness.of(items)
        self._randomness.use(state)
        self._randomness.seed(seed, 0, index)
        self._page.enter(self._run, -1, f"item {index}")
        try:
            sample = variables.run(next, items.read([index]))
            if not transform:
                return sample
            return one_sample(transform(sample, 0, 0, index), keras=isinstance(items, KerasItems))
        except BaseException as error:
            raise item_failed(f"item {index}", error) from error
        finally:
            self._page.leave()

    def batches(self) -> BatchTransform | None:
        """Return what transforms batches of an indexable feed, or None. Read item 0 if the spec of a sample is not
        known.

        Raises:
            GeneratorError: user code raised.
            SpecError: the samples do not fit.
        """
        feed = self._feed
        if feed.sample_spec is None and feed.declared.batch_transform is not None:
            feed.sample_spec = infer_spec(self.item(0, warm=False), feed.plan.batch_size, feed.plan.batching)
        return self._batches_of(None)

    def transformed(self, sample: Any) -> Any:
        """Return what `batch_transform=` makes of a batch that has this sample in each row; None without one.

        Raises:
            GeneratorError: user code raised.
            SpecError: the sample does not fit.
        """
        batches = self._batches_of(sample)
        return None if batches is None else self._made(batches, sample)

    @property
    def _rows(self) -> int:
        """The rows of a first batch."""
        plan = self._feed.plan
        return min(plan.batch_size or 1, max(1, plan.length or plan.samples or ENDLESS))

    def _made(self, batches: BatchTransform, sample: Any) -> Any:
        self._page.enter(self._run, -1, "batch_transform= of the first sample")
        try:
            return batches.made_of(sample, self._rows)
        finally:
            self._page.leave()

    def _batches_of(self, sample: Any) -> BatchTransform | None:
        feed = self._feed
        if feed.declared.batch_transform is not None and feed.sample_spec is None:
            feed.sample_spec = infer_spec(sample, feed.plan.batch_size, feed.plan.batching)
        return batch_transform_of(feed, self._randomness)

    def _shared(self, settings: dict[str, Any], state: dict[str, bytes]) -> tuple[str, ...]:
        """Return warnings about what the generator has changed and all generators share."""
        name, found = self._feed.plan.name, []
        if changed := shared_settings.changed_since(settings):
            found.append(shared_settings.warning(name, changed))
        if changed := shared_objects.changed_since(state, self._feed.declared.generate):
            found.append(shared_objects.warning(name, changed))
        return tuple(text[:1024] for text in found)

    def _describe(
        self, sample: Any, place: str | None, index: int, seconds: float, warnings: tuple[str, ...] = ()
    ) -> tuple[Spec | None, int]:
        feed, plan = self._feed, self._feed.plan
        try:
            batches, made, rows = self._batches_of(sample), None, self._rows
            if batches is not None:
                made = self._made(batches, sample)
                found, nbytes = batches.look(made, rows, varies=plan.batching == "pad")
                spec = feed.spec or found
                if feed.has_lane_batches:  # slots and shuffle blocks also hold samples
                    assert feed.sample_spec is not None
                    nbytes = max(nbytes, nbytes_of(feed.sample_spec, sample))
            else:
                spec = feed.spec or infer_spec(sample, plan.batch_size, plan.batching)
                nbytes = nbytes_of(spec, sample)
            names = names_warning(plan.name, sample)
            is_small = nbytes * (1 if made is None else rows) <= _MOST_DIGESTED
            digests = digests_of(sample) if is_small and seconds < math.inf else b""
            if digests and made is not None:
                digests += digests_of(made)
        except PenstockError as error:
            error.split = place
            raise
        except BaseException as error:  # a sample's __array__ or keys() is user code as well
            raise GeneratorError(
                f"looking at the first sample {describe(error)}", split=place, remote_traceback=user_traceback(error)
            ) from error
        new = spec if feed.spec is None else None
        for text in (batch_warning(plan.name, spec, plan.batch_size), names):
            if text is not None:
                warnings += (text[:1024],)
        feed.set_first(FirstSample(index, digests, seconds, warnings))
        feed.learn(spec)
        return new, nbytes


def _copy_of(split: Any) -> Any:
    """Return a copy of a split, as its lane will get one. User code may change what it gets, and the list of splits is
    not written yet."""
    try:
        return pickle.loads(dumps(split))
    except Exception:  # whoever writes or reads the list reports it
        return split
