"""Does a stream have the speed of all its workers from the first batch on, whatever a sample costs and weighs?

    python benchmarks/evenness.py --json evenness.json
    git worktree add ../before main~20
    python benchmarks/evenness.py --beside ../before --costs 0.001,0.02 --sizes 4K --workers 4,16

Each cell reads a feed for `--seconds`, or for ten times what one worker needs for a batch of 8, if that is longer.
Samples sleep, so that workers need no cores, and the ideal is known: workers / (8 * cost) batches a second. The table
has the share of the ideal from the first batch to the end; that of the worst 3 s (or three times what a worker needs
for a batch); and the seconds to the first batch. Where samples cost less than a millisecond, the machine is the limit,
so the ideal is the speed of the whole cell. In `mixed`, one sample in 80 costs as much as all others together. With
`--beside`, cells of both checkouts alternate.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

from compare import sources
from transport import aligned, machine, progress

FEED = Path(__file__).with_name("evenness_feed.py")
BATCH = 8
SIZES = {"100": 100, "4K": 4 << 10, "150K": 150 << 10, "3M": 3 << 20}


def reader(feed: str, workers: int, seconds: float) -> None:
    """Print the times of all batches, in seconds after `connect`, as JSON."""
    import penstock

    begun, times = time.perf_counter(), []
    with penstock.connect(f"{FEED}:{feed}", workers=workers) as connection:
        for _ in connection.batches():
            times.append(time.perf_counter() - begun)
            if times[-1] > times[0] + seconds:
                break
    print(json.dumps(times))


def measured(feed: str, cost: float, nbytes: int, workers: int, seconds: float) -> dict[str, float]:
    """Return the shares of the ideal, and the seconds to the first batch."""
    alone = BATCH * cost * (2 if feed == "mixed" else 1)
    seconds = max(seconds, 10 * alone)
    command = [sys.executable, __file__, "--reader", feed, "--workers", str(workers), "--seconds", str(seconds)]
    env = {**os.environ, "COST": str(cost), "NBYTES": str(nbytes), "PENSTOCK_LOG_LEVEL": "error"}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout
    times = json.loads(out.splitlines()[-1])
    first, last = times[0], times[-1]
    ideal = workers / alone if cost >= 0.001 else (len(times) - 1) / (last - first)
    window = max(3.0, 3 * alone)
    worst, begin = float("inf"), 0
    for end, at in enumerate(times):
        while times[begin] <= at - window:
            begin += 1
        if at - first >= window:
            worst = min(worst, end - begin + 1)
    return {
        "overall": (len(times) - 1) / (last - first) / ideal,
        "worst": worst / window / ideal,
        "first": first,
        "per_second": (len(times) - 1) / (last - first),
    }


def table(cells: list[dict[str, object]]) -> str:
    rows = [["feed, cost, bytes, workers", "checkout", "overall", "worst 3 s", "first batch, s", "batches/s"]]
    for cell in cells:
        figures = cell["figures"]
        assert isinstance(figures, dict)
        rows.append(
            [
                f"{cell['feed']}, {1000 * cell['cost']:g} ms, {cell['size']}, {cell['workers']}",  # type: ignore[operator]
                str(cell["checkout"]),
                f"{figures['overall']:.2f}",
                f"{figures['worst']:.2f}",
                f"{figures['first']:.2f}",
                f"{figures['per_second']:.1f}",
            ]
        )
    return "\n".join(aligned(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--feeds", default="generator", help="some of generator, whole, indexable and mixed (generator)"
    )
    parser.add_argument("--costs", default="0,0.0001,0.001,0.02,0.5", help="seconds a sample")
    parser.add_argument("--sizes", default="100,4K,150K,3M", help="bytes a sample")
    parser.add_argument("--workers", default="1,4,16")
    parser.add_argument("--seconds", type=float, default=12, help="how long each cell reads (12)")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="measure this checkout, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.reader:
        reader(chosen.reader, int(chosen.workers), chosen.seconds)
        return
    here = Path(__file__).resolve().parents[1]
    cells: list[dict[str, object]] = []
    for feed, cost, size, workers in product(
        chosen.feeds.split(","),
        map(float, chosen.costs.split(",")),
        chosen.sizes.split(","),
        map(int, chosen.workers.split(",")),
    ):
        for checkout in (here, *([chosen.beside.resolve()] if chosen.beside else [])):
            progress(f"{feed}, {cost} s, {size}, {workers} workers: {checkout.name}")
            with sources(checkout):
                figures = measured(feed, cost, SIZES[size], workers, chosen.seconds)
            name = "this" if checkout == here else checkout.name
            cells.append(
                {"feed": feed, "cost": cost, "size": size, "workers": workers, "checkout": name, "figures": figures}
            )
            if chosen.json:
                chosen.json.write_text(json.dumps({"machine": machine(), "cells": cells}, indent=1) + "\n")
    print(table(cells))


if __name__ == "__main__":
    main()
