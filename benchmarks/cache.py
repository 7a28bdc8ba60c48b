"""What do epochs from `Feed(cache=)` cost, compared with epochs in which the generator makes the samples?

    python benchmarks/cache.py --json cache.json

The samples are decoded JPEG images, arrays compressed with zlib, and small rows that cost nothing to make, for which a
cache is useless. A trial is a fresh process that reads a feed with `workers=0`, so its CPU time is the whole cost: the
generator, the cache, and making batches. The page cache holds the files. A trial without a cache reads two epochs, and
the second counts. A trial with a cache reads one epoch that fills it, and one from it. Then another process resumes in
the middle of the epoch, with and without the cache, and takes one batch. The cases alternate, and ratios are taken
within a round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cache_feed import SAMPLES, SPLITS
from measure import Spread
from transport import aligned, machine, progress

import penstock

FEED = Path(__file__).with_name("cache_feed.py")
LABELS = {"jpeg": "JPEG images", "compressed": "zlib arrays", "rows": "rows of 784 bytes"}
COUNTS = {"jpeg": SPLITS * SAMPLES, "compressed": SPLITS * SAMPLES, "rows": 32 * SPLITS * SAMPLES}


def trial(feed: str, state: Path) -> list[float]:
    """Return the CPU seconds of two epochs, or, if there is a state, of the first batch after it."""
    resumes = state.exists()
    connection = penstock.connect(f"{FEED}:{feed}", workers=0)
    found = []
    with connection:
        if resumes:
            connection.load_state_dict(json.loads(state.read_text()))
            began = time.process_time()
            next(connection.batches())
            return [time.process_time() - began]
        for _ in range(2):
            began = time.process_time()
            for number, _batch in enumerate(connection.batches()):
                if number == COUNTS[feed] // 64 + 1:
                    saved = connection.state_dict()
            found.append(time.process_time() - began)
        state.write_text(json.dumps(saved))
    return found


def measured(feed: str, folder: Path, cache: str) -> tuple[list[float], list[float]]:
    """Measure two epochs, and a resume in the middle of the second, each in a separate process."""
    state = folder / f"state of {feed} {'with' if cache else 'without'} cache"
    command = [sys.executable, __file__, "--trial", feed, "--state", str(state)]
    found = []
    for _ in range(2):
        said = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "CACHE": cache}
        ).stdout
        found.append(json.loads(said.splitlines()[-1]))
    return found[0], found[1]


def round_of(feed: str) -> dict[str, float]:
    """Measure one round: microseconds a sample for epochs, milliseconds for a resume."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("CACHE_BENCHMARK")) as folder:
        plain, plain_resumed = measured(feed, Path(folder), "")
        cached, resumed = measured(feed, Path(folder), f"{folder}/cache")
        nbytes = sum(file.stat().st_size for file in Path(folder).glob("cache/*/*"))
    us = 1e6 / COUNTS[feed]
    return {
        "generator": plain[1] * us,
        "filling": cached[0] * us,
        "cached": cached[1] * us,
        "resume": plain_resumed[0] * 1e3,
        "resume_cached": resumed[0] * 1e3,
        "bytes": nbytes / COUNTS[feed],
    }


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Return the results as text."""
    measures = ["generator, us", "filling, us", "of generator", "from cache, us", "of generator"]
    cells = [["median (least-greatest)", *measures, "resume, ms", "from cache, ms"]]
    for feed, rounds in found.items():
        columns: list[Any] = [[one["generator"] for one in rounds]]
        for key in ("filling", "cached"):
            columns.append([one[key] for one in rounds])
            columns.append([one[key] / one["generator"] for one in rounds])
        columns += [[one[key] for one in rounds] for key in ("resume", "resume_cached")]
        cells.append([LABELS[feed], *(str(Spread.of(column)) for column in columns)])
    return "\n".join(aligned(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds (5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.trial:
        print(json.dumps(trial(chosen.trial, chosen.state)))
        return
    try:
        import PIL  # noqa: F401
    except ImportError:
        del LABELS["jpeg"]
    found: dict[str, list[dict[str, float]]] = {feed: [] for feed in LABELS}
    for number in range(chosen.repeats):
        for feed in LABELS:
            progress(f"round {number + 1} of {chosen.repeats}: {LABELS[feed]}")
            found[feed].append(round_of(feed))
    progress("")
    print(table(found))
    if chosen.json:
        chosen.json.write_text(json.dumps({"machine": machine(), "rounds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
