"""How fast is a generator that cannot be divided, with a transform, compared with a plain loop over both?

    python benchmarks/undivided.py --json undivided.json

A sample takes 2 ms of CPU time, of which the generator takes a part. A plain loop takes samples and transforms them in
one process. Penstock's workers each run the whole generator, once for all of their lanes, and divide the transforms
(`docs/decisions/a-worker-runs-a-generator-once-for-its-lanes.md`). "Apart": each lane runs the
generator itself, as with samples that cannot be copied. With W workers and a part s for the generator, 1 / (s + (1 - s)
/ W) of the plain loop is the best that is possible.

The cases alternate, and ratios are taken within a round.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

from measure import Spread
from transport import aligned, machine, progress

import penstock

FEED = Path(__file__).with_name("undivided_feed.py")
SHARES = (0.1, 0.25, 0.5)
WORKERS = (1, 2)
SECONDS = 8.0


def plain_loop() -> float:
    """Return the samples per second of a plain loop."""
    from undivided_feed import generate, transform

    samples = generate()
    until = time.monotonic() + SECONDS / 2
    count = 0
    while time.monotonic() < until:
        transform(next(samples))
        count += 1
    return count / (SECONDS / 2)


def served(feed: str, workers: int) -> float:
    """Return the samples per second of a feed, after what is made ahead was read."""
    with penstock.connect(f"{FEED}:{feed}", workers=workers) as connection:
        batches = connection.batches()
        next(batches)
        until = time.monotonic() + SECONDS / 2
        while time.monotonic() < until:
            next(batches)
        began, count = time.monotonic(), 0
        for batch in islice(batches, 1 << 30):
            count += len(batch[1])
            if time.monotonic() > began + SECONDS:
                break
        return count / (time.monotonic() - began)


def trial(case: str, share: float, *, apart: bool) -> float:
    """Measure a case in a process of its own."""
    said = subprocess.run(
        [sys.executable, __file__, "--trial", case],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "SHARE": str(share), "APART": str(int(apart))},
    ).stdout
    return float(json.loads(said.splitlines()[-1]))


def cases() -> dict[str, tuple[str, bool]]:
    """Return the cases by their labels: what a trial measures, and whether each lane runs the generator."""
    found = {}
    for feed in ("in_order", "shuffled"):
        for workers in WORKERS:
            for apart in (False, True):
                label = f"{feed.replace('_', ' ')}, {workers} worker{'s' * (workers > 1)}{', apart' * apart}"
                found[label] = f"{feed} {workers}", apart
    return found


def table(rounds: list[dict[str, dict[str, float]]]) -> str:
    """Return the results as text: of the plain loop, by the generator's part of the time."""
    cells = [["of a plain loop", *(f"generator {share:.0%}" for share in SHARES)]]
    for workers in WORKERS:
        best = [f"{1 / (share + (1 - share) / workers):.2f}" for share in SHARES]
        cells.append([f"possible, {workers} worker{'s' * (workers > 1)}", *best])
    for label in cases():
        ratios = [[one[str(share)][label] / one[str(share)]["plain"] for one in rounds] for share in SHARES]
        cells.append([label, *(str(Spread.of(each)) for each in ratios)])
    return "\n".join(aligned(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="rounds (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.trial:
        feed, _, workers = chosen.trial.partition(" ")
        print(json.dumps(served(feed, int(workers)) if workers else plain_loop()))
        return
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(chosen.repeats):
        rounds.append({})
        for share in SHARES:
            progress(f"round {number + 1} of {chosen.repeats}: the generator takes {share:.0%}")
            found = rounds[-1][str(share)] = {"plain": trial("plain", share, apart=False)}
            for label, (case, apart) in cases().items():
                found[label] = trial(case, share, apart=apart)
    progress("")
    print(table(rounds))
    if chosen.json:
        chosen.json.write_text(json.dumps({"machine": machine(), "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
