"""How fast does Penstock read each format of files, compared with the format's own library?

    python benchmarks/formats.py --json formats.json
    python benchmarks/formats.py --quick --cases hdf5,parquet

For each case the benchmark writes files, reads them by hand in one process, and serves them with one and with two
workers. Both sides deliver batches of the same rows as NumPy arrays, in epochs one after the other. All trials are
processes of their own, and their first second does not count. The page cache holds the files. Trials alternate, and
ratios are taken within a round. *Ready* is a feed of one worker whose generator yields one batch again and again: what
the transport and the client could deliver.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from measure import Spread
from process_tree import started
from transport import aligned, machine, progress

FEED = Path(__file__).with_name("formats_feed.py")
WAYS = {"hand": 0, "one": 1, "two": 2, "ready": 1}
"""The ways to read a case, and their workers."""

WARM = 1.0
"""Seconds of a trial that do not count."""


def workers_cpu() -> float:
    """Return the CPU seconds of the workers of this process's daemon: of all processes below it that have no others."""
    total = 0.0
    for process in started():
        with suppress(psutil.NoSuchProcess):  # the process ended after it was listed
            total += 0 if process.children() else sum(process.cpu_times()[:2])
    return total


def rate(epochs: Iterator[Any], seconds: float, cpu: Callable[[], float]) -> dict[str, float]:
    """Take batches, and return rows and bytes a second, and by `cpu` the CPU seconds a row. The first second
    does not count."""
    rows = nbytes = 0
    warm = False
    begun = time.perf_counter()
    cpu_begun = cpu()
    for batch in epochs:
        took = time.perf_counter() - begun
        if not warm and took >= WARM:
            warm, rows, nbytes, begun, cpu_begun = True, 0, 0, time.perf_counter(), cpu()
            continue
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        rows += len(parts[0])
        nbytes += sum(part.nbytes for part in parts)
        if warm and took >= seconds:
            return {"rows": rows / took, "bytes": nbytes / took, "cpu": (cpu() - cpu_begun) / rows}
    raise ValueError("too few batches")


def endless(epoch: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from epoch()


def trial(way: str, seconds: float) -> dict[str, float]:
    """Measure one way to read the case of the environment, in this process."""
    from formats_cases import chosen

    case, folder = chosen()
    if way == "hand":
        return rate(endless(lambda: case.read(Path(folder))), seconds, time.process_time)
    import penstock

    feed = "ready" if way == "ready" else "feed"
    with ExitStack() as stack:
        connection = stack.enter_context(penstock.connect(f"{FEED}:{feed}", workers=WAYS[way]))
        return rate(endless(connection.batches), seconds, workers_cpu)


def measured(name: str, folder: str, way: str, seconds: float) -> dict[str, float]:
    """Measure one way to read a case, in a process of its own."""
    command = [sys.executable, __file__, "--trial", way, "--seconds", str(seconds)]
    env = {
        **os.environ,
        "FORMATS_CASE": name,
        "FORMATS_FOLDER": folder,
        "PENSTOCK_LOG_LEVEL": "error",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, {way}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(cases: list[dict[str, Any]]) -> str:
    """Return the results as text."""
    cells = [
        [
            "median (least-greatest)",
            "by hand with",
            "rows/s",
            "MB/s",
            "1 worker / by hand",
            "2 workers / by hand",
            "ready / by hand",
            "worker's CPU / by hand",
        ]
    ]
    for case in cases:
        if missing := case.get("missing"):
            cells.append([case["label"], f"{missing} is not installed", *[""] * 6])
            continue
        ways = case["ways"]

        def over(way: str, key: str = "rows", ways: Any = ways) -> str:
            return str(Spread.of([one[key] / hand[key] for one, hand in zip(ways[way], ways["hand"], strict=False)]))

        hand = ways["hand"]
        cells.append(
            [
                case["label"],
                case["by"],
                f"{Spread.of([one['rows'] for one in hand]).median:,.0f}",
                f"{Spread.of([one['bytes'] / 1e6 for one in hand]).median:,.0f}",
                over("one"),
                over("two"),
                over("ready"),
                over("one", "cpu"),
            ]
        )
    return "\n".join(aligned(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="some of the cases, separated by commas (all)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (5)")
    parser.add_argument("--seconds", type=float, default=2, help="length of a trial, after its first epoch (2)")
    parser.add_argument("--quick", action="store_true", help="one round with an eighth of the rows, to try it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.trial:
        print(json.dumps(trial(chosen.trial, chosen.seconds)))
        return
    from formats_cases import CASES

    if chosen.quick:
        chosen.repeats, chosen.seconds = 1, 0.5
    names = chosen.cases.split(",") if chosen.cases else list(CASES)
    began, cases = machine(), []
    for name in names:
        case = CASES[name]
        found: dict[str, Any] = {"name": name, "label": case.label, "by": case.by, "ways": {way: [] for way in WAYS}}
        cases.append(found)
        if missing := [module for module in case.needs if importlib.util.find_spec(module) is None]:
            found["missing"] = ", ".join(missing)
            continue
        if chosen.quick:
            case = replace(case, rows=case.rows // 8)
        with tempfile.TemporaryDirectory() as folder:
            progress(f"{case.label}: writing")
            case.write(Path(folder), case.rows)
            for number in range(chosen.repeats):
                for way in WAYS if number == 0 else ("hand", "one", "two"):
                    progress(f"{case.label}: round {number + 1} of {chosen.repeats}, {way}")
                    found["ways"][way].append(measured(name, folder, way, chosen.seconds))
        progress("")
        if not chosen.json:
            continue
        chosen.json.write_text(json.dumps({"machine": began, "cases": cases}, indent=1) + "\n")
    print(table(cases))


if __name__ == "__main__":
    main()
