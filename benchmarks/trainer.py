"""The process into which one contestant's batches come. Started by `transport.py`.

    python trainer.py CONTESTANT LOAD WAYS

It says `"ready"` on stdout, then reads a number of seconds from each line of stdin, takes batches
in each of the ways (`eager`, `reduce`, `read`, or `latency` alone) for so long, and answers with a
line of JSON. It ends with its input.
"""

import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from contestants import CONTESTANTS, prebuilt
from measure import Turn

LEAD_BATCHES, LEAD_SHARE = 16, 0.25  # what is taken before a turn is timed, at least and by time
LEAST_BATCHES = 8  # in a turn, however long they take
FRESH = 4  # batches that are taken after the first that was waited for, before latency counts


@dataclass(frozen=True, slots=True)
class Taken:
    """What an eager loop took, how long that was, and the CPU time of all threads of this process, user and system."""

    batches: int
    seconds: float
    cpu_seconds: float


def take(source: Iterator[Any], seconds: float, least: int, consume: Callable[[Any], Any] | None = None) -> Taken:
    """Takes batches for `seconds`, and no fewer than `least`, as a plain eager loop does."""
    count = 0
    cpu = time.process_time()
    start = now = time.perf_counter()
    while count < least or now < start + seconds:
        batch = next(source)  # the one before lives until this one is there
        if consume is not None:
            consume(batch)
        count += 1
        now = time.perf_counter()
    return Taken(count, now - start, time.process_time() - cpu)


def led(source: Iterator[Any], seconds: float, consume: Callable[[Any], Any] | None = None) -> Taken:
    """The same, but for a quarter as long before, uncounted, in which what had filled up is drained."""
    take(source, seconds * LEAD_SHARE, LEAD_BATCHES, consume)
    return take(source, seconds, LEAST_BATCHES, consume)


def reduced(dataset: Any, rate: float, seconds: float) -> float:
    """Batches a second of `Dataset.reduce`, over as many as take about `seconds`, if it is as fast as `rate`.

    The loop itself reads the clock at each batch, so that neither the iterator's start nor a lead counts, nor its end:
    that waits for what is being made then, which no loop asks for. Where it was much faster it is repeated with more
    batches, since they come in bursts.
    """
    import tensorflow as tf

    while True:
        lead = max(LEAD_BATCHES, round(rate * seconds * LEAD_SHARE))
        timed = max(LEAST_BATCHES, round(rate * seconds))

        def counted(state: Any, _: Any, lead: int = lead) -> Any:
            count, begun, _ = state
            now = tf.timestamp()
            return count + 1, tf.where(count < lead, now, begun), now

        start = np.int64(0), np.float64(0), np.float64(0)
        count, begun, ended = dataset.take(lead + timed).reduce(start, counted)
        taken = float(ended - begun)
        if count != lead + timed:
            raise RuntimeError(f"{count} batches came where {lead + timed} were asked for")
        rate = timed / taken
        if taken > seconds / 2:
            return rate


def read(batch: Any) -> int:
    """The sum of all bytes of a batch, eight at a time: all contestants' batches are read by this."""
    return sum(int(leaf.view(np.uint64).sum()) for leaf in prebuilt.leaves(batch))


def latency(source: Iterator[Any], seconds: float, pause: float) -> float:
    """Seconds from a batch's sending to its tensor, the median, where nothing is under way but that batch."""
    start = time.monotonic_ns()
    while True:  # what lay in buffers comes faster than it is made
        begun = time.monotonic()
        batch = next(source)
        if prebuilt.stamp(batch) > start and time.monotonic() - begun > pause / 2:
            break
    take(source, 0, FRESH)
    found: list[float] = []
    end = time.monotonic() + seconds
    while len(found) < LEAST_BATCHES or time.monotonic() < end:
        batch = next(source)
        found.append((time.monotonic_ns() - prebuilt.stamp(batch)) / 1e9)
    return statistics.median(found)


def measured(batches: Any, load: prebuilt.Load, ways: list[str], seconds: float) -> Turn:
    """A turn; each way has an iterator of its own, since only one over a dataset is to run."""
    source = iter(batches)
    if "latency" in ways:
        found = latency(source, seconds, load.pause)
        prebuilt.check(next(source), load)
        return Turn(latency=found)
    taken = led(source, seconds)
    prebuilt.check(next(source), load)
    eager, by_reduce, by_reading = taken.batches / taken.seconds, None, None
    if "reduce" in ways:
        del source
        by_reduce = reduced(batches, eager, seconds)
        source = iter(batches)
        prebuilt.check(next(source), load)
    if "read" in ways:
        reading = led(source, seconds, read)
        prebuilt.check(next(source), load)
        by_reading = reading.batches / reading.seconds
    return Turn(eager, taken.cpu_seconds / taken.batches, by_reduce, by_reading)


def main() -> None:
    contestant, load, ways = CONTESTANTS[sys.argv[1]], prebuilt.Load.of(sys.argv[2]), sys.argv[3].split(",")
    # Answers go to what was stdout; whatever else prints, here or in a child, goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    with getattr(importlib.import_module(contestant.module), contestant.function)(load) as batches:
        prebuilt.check(next(iter(batches)), load)
        print(json.dumps("ready"), file=answers)
        for line in sys.stdin:
            print(json.dumps(asdict(measured(batches, load, ways, float(line)))), file=answers)


if __name__ == "__main__":
    main()
