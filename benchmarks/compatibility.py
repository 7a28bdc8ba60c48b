"""Which sources, structures and faults each loader can handle: docs/compatibility.md.

    python benchmarks/compatibility.py --json benchmarks/results/compatibility-$(date +%F).json
    python benchmarks/compatibility.py --only hdf5 --only torch     # some rows and columns, printed
    python benchmarks/compatibility.py --draw                       # draw the page from the newest result

Each cell gives a source to a loader as that loader's documentation says, in a separate process (`cells/by_*.py`). One
judge compares the samples that come with those that the source yields when it is read without a loader, and checks
whether several processes made them (`cells/judge.py`). A cell in which nothing happens for 30 s is tried once more, and
then counts as a hang. Loaders that are not installed are skipped; see benchmarks/requirements.txt.
"""

import argparse
import contextlib
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

CELLS = Path(__file__).resolve().parent / "cells"
ROOT = CELLS.parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "compatibility.md"
sys.path.append(str(CELLS))

from table import COLUMNS, ERROR, HANG, ROWS  # noqa: E402  (in the parent folder)

IMPORT_SECONDS, SECONDS, LONGEST = 120, 30, 150
PACKAGES = ("penstock-loader", "tensorflow", "keras", "torch", "grain", "numpy", "torchdata", "webdataset", "tfrecord")


def trial(row: str, column: str, data: Path) -> dict[str, str]:
    """Try a cell in a separate process."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {
            **os.environ,
            "COMPATIBILITY_DATA": str(data),
            "COMPATIBILITY_LOG": str(Path(folder) / "made"),
            "PYTHONPATH": os.pathsep.join([str(CELLS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
            "CUDA_VISIBLE_DEVICES": "-1",
        }
        with (Path(folder) / "errors").open("w+") as errors:
            process = subprocess.Popen(
                [sys.executable, str(CELLS / "trial.py"), row, column],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            try:
                answer = ask(process, Path(environment["COMPATIBILITY_LOG"]))
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if answer is not None:
                return answer
            errors.seek(0)
            return {"outcome": ERROR, "note": f"the process ended: {errors.read()[-300:]}"}


def ask(process: subprocess.Popen, log: Path) -> dict[str, str] | None:
    """Return the process's answer, or None if it ended without one."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    note = ""
    try:
        started = lines.get(timeout=IMPORT_SECONDS)
        note = json.loads(started)["note"] if started else ""
        answer = awaited(lines, process, log) if started else ""
    except queue.Empty:
        return {"outcome": HANG, "note": note}
    return json.loads(answer) if answer else None


def awaited(lines: queue.Queue[str], process: subprocess.Popen, log: Path) -> str:
    """Wait for the next line, and return it.

    Raises:
        queue.Empty: for SECONDS no sample was made, and no process did much else, such as imports.
    """
    tree = psutil.Process(process.pid)
    since, before = time.monotonic(), (0.0, 0)
    begun = since
    while True:
        with contextlib.suppress(queue.Empty):
            return lines.get(timeout=1.0)
        now = (computed(tree), log.stat().st_size if log.exists() else 0)
        if now[0] > before[0] + 0.2 or now[1] > before[1]:
            since = time.monotonic()
        before = now
        if time.monotonic() > min(since + SECONDS, begun + LONGEST):
            raise queue.Empty


def computed(tree: psutil.Process) -> float:
    """Return the CPU time in seconds of the process and its descendants."""
    total = 0.0
    for one in (tree, *tree.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += sum(one.cpu_times()[:2])
    return total


def cell(row: str, column: str, data: Path) -> dict[str, str]:
    """Try a cell, and once more if it hangs."""
    found = trial(row, column, data)
    if found["outcome"] == HANG:
        found = trial(row, column, data)
    print(f"{row:16} {column:10} {found['outcome']:16} {found['note']}", flush=True)
    return found


def installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def measured(rows: list[str], columns: list[str], jobs: int) -> dict[str, Any]:
    versions = installed()
    for column in list(columns):
        if COLUMNS[column].distribution not in versions:
            print(f"{column}: skipped, {COLUMNS[column].distribution} is not installed", file=sys.stderr)
            columns.remove(column)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        subprocess.run([sys.executable, str(CELLS / "sources.py"), folder], check=True)
        futures = {row: {column: pool.submit(cell, row, column, Path(folder)) for column in columns} for row in rows}
        cells = {row: {column: one.result() for column, one in some.items()} for row, some in futures.items()}
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "versions": versions}
    return {"machine": machine, "cells": cells}


def drawn(result: dict[str, Any], path: Path) -> str:
    """Return the table, and below it the notes of its cells."""
    machine, notes = result["machine"], {}
    columns = list(next(iter(result["cells"].values())))
    date = path.stem.partition("-")[2]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    note = f" {result['note']}" if "note" in result else ""
    lines = [f"{date}, Python {machine['python']}, {versions} (`{path.relative_to(ROOT)}`).{note}"]
    group = None
    for row, cells in result["cells"].items():
        if ROWS[row].group != group:
            group = ROWS[row].group
            lines += ["", f"## {group}", "", f"| | {' | '.join(COLUMNS[one].label for one in columns)} |"]
            lines.append("|---|" + "---|" * len(columns))
        texts = []
        for column in columns:
            found = cells[column]
            note = found["note"]
            mark = f"[^{notes.setdefault(note, len(notes) + 1)}]" if note else ""
            texts.append(found["outcome"] + mark)
        lines.append(f"| {ROWS[row].label} | {' | '.join(texts)} |")
    lines += ["", *(f"[^{number}]: {note}." for note, number in notes.items())]
    return "\n".join(lines)


def draw() -> None:
    """Draw the page from the newest result."""
    from report import newest, replaced

    path = newest("compatibility")
    if path is None:
        raise SystemExit(f"no result in {RESULTS}")
    PAGE.write_text(replaced(PAGE.read_text(), "compatibility", drawn(json.loads(path.read_text()), path)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], choices=[*ROWS, *COLUMNS], metavar="ROW-OR-COLUMN")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once (default 1)")
    parser.add_argument("--json", type=Path, help="write the result to this file; with --only, into it")
    parser.add_argument("--draw", action="store_true", help="try nothing, only draw the page")
    arguments = parser.parse_args()
    if not arguments.draw:
        rows = [name for name in ROWS if name in arguments.only] or list(ROWS)
        columns = [name for name in COLUMNS if name in arguments.only] or list(COLUMNS)
        result = measured(rows, columns, arguments.jobs)
        if arguments.json is not None:
            write(arguments.json, result)
    if arguments.draw or arguments.json is not None:
        draw()
    return 0


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the result as JSON. Cells that were not tried keep their entries in the file."""
    if path.exists():
        before = json.loads(path.read_text())["cells"]
        result["cells"] = {row: before.get(row, {}) | result["cells"].get(row, {}) for row in ROWS}
        result["note"] = "In several runs."
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
