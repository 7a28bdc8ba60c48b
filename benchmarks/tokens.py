"""How fast do rows of different lengths become padded and ragged batches?

    python benchmarks/tokens.py --json tokens.json

The rows are token ids, 68 on average and at most 256, with a label; a batch has 64 rows. They come from a table in
memory, so that the loader takes all of the time. TensorFlow's own way is `from_generator` over the same function, row
by row, and then `padded_batch` or `ragged_batch`; Penstock's is `batching="pad"` (with and without buckets) or
`batching="ragged"`, with two workers on the trainer's host. Each trial is an eager loop over the batches in a fresh
process, whose first batches are not counted. The cases alternate, and ratios are taken within a round.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measure import Spread
from tokens_feed import BATCH, rows
from transport import aligned, machine, progress

FEED = Path(__file__).with_name("tokens_feed.py")
UNIT = "from_generator, padded_batch"
CASES = {UNIT: "", "from_generator, ragged_batch": "", "Penstock, pad": "padded", "Penstock, ragged": "ragged"}
CASES["Penstock, pad with 4 buckets"] = "buckets"


def dataset(case: str) -> Any:
    """Return the case's batches."""
    import tensorflow as tf

    import penstock

    if feed := CASES[case]:
        return penstock.dataset(f"{FEED}:{feed}", workers=2)
    signature = tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int64)
    rows_of_one_split = tf.data.Dataset.from_generator(lambda: rows(0), output_signature=signature).repeat()
    if case == UNIT:
        return rows_of_one_split.padded_batch(BATCH).prefetch(2)
    return rows_of_one_split.ragged_batch(BATCH).prefetch(2)


def trial(case: str, seconds: float) -> float:
    """Return batches a second."""
    batches = iter(dataset(case))
    for _ in range(20):
        next(batches)
    count, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        next(batches)
        count += 1
    return count / took


def measured(case: str, seconds: float) -> float:
    command = [sys.executable, __file__, "--trial", case, "--seconds", str(seconds)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    return float(said.split()[-1])


def table(found: dict[str, list[float]]) -> str:
    """Return the results in Markdown."""
    cells = [["median (least-greatest)", "batches/s", f"of {UNIT}"]]
    for case, speeds in found.items():
        ratios = [speed / unit for speed, unit in zip(speeds, found[UNIT], strict=True)]
        cells.append([case, str(Spread.of(speeds)), str(Spread.of(ratios))])
    return "\n".join(aligned(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="trials of each case (5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of a trial (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.trial:
        print(trial(chosen.trial, chosen.seconds))
        return
    found: dict[str, list[float]] = {case: [] for case in CASES}
    for round_ in range(chosen.repeats):
        for case in CASES:
            progress(f"round {round_ + 1} of {chosen.repeats}: {case}")
            found[case].append(measured(case, chosen.seconds))
    progress("")
    print(table(found))
    if chosen.json:
        report = {"machine": machine(), "batches_per_second": found}
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
