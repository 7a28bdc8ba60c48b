"""How well does `shuffle=` mix, compared with tf.data with as many samples in its buffer, and with a full shuffle?

    python benchmarks/mixing.py --json benchmarks/results/mixing-DATE.json

It reads no data and starts no process: the orders are modelled (`mixing_model.py`). tf.data is
`files.shuffle(all).interleave(cycle_length=16, block_length=1).shuffle(buffer)`. A batch has 32 samples.

- *Splits in a batch*: distinct files among the samples of a batch, on average.
- *Spread*: chi-squared over its degrees of freedom, of the files in windows of 800 samples (25 batches). A full shuffle
  has 1. If a window comes from 4 of 64 files alone, it is about 200.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from mixing_model import Positions, full_order, mixing, penstock_order, tfdata_order, turn_and_pool
from transport import aligned, progress

from penstock_server import Feed

BATCH = 32
WINDOW = 800
CYCLE = 16
FILES = (16, 64, 1000)
SAMPLES = (200, 5000)
"""In a file."""
NBYTES = {100: "100 B", 10_000: "10 KB", 600_000: "600 KB"}
"""Sizes of a sample. Larger samples have shorter turns, and fewer lanes mix their rows."""
SHUFFLES = (0, 1000, 10_000, None)
"""None: all samples of the epoch."""
SHOWN = (64, 200)
"""The case whose positions are plotted: files, and samples in each."""
POINTS = 1600


def rows(split: int) -> Any:
    raise NotImplementedError("the order is modelled")


def plan_of(files: int, shuffle: int) -> Any:
    return Feed(rows, splits=range(files), batch_size=BATCH, shuffle=shuffle).plan("feed")


def figures(positions: Positions, sizes: Positions) -> list[float]:
    found = mixing(positions, sizes, batch_size=BATCH, window=WINDOW)
    return [round(found.splits, 2), round(found.spread, 3)]


def case(files: int, samples: int, shuffle: int | None) -> dict[str, Any]:
    """Return the figures of each order, by its label: distinct splits in a batch, and the spread."""
    sizes = np.full(files, samples)
    buffer = files * samples if shuffle is None else shuffle
    plan = plan_of(files, buffer)
    turns = {f"penstock, {name}": turn_and_pool(plan, nbytes) for nbytes, name in NBYTES.items()}
    known = {each: figures(penstock_order(plan, sizes, *each), sizes) for each in set(turns.values())}
    return {
        "files": files,
        "samples": samples,
        "shuffle": shuffle,
        "interleave": plan.interleave,
        "turns": turns,
        "orders": {
            **{label: known[each] for label, each in turns.items()},
            "tf.data": figures(tfdata_order(sizes, cycle=CYCLE, buffer=buffer), sizes),
            "full": figures(full_order(files * samples), sizes),
        },
    }


def points(shuffle: int | None) -> dict[str, list[int]]:
    """Return the input position of every n-th output position, for the plot."""
    files, samples = SHOWN
    sizes = np.full(files, samples)
    buffer = files * samples if shuffle is None else shuffle
    plan = plan_of(files, buffer)
    found = {
        "penstock": penstock_order(plan, sizes, *turn_and_pool(plan, 100)),
        "tf.data": tfdata_order(sizes, cycle=CYCLE, buffer=buffer),
    }
    return {name: order[:: files * samples // POINTS].tolist() for name, order in found.items()}


def shuffle_name(shuffle: int | None) -> str:
    return "all" if shuffle is None else "none" if not shuffle else f"{shuffle:,}"


def table(result: dict[str, Any], samples: int) -> str:
    """Return the figures for files of `samples` samples, as text."""
    spreads = [*(f"penstock, {name}" for name in NBYTES.values()), "tf.data"]
    lines = [
        [
            "files",
            "shuffle",
            "penstock",
            "tf.data",
            "full",
            "|",
            *(label.removeprefix("penstock, ") for label in spreads),
        ]
    ]
    for one in result["cases"]:
        if one["samples"] == samples:
            orders = one["orders"]
            lines.append(
                [
                    str(one["files"]),
                    shuffle_name(one["shuffle"]),
                    *(f"{orders[label][0]:.1f}" for label in ("penstock, 100 B", "tf.data", "full")),
                    "|",
                    *(f"{orders[label][1]:.1f}" for label in spreads),
                ]
            )
    head = f"files of {samples} samples, {BATCH} in a batch: splits in a batch | spread, by the size of a sample"
    return "\n".join([head, *aligned(lines)])


def tables(result: dict[str, Any]) -> list[str]:
    return [table(result, samples) for samples in SAMPLES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    chosen = parser.parse_args()
    cases = []
    for samples in SAMPLES:
        for files in FILES:
            for shuffle in SHUFFLES:
                progress(f"{files} files of {samples} samples, shuffle {shuffle_name(shuffle)}")
                cases.append(case(files, samples, shuffle))
    progress("")
    result = {"cases": cases, "points": {shuffle_name(shuffle): points(shuffle) for shuffle in SHUFFLES}}
    print("\n\n".join(tables(result)))
    if chosen.json:
        chosen.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
