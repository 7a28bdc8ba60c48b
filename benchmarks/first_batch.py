"""How long does a trainer wait for its first batch, from a running daemon, and from nothing?

    python benchmarks/first_batch.py --json first_batch.json

Each measurement uses a fresh process that has imported TensorFlow but not used it yet. It measures from the call of
`penstock.connect` to the first batch, as NumPy arrays or as tensors of `dataset()`. *From nothing* means that the URL
is `MODULE:ATTR`, so the daemon and its workers start first, and import the feed's module (only NumPy). A running daemon
was started for this one trainer, and nobody has read the feed before. The four cases alternate.
"""

import argparse
import json
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from contestants.penstock_service import daemon
from measure import Spread
from transport import aligned, machine, progress

FEED = Path(__file__).with_name("first_batch_feed.py")
CASES = {  # label of the row: whether a daemon runs, and whether tensors are wanted
    "a daemon that runs, NumPy": (True, False),
    "a daemon that runs, tensors": (True, True),
    "from nothing, NumPy": (False, False),
    "from nothing, tensors": (False, True),
}
TARGETS = {True: 0.3, False: 1.5}


def trainer(url: str, tensors: bool) -> None:
    """Print the seconds from `connect` to the first batch."""
    import tensorflow as tf  # noqa: F401  as a trainer has imported it

    import penstock

    begun = time.perf_counter()
    with penstock.connect(url) as connection:
        next(iter(connection.dataset() if tensors else connection.batches()))
        print(time.perf_counter() - begun)


def measured(runs: bool, tensors: bool) -> float:
    source: AbstractContextManager[str] = daemon(FEED, {}) if runs else nullcontext(f"{FEED}:feed")
    with source as url:
        command = [sys.executable, __file__, "--trainer", url, *(["--tensors"] if tensors else [])]
        return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def table(seconds: dict[str, list[float]]) -> str:
    rows = [["the first batch; seconds; median (least-greatest)", "measured", "target"]]
    rows += [[name, str(Spread.of(found)), f"< {TARGETS[CASES[name][0]]}"] for name, found in seconds.items()]
    return "\n".join(aligned(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each case (9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    parser.add_argument("--tensors", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.trainer:
        trainer(chosen.trainer, chosen.tensors)
        return
    report = {"machine": machine(), "seconds": {name: [] for name in CASES}}
    for round_ in range(chosen.repeats):
        for name, case in CASES.items():
            progress(f"round {round_ + 1} of {chosen.repeats}: {name}")
            report["seconds"][name].append(measured(*case))
    progress("")
    print(table(report["seconds"]))
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
