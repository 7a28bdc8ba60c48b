"""How fast does the same user code produce TensorFlow tensors through each loader, and what does it cost?

    python benchmarks/pipelines.py --quick                             # three of the pipelines, a few minutes
    python benchmarks/pipelines.py --repeats 9 --json pipelines.json   # everything, two hours
    python benchmarks/pipelines.py --only unit,torch,penstock-local --pipelines rotate

`pipelines_feeds.py` is the user code: one function for each pipeline, which makes a sample. `loaders/` has the loaders
and says how each is configured. benchmarks/requirements.txt has the other loaders; the table says which are missing.

How it is measured:

- Each trial of one loader with one pipeline has fresh processes, which all end before the next trial begins, so no
  worker of one loader fills its queue while another loader is measured. A trial is an eager loop over the batches for
  two seconds (one with --quick), and then `Dataset.reduce`, a loop in the graph, for about as long. Before each loop a
  quarter as many batches are taken uncounted. A loader that gives NumPy batches is wrapped in `from_generator` for the
  second loop. For the first loop its arrays become tensors, without a copy if their alignment allows that.
- In each round every loader has one trial with every pipeline, and each round begins with another loader. Ratios to the
  unit (the sample function and np.stack in one thread, without tensors) are taken within a round. Tables show medians
  and quartiles.
- CPU is the user and system time of all threads during the eager loop, divided by its batches, for the trainer's
  process and for all processes below it. For Penstock these include the daemon.
- Memory is the anonymous and shared memory of all these processes, in proportional shares (PSS): a page that several
  processes have mapped counts once. Libraries and other mapped files do not count. It is measured after the second
  loop, when the loader has had time to fill its queues. TensorFlow's own allocations count, as they do for the unit.
- The time to the first batch runs from the loader's start, with TensorFlow imported and nothing else.
- The first batch must equal the unit's in the shape, dtype and sum of each leaf (if the pipeline is shuffled, in shape
  and dtype), and every requested batch must come. A loader that is silent for two minutes is killed with all its
  processes, and counts as hung.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pipelines_data
from loaders import LOADERS, missing
from measure import Quartiles, Run, ratios
from transport import Failed, Hung, machine, progress, size_name, stop, trainer

QUICK = ("images", "rotate", "leaves")
TRIES = 2  # failures of a loader with a pipeline, after which it is skipped
LEAST_SECONDS = 120.0  # until a trial counts as hung; some loaders start two processes with large imports


class Wrong(Failed):
    """The first batch differs from the one that the user code makes."""


def trial(loader: str, pipeline: str, seconds: float, sums: Sequence[Any]) -> Run:
    """Run a loader in a separate process.

    Raises:
        Hung, Wrong, Failed: it did not finish correctly; the text says why.
    """
    with trainer("pipelines_trainer.py", loader, pipeline, seconds) as process:
        answer = process.answer(LEAST_SECONDS + 10 * seconds)
    if "cannot" in answer:
        raise Failed(f"cannot: {answer['cannot']}")
    run = Run(**answer)
    if not LOADERS[loader].limit and comparable(run.sums, pipeline) != comparable(sums, pipeline):
        raise Wrong(f"wrong: the first batch has {run.sums!s:.100}, expected {sums!s:.100} (shape, dtype, sum)")
    return run


def comparable(sums: Any, pipeline: str) -> Any:
    """Return the part of `samples.summed` that must be the same for all loaders."""
    from pipelines_feeds import PIPELINES

    return [leaf[:2] for leaf in sums] if PIPELINES[pipeline].shuffle else sums


def measured(
    names: Sequence[str], pipelines: Sequence[str], repeats: int, seconds: float
) -> Iterator[list[dict[str, Any]]]:
    """Yield the runs of each loader with each pipeline (None for failed ones) and the reasons of failures, as JSON.

    Yields everything again after each round.
    """
    from loaders.samples import batch, leaves, summed
    from pipelines_feeds import PIPELINES

    tables = []
    for name in pipelines:
        first = batch(name, 0)
        entry = {"name": name, "label": PIPELINES[name].label, "bytes": sum(leaf.nbytes for leaf in leaves(first))}
        results = {one: {"label": LOADERS[one].label, "runs": [], "failures": []} for one in names}
        tables.append(({**entry, "loaders": results}, summed(first)))
    for round_ in range(repeats):
        for entry, sums in tables:
            for position in range(len(names)):
                one = names[(round_ + position) % len(names)]
                result = entry["loaders"][one]
                progress(f"round {round_ + 1} of {repeats}, {entry['name']}: {LOADERS[one].label}")
                result["runs"].append(None)
                if len(result["failures"]) >= TRIES:
                    continue
                if reason := missing(LOADERS[one]):
                    result["failures"] = [reason] * TRIES
                    continue
                try:
                    run = trial(one, entry["name"], seconds, sums)
                    result["runs"][-1] = asdict(replace(run, sums=None))
                except Hung as reason:
                    result["failures"].append(f"hung: {reason}")
                except Failed as reason:
                    result["failures"].append(str(reason))
        progress("")
        yield [entry for entry, _ in tables]


COLUMNS = (
    "batches/s, eager",
    "of the unit",
    "batches/s, reduce",
    "trainer's CPU, ms a batch",
    "workers' CPU, ms a batch",
    "memory, MiB",
    "first batch, s",
)


def cells(runs: Sequence[Any], units: Sequence[Any]) -> list[str]:
    """Return a row of the table, from the runs of one loader and those of the unit in the same rounds."""
    there = [run for run in runs if run is not None]
    columns = (
        [run["per_second"] for run in there],
        ratios(runs, units),
        [run["reduce_per_second"] for run in there if run["reduce_per_second"] is not None],
        [run["trainer_cpu"] * 1e3 for run in there],
        [run["workers_cpu"] * 1e3 for run in there],
        [run["memory"] / 2**20 for run in there],
        [run["first_seconds"] for run in there],
    )
    return [str(Quartiles.of(values)) if values else "-" for values in columns]


def table(entry: dict[str, Any], cores: int) -> str:
    """Return one pipeline's table, in Markdown. One row is the unit times `cores`."""
    loaders = entry["loaders"]
    units = loaders["unit"]["runs"] if "unit" in loaders else [None] * len(next(iter(loaders.values()))["runs"])
    lines = [
        f"**{entry['label']}** ({size_name(entry['bytes'])}); median (quartiles)",
        "",
        f"| | {' | '.join(COLUMNS)} |",
        f"|---|{'---:|' * len(COLUMNS)}",
    ]
    for result in loaders.values():
        runs, failures, label = result["runs"], result["failures"], result["label"]
        if any(runs):
            note = f" ({failures[-1].partition(':')[0]} in {len(failures)} of {len(runs)})" if failures else ""
            lines.append(f"| {label}{note} | {' | '.join(cells(runs, units))} |")
        else:
            lines.append(f"| {label} | {failures[-1].replace('|', '/')} |{' |' * (len(COLUMNS) - 1)}")
        if runs is units:
            times = [None if unit is None else {**unit, "per_second": unit["per_second"] * cores} for unit in units]
            empty = " | -" * (len(COLUMNS) - 2)
            lines.append(f"| the same, times {cores} cores | {' | '.join(cells(times, units)[:2])}{empty} |")
    return "\n".join(lines)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, help="rounds (5, or 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help=f"one round of shorter trials, with {', '.join(QUICK)}")
    parser.add_argument("--only", help=f"some of {','.join(LOADERS)}")
    parser.add_argument("--pipelines", help="names from pipelines_feeds.py")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    chosen = parser.parse_args()
    if chosen.repeats is None:
        chosen.repeats = 1 if chosen.quick else 5
    if chosen.repeats < 1:
        parser.error("--repeats must be at least 1")
    chosen.names = chosen.only.split(",") if chosen.only else list(LOADERS)
    if unknown := set(chosen.names) - set(LOADERS):
        parser.error(f"--only: no such loader: {', '.join(sorted(unknown))}")
    return chosen


