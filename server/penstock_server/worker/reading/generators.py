"""Starts the generator of a feed with the arguments that it takes. Zipped generators run in step.

A generator has an `rng` of its own, or draws from global random states that belong to its split. Zipped generators
share these states, and the settings of the process: they always run in the same order, and exchanging the states for
each sample would take 80 us. Each of them has its own context variables. This file knows nothing of lanes or runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from contextvars import Context
from functools import partial
from typing import Any, NamedTuple

from penstock_proto import GeneratorError
from penstock_proto.value_text import shown

from ...feed.combined.component_options import seed_of
from ...feed.combined.feed_kinds import generator_call
from ...feed.combined.zipped import Zipped
from ...feed.options.feed_options import FeedOptions
from ...feed.options.generator_call import Wants
from ...sources.reader import StackReader
from ...sources.row_stacks import RowStacks
from ..isolation.randomness import GlobalRandomness, GlobalState, generator, seeds
from .returned_iterator import ReadTwice, ReturnedIterator, held_iterators, is_plain


class CallFailed(Exception):
    """User code raised `error` in the function `name`."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(name, error)
        self.name = name
        self.error = error


class Started(NamedTuple):
    """A generator that was started.

    Attributes:
        samples: the iterator over its samples.
        state: the random states and settings of the process that it runs with.
        variables: the context variables that it runs with.
    """

    samples: Iterator[Any]
    state: GlobalState
    variables: Context


class OneGenerator:
    """The generator of a feed.

    Args:
        feed: the user's object.
        seed: for its random numbers.
        randomness: the random numbers of this process.
        stacked: whether to return the rows of a `StackReader` as `RowStacks`.

    Attributes:
        name: of the function, or of the class and its method.
        wants: the arguments that it takes.
        held: the type of the iterator that it returned last, if that is held elsewhere; see `returned_iterator.py`.
    """

    def __init__(self, feed: FeedOptions, seed: int, randomness: GlobalRandomness, *, stacked: bool = False) -> None:
        self._call = generator_call(feed)
        self._generate = feed.generate
        self._reader = feed.generate if stacked and isinstance(feed.generate, StackReader) else None
        self._state_of_reader = GlobalState()  # it draws nothing, and holds no settings
        self._seed = seed
        self._randomness = randomness
        self.name = self._call.name
        self.wants: Wants = self._call.wants
        self.held: str | None = None

    @property
    def draws_globally(self) -> bool:
        """Whether it may draw from the global random generators."""
        return self._call.seeds_global_state

    def start(
        self,
        split: Any,
        index: int,
        epoch: int,
        report: Callable[[int, str], None],
        state: GlobalState | None = None,
    ) -> Started:
        """Start the generator.

        Args:
            split: the split, segment number or shard that it gets if it takes one.
            index: of the split, for its random numbers.
            epoch: from 0.
            report: not needed.
            state: the global state to run with; by default one of its own.

        Raises:
            CallFailed: the user's code raised.
            GeneratorError: it did not return an iterator.
        """
        arguments = {"split": split, "shard": split, "epoch": epoch}
        if self.wants.rng:
            arguments["rng"] = generator(self._seed, epoch, index)
        variables = self._randomness.variables.new()
        if self._reader is not None:
            return Started(RowStacks(self._reader.stacks(split)), self._state_of_reader, variables)
        if state is None:
            of_split = partial(seeds, "split", self._seed, epoch, index)
            state = GlobalState(of_split() if self.draws_globally else None, of_split)
        calling = self._call.constructor or self.name
        before = held_iterators(self._generate)
        self._randomness.use(state)
        try:
            start = variables.run(self._call.prepare, arguments)
            calling = self.name
            samples = variables.run(start)
        except BaseException as error:
            raise CallFailed(calling, error) from error
        if not hasattr(samples, "__next__"):
            raise GeneratorError(f"{self.name} must return an iterator, got {shown(samples)}: {_hint(samples)}")
        held = any(samples is one for one in before)
        if held and is_plain(samples):
            raise GeneratorError(
                f"{self.name} returns {shown(samples)}, which a variable holds: it can be read only once, and each "
                "call must return a new one. Make it in the function"
            )
        if not is_plain(samples):
            self.held = type(samples).__name__ if held else None
            try:
                samples = ReturnedIterator(samples)
            except ReadTwice:
                raise GeneratorError(
                    f"{self.name} returned an iterator ({type(samples).__name__}) that another split is reading: each "
                    "call must return a new one. Make it in the function, or give its class: Feed(Reader, method=...)"
                ) from None
        return Started(samples, state, variables)


