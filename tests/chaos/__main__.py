"""Run many scenarios in several processes, and report those that differ from the model.

python -m tests.chaos --scenarios 2000 --seed 1 --jobs 2
python -m tests.chaos --scenario "Scenario(...)"        # a literal from a report, perhaps reduced
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import scenario as scenarios

BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
"""A program that keeps a core busy while its parent lives: a race shows only if threads stand still at odd moments."""
STUCK = 3
"""Exit status of a process that has reported a run in which some consumer could not be stopped."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scenarios", type=int, default=200, help="how many (200)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first one; the others follow (1)")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run them (2)")
    parser.add_argument("--load", type=int, default=2, help="busy loops that run beside them; 0: none (2)")
    parser.add_argument("--scenario", help="run this literal instead")
    parser.add_argument("--reports", type=Path, help="write a report of each difference into this folder")
    parser.add_argument("--show", action="store_true", help="print the scenarios, and run nothing")
    parser.add_argument("--take", help=argparse.SUPPRESS)  # for our own processes: the seeds to run
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # even if a shell ignores them: we must stop what we started
        signal.signal(number, signal.default_int_handler)
    if options.take:
        return _runner(options.take)
    seeds = range(options.seed, options.seed + options.scenarios)
    if options.show:
        for seed in seeds:
            print(scenarios.scenario(seed))
        return 0
    with busy(options.load):
        if options.scenario:
            return _one(eval(options.scenario, vars(scenarios)))
        if options.scenarios == 1:
            return _one(scenarios.scenario(options.seed))
        return _many(seeds, options.jobs, options.reports)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.DEVNULL) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _one(scenario: scenarios.Scenario) -> int:
    from .run import run

    result = run(scenario)
    print(result.report())
    print(f"{result.batches} batches, {result.faults} faults, {result.seconds:.1f} s, longest wait {result.gap:.1f} s")
    sys.stdout.flush()
    if result.stuck:
        os._exit(1)  # the busy loops end with this process
    return bool(result.differences)


@dataclass
class Totals:
    """The results of all scenarios so far."""

    done: int = 0
    faults: int = 0
    batches: int = 0
    longest: tuple[float, int] = (0.0, 0)
    failed: list[int] = field(default_factory=list)

    def add(self, said: dict[str, Any], reports: Path | None) -> None:
        self.done += 1
        self.faults += said["faults"]
        self.batches += said["batches"]
        self.longest = max(self.longest, (said["gap"], said["seed"]))
        if said["differences"]:
            self.failed.append(said["seed"])
            print(f"scenario {said['seed']} ({said['seconds']:.1f} s): {said['differences'][0][:400]}", flush=True)
            if reports is not None:
                reports.mkdir(parents=True, exist_ok=True)
                (reports / f"{said['seed']}.txt").write_text(said["report"])
        if self.done % 50 == 0:
            print(f"{self.done} scenarios, {len(self.failed)} differ", flush=True)

    def ended(self, seed: int, status: int) -> None:
        print(f"scenario {seed}: the process that ran it ended with {status}", flush=True)
        self.failed.append(seed)

    def show(self, seconds: float) -> None:
        print(
            f"{self.done} scenarios with {self.faults} faults and {self.batches} batches in {seconds:.0f} s; the "
            f"longest wait was {self.longest[0]:.1f} s (seed {self.longest[1]}); {len(self.failed)} differ"
        )
        for seed in sorted(self.failed):
            print(f"  again: {scenarios.scenario(seed).command}")


def _many(seeds: range, jobs: int, reports: Path | None) -> int:
    """Deal the seeds to processes. If one ends before its last seed, another process takes over the rest."""
    began = time.monotonic()
    totals = Totals()
    todo = [list(seeds[job::jobs]) for job in range(jobs)]
    running: dict[int, subprocess.Popen[str]] = {}
    with contextlib.ExitStack() as stack:
        waiting = stack.enter_context(selectors.DefaultSelector())
        stack.callback(_stop, running)

        def start(job: int) -> None:
            command = [sys.executable, "-m", "tests.chaos", "--take", ",".join(map(str, todo[job]))]
            running[job] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
            assert running[job].stdout is not None
            waiting.register(running[job].stdout, selectors.EVENT_READ, job)

        for job in range(jobs):
            if todo[job]:
                start(job)
        while running:
            for key, _ in waiting.select():
                job = key.data
                line = key.fileobj.readline()
                if line:
                    said = json.loads(line)
                    todo[job].remove(said["seed"])
                    totals.add(said, reports)
                    continue
                waiting.unregister(key.fileobj)
                status = running[job].wait()
                key.fileobj.close()
                del running[job]
                if status and todo[job] and status != STUCK:
                    totals.ended(todo[job].pop(0), status)
                if todo[job]:
                    start(job)
    totals.show(time.monotonic() - began)
    return bool(totals.failed)


def _stop(running: dict[int, subprocess.Popen[str]]) -> None:
    """Interrupt the processes until they end. They stop what they started. Code may swallow one interrupt."""
    for process in running.values():
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=5)


def _runner(seeds: str) -> int:
    from .service import end_all

    try:
        return _take(seeds)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        end_all()


def _take(seeds: str) -> int:
    from .run import run

    for seed in map(int, seeds.split(",")):
        result = run(scenarios.scenario(seed))
        said = {
            "seed": seed,
            "differences": result.differences,
            "seconds": result.seconds,
            "gap": result.gap,
            "batches": result.batches,
            "faults": result.faults,
            "report": result.report() if result.differences else "",
        }
        print(json.dumps(said), flush=True)
        if result.stuck:
            os._exit(STUCK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
