"""Is this checkout slower than another one?

    git worktree add ../before main~20
    python benchmarks/compare.py ../before                  # a quarter of an hour
    python benchmarks/compare.py ../before --cases 100K/2:tcp,rotate --repeats 15 --json compare.json
    python benchmarks/compare.py ../before --cases pipelines      # every pipeline, half an hour

It measures only Penstock, from the sources of both checkouts, with the benchmarks of this checkout: batches through the
trainers of `transport.py` (SIZE/LEAVES:TRANSPORT), and whole pipelines through those of `pipelines_trainer.py`. The two
checkouts alternate, and take turns at going first. Ratios are taken within a round, between neighbouring trials: speeds
drift on a shared machine, ratios do not. The table has their medians and quartiles. A speed ratio above 1 means that
this checkout is faster; a ratio of CPU time, memory or time to the first batch above 1 means that it takes more. If
other programs use the CPU too, CPU times say more than speeds.
"""

import argparse
import compileall
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pipelines_data
from measure import Quartiles, Run, ratios
from pipelines import LEAST_SECONDS
from transport import Failed, aligned, loads_of, machine, progress, stop, trainer

EVERY_PIPELINE = "pipelines"  # as a case
CASES = "100K/2:local,100K/2:tcp,16M:local,16M:tcp,rotate"
FIGURES = {
    "batches/s": "per_second",
    "by reduce": "reduce_per_second",
    "trainer's CPU": "trainer_cpu",
    # Only pipelines have these. "Workers" includes the daemon.
    "workers' CPU": "workers_cpu",
    "memory": "memory",
    "first batch": "first_seconds",
}

RunTrial = Callable[[], dict[str, Any]]


@contextmanager
def sources(checkout: Path) -> Iterator[None]:
    """Make processes started in this block import Penstock from this checkout."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(str(checkout / part) for part in ("proto", "server", "client"))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def batches(stack: ExitStack, case: str, checkout: Path, seconds: float) -> RunTrial:
    """Start a trainer that takes batches of one size, and return a function that runs a trial of `seconds`."""
    size, transport = case.split(":")
    (load,) = loads_of(size)
    with sources(checkout):
        process = stack.enter_context(trainer("trainer.py", f"penstock-{transport}", load.text(), "eager,reduce"))
    process.wait_until_ready()
    return lambda: asdict(process.trial(seconds))


def pipeline(name: str, checkout: Path, seconds: float) -> RunTrial:
    """Return a function that runs a trial of a pipeline, in fresh processes each time."""

    def run_trial() -> dict[str, Any]:
        with sources(checkout), trainer("pipelines_trainer.py", "penstock-local", name, 2 * seconds) as process:
            return asdict(Run(**process.answer(LEAST_SECONDS + 20 * seconds)))

    return run_trial


def compared(case: str, checkouts: Sequence[Path], repeats: int, seconds: float) -> list[list[dict[str, Any]]]:
    """Run the trials of each checkout, in rounds. An extra first round warms up, and is dropped."""
    with ExitStack() as stack:
        sides = [
            batches(stack, case, checkout, seconds) if ":" in case else pipeline(case, checkout, seconds)
            for checkout in checkouts
        ]
        trials: list[list[dict[str, Any]]] = [[] for _ in sides]
        for round_ in range(repeats + 1):
            for side in sorted(range(len(sides)), reverse=round_ % 2 == 1):
                progress(f"{case}: round {round_} of {repeats}, {checkouts[side]}")
                trials[side].append(sides[side]())
    progress("")
    return [taken[1:] for taken in trials]


def commit(checkout: Path) -> str:
    """Return the commit of a checkout, with its date and title, and whether files differ from it."""
    log = ["git", "-C", str(checkout), "log", "-1", "--date=format:%Y-%m-%d", "--format=%h (%ad): %s"]
    status = ["git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no", "proto", "server", "client"]
    head, changed = (subprocess.run(one, stdout=subprocess.PIPE, text=True).stdout.strip() for one in (log, status))
    return f"{head or 'no repository'}{', changed since' if changed else ''}"


def cell(now: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]], key: str) -> str:
    """Return the ratios of one figure as text. Trials of batches lack some figures."""
    found = ratios(now, before, key) if key in now[0] else []
    return str(Quartiles.of(found)) if found else "-"


def table(report: dict[str, Any]) -> str:
    """Return the ratios of all cases as text. `report` is as in the JSON."""
    rows = [["this checkout over the other", "rounds", *FIGURES]]
    for case, runs in report["cases"].items():
        now, before = runs["now"], runs["before"]
        rows.append([case, str(len(now)), *(cell(now, before, key) for key in FIGURES.values())])
    return "\n".join(aligned(rows))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument(
        "--cases", default=CASES, help=f"some of {CASES}, other sizes or pipelines; {EVERY_PIPELINE}: all of these"
    )
    parser.add_argument("--repeats", type=int, default=9, help="rounds (9)")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a trial (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    chosen = parser.parse_args()
    if not (chosen.before / "client" / "penstock").is_dir():
        parser.error(f"{chosen.before}: expected a checkout of Penstock")
    return chosen


def main() -> int:
    chosen = options()
    signal.signal(signal.SIGTERM, stop)  # so that `kill` ends the processes as well
    checkouts = [Path(__file__).resolve().parents[1], chosen.before.resolve()]
    report: dict[str, Any] = {
        "machine": machine(),
        **dict(zip(("now", "before"), map(commit, checkouts), strict=True)),
        "trial_seconds": chosen.seconds,
        "cases": {},
    }
    for checkout in checkouts:  # so that the first batch of neither waits for a compiler
        for part in ("proto", "server", "client"):
            compileall.compile_dir(checkout / part, quiet=1)
    with tempfile.TemporaryDirectory(prefix="pipelines-") as data:
        pipelines_data.write(Path(data))
        os.environ["PIPELINES_DATA"] = data
        from pipelines_feeds import PIPELINES  # it reads that data

        for case in chosen.cases.replace(EVERY_PIPELINE, ",".join(PIPELINES)).split(","):
            try:
                now, before = compared(case, checkouts, chosen.repeats, chosen.seconds)
            except Failed as error:
                sys.exit(f"{case}: {error}")
            report["cases"][case] = {"now": now, "before": before}
            if chosen.json:
                chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
