"""Try one cell, in this process: trial.py ROW COLUMN. It writes two lines of JSON to the standard output.

The first comes when everything is imported, with the cell's note in case it hangs. The second is the outcome.
"""

import importlib
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import judge
import numpy as np
import sources
from table import ADAPTED, COLUMNS, ERROR, ONE, OTHER, ROWS, SOURCES, WORKS, Cell

HARMLESS = {judge.IGNORED["lists"], judge.IGNORED["order"]}
RANDOM_BATCHES = 40  # of an endless source


def plainly(row: str) -> list[Any]:
    """Return the samples that the source of this row yields when it is read without any loader."""
    sources.SECONDS = 0
    os.environ.pop("COMPATIBILITY_LOG", None)
    if row == "undivided":
        return [sources.spectrum(value) for value in sources.readings()]
    if row == "parquet":
        return list(sources.of_parquet(sources.parts("*.parquet")))
    if row == "notebook":
        return list(sources.in_notebook()(sources.PATHS))
    if row in sources.STRUCTURES:
        return list(sources.Table(item=sources.STRUCTURES[row]))
    return list(sources.Table(sources.LONG if row == "killed" else sources.SAMPLES))


def rows(batches: Iterable[Any]) -> list[Any]:
    return [row for batch in batches for row in judge.rows(batch)]


def compared(batches: Iterable[Any], row: str) -> str | None:
    got = rows(batches)
    return judge.judged(got, plainly(row))


def random(batches: Iterable[Any], row: str) -> str | None:
    got = list(itertools.islice(batches, RANDOM_BATCHES))
    return judge.judged_random(got, next(sources.Scenes(sources.scene_files()).generate_data()))


def endless(batches: Iterable[Any], row: str) -> str | None:
    return compared(itertools.islice(batches, sources.SAMPLES // sources.BATCH), row)


def shuffled(batches: Iterable[Any], row: str) -> str | None:
    """Check that two epochs have all samples each, in two orders."""
    got, once = rows(batches), plainly(row)
    one, two = got[: len(once)], got[len(once) :]
    if judge.same_order(one, two) is None:
        return "the second epoch has the order of the first"
    return judge.judged(one, once) or judge.judged(two, once)


def bucketed(batches: Iterable[Any], row: str) -> str | None:
    got = []
    for batch in batches:
        filled = judge.plain(batch)
        if filled.shape[1] not in sources.BUCKETS:
            return f"a batch is {filled.shape[1]} wide"
        got += [one[one != 0] for one in filled]
    return judge.judged(got, plainly(row))


def resized(batches: Iterable[Any], row: str) -> str | None:
    got = [list(judge.rows(batch)) for batch in batches]
    sizes = {len(some) for some in got[:-1]}
    wrong = judge.judged([one for some in got for one in some], plainly(row))
    return wrong or (f"batches of {sorted(sizes)} rows" if sizes != {sources.BATCH} else None)


JUDGES: dict[str, Callable[[Iterable[Any], str], str | None]] = {
    "scenes": random,
    "keras_endless": endless,
    "keras_shuffled": shuffled,
    "buckets": bucketed,
    "rebatch": resized,
}


def logged() -> list[int]:
    """Return the processes that made samples, one entry for each sample."""
    path = Path(os.environ["COMPATIBILITY_LOG"])
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def message(error: Exception) -> str:
    """Return the most informative line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = lines[-1] if lines[0].startswith("Caught") else f"{type(error).__name__}: {lines[0]}"
    return line if len(line) <= 160 else line[:160] + " ..."


def tried(row: str, cell: Cell) -> dict[str, str]:
    """Try the cell. Return the outcome, the note about it, and the error if there was one."""
    if cell.read is None:
        return {"outcome": cell.outcome, "note": cell.note}
    path = os.environ["COMPATIBILITY_LOG"]
    try:
        if row in ("same", "same_random"):
            wrong = judge.same_order(*(rows(cell.read(workers)) for workers in (1, 3)))
        else:
            wrong = JUDGES.get(row, compared)(cell.read(), row)
    except Exception as error:
        traceback.print_exc()
        said = message(error)
        return {"outcome": ERROR, "note": cell.note or said, "error": said}
    os.environ["COMPATIBILITY_LOG"] = path
    if row != "nested" and wrong in HARMLESS:  # that row is about the structure, the others about the data
        cell, wrong = replace(cell, note=wrong), None
    if wrong:
        return {"outcome": OTHER, "note": wrong}
    if ROWS[row].group == SOURCES and not cell.native and not judge.parallel(logged()):
        return {"outcome": ONE, "note": cell.adapter or cell.note}
    return {"outcome": ADAPTED if cell.adapter else WORKS, "note": cell.adapter or cell.note}


def main(row: str, column: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that the loaders' output is not in it
    np.random.seed(0)
    cell = importlib.import_module(COLUMNS[column].module).cells[row]
    print(json.dumps({"note": cell.note}), file=out, flush=True)
    print(json.dumps(tried(row, cell)), file=out, flush=True)
    os._exit(0)  # loaders may wait for their processes forever


if __name__ == "__main__":
    main(*sys.argv[1:])
