"""Collects the facts about a feed: starts the runs in order, and decides which are needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from penstock_proto.messages import Environment

from ...machine.environment import of_workers
from ..observing import messages
from ..observing.recording import TRANSFORMED, Recording, load
from ..observing.repeats import unknown
from . import culprit
from .compare import Difference, compared, first_difference
from .culprit import Culprit, Result, Trial
from .runs import Outcome, Run, finish

_AGAIN = 4
"""The second run may take 10 s plus this many times as long as the first."""

_BEYOND = 64
"""Samples that an experiment reads after the first one that differs."""

_LENGTHS = 3
"""How many times two runs must have the same number of samples to agree, since one match can be chance."""

_PLAIN_SECONDS = 3.0
"""For how long the plain loop over the generator is read, at most."""

_LOOKS = 60.0
"""Seconds after which no new experiment begins, or four times `Options.seconds` if that is longer."""


@dataclass(frozen=True, slots=True)
class Options:
    """The user's options.

    Attributes:
        target: MODULE:ATTR, or a target of data files.
        seconds: how long the first run reads.
        environment: workers' environment variables, from the command line.
        hang_timeout: seconds without a sign of life after which the check ends a run.
        debugs: start pdb where user code fails.
    """

    target: str
    seconds: float
    environment: Environment
    hang_timeout: float
    debugs: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a feed.

    Attributes:
        first, second: the two runs. There is no second run if the first read nothing.
        compared: how many samples both runs read.
        lists_differ: whether the runs listed different splits.
        difference: the first sample that differs, or None.
        culprit: why something differs, or None.
        recording: the first run's recording, or None.
        hashes: the facts of two runs with different PYTHONHASHSEEDs, if only that makes the runs differ. Then all other
            facts are about two runs with the same PYTHONHASHSEED.
        carried: what the generator carries on that the feed loses, or None.
        undivided: what is known of a generator that cannot be divided; None if it can be.
    """

    first: Outcome
    second: Outcome | None = None
    compared: int = 0
    lists_differ: bool = False
    difference: Difference | None = None
    culprit: Culprit | None = None
    recording: Recording | None = None
    hashes: Facts | None = None
    carried: messages.Carried | None = None
    undivided: messages.Undivided | None = None

    @property
    def differ(self) -> bool:
        """Whether the two runs differ."""
        return self.lists_differ or self.difference is not None


Tell = Callable[[str, float], None]
"""Called with the current activity, and the finished share of all work (0 to 1)."""


def collect(options: Options, tell: Tell) -> Facts:
    """Run the feed, and return the facts about it. Never raises for anything that user code does."""
    with TemporaryDirectory(prefix="penstock-check-") as folder:
        return _Collector(options, Path(folder), tell).collect()


def cause_of(options: Options, folder: Path, place: int, number: int) -> Culprit | None:
    """Find out why sample `number` of a place differs from process to process. Return None if that fails. `folder`: an
    empty one, for the experiments."""
    return _Collector(options, folder, lambda what, share: None).cause_of(place, number)


