"""How long do workers take to start, and how much memory do they need, if a library is imported once for all of them?

    python benchmarks/workers.py --json workers.json

A daemon serves a module that imports a library. *First*: the module begins with the import, so the fork server does it
once and forks the workers. *Apart*: a statement comes before the import (`os.environ[...] = ...`), so each worker
imports the library itself. *Ready* is the time from the start of `penstock serve` until all workers are ready. *Again*
is the time from the SIGKILL of a worker until its replacement is ready, including the pause of 0.1 s before each
restart. *Memory* is the anonymous and shared memory of daemon, fork server and workers (PSS: shared pages count once),
with the batches made ahead. Cases alternate within a round.
"""

import argparse
import json
import os
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from contestants.penstock_service import daemon
from measure import Spread
from process_tree import memory_bytes
from transport import aligned, machine, progress

from penstock_server.to_daemon import control

MODULE = """
import os
{before}
import {library}
import numpy as np
from penstock_server import Feed

def samples(split):
    yield np.int64(split)

feed = Feed(samples, splits=range(64), batch_size=1)
"""
BEFORE = {"first": "", "apart": 'os.environ["WORKERS_BENCHMARK"] = "1"'}
COLUMNS = ("ready, s", "memory, MiB", "again, s")


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    library: str
    workers: int
    imported: str

    def __str__(self) -> str:
        return f"{self.library}, {self.workers} workers, imported {self.imported}"


CASES = [  # the fork server imports NumPy in any case
    *(Case("numpy", workers, "first") for workers in (2, 8)),
    *(Case("tensorflow", workers, imported) for workers in (2, 8) for imported in BEFORE),
]


def ready_pids(url: str) -> list[int]:
    """Wait until all workers are ready, and return their pids."""
    while True:
        workers = control.status(url, 60).workers
        if all(worker.ready for worker in workers):
            return [worker.pid for worker in workers]
        time.sleep(0.005)


def measured(case: Case) -> tuple[float, float, float]:
    with tempfile.TemporaryDirectory(prefix="workers-") as folder:
        module = Path(folder) / "workers_module.py"
        module.write_text(MODULE.format(before=BEFORE[case.imported], library=case.library))
        others = memory_bytes()
        begun = time.perf_counter()
        with daemon(module, {}, "--workers", str(case.workers)) as url:
            pids = ready_pids(url)
            ready = time.perf_counter() - begun
            memory = memory_bytes() - others
            os.kill(pids[0], signal.SIGKILL)
            begun = time.perf_counter()
            while set(ready_pids(url)) == set(pids):
                time.sleep(0.005)
            return ready, memory / 2**20, time.perf_counter() - begun


def table(cases: list[dict[str, object]]) -> str:
    rows = [["starting workers; median (least-greatest)", *COLUMNS]]
    for entry in cases:
        case = Case(**entry["case"])  # type: ignore[arg-type]
        rows.append([str(case), *(str(Spread.of(list(values))) for values in zip(*entry["runs"], strict=True))])
    return "\n".join(aligned(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    chosen = parser.parse_args()
    report = {"machine": machine(), "cases": [{"case": asdict(case), "runs": []} for case in CASES]}
    for round_ in range(chosen.repeats):
        for entry, case in zip(report["cases"], CASES, strict=True):
            progress(f"round {round_ + 1} of {chosen.repeats}: {case}")
            entry["runs"].append(measured(case))
    progress("")
    print(table(report["cases"]))
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