def main() -> int:
    chosen = options()
    signal.signal(signal.SIGTERM, stop)  # so that `kill` ends the processes as well
    with tempfile.TemporaryDirectory(prefix="pipelines-") as data:
        pipelines_data.write(Path(data))
        os.environ["PIPELINES_DATA"] = data
        from pipelines_feeds import PIPELINES  # it reads that data

        every = QUICK if chosen.quick else tuple(PIPELINES)
        pipelines = chosen.pipelines.split(",") if chosen.pipelines else every
        if unknown := set(pipelines) - set(PIPELINES):
            sys.exit(f"--pipelines: no such pipeline: {', '.join(sorted(unknown))}; there are {', '.join(PIPELINES)}")
        seconds = 1.0 if chosen.quick else 2.0
        report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "trial_seconds": seconds}
        print(json.dumps(report["machine"]), end="\n\n", flush=True)
        for report["pipelines"] in measured(chosen.names, pipelines, chosen.repeats, seconds):
            if chosen.json:
                chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    for entry in report["pipelines"]:
        print(table(entry, report["machine"]["cores"]), end="\n\n")
    return 1 if any(failed(entry) for entry in report["pipelines"]) else 0


def failed(entry: dict[str, Any]) -> bool:
    """Return whether Penstock or a limit failed or was wrong. Other loaders may fail."""
    ours = [result for name, result in entry["loaders"].items() if LOADERS[name].required]
    return any(result["failures"] for result in ours)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