class _Collector:
    def __init__(self, options: Options, folder: Path, tell: Tell) -> None:
        self._options = options
        self._folder = folder
        self._tell = tell
        self._of_feed: Environment = {}
        self._trials = 0
        self._read = 0.0
        """When reading began."""

    def collect(self) -> Facts:
        self._tell("importing", 0.0)
        first = self._first()
        recording = self._load("first")
        if recording is None or first.done is None or first.looked is None or not recording.samples:
            return Facts(first, recording=recording)
        found, whole = self._carried(first)
        facts = replace(self._compared(first, recording, "1"), carried=found, undivided=whole)
        if facts.culprit is None or facts.culprit.kind != culprit.HASH:
            return facts
        # All workers have the same PYTHONHASHSEED, so find out whether anything else differs.
        return replace(self._compared(first, recording, "0"), hashes=facts, carried=found, undivided=whole)

    def cause_of(self, place: int, number: int) -> Culprit | None:
        """See the function of this name."""
        first = self._first(order=messages.ALONE, place=place, count=number + 1)
        if first.imported is None or first.looked is None:
            return None
        return self._culprit(first, Difference(place, "", number, ("",), "", 1))

    def _compared(self, first: Outcome, recording: Recording, hash_seed: str) -> Facts:
        """Make the second run with this PYTHONHASHSEED, and return the facts of both runs."""
        name = f"second-{hash_seed}"
        second = self._second(name, first, recording, hash_seed)
        again = self._load(name)
        facts = Facts(first, second, recording=recording)
        assert first.looked is not None
        if second.looked is not None and second.looked.digest != first.looked.digest:
            return replace(facts, lists_differ=True, culprit=self._culprit(first, None))
        if again is None:
            return facts
        facts = replace(facts, compared=compared(recording, again))
        difference = first_difference(recording, again)
        if difference is None:
            return facts
        return replace(facts, difference=difference, culprit=self._culprit(first, difference))

    def _first(self, **given: Any) -> Outcome:
        """Do the first run. Repeat it if the feed asks for other environment variables."""
        task = self._task("first", seconds=self._options.seconds, debugs=self._options.debugs, **given)
        first = self._finish(task)
        if first.wanted is not None:
            self._of_feed = first.wanted.variables
            first = self._finish(task)
        return first

    def _second(self, name: str, first: Outcome, recording: Recording, hash_seed: str) -> Outcome:
        assert first.done is not None
        assert first.looked is not None
        self._tell("importing again", 0.5)
        task = self._task(
            name,
            order=messages.BACKWARDS,
            repeats="first",
            seconds=10 + _AGAIN * max(first.done.seconds, self._options.seconds),
            spec=first.looked.spec,
        )

        def heard(report: messages.Report) -> None:
            if isinstance(report, messages.Imported):
                self._tell("reading again", 0.5)
            elif isinstance(report, messages.Progress):
                self._tell("reading again", 0.5 + 0.4 * report.samples / recording.samples)

        (outcome,) = finish(self._run(task, hash_seed, heard))
        return outcome

    def _carried(self, first: Outcome) -> tuple[messages.Carried | None, messages.Undivided | None]:
        """Compare the feed with a plain loop over its generator. Return `carried` and `undivided`."""
        assert first.imported is not None
        assert first.looked is not None
        if first.imported.plan.length is not None:
            return None, None
        self._tell("importing again", 0.9)
        task = self._task("plain", order=messages.PLAIN, seconds=_PLAIN_SECONDS, spec=first.looked.spec)

        def heard(report: messages.Report) -> None:
            if isinstance(report, messages.Imported):
                self._tell("comparing with a plain loop", 0.9)

        (outcome,) = finish(self._run(task, "0", heard))
        if outcome.done is not None:
            return outcome.done.carried, outcome.done.undivided
        error = outcome.failed.error.message if outcome.failed is not None else ""
        why = error or (f"the process {outcome.ended}" if outcome.ended else "nothing happened any longer")
        return unknown(why), None

    def _finish(self, task: messages.Task) -> Outcome:
        def heard(report: messages.Report) -> None:
            if isinstance(report, messages.Debugging):
                self._tell("", 0.0)
            elif isinstance(report, messages.Looked):
                self._read = time.monotonic()
            if isinstance(report, messages.Looked | messages.Progress):
                part = (time.monotonic() - self._read) / self._options.seconds
                self._tell("reading", 0.1 + 0.4 * min(1.0, part))

        (outcome,) = finish(self._run(task, "0", heard))
        return outcome

    def _culprit(self, first: Outcome, difference: Difference | None) -> Culprit:
        """Find out why a sample differs or, if `difference` is None, why the lists of splits do."""
        assert first.imported is not None
        self._tell("looking for the cause", 0.9)
        until = time.monotonic() + max(_LOOKS, 4 * self._options.seconds)

        def attempt(trial: Trial) -> Result | None:
            result = None
            for _ in range(1 if difference is None or difference.leaves else _LENGTHS):
                result = self._try(trial, first, difference) if time.monotonic() < until else None
                if result is None or not result.agree:
                    break
            return result

        found = culprit.find(attempt, takes_rng=first.imported.takes_rng)
        leaf = "" if difference is None else next(iter(difference.leaves), "")
        return replace(found, items=first.imported.plan.length is not None, batches=leaf.startswith(TRANSFORMED))

    def _try(self, trial: Trial, first: Outcome, difference: Difference | None) -> Result | None:
        assert first.looked is not None
        self._trials += 1
        self._tell("looking for the cause", min(0.99, 0.9 + 0.01 * self._trials))
        place, count = _to_read(difference)
        tasks = [
            self._task(
                f"trial-{self._trials}-{side}",
                order=messages.ALONE,
                place=place,
                count=count,
                seconds=30.0,
                spies=True,
                fixes=trial.fixes,
                spec=first.looked.spec,
            )
            for side in "ab"
        ]
        runs = [self._run(task, seed) for task, seed in zip(tasks, trial.hash_seeds, strict=True)]
        one, other = finish(*runs)
        if one.looked is None or other.looked is None:
            return None
        if difference is None:
            return Result(one.looked.digest == other.looked.digest, (one.done, other.done))
        recordings = [self._load(task.name) for task in tasks]
        for task in tasks:
            (self._folder / task.name).unlink(missing_ok=True)
        if one.done is None or other.done is None:
            return None
        if count is None and not (one.done.whole and other.done.whole):
            return None  # the number of samples is unknown
        return Result(culprit.agree(*recordings), (one.done, other.done))

    def _task(self, name: str, **given: Any) -> messages.Task:
        return messages.Task(target=self._options.target, folder=str(self._folder), name=name, **given)

    def _run(
        self, task: messages.Task, hash_seed: str, heard: Callable[[messages.Report], None] = lambda report: None
    ) -> Run:
        variables = of_workers(self._of_feed, self._options.environment)
        variables["PYTHONHASHSEED"] = hash_seed
        variables["PENSTOCK_WORKER"] = "0"
        return Run(task, variables, self._options.hang_timeout, heard)

    def _load(self, name: str) -> Recording | None:
        path = self._folder / name
        try:
            return load(path) if path.is_file() else None
        except (OSError, msgspec.MsgspecError):  # the process died while it wrote the file
            return None


def _to_read(difference: Difference | None) -> tuple[int, int | None]:
    """Return the place that an experiment reads, and how many samples of it (None: all).

    If the lists of splits differ, an experiment reads no samples.
    """
    if difference is None:
        return 0, 0
    if not difference.leaves:  # one run had fewer samples
        return difference.place, None
    return difference.place, difference.number + _BEYOND
