"""Run many scenarios in several processes, and report those that differ.

python -m chaos --scenarios 2000 --seed 1 --jobs 2
python -m chaos --scenario "Scenario(...)"        # a literal, as a report shows it, perhaps made smaller
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from . import scenario as scenarios


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--scenarios", type=int, default=200, help="how many (200)")
    parser.add_argument("--seed", type=int, default=1, help="the first one's seed; the others' follow (1)")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run them (2)")
    parser.add_argument("--scenario", help="run this literal instead")
    parser.add_argument("--reports", type=Path, help="write the report of each that differs into this folder")
    parser.add_argument("--show", action="store_true", help="print the scenarios, and run nothing")
    parser.add_argument("--take", help=argparse.SUPPRESS)  # of a process of ours: the seeds it runs
    options = parser.parse_args()
    if options.take:
        return _runner(options.take)
    if options.scenario:
        return _one(eval(options.scenario, vars(scenarios)))
    seeds = range(options.seed, options.seed + options.scenarios)
    if options.show:
        for seed in seeds:
            print(scenarios.scenario(seed))
        return 0
    if options.scenarios == 1:
        return _one(scenarios.scenario(options.seed))
    return _many(seeds, options.jobs, options.reports)


def _one(scenario: scenarios.Scenario) -> int:
    from .run import run

    result = run(scenario)
    print(result.report())
    print(f"{result.batches} batches, {result.faults} faults, {result.seconds:.1f} s, longest wait {result.gap:.1f} s")
    sys.stdout.flush()
    if result.stuck:
        os._exit(1)
    return bool(result.differences)


def _many(seeds: range, jobs: int, reports: Path | None) -> int:
    """Deal the seeds to processes; one that is stuck is replaced, and goes on behind the seed that stuck."""
    began = time.monotonic()
    done = batches = faults = 0
    longest = (0.0, 0)
    failed: list[int] = []
    todo = [list(seeds[job::jobs]) for job in range(jobs)]
    running: dict[int, subprocess.Popen[str]] = {}
    import selectors

    waiting = selectors.DefaultSelector()

    def start(job: int) -> None:
        command = [sys.executable, "-m", "chaos", "--take", ",".join(map(str, todo[job]))]
        running[job] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        waiting.register(running[job].stdout, selectors.EVENT_READ, job)  # type: ignore[arg-type]

    for job in range(jobs):
        if todo[job]:
            start(job)
    while running:
        for key, _ in waiting.select():
            job = key.data
            line = running[job].stdout.readline()  # type: ignore[union-attr]
            if not line:
                waiting.unregister(key.fileobj)
                status = running[job].wait()
                running.pop(job).stdout.close()  # type: ignore[union-attr]
                if status and todo[job] and not _was_reported(todo[job][0], failed):
                    print(f"scenario {todo[job][0]}: the process that ran it ended with {status}", flush=True)
                    failed.append(todo[job].pop(0))
                if todo[job]:
                    start(job)
                continue
            said = json.loads(line)
            todo[job].remove(said["seed"])
            done, batches, faults = done + 1, batches + said["batches"], faults + said["faults"]
            longest = max(longest, (said["gap"], said["seed"]))
            if said["differences"]:
                failed.append(said["seed"])
                print(f"scenario {said['seed']} ({said['seconds']:.1f} s): {said['differences'][0][:400]}", flush=True)
                if reports is not None:
                    reports.mkdir(parents=True, exist_ok=True)
                    (reports / f"{said['seed']}.txt").write_text(said["report"])
            elif done % 50 == 0:
                print(f"{done} of {len(seeds)} scenarios, {len(failed)} differ", flush=True)
    seconds = time.monotonic() - began
    print(
        f"{done} scenarios with {faults} faults and {batches} batches in {seconds:.0f} s; the longest wait was "
        f"{longest[0]:.1f} s (seed {longest[1]}); {len(failed)} differ{': ' if failed else ''}"
        f"{', '.join(map(str, sorted(failed)))}"
    )
    for seed in sorted(failed)[:10]:
        print(f"  again: {scenarios.scenario(seed).command}")
    return bool(failed)


def _was_reported(seed: int, failed: list[int]) -> bool:
    return seed in failed


def _runner(seeds: str) -> int:
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
            os._exit(3)
    return 0


if __name__ == "__main__":
    sys.exit(main())
