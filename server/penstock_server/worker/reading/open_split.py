"""One split that is being read: takes its samples, transforms them, and says which one an error is about."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextvars import Context
from itertools import chain, filterfalse, islice
from typing import Any

from penstock_proto import FeedError, GeneratorError, PenstockError, SpecError

from ...sources.row_stacks import RowStacks
from ...targets.importing import user_traceback
from ...worker_state.activity import ActivityPage
from ..batch.collate import BadSample, Collate, Raised
from ..batch.rebatching import NoRows
from ..batch.shares import Share
from ..cache.cached_samples import CachedSamples, UnreadableSample
from ..failures import describe, memory_advice
from ..isolation import helpers
from ..isolation.randomness import GlobalRandomness, GlobalState
from ..lane.restart_record import SourcePlace
from ..verification.spot_checks import Spot
from .generators import CallFailed
from .item_splits import ItemSamples
from .passes import ShareSamples
from .transforming import TransformedSamples, TransformFailed, Transforms


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
    `CachedSamples` and `ShareSamples` have only these samples. Skipping `CachedSamples` or `ItemSamples` reads nothing.
    `key` is the epoch and the split's index, for the random numbers of `transform`. `made` has the first sample if it
    was taken from `samples` and transformed already. `counted`: the feed promises its number of samples.
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
        self._of_pass = samples if isinstance(samples, ShareSamples) else None
        self._singly = len(made)
        """How many of the first samples are read one by one."""
        if made and self._of_pass is None:
            samples = chain(made, samples)
        if transform and self._of_pass is None:
            samples = page.beating(samples)
        if most is not None:
            samples = islice(samples, most)
        if share is not None:
            samples = share.of(samples) if cached is None and self._of_pass is None else samples
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
            own = state if self._of_pass is None else None
            self._transformed = TransformedSamples(
                samples, transform, *key, self._place_of, own, randomness, first=len(made), counted=counted
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
        reads = None if self._of_pass is None else self._of_pass.reads
        return self._generator if reads is None else reads.generator

    @property
    def helper(self) -> object:
        """What owns the processes that the generator starts."""
        return (None if self._of_pass is None else self._of_pass.reads) or self

    @property
    def helped_seconds(self) -> float:
        """How long the generator has run for other lanes."""
        return 0.0 if self._of_pass is None else self._of_pass.helped_seconds

    def seconds_to(self, number: int) -> float:
        """Return how long the generator takes to sample `number` if it runs for this lane alone, as far as it has run
        for others."""
        return 0.0 if self._of_pass is None else self._of_pass.seconds_to(number)

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
            if self._of_pass is not None and not self._drops:
                self._of_pass.seek(goal)
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
        self._transformed = self._seekable = self._items = self._stacks = self._of_pass = None
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
            return user_error(error.name, self.place, error.error)
        if isinstance(error, GeneratorError) or type(error) is FeedError:
            error.split = self.place
            return error
        return user_error(self._name, self.place, error, self._which(self.taken))

    def _which(self, number: int) -> str:
        """Describe sample `number` of those that this split reads."""
        if self._items is not None:
            return f"item {self._items.item_of(number)}"
        where = self._name if self._is_share else f"its {self._piece}"
        return f"sample {self._place_of(number)} of {where}, from 0"

    def _enter(self) -> None:
        if self._of_pass is not None:  # it runs user code with its own settings
            self._randomness.use_settings(self.state)
        elif self._stacks is None:
            self._randomness.use(self.state)
        else:  # no user code runs
            self._randomness.use_settings(self.state)
        self._page.enter(self._run, self._number, self._text, self.taken)

    def _leave(self, copying: int = 0) -> None:
        self._page.leave(copying)
        if self._stacks is None:
            helpers.of_this_process.look(self.helper)


def user_error(name: str, place: str | None, error: BaseException, sample: str = "") -> GeneratorError:
    """Return the error to report if code of the function `name` has raised `error`, in that place, at that sample."""
    said = f"{name} {describe(error)}"
    if isinstance(error, MemoryError):
        said += f"{sample and f' ({sample})'}{memory_advice()}"
    return GeneratorError(said, split=place, remote_traceback=user_traceback(error))


def _same(number: int) -> int:
    return number
