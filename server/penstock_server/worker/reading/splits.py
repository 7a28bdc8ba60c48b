"""Opens and reads one split: starts the user's generator with the arguments that it takes, and reads its samples."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from functools import partial
from itertools import chain, filterfalse, islice
from typing import Any, TypeAlias

from penstock_proto import FeedError, GeneratorError, PenstockError, SpecError
from penstock_proto.messages import FeedPlan
from penstock_proto.value_text import shown

from ...feed.combined.feed_kinds import is_shared
from ...feed.feed import Feed
from ...feed.options.transforms import Transform
from ...sources.row_stacks import RowStacks
from ...targets.importing import user_traceback
from ...worker_state.activity import ActivityPage
from ..batch.collate import BadSample, Collate, Raised
from ..batch.rebatching import BatchRows, NoRows
from ..batch.shares import Share
from ..cache.cached_samples import CachedSamples, RecordedSamples, UnreadableSample
from ..cache.split_cache import SplitCache
from ..failures import describe, memory_advice
from ..isolation import helpers
from ..isolation.randomness import GlobalRandomness, GlobalState
from ..items.items import Items, PlainItems
from ..lane.restart_record import SourcePlace
from ..verification.file_versions import FileVersions
from ..verification.spot_checks import Spot
from .generators import CallFailed, OneGenerator, Started, ZippedGenerators, generator_of
from .item_splits import ItemSamples, ItemsGenerator
from .transforming import TransformedSamples, TransformFailed, Transforms, transform_of

Report: TypeAlias = Callable[[int, str], None]
"""Called when zipped generators yield different numbers of samples, with the smallest number, and a text for the
log."""


class SplitOpener:
    """Starts the user's generator with the arguments that it takes.

    In a feed with segments a split is the segment's number, which is its index too.

    If every lane runs the whole generator, a split is (index, count) of the lane's share.

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
            raise _failed(self._generator.name, self._place(split), error) from error

    def open(self, split: Any, index: int, epoch: int, number: int = -1) -> OpenSplit:
        """Start to read `split`, which has this index in the list and this number within its lane.

        Raises:
            GeneratorError: the user's code raised, or did not return an iterator.
            FeedError: with a cache, the split cannot be told from others.
        """
        report, share = partial(self._on_uneven, number, index), None
        open_already = self._taken_over(split, index, epoch, report)
        if self._stretch is not None:
            part, count = split
            share = Share(part, count, self._stretch)
            index = 0  # the generator is the same in all lanes
        name, place = self._generator.name, self._place(split)

        def start(state: GlobalState | None = None) -> Started:
            return self._generator.start(split, index, epoch, report, state)

        self._page.enter(self._run, number, place or name)
        try:
            if open_already is not None:
                first = open_already[0]
                started = Started(first.generator, first.state, first.variables)
            elif self._cache is None:
                started = start()
            else:
                started = self._start_cached(self._cache, None if share is not None else split, share, start)
        except CallFailed as failed:
            helpers.of_this_process.end_of(failed)
            raise _failed(failed.name, place, failed.error) from failed.error
        except PenstockError as error:
            error.split = place
            raise
        finally:
            self._page.leave()
        opened = OpenSplit(
            BatchRows(started.samples) if self._yields_batches and open_already is None else started.samples,
            name,
            place,
            started.state,
            started.variables,
            self._randomness,
            self._page,
            self._run,
            number,
            self._most(index),
            share=share,
            transform=self._transform,
            key=(epoch, index),
            drops=self._drops,
            made=() if open_already is None else (open_already[1],),
            held=self._generator.held if open_already is None else open_already[0].held,
            counted=self._plan.samples is not None,
        )
        if open_already is not None:
            helpers.of_this_process.pass_on(open_already[0], opened)
        helpers.of_this_process.look(opened)
        return opened

    def _start_cached(
        self, cache: SplitCache, split: Any, share: Share | None, start: Callable[[GlobalState], Started]
    ) -> Started:
        """Open the cached split, or else start the generator with the random state of the split's key. Write its
        samples to the cache if that is asked for, and nobody else does so."""
        key = cache.key_of(split)
        found = cache.find(key)
        if self._fills_cache:
            cache.counters.count_opened(hit=found is not None)
        if found is not None:
            # A share has rows of batches, not whole batches.
            cached = CachedSamples(found, key.name, None if self._yields_batches else share)
            return Started(cached, GlobalState(), self._randomness.variables.new())
        started = start(key.global_state())
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


