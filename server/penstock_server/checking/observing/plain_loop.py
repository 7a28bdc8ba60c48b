"""Compares a feed with a plain loop over its generator, which makes the object once and reads on and on.

A feed makes the object again for each segment, split and epoch. So what the object carries from one sample, or from one
epoch, to the next is lost: its place in the data, an order that it shuffles once, or a random generator of its own.
Only samples of the source are compared, before `transform`. Batches that a generator makes are compared row by row: a
loader that shuffles its rows makes other batches of them each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ...feed.combined.feed_kinds import generator_call, is_shared, kind_of
from ...feed.combined.mixed import is_mix
from ...feed.combined.zipped import Zipped
from ...feed.objects.endless_items import EndlessItems
from ...feed.objects.torch_iterable import TorchIterable
from ...worker.failures import describe
from ...worker.isolation.randomness import GlobalRandomness, GlobalState, generator, seeds
from ...worker.reading.loaded_feed import LoadedFeed
from ...worker.reading.sample_copies import NotCopied, SampleCopy
from .messages import Carried, Undivided
from .raw_samples import NotComparable, digests_of_raw, digests_of_rows
from .repeats import (
    BEGINS,
    ENDLESS,
    EPOCHS,
    FEWEST,
    PIECES,
    REPEATS,
    RESTARTS,
    UNEVEN,
    agreeing,
    as_whole,
    bits,
    is_alike,
    leaves_of,
    lost_by_epochs,
    lost_by_segments,
    one_pass,
    reordered,
    tiny_pass,
    unknown,
)

_MOST = 4096
"""Samples or rows of a loop to compare, at most."""

_OF_A_SEGMENT = 512
"""Of one segment at most so many: samples come twice only in different ones."""

_STARTS = range(12, 65)
"""How many times a generator is started before all starts count as equal, at least and at most: it may begin with a
random one of few files."""

_OF_A_START = 64
"""Samples or rows to read after each of them."""

_BITS = 32
"""Bits of evidence that are needed to say that segments or epochs are the same. One feed in 4 billion has that much by
chance."""


def carried(feed: LoadedFeed, splits: Sequence[Any], randomness: GlobalRandomness, seconds: float) -> Carried | None:
    """Return what the generator of `feed` carries on that the feed loses, or None if it loses nothing. If user code
    raises, the report says so.

    Args:
        feed: the feed.
        splits: its list of splits, or a range of segments.
        randomness: the random numbers of this process.
        seconds: how long to read.
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
    try:
        return loops.segments(feed.plan.segment or 0) if kind == "segments" else loops.epochs()
    except NotComparable as error:
        return unknown(str(error))
    except Exception as error:
        return unknown(f"{loops.name} {describe(error)}")


def undivided(
    feed: LoadedFeed, splits: Sequence[Any], randomness: GlobalRandomness, seconds: float
) -> Undivided | None:
    """Return what is known of the generator of `feed`, if it cannot be divided.

    The arguments are those of `carried`.
    """
    if not is_shared(feed.declared) or isinstance(feed.declared.generate, Zipped):
        return None
    began, count, uncopied = time.monotonic(), 0, ""
    samples = _Loops(feed, splits, randomness, began + seconds).samples()
    try:
        for sample in samples:
            if not count:
                uncopied = _uncopied(sample)
            count += 1
            if time.monotonic() > began + seconds:
                break
    except Exception:  # the first run says so
        return None
    finally:
        samples.close()
    return Undivided((time.monotonic() - began) / count, uncopied) if count else None


def _uncopied(sample: Any) -> str:
    """Return the type of a value that cannot be copied; empty if all can be."""
    try:
        SampleCopy(sample)
    except NotCopied as error:
        return error.what
    return ""


