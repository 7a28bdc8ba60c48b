"""Runs a generator that cannot be divided once for all lanes of a process that read it.

Each lane keeps its share of the samples (`batch/shares.py`). A *pass* is the generator, running from its start. On the
way to a sample of one lane it comes to samples that other lanes need later: it copies these and keeps them. A lane for
which it can keep no more leaves the pass. It joins another one that has not come to its place yet, or begins one. The
generator yields the same samples whenever it runs, so the stream does not depend on who reads which pass.

If two passes come near each other, all lanes read the one that is behind, and the other ends. Each lane has a pass of
its own if samples cannot be copied, or if that takes longer than to run the generator for each
lane.

This file knows nothing of runs or slots.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextvars import Context
from itertools import islice
from typing import Any, TypeAlias

from ..batch.shares import Share
from ..isolation import helpers
from ..isolation.randomness import GlobalRandomness, GlobalState
from .generators import Started
from .sample_copies import NotCopied, SampleCopy

MOST_KEPT = 256 << 20
"""Bytes of samples that a pass keeps, at most. From half of that on, it asks that the lanes go on for which it keeps
most."""

FEW = 32
"""Copies after which copying is compared with running the generator."""

MEASURED = 1.0
"""Seconds that a pass runs while they are compared."""

_NEAR = 2
"""Passes are near each other if so many samples of each lane or fewer are between them."""

_END = object()

Start: TypeAlias = "Callable[[Pass], tuple[Any, ...]]"
"""Runs a generator in a pass. Returns its first sample, if that was taken from it already and is the first one of the
share."""


class Passes:
    """The passes of one feed in this process.

    Attributes:
        shared: whether several lanes may read one pass.
    """

    def __init__(self, *, shared: bool = True) -> None:
        self.shared = shared
        self._seconds = 0.0
        self._members: list[ShareSamples] = []
        self._running: list[Pass] = []

    @property
    def seconds(self) -> float:
        """How long generators have run."""
        return self._seconds + sum(one.seconds for one in self._running)

    @property
    def urgent(self) -> int | None:
        """The run that should go on now, as a pass keeps much for it."""
        for one in self._running:
            if one.kept > MOST_KEPT // 2:
                return one.furthest_behind.run
        return None

    def expect(self, key: Hashable, share: Share, first: int = 0, *, run: int = -1) -> ShareSamples:
        """Return the samples of a share. They will be opened later, but are kept from now on.

        Args:
            key: shares with the same key may read a pass together.
            share: the share.
            first: the number, within the share, of the first sample that is needed.
            run: the daemon's number of the run that reads them.
        """
        member = ShareSamples(self, key, share, first, run)
        self._members.append(member)
        self.join(member)
        return member

    def join(self, member: ShareSamples) -> bool:
        """Let `member` read the pass that comes to its place first. Return False if none does."""
        fit = [one for one in self._running if one.key == member.key and not one.over and one.next <= member.place]
        if not fit or not self.shared:
            return False
        max(fit, key=lambda one: one.next).add(member)
        return True

    def begin(self, member: ShareSamples, start: Start) -> None:
        """Begin a pass for `member`. Others with its key who read none join it, if it comes to their places."""
        new = Pass(self, member.key)
        made = start(new)
        self._running.append(new)
        new.add(member)
        member.keep_made(made)
        for other in self._members if self.shared else ():
            if other.key == new.key and other.reads is None and new.next <= other.place:
                new.add(other)

    def merge(self, behind: Pass) -> None:
        """End the passes that are a little ahead of `behind`. Their readers go on with it."""
        for ahead in [one for one in self._running if one is not behind and one.key == behind.key]:
            if self.shared and not ahead.over and behind.comes_to(ahead):
                ahead.move_to(behind)

    def share_no_longer(self, taker: ShareSamples) -> None:
        """From now on, let each lane have a pass of its own. `taker` stays with the one that it reads."""
        self.shared = False
        for one in self._running:
            one.stay(taker)

    def forget(self, member: ShareSamples) -> None:
        """Forget a member that is closed."""
        self._members.remove(member)

    def on_closed(self, closed: Pass) -> None:
        """Forget a pass that is closed."""
        self._running.remove(closed)
        self._seconds += closed.seconds

    @property
    def running(self) -> int:
        """How many passes run."""
        return len(self._running)


class Pass:
    """A generator that runs from its start, for one lane or several.

    Attributes:
        key: see `Passes.expect`.
        next: the number of the generator's next sample.
        over: whether the generator has ended or raised.
        ended: whether it has ended.
        seconds: how long it has run.
        kept: bytes of the samples that it keeps.
        generator: the iterator that the user's function returned, while it runs.
        held: the type of its iterator, if a variable of the user's holds it; see `returned_iterator.py`.
    """

    _randomness: GlobalRandomness
    _state: GlobalState
    _variables: Context

    def __init__(self, passes: Passes, key: Hashable) -> None:
        self.key = key
        self.next = 0
        self.over = self.ended = False
        self.seconds = 0.0
        self.kept = 0
        self.held: str | None = None
        self._passes = passes
        self.generator: Iterator[Any] = iter(())
        self._samples = self.generator
        self._readers: list[ShareSamples] = []
        self._gaps: list[int] = []
        """For each share: how many stretches further one begins that is read."""
        self._twins = False
        """Whether several read the same share."""
        self._copying = 0.0
        self._copies = 0

    def run(
        self,
        started: Started,
        samples: Iterator[Any],
        randomness: GlobalRandomness,
        held: str | None = None,
        taken: int = 0,
    ) -> None:
        """Run a generator that was started, and of which `taken` samples were taken. The others are `samples`."""
        self._randomness, self._state, self._variables = randomness, started.state, started.variables
        self.generator, self._samples = started.samples, samples
        self.held = held
        self.next = taken

    @property
    def furthest_behind(self) -> ShareSamples:
        """The reader for which it keeps most."""
        return max(self._readers, key=lambda one: one.nbytes)

    def report(self, samples: int, why: str) -> None:
        """Tell all readers that zipped generators yield different numbers of samples."""
        for reader in self._readers:
            reader.report(samples, why)

    def add(self, reader: ShareSamples) -> None:
        """Let `reader` read this pass."""
        reader.reads = self
        self._readers.append(reader)
        self._look()

    def release(self, reader: ShareSamples) -> None:
        """Let `reader` read this pass no longer."""
        self._readers.remove(reader)
        self.kept -= reader.lose()
        self._look()

    def comes_to(self, ahead: Pass) -> bool:
        """Whether it soon comes to the place of another pass, and may keep for that one's readers, too. (What they need
        before that place is kept already.)"""
        is_near = 0 <= ahead.next - self.next <= _NEAR * self._readers[0].share.round
        return is_near and self.kept + ahead.kept <= MOST_KEPT

    def move_to(self, behind: Pass) -> None:
        """Let all readers go on with another pass, and end this one."""
        for reader in [*self._readers]:
            self._readers.remove(reader)
            self.kept -= reader.nbytes
            behind.kept += reader.nbytes
            behind.add(reader)
        self.close()

    def stay(self, taker: ShareSamples) -> None:
        """Leave this pass to `taker`, if that reads it, or else to another reader."""
        stays = taker if taker.reads is self else self._readers[0]
        for reader in [one for one in self._readers if one is not stays]:
            self.release(reader)

    def take(self, reader: ShareSamples, place: int) -> Any:
        """Return the generator's sample number `place`, to which it has not come yet. Keep what others need before.

        Raises:
            StopIteration: the generator has ended.
        """
        if self.ended:
            raise StopIteration
        self._randomness.use(self._state)
        try:
            return self._variables.run(self._take, reader, place)
        finally:
            self._randomness.leave_random()  # what transforms draw does not change the generator

    def _take(self, reader: ShareSamples, place: int) -> Any:
        copying, began = self._copying, time.perf_counter()
        try:
            while self.next < place:
                self._pass_over(place, reader)
            sample = next(self._samples)
            if self._twins:
                self._keep_for(reader.share.index, sample, reader)
        except BaseException as error:
            self.over = True
            self.ended = isinstance(error, StopIteration)
            raise
        finally:
            self.seconds += time.perf_counter() - began - (self._copying - copying)
        self.next += 1
        if self._copies >= FEW and self._copying > (len(self._readers) - 1) * self.seconds and self.seconds < MEASURED:
            self._passes.share_no_longer(reader)
        return sample

    def on_taken(self, nbytes: int) -> None:
        """Note that a reader has taken a sample that was kept for it."""
        self.kept -= nbytes

    def close(self) -> None:
        """End the generator, if nobody reads it or is expected to."""
        if self._readers:
            return
        self._passes.on_closed(self)
        close, variables = getattr(self.generator, "close", None), self._variables
        self.generator = self._samples = iter(())
        self._variables = Context()
        try:
            if close is not None:
                self._randomness.use(self._state)
                variables.run(close)
        finally:
            del close, variables
            helpers.of_this_process.end_of(self)

    def _look(self) -> None:
        """Look which shares are read."""
        self._gaps = []
        if self._readers:
            gap = count = self._readers[0].share.count
            read = {reader.share.index for reader in self._readers}
            self._twins = len(read) < len(self._readers)
            for index in reversed(range(2 * count)):
                gap = 0 if index % count in read else gap + 1
                self._gaps.append(gap)
            self._gaps = self._gaps[: count - 1 : -1]

    def _pass_over(self, place: int, taker: ShareSamples) -> None:
        """Go on to `place`, a sample of `taker`, or behind the next sample that is kept, if that comes first."""
        share = self._readers[0].share
        stretch, within = divmod(self.next, share.stretch)
        index = stretch % share.count
        if gap := self._gaps[index]:
            count = min(gap * share.stretch - within, place - self.next)
            if next(islice(self._samples, count - 1, count), _END) is _END:
                raise StopIteration
            self.next += count
            return
        sample = next(self._samples)
        self._keep_for(index, sample, taker)
        self.next += 1

    def _keep_for(self, index: int, sample: Any, taker: ShareSamples) -> None:
        """Keep the generator's next sample for those who read share `index`, except `taker`."""
        for reader in [one for one in self._readers if one.share.index == index and one is not taker]:
            self._keep(reader, sample, taker)

    def _keep(self, reader: ShareSamples, sample: Any, taker: ShareSamples) -> None:
        """Keep a copy of the generator's next sample for `reader`, if it needs it."""
        if self.next < reader.following or reader.reads is not self:
            return
        began = time.perf_counter()
        try:
            copy = SampleCopy(sample)
        except (NotCopied, MemoryError, RecursionError):
            self._passes.share_no_longer(taker)
            return
        finally:
            self._copying += time.perf_counter() - began
        self._copies += 1
        self.kept += copy.nbytes
        reader.keep(copy)
        if self.kept > MOST_KEPT:
            self.release(self.furthest_behind)


