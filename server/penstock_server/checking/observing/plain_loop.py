"""Compares a feed with a plain loop over its generator, which makes the object once and reads on and on.

A feed makes the object again for each segment, split and epoch. So what the object carries from one sample, or from one
epoch, to the next is lost: an order that it shuffles once, or a random generator of its own. Only samples of the source
are compared, before `transform`. Batches that a generator makes are compared row by row: a loader that shuffles its
rows makes other batches of them each time.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from ...feed.combined.feed_kinds import generator_call, kind_of
from ...feed.combined.mixed import is_mix
from ...feed.combined.zipped import Zipped
from ...feed.objects.endless_items import EndlessItems
from ...feed.objects.torch_iterable import TorchIterable
from ...worker.batch.rebatching import BatchRows, NoRows
from ...worker.batch.sample_spec import DIGEST, digests_of
from ...worker.isolation.randomness import GlobalRandomness, GlobalState, generator, seeds
from ...worker.reading.loaded_feed import LoadedFeed
from .messages import Carried

EPOCHS, SEGMENTS, UNEVEN, ENDLESS, PIECES = "epochs", "segments", "uneven", "endless", "pieces"

_MOST = 4096
"""Samples or rows of a loop to compare, at most."""

_OF_A_SEGMENT = 512
"""Of one segment at most so many: samples come twice only in different ones."""

_FEWEST = 8
"""Fewer samples would agree or differ by chance."""


def carried(feed: LoadedFeed, splits: Sequence[Any], randomness: GlobalRandomness, seconds: float) -> Carried | None:
    """Return what the generator of `feed` carries on that the feed loses, or None if it loses nothing.

    Args:
        feed: the feed.
        splits: its list of splits, or a range of segments.
        randomness: the random numbers of this process.
        seconds: how long to read.

    Raises:
        Exception: any exception of user code.
    """
    source = feed.declared.generate
    if feed.parts or is_mix(feed.declared) or isinstance(source, Zipped | EndlessItems | TorchIterable):
        return None
    kind = kind_of(feed.declared)
    if kind == "items":
        return None
    loops = _Loops(feed, splits, randomness, time.monotonic() + seconds)
    if kind == "segments" and loops.takes_split:
        return None
    return loops.segments(feed.plan.segment or 0) if kind == "segments" else loops.epochs()


class _Loops:
    """Reads the generator of a feed in both ways. `until`: when to stop, at half of the remaining time for each."""

    def __init__(self, feed: LoadedFeed, splits: Sequence[Any], randomness: GlobalRandomness, until: float) -> None:
        self._call = generator_call(feed.declared)
        self._seed = feed.plan.seed
        self._makes_batches = feed.plan.batch_size is None or feed.declared.rebatch is not None
        self._counts_batches = feed.plan.batch_size is None
        """Whether `segment=` and `shuffle=` count batches."""
        self._unit = "rows" if self._makes_batches else "samples"
        self._shuffles_samples = feed.plan.shuffle > 0 and not self._counts_batches
        self._has_pieces = feed.plan.samples is None and feed.plan.lanes > 1
        """Whether an endless stream is made of several segments at a time."""
        self._splits = splits
        self._randomness = randomness
        self._until = until
        self.takes_split = self._call.wants.split

    def segments(self, segment: int) -> Carried | None:
        """Compare one long run with the segments of an epoch."""
        begins: list[int] = []
        plain = list(self._read(self._start(0, 0), _MOST, self._part_of_time(2), begins=begins))
        reads: list[tuple[int, bytes]] = []
        for number in range(len(self._splits)):
            if len(reads) >= len(plain) or time.monotonic() > self._until:
                break
            most = _OF_A_SEGMENT if self._counts_batches else min(segment, _OF_A_SEGMENT)
            batches = segment if self._counts_batches else None
            reads += enumerate(self._read(self._start(number, 0), most, self._until, batches=batches))
        found = lost_by_segments(plain, reads)
        if found is not None:
            return replace(found, unit=self._unit, one_pass=self._in_segments(found.one_pass, begins))
        rows = one_pass(plain, each_leaf=True)
        counted = self._in_segments(rows, begins)
        if not counted or segment < counted:
            return None
        if segment % counted:
            return Carried(UNEVEN, rows, 0, counted, unit=self._unit)
        return Carried(PIECES, rows, 0, counted, unit=self._unit) if self._has_pieces else None

    def epochs(self) -> Carried | None:
        """Compare two passes over one object with the feed's first two epochs of a split."""
        again = self._start(0, 0)
        begins: list[int] = []
        first = list(self._read(again, _MOST, self._part_of_time(4), begins=begins))
        if rows := one_pass(first):
            counted = 0 if self.takes_split else self._in_segments(rows, begins)
            return Carried(ENDLESS, rows, len(first) - rows, counted, unit=self._unit)
        second = list(self._read(again, len(first), self._part_of_time(3)))
        epochs = [
            list(self._read(self._start(0, epoch), len(second), self._part_of_time(2 - epoch))) for epoch in (0, 1)
        ]
        count = min(map(len, (second, *epochs)))
        if count < _FEWEST or epochs[0][:count] != epochs[1][:count] or first[:count] == second[:count]:
            return None
        if self._shuffles_samples and sorted(first) == sorted(second):
            return None  # only the order is lost
        different = sum(one != other for one, other in zip(first, second, strict=False))
        return Carried(EPOCHS, count, different, unit=self._unit)

    def _in_segments(self, rows: int, begins: list[int]) -> int:
        """Return this number of samples as `segment=` counts them; 0 if they end within a batch."""
        if not self._counts_batches:
            return rows
        return begins.index(rows) if rows in begins else 0

    def _start(self, index: int, epoch: int) -> Any:
        """Make the object, or the arguments, and return a function that starts a pass over it."""
        split = self._splits[index]
        arguments = {"split": split, "shard": split, "epoch": epoch, "rng": generator(self._seed, epoch, index)}
        wanted = {name: arguments[name] for name in arguments if getattr(self._call.wants, name)}
        drawn = seeds("split", self._seed, epoch, index)
        self._randomness.use(GlobalState(drawn if self._call.seeds_global_state else None, lambda: drawn))
        variables = self._randomness.variables.new()
        start = variables.run(self._call.prepare, wanted)
        return lambda: variables.run(start)

    def _read(
        self, start: Any, most: int, until: float, *, batches: int | None = None, begins: list[int] | None = None
    ) -> Iterator[bytes]:
        """Yield the digests of the samples of a pass, or of the rows of its batches.

        Args:
            start: starts the pass.
            most: this many of them, at most.
            until: when to stop (monotonic).
            batches: read this many batches, at most.
            begins: receives the numbers of the rows with which batches begin.
        """
        samples = start()
        try:
            read = itertools.islice(samples, batches)
            for sample in itertools.islice(self._rows(read, begins), most):
                yield digests_of(sample)
                if time.monotonic() > until:
                    break
        finally:
            if hasattr(samples, "close"):
                samples.close()

    def _rows(self, samples: Iterator[Any], begins: list[int] | None) -> Iterator[Any]:
        """Yield samples, and instead of batches their rows."""
        if not self._makes_batches:
            yield from samples
            return
        count = 0
        for batch in samples:
            if begins is not None:
                begins.append(count)
            rows = [batch]
            with contextlib.suppress(NoRows):  # a batch of another kind is compared as a whole
                rows = list(BatchRows(iter(rows)))
            count += len(rows)
            yield from rows

    def _part_of_time(self, parts: int) -> float:
        now = time.monotonic()
        return now + (self._until - now) / parts