@dataclass
class _Read:
    """Samples that were read, or rows of batches.

    Attributes:
        samples: their digests.
        begins: the numbers of those with which batches begin; for samples, all numbers.
        ended: whether the generator has ended.
    """

    samples: list[bytes] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    ended: bool = False

    def batches(self, count: int) -> int:
        """Return how many batches the first `count` samples are of."""
        return sum(begin < count for begin in self.begins)

    def bits(self, leaves: Collection[int]) -> float:
        """Return how many bits of evidence it is that a batch of another run agrees with one of these in some leaves,
        if each batch was drawn from all of them."""
        ends = [*self.begins[1:], len(self.samples)]
        pieces = [slice(*ends_of_one) for ends_of_one in zip(self.begins, ends, strict=True)]
        found = [leaf for number, leaf in enumerate(leaves_of(self.samples)) if number in leaves]
        return max((bits(tuple(leaf[piece]) for piece in pieces) for leaf in found), default=0.0)


class _Loops:
    """Reads the generator of a feed in both ways. `until`: when to stop, at half of the remaining time for each."""

    def __init__(self, feed: LoadedFeed, splits: Sequence[Any], randomness: GlobalRandomness, until: float) -> None:
        self._call = generator_call(feed.declared)
        self.name = self._call.name
        self._seed = feed.plan.seed
        self._makes_batches = feed.plan.batch_size is None or feed.declared.rebatch is not None
        self._counts_batches = feed.plan.batch_size is None
        """Whether `segment=` and `shuffle=` count batches."""
        self._unit = "rows" if self._makes_batches else "samples"
        self._shuffles_samples = feed.plan.shuffle > 0 and not self._counts_batches
        self._has_pieces = feed.plan.samples is None and feed.plan.lanes > 1
        """Whether an endless stream is made of several segments at a time."""
        self._samples = feed.plan.samples
        self._splits = splits
        self._randomness = randomness
        self._until = until
        self._as_wholes = False
        """Whether samples are compared as wholes, not leaf by leaf."""
        self.takes_split = self._call.wants.split

    def samples(self) -> Generator[Any, None, None]:
        """Yield the samples of a plain loop."""
        yield from self._start(0, 0)()

    def segments(self, segment: int) -> Carried | None:
        """Compare one long run with the segments of an epoch, and the segments with each other.

        Args:
            segment: the feed's `segment=`.
        """
        plain = self._plain(self._start(0, 0), self._part_of_time(2))
        found = self._lost_order(plain, segment) or self._repeats(plain, segment)
        found = found or self._begins(plain, segment) or self._parts(plain, segment)
        return found or (self._restarts(plain, segment) if len(self._splits) == 1 else None)

    def epochs(self) -> Carried | None:
        """Compare two passes over one object with the feed's epochs of a split."""
        again = self._start(0, 0)
        first = self._plain(again, self._part_of_time(4))
        if rows := 0 if first.ended else one_pass(first.samples) or tiny_pass(first.samples):
            counted = 0 if self.takes_split else self._counted(rows, first)
            return self._found(ENDLESS, rows, len(first.samples) - rows, counted, first)
        second = self._second_pass(again, len(first.samples))
        return self._compared(EPOCHS, first, first.samples, second)

    def _plain(self, start: Any, until: float) -> _Read:
        """Read the beginning of a plain loop. If samples differ in their numbers of leaves, all are compared as
        wholes."""
        plain = self._read(start, _MOST, until)
        self._as_wholes = len(set(map(len, plain.samples))) > 1
        if self._as_wholes:
            plain.samples = [*map(as_whole, plain.samples)]
        return plain

    def _second_pass(self, again: Any, most: int, **given: Any) -> list[bytes]:
        """Read what a plain loop has after the first pass. If user code raises, there is nothing to lose."""
        try:
            return self._read(again, most, self._part_of_time(3), **given).samples
        except Exception:
            return []

    def _compared(
        self, kind: str, plain: _Read, first: list[bytes], second: list[bytes], units: int | None = None
    ) -> Carried | None:
        """Compare two passes of a plain loop with the feed's epochs, of `units` batches each at most."""

        def epoch(number: int, most: int, until: float) -> list[bytes]:
            return self._read(self._start(0, number), most, until, units=units).samples

        epochs = epoch(0, len(second), self._part_of_time(3)), epoch(1, len(second), self._part_of_time(2))
        lost = lost_by_epochs((first, second), epochs, shuffled=self._shuffles_samples)
        if lost is None:
            return None
        leaves = agreeing(*epochs)
        start = epochs[0][:_OF_A_START]

        def agree(number: int) -> int:
            other = epoch(number, len(start), self._until)
            return min(len(start), len(other)) if leaves <= agreeing(start, other) else 0

        is_certain = self._is_certain(plain, leaves, lost[0], agree, self._until)
        return Carried(kind, *lost, unit=self._unit) if is_certain else None

    def _is_certain(
        self, plain: _Read, leaves: Collection[int], compared: int, agree: Callable[[int], int], until: float
    ) -> bool:
        """Return whether runs of the generator agree in these leaves not by chance.

        Args:
            plain: a plain loop.
            leaves: the numbers of the leaves.
            compared: how many samples of two runs agreed.
            agree: returns how many samples of further runs, in this epoch, agree; 0 if one does not.
            until: when to stop (monotonic).
        """
        each = plain.bits(leaves)
        evidence = each * plain.batches(compared)
        for epoch in range(2, _STARTS.stop):
            in_time = time.monotonic() < until
            if evidence >= _BITS and (epoch > _STARTS.start or not in_time):
                return True
            count = agree(epoch) if in_time and each else 0
            if not count:
                return False
            evidence += each * plain.batches(count)
        return False

    def _lost_order(self, plain: _Read, segment: int) -> Carried | None:
        """Return a report if the generator has an order that segments lose."""
        numbers: list[int] = []
        reads: list[bytes] = []
        until = self._part_of_time(2)
        for number in range(len(self._splits)):
            if len(reads) >= len(plain.samples) or time.monotonic() > until:
                break
            read = self._segment(number, 0, segment, until)
            numbers += range(len(read))
            reads += read
        rows = len(plain.samples) / max(1, len(plain.begins))
        found = lost_by_segments(plain.samples, [*zip(numbers, reads, strict=True)], rows)
        if found is None:
            return None
        return self._found(found.kind, found.compared, found.different, self._counted(found.one_pass, plain), plain)

    def _repeats(self, plain: _Read, segment: int) -> Carried | None:
        """Return a report if the first two segments of each epoch are the same."""
        if len(self._splits) < 2 or len(set(plain.samples)) < FEWEST:
            return None
        until = self._part_of_time(2)

        def agree(epoch: int, most: int = _OF_A_START) -> int:
            one, other = (self._segment(number, epoch, segment, until, most) for number in (0, 1))
            count = min(len(one), len(other))
            return count if one[:count] == other[:count] else 0

        count = agree(0, _OF_A_SEGMENT)
        leaves = range(len(leaves_of(plain.samples)))
        if not count or not self._is_certain(plain, leaves, count, agree, until):
            return None
        return self._found(REPEATS, count, 0, self._counted(self._rows_of_a_pass(plain), plain), plain)

    def _begins(self, plain: _Read, segment: int) -> Carried | None:
        """Return a report if segments of whole passes begin with the same one, and a plain loop has its order once: the
        generator shuffles after a pass, not before the first."""
        rows = self._rows_of_a_pass(plain)
        counted = self._counted(rows, plain)
        leaves = reordered(plain.samples, rows)
        if not counted or segment % counted or len(self._splits) < 2 or not leaves:
            return None
        until = self._part_of_time(2)
        most = min(rows, _OF_A_SEGMENT)

        def agree(epoch: int, most: int = min(most, _OF_A_START)) -> int:
            one, other = (self._segment(number, epoch, segment, until, most)[:most] for number in (0, 1))
            return min(len(one), len(other)) if leaves <= agreeing(one, other) else 0

        count = agree(0, most)
        if not count or not self._is_certain(plain, leaves, count, agree, until):
            return None
        return self._found(BEGINS, rows, 0, counted, plain)

    def _parts(self, plain: _Read, segment: int) -> Carried | None:
        """Return a report if segments are not whole passes over the data, or if the stream mixes several of them."""
        rows = self._rows_of_a_pass(plain)
        counted = self._counted(rows, plain)
        if not counted or segment < counted or plain.ended:
            return None
        if segment % counted:
            return self._found(UNEVEN, rows, 0, counted, plain)
        return self._found(PIECES, rows, 0, counted, plain) if self._has_pieces else None

    def _restarts(self, plain: _Read, segment: int) -> Carried | None:
        """Return a report if each epoch has the same samples, and a plain loop goes on to others."""
        epoch = min(segment, self._samples or segment)
        units = epoch if self._counts_batches else None
        most = _MOST if self._counts_batches else min(_MOST, epoch)
        first = self._read(self._start(0, 0), most, self._part_of_time(4), units=units).samples
        second = self._second_pass(self._start(0, 0), len(first), units=units, skip=epoch)
        found = self._compared(RESTARTS, plain, first, second, units)
        return None if found is None else replace(found, one_pass=self._counted(self._rows_of_a_pass(plain), plain))

    def _found(self, kind: str, compared: int, different: int, counted: int, plain: _Read) -> Carried:
        """Return a report. If it can advise a whole pass, find out whether all passes are the same."""
        again = self._read(self._start(0, 1), min(compared, _OF_A_SEGMENT), self._part_of_time(2))
        alike = is_alike(plain.samples, again.samples)
        return Carried(kind, compared, different, counted, unit=self._unit, alike=alike)

    def _segment(self, number: int, epoch: int, segment: int, until: float, most: int = _OF_A_SEGMENT) -> list[bytes]:
        """Return the first samples of a segment."""
        most = most if self._counts_batches else min(segment, most)
        units = segment if self._counts_batches else None
        return self._read(self._start(number, epoch), most, until, units=units).samples

    def _rows_of_a_pass(self, plain: _Read) -> int:
        """Return after how many samples the generator has gone through its data; 0 if that is unknown."""
        return len(plain.samples) if plain.ended else one_pass(plain.samples, each_leaf=True)

    def _counted(self, rows: int, plain: _Read) -> int:
        """Return this number of samples as `segment=` counts them; 0 if they end within a batch."""
        if not self._counts_batches or not rows:
            return rows
        if plain.ended and rows == len(plain.samples):
            return len(plain.begins)
        return plain.begins.index(rows) if rows in plain.begins else 0

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

    def _read(self, start: Any, most: int, until: float, *, units: int | None = None, skip: int = 0) -> _Read:
        """Return the digests of the samples of a pass, or of the rows of its batches: those before user code raised.

        Args:
            start: starts the pass.
            most: this many of them, at most.
            until: when to stop (monotonic).
            units: read this many batches or samples, at most.
            skip: how many batches or samples to leave out first, as `segment=` counts them.

        Raises:
            NotComparable: a sample has no digest.
            Exception: any exception of user code, if there are no samples before it.
        """
        samples = start()
        found = _Read()
        try:
            for sample in samples:
                if skip <= 0:
                    self._add(found, sample, most, until)
                    skip = 0
                else:
                    skip -= 1 if self._counts_batches or not self._makes_batches else _count(digests_of_rows(sample))
                if len(found.samples) >= most or len(found.begins) == units or time.monotonic() > until:
                    return found
            found.ended = True
        except NotComparable:
            raise
        except Exception:
            if not found.samples:
                raise
        finally:
            if hasattr(samples, "close"):
                samples.close()
        return found

    def _add(self, found: _Read, sample: Any, most: int, until: float) -> None:
        """Add a sample, or the rows of a batch."""
        found.begins.append(len(found.samples))
        if not self._makes_batches:
            found.samples.append(self._digest(digests_of_raw(sample)))
            return
        for row in digests_of_rows(sample):
            found.samples.append(self._digest(row))
            if len(found.samples) >= most or time.monotonic() > until:
                return

    def _digest(self, digests: bytes) -> bytes:
        return as_whole(digests) if self._as_wholes else digests

    def _part_of_time(self, parts: int) -> float:
        now = time.monotonic()
        return now + (self._until - now) / parts


def _count(found: Iterable[Any]) -> int:
    return sum(1 for _ in found)
