"""Opens splits: starts the user's generator with the arguments that it takes, or finds what is there already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from penstock_proto import PenstockError
from penstock_proto.messages import IDS_PER_STREAM, FeedPlan
from penstock_proto.value_text import shown

from ...feed.combined.feed_kinds import is_shared
from ...feed.feed import Feed
from ...feed.options.transforms import Transform
from ...worker_state.activity import ActivityPage
from ..batch.rebatching import BatchRows
from ..batch.shares import Share
from ..cache.cached_samples import CachedSamples, RecordedSamples
from ..cache.split_cache import SplitCache
from ..isolation import helpers
from ..isolation.randomness import GlobalRandomness, GlobalState
from ..items.items import Items, PlainItems
from ..verification.file_versions import FileVersions
from .generators import CallFailed, OneGenerator, Started, ZippedGenerators, generator_of
from .item_splits import ItemsGenerator
from .open_split import OpenSplit, user_error
from .passes import Pass, Passes, ShareSamples
from .transforming import transform_of

Report: TypeAlias = Callable[[int, str], None]
"""Called when zipped generators yield different numbers of samples, with the smallest number, and a text for the
log."""


class _Begun(NamedTuple):
    """The samples that a split is read from.

    Attributes:
        samples: an iterator.
        state: the random state and the settings of the process that it runs with.
        variables: the context variables that it runs with.
        held: the type of the iterator, if a variable of the user's holds it; see `returned_iterator.py`.
        made: the first sample, if it was taken from `samples` and transformed already.
        taken_over: the open split that it was taken from.
    """

    samples: Iterator[Any]
    state: GlobalState
    variables: Context
    held: str | None = None
    made: tuple[Any, ...] = ()
    taken_over: OpenSplit | None = None


class SplitOpener:
    """Starts the user's generator with the arguments that it takes.

    In a feed with segments a split is the segment's number, which is its index too.

    If the generator cannot be divided, a split is (index, count) of the lane's share.

    Args:
        feed: the user's object.
        plan: its options.
        randomness: the random numbers of this process.
        page: shows which split user code reads, for `run`.
        run: the daemon's number of the run.
        stretch: length of the stretches of samples that a share is made of.
        drops: returns whether to leave a sample out, as if it had not been yielded. None if all are kept.
        cache: keeps splits as the generator yields them. None if they are not kept.
        fills_cache: whether splits that are read to their ends are written to the cache.
        on_uneven: called when zipped generators yield different numbers of samples, with the split's number and index,
            the number of samples of the shortest one, and a text for the log.
        taken_over: returns the split that is to be opened, and its first sample, if it is open already. Called with the
            split, its index, the epoch, and what to call if zipped generators yield different numbers of samples.
        component: name of the feed in a mix, for errors; None if it is not part of one.
        also: transforms of the mix, applied after those of the feed.
        items: those of an indexable feed.
        passes: runs a generator that cannot be divided once for the lanes of this process. None: this opener runs it
            apart.
    """

    def __init__(
        self,
        feed: Feed,
        plan: FeedPlan,
        randomness: GlobalRandomness,
        page: ActivityPage,
        run: int = -1,
        *,
        stretch: int = 1,
        drops: Callable[[Any], bool] | None = None,
        cache: SplitCache | None = None,
        fills_cache: bool = False,
        on_uneven: Callable[[int, int, int, str], None] = lambda *_: None,
        taken_over: Callable[[Any, int, int, Report], tuple[OpenSplit, Any] | None] = lambda *_: None,
        component: str | None = None,
        also: Sequence[Transform] = (),
        items: Items | None = None,
        passes: Passes | None = None,
    ) -> None:
        self._feed = feed
        self._drops = drops
        self._cache = cache
        self._fills_cache = fills_cache
        self._component = component
        self._on_uneven = on_uneven
        self._taken_over = taken_over
        self._transform = transform_of(feed, plan.seed, randomness, also)
        self._generator: OneGenerator | ZippedGenerators | ItemsGenerator
        # Whatever looks at single samples needs them one by one.
        stacked = not (self._transform or cache or drops or feed.rebatch or is_shared(feed) or plan.segment)
        if isinstance(items, PlainItems):
            self._generator = ItemsGenerator(items, feed, plan, randomness, page, run)
        else:
            self._generator = generator_of(feed, plan.seed, randomness, stacked=stacked)
        self._stretch = stretch if is_shared(feed) else None
        self._passes = passes
        self._expected: ShareSamples | None = None
        self._yields_batches = feed.rebatch is not None
        self._plan = plan
        self._randomness = randomness
        self._page = page
        self._run = run

    def check_files(self, split: Any, versions: FileVersions) -> None:
        """Check that the files of a split are as they were when it was listed.

        Raises:
            GeneratorError: one has changed.
        """
        try:
            versions.check(self._feed, split)
        except OSError as error:
            raise user_error(self._generator.name, self._place(split), error) from error

    def open(self, split: Any, index: int, epoch: int, number: int = -1) -> OpenSplit:
        """Start to read `split`, which has this index in the list and this number within its lane.

        Raises:
            GeneratorError: the user's code raised, or did not return an iterator.
            FeedError: with a cache, the split cannot be told from others.
        """
        report = partial(self._on_uneven, number, index)
        share = self._share_of(split)
        name, place = self._generator.name, self._place(split)
        self._page.enter(self._run, number, place or name)
        try:
            if self._reads_passes:
                begun = self._join(split, index, epoch, report)
            else:
                self.close()
                begun = self._take_over(split, index, epoch, report) or self._start(split, index, epoch, report, share)
        except CallFailed as failed:
            helpers.of_this_process.end_of(failed)
            raise user_error(failed.name, place, failed.error) from failed.error
        except PenstockError as error:
            error.split = place
            raise
        finally:
            self._page.leave()
        opened = OpenSplit(
            begun.samples,
            name,
            place,
            begun.state,
            begun.variables,
            self._randomness,
            self._page,
            self._run,
            number,
            self._most(index),
            share=share,
            transform=self._transform,
            key=(epoch, index if share is None else 0),
            drops=self._drops,
            made=begun.made,
            held=begun.held,
            counted=self._plan.samples is not None,
        )
        if begun.taken_over is not None:
            helpers.of_this_process.pass_on(begun.taken_over, opened.helper)
        helpers.of_this_process.look(opened.helper)
        return opened

    def expect(self, split: Any, epoch: int, first: int) -> None:
        """Say that `split` will be opened, and that its samples from number `first` on are needed."""
        share = self._share_of(split)
        if share is not None and self._passes is not None:
            key = self._run // IDS_PER_STREAM, epoch
            needed = first if self._drops is None else 0  # all samples are transformed and filtered again
            self._expected = self._passes.expect(key, share, needed, run=self._run)

    @property
    def begins_pass(self) -> bool:
        """Whether it expects a share of single samples, whose generator must be started."""
        return self._expected is not None and self._expected.reads is None and self._stretch == 1

    def close(self) -> None:
        """Say that no split will be opened any more."""
        expected, self._expected = self._expected, None
        if expected is not None:
            expected.close()

    def _share_of(self, split: Any) -> Share | None:
        if self._stretch is None:
            return None
        index, count = split
        return Share(index, count, self._stretch)

    @property
    def _reads_passes(self) -> bool:
        """Whether the generator runs for several lanes. A split of the cache is read by each lane itself."""
        if self._passes is None or self._stretch is None:
            return False
        return self._cache is None or self._cache.find(self._cache.key_of(None)) is None

    def _take_over(self, split: Any, index: int, epoch: int, report: Report) -> _Begun | None:
        """Go on with a generator whose first sample was made, if there is one of this split."""
        found = self._taken_over(split, index, epoch, report)
        if found is None:
            return None
        first, sample = found
        return _Begun(first.generator, first.state, first.variables, first.held, (sample,), first)

    def _start(self, split: Any, index: int, epoch: int, report: Report, share: Share | None) -> _Begun:
        """Start the generator, or open the cached split, of which only `share` is read."""
        if self._stretch is not None:
            index = 0  # the generator is the same in all lanes
        start = partial(self._generator.start, split, index, epoch, report)
        started = start() if self._cache is None else self._start_cached(self._cache, split, share, start)
        samples = BatchRows(started.samples) if self._yields_batches else started.samples
        return _Begun(samples, started.state, started.variables, self._generator.held)

    def _join(self, split: Any, index: int, epoch: int, report: Report) -> _Begun:
        """Read a share of a pass."""
        if self._expected is None:
            self.expect(split, epoch, 0)
        samples = self._expected
        assert samples is not None

        def run(new: Pass) -> tuple[Any, ...]:
            begun = None if samples.opened else self._take_over(split, index, epoch, new.report)
            if begun is None:
                begun = self._start(split, index, epoch, new.report, None)
            if begun.taken_over is not None:
                helpers.of_this_process.pass_on(begun.taken_over, new)
            started = Started(begun.samples, begun.state, begun.variables)
            new.run(started, self._page.beating(begun.samples), self._randomness, begun.held, len(begun.made))
            return begun.made

        samples.report = report
        reads = samples.open(run)
        self._expected = None  # the open split closes it
        return _Begun(samples, GlobalState(), self._randomness.variables.new(), reads.held, tuple(samples.made))

    def _start_cached(
        self, cache: SplitCache, split: Any, share: Share | None, start: Callable[..., Started]
    ) -> Started:
        """Open the cached split, or else start the generator with the random state of the split's key. Write its
        samples to the cache if that is asked for, and nobody else does so."""
        if self._stretch is not None:
            split = None  # all of it is cached
        key = cache.key_of(split)
        found = cache.find(key)
        if self._fills_cache:
            cache.counters.count_opened(hit=found is not None)
        if found is not None:
            # A share has rows of batches, not whole batches.
            cached = CachedSamples(found, key.name, None if self._yields_batches else share)
            return Started(cached, GlobalState(), self._randomness.variables.new())
        started = start(state=key.global_state())
        writer = cache.writer(key) if self._fills_cache else None
        if writer is None:
            return started
        return started._replace(samples=RecordedSamples(started.samples, writer, partial(cache.is_key_of, key, split)))

    def _most(self, index: int) -> int | None:
        """Return the number of samples after which the split is ended if it is a segment, else None."""
        segment, samples = self._plan.segment, self._plan.samples
        if segment is None or samples is None:
            return segment
        return min(segment, samples - index * segment)

    @property
    def name(self) -> str:
        """The name of the user's function."""
        return self._generator.name

    def show(self, split: Any) -> str:
        """Return a short text for `split`, or for the generator if it takes no split."""
        return self._place(split) or self._generator.name

    def _place(self, split: Any) -> str | None:
        place = self._place_in_feed(split)
        if self._component is None:
            return place
        return self._component if place is None else f"{place} of {self._component}"

    def _place_in_feed(self, split: Any) -> str | None:
        if self._stretch is not None:
            return f"share {split[0]} of {split[1]}"
        if isinstance(self._generator, ItemsGenerator):
            return f"part {split[0]} of {split[1]}"
        if self._generator.wants.shard:
            return f"shard {split[0]} of {split[1]}"
        if self._plan.segment is not None:
            return f"segment {split}"
        return shown(split) if self._generator.wants.split else None
