"""The process that receives one contestant's batches. Started by `transport.py`.

    python trainer.py CONTESTANT LOAD WAYS

It writes `"ready"` to stdout. Each line of stdin is a number of seconds: it takes batches for that long in each of the
ways (`eager`, `reduce`, `read`, or `latency` alone), and answers with a line of JSON. It ends at the end of its input.
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
from measure import Trial

LEAD_BATCHES, LEAD_SHARE = 16, 0.25  # batches taken untimed before a trial: at least, and as a share of its time
LEAST_BATCHES = 8  # in a trial, however long they take
FRESH = 4  # batches taken after the first fresh one, before latency counts


@dataclass(frozen=True, slots=True)
class Taken:
    """The number of batches that an eager loop took, its duration, and the CPU time (user and system) of all threads of
    this process."""

    batches: int
    seconds: float
    cpu_seconds: float


def take(source: Iterator[Any], seconds: float, least: int, consume: Callable[[Any], Any] | None = None) -> Taken:
    """Take batches for `seconds`, but at least `least`, as a plain eager loop does."""
    count = 0
    cpu = time.process_time()
    start = now = time.perf_counter()
    while count < least or now < start + seconds:
        batch = next(source)  # the previous batch lives until this one has arrived
        if consume is not None:
            consume(batch)
        count += 1
        now = time.perf_counter()
    return Taken(count, now - start, time.process_time() - cpu)


def led(source: Iterator[Any], seconds: float, consume: Callable[[Any], Any] | None = None) -> Taken:
    """Do the same as `take`, after a quarter of the time uncounted, which drains the queues."""
    take(source, seconds * LEAD_SHARE, LEAD_BATCHES, consume)
    return take(source, seconds, LEAST_BATCHES, consume)


def reduced(dataset: Any, rate: float, seconds: float) -> float:
    """Return batches a second of `Dataset.reduce`, over as many batches as take about `seconds` at `rate`.

    The loop itself reads the clock at each batch. So neither the iterator's start and the untimed lead count, nor its
    end, which waits for batches that no loop asked for. A loop that was much faster than `rate` is repeated with more
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
            raise RuntimeError(f"got {count} batches, asked for {lead + timed}")
        rate = timed / taken
        if taken > seconds / 2:
            return rate


def read(batch: Any) -> int:
    """Return the sum of all bytes of a batch, eight at a time. Reads the batches of all contestants."""
    return sum(int(leaf.view(np.uint64).sum()) for leaf in prebuilt.leaves(batch))


def latency(source: Iterator[Any], seconds: float, pause: float) -> float:
    """Return the median of the seconds from sending a batch to its tensor, with only that batch under way."""
    start = time.monotonic_ns()
    while True:  # batches from full buffers come faster than they are made
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


def measured(batches: Any, load: prebuilt.Load, ways: list[str], seconds: float) -> Trial:
    """Run a trial. Each way has its own iterator, since only one over a dataset may run."""
    source = iter(batches)
    if "latency" in ways:
        found = latency(source, seconds, load.pause)
        prebuilt.check(next(source), load)
        return Trial(latency=found)
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
    return Trial(eager, taken.cpu_seconds / taken.batches, by_reduce, by_reading)


def main() -> None:
    contestant, load, ways = CONTESTANTS[sys.argv[1]], prebuilt.Load.of(sys.argv[2]), sys.argv[3].split(",")
    # Answers go to the original stdout. All other output, here or in a child, goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    with getattr(importlib.import_module(contestant.module), contestant.function)(load) as batches:
        prebuilt.check(next(iter(batches)), load)
        print(json.dumps("ready"), file=answers)
        for line in sys.stdin:
            print(json.dumps(asdict(measured(batches, load, ways, float(line)))), file=answers)


if __name__ == "__main__":
    main()