class ZippedGenerators:
    """The generators of a zipped feed. See `OneGenerator`."""

    def __init__(self, zipped: Zipped, seed: int, randomness: GlobalRandomness) -> None:
        self._zipped = zipped
        self._seed = seed
        self._randomness = randomness
        self._parts = {
            label: generator_of(feed, seed_of(seed, label), randomness) for label, feed in zipped.parts.items()
        }
        self.name = zipped.name
        self.wants = zipped.wants

    @property
    def draws_globally(self) -> bool:
        """Whether one of them may draw from the global random generators."""
        return any(part.draws_globally for part in self._parts.values())

    @property
    def held(self) -> str | None:
        """As in `OneGenerator`, of the first of them that returned such an iterator."""
        return next((part.held for part in self._parts.values() if part.held), None)

    def start(
        self,
        split: Any,
        index: int,
        epoch: int,
        report: Callable[[int, str], None],
        state: GlobalState | None = None,
    ) -> Started:
        """Start all of them; see `OneGenerator`. `split` is a tuple of splits if they take splits.

        If the generators yield different numbers of samples, and the feed should warn of that, `report` is called with
        the number of samples and the reason why there are no more.
        """
        if state is None:
            of_split = partial(seeds, "split", self._seed, epoch, index)
            state = GlobalState(of_split() if self.draws_globally else None, of_split)
        pairs = self.wants.split and isinstance(split, tuple)
        started: dict[str, Started] = {}
        samples = ZippedSamples(self._zipped, self._parts, started, report)
        for number, (label, part) in enumerate(self._parts.items()):
            try:
                each = split[number] if pairs else split
                started[label] = part.start(each, index, epoch, report, state)
            except CallFailed as failed:
                samples.close()
                raise CallFailed(f"{failed.name} of {label}", failed.error) from failed.error
            except BaseException:
                samples.close()
                raise
        return Started(samples, state, self._randomness.variables.new())


class ZippedSamples(Iterator[Any]):
    """The samples of generators that run in step, joined. It ends with the first of them that ends."""

    def __init__(
        self,
        zipped: Zipped,
        generators: Mapping[str, OneGenerator | ZippedGenerators],
        started: dict[str, Started],
        report: Callable[[int, str], None],
    ) -> None:
        self._zipped = zipped
        self._generators = generators
        self._started = started
        self._report = report
        self._yielded = 0

    def __next__(self) -> Any:
        samples: list[Any] = []
        for label, part in self._started.items():
            try:
                samples.append(self._next(label, part))
            except StopIteration:
                self._on_part_ended(label, longer=bool(samples))
                raise
        self._yielded += 1
        return self._zipped.form.joined(samples)

    def close(self) -> None:
        """End the generators. If the clean-up of one raises, raise its error after all have ended."""
        with ExitStack() as closing:
            for part in reversed(self._started.values()):
                closing.callback(part.variables.run, getattr(part.samples, "close", _nothing))

    def _next(self, label: str, part: Started) -> Any:
        try:
            return part.variables.run(next, part.samples)
        except (StopIteration, GeneratorError):
            raise
        except CallFailed as failed:
            raise CallFailed(f"{failed.name} of {label}", failed.error) from failed.error
        except BaseException as error:
            raise CallFailed(f"{self._generators[label].name} of {label}", error) from error

    def _on_part_ended(self, label: str, *, longer: bool) -> None:
        """Compare the numbers of samples when the part `label` has ended.

        `longer`: another part has already yielded one more sample. Otherwise ask the other parts for one.

        Raises:
            GeneratorError: the numbers of samples differ, and the feed forbids it.
        """
        if self._zipped.uneven == "allow":
            return
        others = [other for other in self._started if other != label]
        if not longer:
            others = [other for other in others if self._has_more(other)][:1]
        if not others:
            return
        why = f"{label} has {self._yielded} samples there, and {others[0]} has more"
        if self._zipped.uneven == "raise":
            raise GeneratorError(f"{why}, which uneven='raise' of {self._zipped.name} forbids")
        self._report(self._yielded, f"{why}. If that is meant, give Feed.zip uneven='allow'")

    def _has_more(self, label: str) -> bool:
        try:
            self._next(label, self._started[label])
        except StopIteration:
            return False
        return True


def generator_of(
    feed: FeedOptions, seed: int, randomness: GlobalRandomness, *, stacked: bool = False
) -> OneGenerator | ZippedGenerators:
    """Return the generator of a feed that is not indexable, or its generators if it is zipped. `stacked`: see
    `OneGenerator`."""
    if isinstance(feed.generate, Zipped):
        return ZippedGenerators(feed.generate, seed, randomness)
    return OneGenerator(feed, seed, randomness, stacked=stacked)


def _nothing() -> None:
    pass


def _hint(returned: Any) -> str:
    if returned is None:
        return "did you forget to `yield` its samples?"
    return "`yield` the samples one by one, or return iter(...) of it"