class OpenSplit:
    """A split that is being read.

    Attributes:
        taken: samples read so far.
        place: a short text for the split, or None if the generator takes none.
        state: the random state and the settings of the process that its generator continues with.
        variables: the context variables that its code sees.
        held: the type of the iterator, if a variable of the user's holds it; see `returned_iterator.py`.
        on_end: called when all samples were read; may raise.

    It ends after `most` samples, if that is given. With a `share`, only that part of the generator's samples is read.
    `CachedSamples` have only these samples, and skipping them, or `ItemSamples`, reads nothing. `key` is the epoch and
    the split's index, for the random numbers of `transform`. `made` has the first sample if it was taken from `samples`
    and transformed already. `counted`: the feed promises its number of samples.
    """

    def __init__(
        self,
        samples: Iterator[Any],
        name: str,
        place: str | None,
        state: GlobalState,
        variables: Context,
        randomness: GlobalRandomness,
        page: ActivityPage,
        run: int,
        number: int,
        most: int | None = None,
        *,
        share: Share | None = None,
        transform: Transforms | None = None,
        key: tuple[int, int] = (0, 0),
        drops: Callable[[Any], bool] | None = None,
        made: tuple[Any, ...] = (),
        held: str | None = None,
        counted: bool = False,
    ) -> None:
        self.taken = 0
        self.place = place
        self.held = held
        self.on_end: Callable[[], None] = lambda: None
        self.state = state
        self.variables = variables
        self._generator = samples
        self._place_of: Callable[[int], int] = _same
        self._transformed: TransformedSamples | None = None
        cached = samples if isinstance(samples, CachedSamples) else None
        self._items = samples if isinstance(samples, ItemSamples) else None
        self._seekable = (cached or self._items) if drops is None else None
        self._stacks = samples if isinstance(samples, RowStacks) and drops is None else None
        self._singly = len(made)
        """How many of the first samples are read one by one."""
        samples = chain(made, samples) if made else samples
        if transform:
            samples = page.beating(samples)
        if most is not None:
            samples = islice(samples, most)
        if share is not None:
            samples = share.of(samples) if cached is None else samples
            self._place_of = share.place_of
        if self._stacks is None:
            samples = page.counting(samples)
        else:
            self._stacks.on_taken = page.count
        self._source = self._samples = samples
        if self._items is not None:
            assert transform is not None
            numbers, items = self._items.number_of, self._items
            self._transformed = TransformedSamples(
                samples, transform, key[0], 0, numbers, state, randomness, len(made), items.leaves_out, counted
            )
            self._samples = page.counting(self._transformed)
        elif transform:
            self._transformed = TransformedSamples(
                samples, transform, *key, self._place_of, state, randomness, first=len(made), counted=counted
            )
            self._samples = page.counting(self._transformed)
        self._drops = drops is not None
        if drops is not None:  # `drops` follows the transform, so replayed samples pass through that too
            self._source = self._samples = filterfalse(drops, self._samples)
        self._name = name
        self._run_code = variables.run
        self._randomness = randomness
        self._page = page
        self._run = run
        self._number = number
        self._text = place or name
        self._piece = "split" if most is None else "segment"
        self._is_share = share is not None
        self._spot: Spot | None = None

    @property
    def generator(self) -> Iterator[Any]:
        """The iterator that the user's function returned, or that of a cached split."""
        return self._generator

    def check(self, spot: Spot) -> None:
        """Note in `spot` the first samples that are read, unless they are skipped."""
        self._spot = spot
        self._samples = spot.of(self._samples)

    def read(self, collate: Collate, store: Any, row: int, stop: int) -> int:
        """Fill the rows of `store` from `row` to `stop`. Return `stop`, or the first unfilled row if the split ended.

        Raises:
            GeneratorError: user code or `on_end` raised; `taken` counts the rows that were filled before.
            SpecError: a sample does not fit the spec.
        """
        self._enter()
        try:
            if self._stacks is not None and self._is_at_stacks:
                end = self._run_code(collate.fill_stacked, store, row, stop, self._stacks)
            else:
                end = self._run_code(collate.timed_fill, store, row, stop, self._samples)
        except BadSample as error:
            made, number = "", self.taken + error.row - row
            if self._transformed is not None:
                made, number = "the output of transform= for ", self._transformed.number - 1
            which = self._which(number)
            raise SpecError(f"{error.message} ({made}{which})", split=self.place) from None
        except Raised as raised:
            self.taken += raised.row - row
            raise self._error_of(raised.error) from raised.error
        finally:
            self._leave(collate.copying)
        self.taken += end - row
        if end < stop:
            self.on_end()
        return end

    def first(self) -> list[Any]:
        """Return the next sample as a list of one, or an empty list if the split has ended.

        Raises:
            GeneratorError: user code raised.
        """
        self._enter()
        try:
            return self._run_code(list, islice(self._samples, 1))
        except BaseException as error:
            raise self._error_of(error) from error
        finally:
            self._leave()

    @property
    def source_place(self) -> SourcePlace:
        """The place in the source. Samples that `drops` leaves out are not counted."""
        if self._transformed is None:
            return SourcePlace(self.taken, 0, 0)
        place = self._transformed.place
        return SourcePlace(self.taken, 0, place.dropped) if self._drops else place

    def skip(self, until: int, seconds: float, place: SourcePlace | None = None) -> bool:
        """Drop samples, for about `seconds`, until `until` samples were read in all. Return whether they were. `place`
        is where that is in the source, if transforms have made more or less than one sample of each before.

        Raises:
            GeneratorError: user code raised.
            FeedError: the split has fewer samples than when it was read first.
        """
        deadline = time.monotonic() + seconds
        if self._drops:
            place = None  # all samples are transformed and filtered again
        goal = until if place is None else place.read
        if self._spot is not None:
            self._spot.give_up()
        self._enter()
        try:
            if self._seekable is not None:
                self.taken = self._seekable.seek(goal)
            late = self._run_code(self._drop, goal, deadline)
            if self.taken == goal and place is not None and self._transformed is not None:
                self.taken = until if self._run_code(self._transformed.go_to, place) else 0
        except BaseException as error:
            raise self._error_of(error) from error
        finally:
            self._leave()
            if self._transformed is not None and not self._drops and place is None:  # otherwise it counts on its own
                self._transformed.on_skipped(self.taken)
        if self.taken != until and not late:
            raise FeedError(
                f"{self._name} yielded {until} samples of a {self._piece}, and only {self.taken} when it was run "
                f"again: a stream can continue elsewhere only if a {self._piece} always yields the same samples",
                split=self.place,
            )
        return self.taken == until

    def close(self) -> None:
        """End the generator, and the processes that it has left behind; an error in its clean-up is only logged."""
        if self._spot is not None:
            self._spot.close()
        if hasattr(self._generator, "close"):
            self._enter()
            try:
                self._run_code(self._generator.close)
            except BaseException:
                self._randomness.use(None)  # it may have replaced sys.stderr
                traceback.print_exc()
            finally:
                self._leave()
        self._generator = self._source = self._samples = iter(())
        self._transformed = self._seekable = self._items = self._stacks = None
        self.variables = Context()
        self._run_code = self.variables.run
        helpers.of_this_process.end_of(self)

    def _drop(self, until: int, deadline: float) -> bool:
        """Drop samples until `until` samples were read in all, or the split has ended. Return whether the deadline came
        first."""
        singly = until if self._stacks is None else min(until, self._singly)
        for _ in islice(self._source, max(0, singly - self.taken)):
            self.taken += 1
            if time.monotonic() >= deadline:
                return True
        while self._stacks is not None and self.taken < until:
            stack = self._stacks.take(until - self.taken)
            if stack is None:
                break
            self.taken += stack.rows
            if time.monotonic() >= deadline:
                return True
        return False

    @property
    def _is_at_stacks(self) -> bool:
        """Whether the next samples need not be taken one by one."""
        return self.taken >= self._singly and (self._spot is None or self._spot.over)

    def _error_of(self, error: BaseException) -> PenstockError:
        if isinstance(error, NoRows):
            what = self._name if self._is_share else f"its {self._piece}"
            return SpecError(f"{error.message} (batch {error.number} of {what}, from 0)", split=self.place)
        if isinstance(error, TransformFailed) and self._transformed is not None:
            return error.user_error(self.place, self._which(self._transformed.number - 1))
        if isinstance(error, UnreadableSample):
            return error.user_error(self.place)
        if isinstance(error, CallFailed):
            return _failed(error.name, self.place, error.error)
        if isinstance(error, GeneratorError) or type(error) is FeedError:
            error.split = self.place
            return error
        return _failed(self._name, self.place, error, self._which(self.taken))

    def _which(self, number: int) -> str:
        """Describe sample `number` of those that this split reads."""
        if self._items is not None:
            return f"item {self._items.item_of(number)}"
        where = self._name if self._is_share else f"its {self._piece}"
        return f"sample {self._place_of(number)} of {where}, from 0"

    def _enter(self) -> None:
        if self._stacks is None:
            self._randomness.use(self.state)
        else:  # no user code runs
            self._randomness.use_settings(self.state)
        self._page.enter(self._run, self._number, self._text, self.taken)

    def _leave(self, copying: int = 0) -> None:
        self._page.leave(copying)
        if self._stacks is None:
            helpers.of_this_process.look(self)


def _failed(name: str, place: str | None, error: BaseException, sample: str = "") -> GeneratorError:
    said = f"{name} {describe(error)}"
    if isinstance(error, MemoryError):
        said += f"{sample and f' ({sample})'}{memory_advice()}"
    return GeneratorError(said, split=place, remote_traceback=user_traceback(error))


def _same(number: int) -> int:
    return number
