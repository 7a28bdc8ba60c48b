"""What does a busy Python thread in the trainer cost its loader, and does `sys.setswitchinterval` help?

    python benchmarks/gil.py --json gil.json

Anything that passes batches from Python to TensorFlow needs the GIL for each element, and a thread that computes in
Python gives it up only after the switch interval, 5 ms by default. `Dataset.reduce`, a loop in the graph as in `fit`,
takes batches from a bare `from_generator` that yields ready arrays (one element a batch), and from Penstock over shared
memory, where small batches share a slab. Each trial is a fresh process; the cases alternate within a round.
"""

import argparse
import importlib
import json
import subprocess
import sys
import threading
from pathlib import Path

from contestants import CONTESTANTS, prebuilt
from measure import Spread
from trainer import reduced, take
from transport import aligned, machine, progress, size_name

LOADS = [prebuilt.Load(100 << 10, 2), prebuilt.Load(4 << 20)]
WAYS = ("generator", "penstock-local")
INTERVALS = {  # label of the column: seconds; None: no other thread runs
    "no other thread": None,
    "5 ms (default)": 0.005,
    "1 ms": 0.001,
    "0.1 ms": 0.0001,
}


def busy(stop: threading.Event) -> None:
    number = 0
    while not stop.is_set():
        for _ in range(1000):
            number = (number * 3 + 1) % 1000003


def trainer(way: str, load: prebuilt.Load, interval: float | None, seconds: float) -> None:
    """Print the number of batches a second."""
    contestant, stop = CONTESTANTS[way], threading.Event()
    with getattr(importlib.import_module(contestant.module), contestant.function)(load) as dataset:
        prebuilt.check(next(iter(dataset)), load)
        other = threading.Thread(target=busy, args=[stop])
        if interval is not None:
            sys.setswitchinterval(interval)
            other.start()
        try:
            rate = take(iter(dataset), seconds / 4, 8)
            print(reduced(dataset, rate.batches / rate.seconds, seconds))
        finally:
            stop.set()
            if interval is not None:
                other.join()


def measured(way: str, load: prebuilt.Load, interval: float | None, seconds: float) -> float:
    command = [sys.executable, __file__, "--trainer", json.dumps([way, load.text(), interval, seconds])]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def table(loads: list[dict[str, object]]) -> str:
    rows = [["batches/s by reduce, another thread busy; median (least-greatest)", *INTERVALS]]
    for entry in loads:
        for way, found in entry["ways"].items():
            name = f"{size_name(entry['bytes'])}, {CONTESTANTS[way].label}"
            rows.append([name, *(str(Spread.of(found[column])) for column in INTERVALS)])
    return "\n".join(aligned(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds (5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a trial (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.trainer:
        way, load, *rest = json.loads(chosen.trainer)
        trainer(way, prebuilt.Load.of(load), *rest)
        return
    empty = [{"bytes": load.nbytes, "ways": {way: {name: [] for name in INTERVALS} for way in WAYS}} for load in LOADS]
    report = {"machine": machine(), "loads": empty}
    for round_ in range(chosen.repeats):
        for load, entry in zip(LOADS, report["loads"], strict=True):
            for way, found in entry["ways"].items():
                for name, interval in INTERVALS.items():
                    progress(f"round {round_ + 1} of {chosen.repeats}: {size_name(load.nbytes)}, {way}, {name}")
                    found[name].append(measured(way, load, interval, chosen.seconds))
    progress("")
    print(table(report["loads"]))
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
