"""What the web page costs: batches a second, and the daemon's CPU time, without --http, with it, and with an open page.

    python benchmarks/page.py [--rounds 5] [--seconds 15]

A reader takes batches of 32 images of 224x224x3 bytes as fast as they come, and then at a steady pace. An open page is
a loop that asks for what the page asks for, so the browser's own CPU time is not part of it. Prints medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil

import penstock
from penstock_server import Feed

WAYS = ("no --http", "--http, nobody looks", "--http, a page is open")
PACE = 0.02
"""Seconds between two batches of a steady reader."""


def images(split: int) -> Iterator[Any]:
    """Yield random pixels: a trivial generator, so that nothing hides what the page costs."""
    image = np.random.default_rng(split).integers(0, 255, (224, 224, 3)).astype(np.uint8)
    for number in range(400):
        yield image, number


feed = Feed(images, splits=range(10000), batch_size=32, lanes=8)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    found: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for number in range(given.rounds):
        for pace in (0.0, PACE):
            for way in WAYS if number % 2 else WAYS[::-1]:
                found.setdefault((way, pace), []).append(measure(way, pace, given.seconds, given.workers))
    for pace in (0.0, PACE):
        print(f"{'as fast as they come' if not pace else f'a batch each {1000 * pace:.0f} ms'}:")
        for way in WAYS:
            rates, used = zip(*found[way, pace], strict=True)
            share = 100 * statistics.median(used)
            print(f"  {way:24} {statistics.median(rates):7.0f} batches/s, {share:5.1f} % of a core for the daemon")


def measure(way: str, pace: float, seconds: float, workers: int) -> tuple[float, float]:
    """Return batches a second, and the CPUs that the daemon used."""
    command = [sys.executable, "-m", "penstock_server", "serve", f"{__file__}:feed", "--bind", "tcp://127.0.0.1:0"]
    command += ["--workers", str(workers), *([] if way == WAYS[0] else ["--http", "0"])]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
        return count / apart, (after.user + after.system - before.user - before.system) / apart
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
    """Take batches for some seconds, and return how many."""
    end = time.perf_counter() + seconds
    for count in itertools.count(1):
        next(batches)
        if pace:
            time.sleep(pace)
        if time.perf_counter() > end:
            return count
    raise AssertionError("never here")


def look(address: str, stop: threading.Event) -> None:
    """Ask as the page does: for everything new once a second, for a preview every three seconds."""
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