class ShareSamples(Iterator[Any]):
    """The samples of a share. Those before number `first` may be None instead: they are only counted.

    Attributes:
        key, run: see `Passes.expect`.
        share: the share.
        first: the number of the first sample that is needed.
        opened: whether they are being read.
        reads: the pass that they come from; None if there is none now.
        nbytes: how much is kept for them.
        made: the first samples, if they existed before.
        report: called if zipped generators yield different numbers of samples.
    """

    def __init__(self, passes: Passes, key: Hashable, share: Share, first: int, run: int) -> None:
        self.key = key
        self.run = run
        self.share = share
        self.first = first
        self.opened = False
        self.reads: Pass | None = None
        self.nbytes = 0
        self.report: Callable[[int, str], None] = _no_report
        self._passes = passes
        self._start: Start
        self._number = 0
        self.made: deque[Any] = deque()
        self._kept: deque[tuple[int, Any, int]] = deque()
        """Numbers, samples and sizes. There are no gaps between the numbers."""
        self._own_seconds = 0.0

    @property
    def place(self) -> int:
        """The number, in the generator, of the next sample that is needed."""
        return self.share.place_of(max(self._number, self.first))

    @property
    def following(self) -> int:
        """The number, in the generator, of the next sample that is needed and not kept."""
        return self.share.place_of(self._kept[-1][0] + 1) if self._kept else self.place

    @property
    def helped_seconds(self) -> float:
        """How long the generator has run for other readers of the pass."""
        return 0.0 if self.reads is None else max(0.0, self.reads.seconds - self._own_seconds)

    def seconds_to(self, number: int) -> float:
        """Return how long the generator takes to sample `number` of the share, as far as that is known."""
        if self.reads is None or not self.reads.next:
            return 0.0
        return self.reads.seconds / self.reads.next * (self.share.place_of(number) + 1)

    def open(self, start: Start) -> Pass:
        """Begin to read them. Return the pass that is read first.

        Raises:
            Exception: as `start`.
        """
        self._start = start
        reads = self._reads_on()
        self.opened = True
        return reads

    def seek(self, number: int) -> None:
        """Say that the samples before this one are not needed."""
        self.first = max(self.first, number)

    def __next__(self) -> Any:
        number = self._number
        if self.made:
            self._number += 1
            return self.made.popleft()
        while self._kept and self._kept[0][0] <= number:
            kept, sample, nbytes = self._kept.popleft()
            self.nbytes -= nbytes
            if self.reads is not None:
                self.reads.on_taken(nbytes)
            if kept == number:
                self._number += 1
                return sample
        sample, place = None, self.share.place_of(number)
        reads = self._reads_on()
        if place >= reads.next:
            began = reads.seconds
            sample = reads.take(self, place)
            self._own_seconds += reads.seconds - began
            if self._passes.running > 1:
                self._passes.merge(reads)
        self._number += 1
        return sample

    def keep(self, copy: SampleCopy) -> None:
        """Keep the next sample that is needed and not kept."""
        number = self._kept[-1][0] + 1 if self._kept else max(self._number, self.first)
        self._kept.append((number, copy.sample, copy.nbytes))
        self.nbytes += copy.nbytes

    def keep_made(self, samples: tuple[Any, ...]) -> None:
        """Keep the first samples of the share, which exist already."""
        self.made.extend(samples)

    def lose(self) -> int:
        """Read no pass. Return how much was kept."""
        nbytes, self.nbytes = self.nbytes, 0
        self.reads = None
        self._kept.clear()
        self._own_seconds = 0.0
        return nbytes

    def close(self) -> None:
        """End them, and the generator if nobody else reads it."""
        self.opened = False
        self._passes.forget(self)
        self._leave()

    def _reads_on(self) -> Pass:
        """Return the pass that has the next sample; begin one if need be."""
        if self.reads is not None and self.reads.over and not self.reads.ended:
            self._leave()
        if self.reads is None and not self._passes.join(self):
            self._passes.begin(self, self._start)
        assert self.reads is not None
        return self.reads

    def _leave(self) -> None:
        reads = self.reads
        if reads is not None:
            reads.release(self)
            reads.close()


def _no_report(samples: int, why: str) -> None:
    pass
