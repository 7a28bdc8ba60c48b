"""The process into which one contestant's batches come. Started by `transport.py`.

    python trainer.py CONTESTANT SIZE

It says `"ready"` on stdout, then reads a number of seconds from each line of stdin, takes batches
for so long, and answers with a line of JSON. It ends with its input.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from contestants import CONTESTANTS, prebuilt
from measure import Turn

LEAD_BATCHES, LEAD_SHARE = 16, 0.25  # what is taken before a turn is timed, at least and by time
LEAST_BATCHES = 8  # in a turn, however long they take


def take(source: Iterator[Any], size: int, seconds: float, least: int) -> Turn:
    """Takes batches for `seconds`, and no fewer than `least`, as a plain eager loop does."""
    count = 0
    cpu = time.process_time()
    start = now = time.perf_counter()
    while count < least or now < start + seconds:
        batch = next(source)  # noqa: F841  the one before lives until this one is there
        count += 1
        now = time.perf_counter()
    return Turn(count, count * size, now - start, time.process_time() - cpu)


def main() -> None:
    contestant, size = CONTESTANTS[sys.argv[1]], int(sys.argv[2])
    # Answers go to what was stdout; whatever else prints, here or in a child, goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    batches = getattr(importlib.import_module(contestant.module), contestant.function)
    with batches(size) as dataset:
        source = iter(dataset)
        prebuilt.check(np.asarray(next(source)), size)
        print(json.dumps("ready"), file=answers)
        for line in sys.stdin:
            seconds = float(line)
            # While the others had their turns, all buffers filled up. Once these are drained, the
            # speed is that of the whole way.
            take(source, size, seconds * LEAD_SHARE, LEAD_BATCHES)
            turn = take(source, size, seconds, LEAST_BATCHES)
            prebuilt.check(np.asarray(next(source)), size)
            print(json.dumps(asdict(turn)), file=answers)
        del source  # TensorFlow may be waiting for a batch: let it end while there is one


if __name__ == "__main__":
    main()