def one_pass(plain: Sequence[bytes], *, each_leaf: bool = False) -> int:
    """Return after how many samples a loop has gone through its data, if it then does so again and again; otherwise 0.

    Args:
        plain: the digests of the loop's samples.
        each_leaf: leaves may go through their data on their own, while others have random numbers.
    """
    width = min(map(len, plain), default=0)
    passes = [0]
    for leaf in range(0, width, DIGEST if each_leaf else width):
        of_leaf = [sample[leaf : leaf + DIGEST] if each_leaf else sample for sample in plain]
        period = _before_a_repeat(of_leaf)
        whole = [set(of_leaf[start : start + period]) for start in range(0, len(plain) - period + 1, period)]
        if period >= _FEWEST and len(whole) > 1 and all(one == whole[0] for one in whole):
            passes.append(period)
    return max(passes)


def lost_by_segments(plain: Sequence[bytes], reads: Sequence[tuple[int, bytes]]) -> Carried | None:
    """Compare the samples of a plain loop with those of an epoch in segments: their digests, and their numbers in their
    segments.

    If the loop goes through its data before it repeats any of it, and segments repeat some much sooner, an order is
    lost. Each leaf is compared on its own, since others may have random numbers.
    """
    width = min(map(len, plain), default=0)
    found = None
    for leaf in range(0, width, DIGEST):
        of_leaf = [sample[leaf : leaf + DIGEST] for sample in plain]
        repeats = _lost(of_leaf, [(number, sample[leaf : leaf + DIGEST]) for number, sample in reads])
        if repeats is not None and (found is None or repeats.compared > found.compared):
            found = repeats
    return found


def _lost(plain: Sequence[bytes], reads: Sequence[tuple[int, bytes]]) -> Carried | None:
    period = _before_a_repeat(plain)
    compared = min(period, len(reads))
    if compared < _FEWEST:
        return None
    seen: dict[bytes, int] = {}
    repeats = 0
    for number, digest in reads[:compared]:
        repeats += seen.setdefault(digest, number) != number  # generators may begin alike
    goes_through = len(plain) >= 2 * period and set(plain[:period]) == set(plain[period : 2 * period])
    enough = max(2, compared // 20) if goes_through else _FEWEST
    return Carried(SEGMENTS, compared, repeats, period if goes_through else 0) if repeats >= enough else None


def _before_a_repeat(plain: Sequence[bytes]) -> int:
    """Return how many samples come before the first one that came already."""
    seen: set[bytes] = set()
    for digest in plain:
        if digest in seen:
            break
        seen.add(digest)
    return len(seen)
