"""What does the web page cost? Batches a second and the daemon's CPU time without --http, with it, and with an open
page.

    python benchmarks/page.py [--rounds 5] [--seconds 5] [--json FILE]

A reader takes batches as fast as they come, from pipelines of pipelines.py, and from a generator that does no work, so
that nothing hides the cost of the page. The latter is also read at a steady pace. An open page is a loop that sends the
page's requests, so the browser's own CPU time does not count. The three ways take turns, and ratios are taken within a
round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pipelines_data
import psutil
from measure import Quartiles, ratios
from transport import aligned, machine

import penstock
from penstock_server import Feed

WAYS = ("no --http", "--http", "open page")
PACE = 0.02
"""Seconds between two batches of a steady reader."""

FOLDER = Path(__file__).resolve().parent
CASES = {
    "images": (f"{FOLDER}/loaders/penstock_feed.py:feed", 0.0),
    "rotate": (f"{FOLDER}/loaders/penstock_feed.py:feed", 0.0),
    "small": (f"{FOLDER}/loaders/penstock_feed.py:feed", 0.0),
    "no work": (f"{__file__}:feed", 0.0),
    f"no work, a batch each {1000 * PACE:.0f} ms": (f"{__file__}:feed", PACE),
}
"""The feed of each case, and the seconds between two batches. The first three are pipelines."""


def pixels(split: int) -> Iterator[Any]:
    """Yield the same image again and again."""
    image = np.random.default_rng(split).integers(0, 255, (224, 224, 3)).astype(np.uint8)
    for number in range(400):
        yield image, number


feed = Feed(pixels, splits=range(10000), batch_size=32, lanes=8)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    given = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "trial_seconds": given.seconds, "cases": {}}
    with tempfile.TemporaryDirectory(prefix="pipelines-") as data:
        pipelines_data.write(Path(data))
        for case in CASES:
            runs = report["cases"][case] = {way: [] for way in WAYS}
            for number in range(given.rounds):
                for way in WAYS if number % 2 else WAYS[::-1]:
                    runs[way].append(measure(case, way, given.seconds, given.workers, data))
            print(case, *(f"{Quartiles.of([run['per_second'] for run in runs[way]])}" for way in WAYS), sep="  ")
    print(table(report))
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n")


def table(report: dict[str, Any]) -> str:
    """Return as text the batches a second without the server, the ratios with it, and the daemon's share of a core."""
    rows = [["", "batches/s", *(f"{way}, over that" for way in WAYS[1:]), *(f"daemon: {way}" for way in WAYS)]]
    for case, runs in report["cases"].items():
        without = runs[WAYS[0]]
        speeds = [str(Quartiles.of([run["per_second"] for run in without]))]
        speeds += [f"{Quartiles.of(ratios(runs[way], without)).median:.3f}" for way in WAYS[1:]]
        used = [f"{100 * Quartiles.of([run['daemon_cpu'] for run in runs[way]]).median:.1f} %" for way in WAYS]
        rows.append([case, *speeds, *used])
    return "\n".join(aligned(rows))


def measure(case: str, way: str, seconds: float, workers: int, data: str) -> dict[str, float]:
    """Return batches a second, and the number of CPUs that the daemon used."""
    target, pace = CASES[case]
    command = [sys.executable, "-m", "penstock_server", "serve", target, "--bind", "tcp://127.0.0.1:0"]
    command += ["--workers", str(workers), *([] if way == WAYS[0] else ["--http", "0"])]
    paths = os.pathsep.join(filter(None, [str(FOLDER), os.getenv("PYTHONPATH")]))
    environment = {**os.environ, "PIPELINES_DATA": data, "PIPELINE": case, "PYTHONPATH": paths}
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert daemon.stdout is not None
    assert daemon.stderr is not None
    stop, looking = threading.Event(), None
    rest = threading.Thread(target=daemon.stderr.read)  # so that the daemon never waits for us to read its log
    try:
        url = daemon.stdout.readline().split()[1]
        if way == WAYS[2]:
            address = next(line.split()[-1] for line in daemon.stderr if "HTTP server:" in line)
            looking = threading.Thread(target=look, args=(address, stop))
            looking.start()
        rest.start()
        with penstock.connect(url) as connection:
            batches = itertools.chain.from_iterable(connection.batches() for _ in itertools.count())
            read(batches, pace, 2.0)
            before, began = psutil.Process(daemon.pid).cpu_times(), time.perf_counter()
            count = read(batches, pace, seconds)
            apart = time.perf_counter() - began
            after = psutil.Process(daemon.pid).cpu_times()
        used = after.user + after.system - before.user - before.system
        return {"per_second": count / apart, "daemon_cpu": used / apart}
    finally:
        stop.set()
        if looking is not None:
            looking.join()
        daemon.kill()
        daemon.wait()
        rest.join()
        daemon.stdout.close()
        daemon.stderr.close()


def read(batches: Iterator[Any], pace: float, seconds: float) -> int:
    """Take batches for `seconds` seconds, and return their number."""
    end = time.perf_counter() + seconds
    for count in itertools.count(1):
        next(batches)
        if pace:
            time.sleep(pace)
        if time.perf_counter() > end:
            return count
    raise AssertionError("never here")


def look(address: str, stop: threading.Event) -> None:
    """Send requests as the page does: for everything new once a second, for a preview every three seconds."""
    had = {"seconds": 0, "minutes": 0, "looks": 0, "changes": 0}
    number = 0
    for times in itertools.count():
        news = ask(f"{address}/api/live?" + "&".join(f"{key}={value}" for key, value in had.items()))
        had = {name: news["rates"][name]["count"] for name in ("seconds", "minutes")}
        had |= {"looks": news["timeline"]["count"], "changes": news["notices"]["changes"]}
        if times % 3 == 0 and (found := ask(f"{address}/api/preview?feed=feed&number={number}")) is not None:
            number = found["number"]
        if stop.wait(1.0):
            return


def ask(url: str) -> Any:
    """Return the JSON at a URL."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
