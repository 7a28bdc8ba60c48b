"""How long does a stream pause when a worker, the daemon or the link fails? And what do states for resuming cost?

    python benchmarks/recovery.py                       # about a quarter of an hour
    python benchmarks/recovery.py --quick               # about six minutes, fewer repeats
    python benchmarks/recovery.py --only worker,state --json recovery.json

How it is measured:

- Every measurement has its own daemon, since the pause before a worker's restart grows with each death.
- Each sample of the feed sleeps for 5 ms; 8 make a batch. Unless the row says otherwise, a split has 40 samples (0.2
  s), and there are 16 lanes (the default). The trainer reads as fast as batches come, without prefetch and without a
  training step. So the workers are the limit, and no ready batches hide a pause.
- The trainer reads for 1.5 s (longer with long splits and large blocks) plus a random part of a second. Then it causes
  the event, in the reading thread itself, and reads on. The *pause* is the longest time between two batches from then
  on. The *usual* pause is the longest before. *Until then* is the time from the event to the batch that ended the
  pause, which is the one that needed the lost work. *Lost* is the delay of everything after the event: the time that it
  took to read, less the time that as many batches took before.
- *Made again* is a number of samples: each sample is recorded when it is made.
- *Start* is the time from the event until the new worker or daemon is ready. It includes the 0.1 s before a worker is
  restarted, and the imports of the feed's module (a second of sleep in rows that say so). The imports are user code,
  and are also shown separately.

The link is a proxy (tests/fakes/fault_proxy.py). Tables show the median, the least and the greatest.
"""

import argparse
import collections
import itertools
import json
import logging
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

sys.path.append(str(Path(__file__).resolve().parents[1]))

from measure import Spread
from tests.fakes.fault_proxy import FaultProxy
from transport import machine, progress

import penstock
from penstock_server.to_daemon import control

FEED = Path(__file__).with_name("recovery_feed.py")
SAMPLE_SECONDS = 0.005
START_SECONDS = 60.0
RECORD_BYTES = 24


@dataclass(frozen=True, slots=True)
class Case:
    """A row of a table: the event, and the feed whose stream it hits."""

    label: str
    event: str
    workers: int = 2
    transport: str = "local"
    split_seconds: float = 0.2
    lanes: int = 16
    shuffle: int = 0
    import_seconds: float = 0.0
    refusing: float = 0.0
    quiet_seconds: float = 1.5
    """How long the trainer reads before the event. With long splits and large blocks, lanes take a while to get
    going."""
    watch_seconds: float = 3.5
    """How long the trainer reads after the event."""
    repeats: int | None = None


CASES = {
    "worker": [
        Case("nothing (the noise of the figures)", "nothing"),
        Case("one of two workers", "worker"),
        Case("the same, over TCP", "worker", transport="tcp"),
        Case("the only worker", "worker", workers=1),
        Case("the only worker, imports of 1 s", "worker", workers=1, import_seconds=1.0),
    ],
    "daemon": [
        Case("the daemon, shared memory", "daemon", watch_seconds=5),
        Case("the daemon, TCP", "daemon", transport="tcp", watch_seconds=5),
        Case("the daemon, imports of 1 s", "daemon", transport="tcp", import_seconds=1.0, watch_seconds=6),
    ],
    "link": [
        Case("the link, broken and restored at once", "cut", transport="tcp"),
        Case("the same, 4 lanes", "cut", transport="tcp", lanes=4),
        Case("the link, refused for 1 s", "cut", transport="tcp", refusing=1.0, watch_seconds=5),
        Case("the link, silent but unbroken", "freeze", transport="tcp", watch_seconds=35, repeats=2),
    ],
    "replay": [
        *(
            Case(f"splits of {s:g} s", "worker", split_seconds=s, quiet_seconds=1.5 + 10 * s, watch_seconds=3 + 6 * s)
            for s in (0.05, 0.2, 0.5, 2)
        ),
        Case("splits of 0.2 s, shuffle=256", "worker", shuffle=256, quiet_seconds=4, watch_seconds=5),
        Case("splits of 0.2 s, shuffle=1024", "worker", shuffle=1024, quiet_seconds=9, watch_seconds=9),
    ],
}
REPEATS = {"worker": 7, "daemon": 5, "link": 5, "replay": 3}
TITLES = {
    "worker": "SIGKILL of a worker; seconds",
    "daemon": "SIGKILL of the daemon, restarted at once; seconds",
    "link": "The link; seconds",
    "replay": "The cost of a worker's death by the length of the replay (2 workers, 16 lanes); seconds",
}


@dataclass(frozen=True, slots=True)
class Pause:
    """The effect of one event on a stream, in seconds."""

    usual: float
    pause: float
    until_then: float
    lost: float
    made_again: int
    start: float | None = None
    imports: float | None = None


class Daemon:
    """`penstock serve` of the feed for a case. Reads its log continuously."""

    def __init__(self, case: Case, folder: Path, port: int = 0) -> None:
        samples = round(case.split_seconds / SAMPLE_SECONDS)
        command = [sys.executable, "-m", "penstock_server", "serve", f"{FEED}:feed", "--workers", str(case.workers)]
        command += ["--bind", f"tcp://127.0.0.1:{port}", "--memory", "512M"]
        environment = {
            **os.environ,
            "SAMPLE_SECONDS": str(SAMPLE_SECONDS),
            "SPLIT_SAMPLES": str(samples),
            "SPLITS": str(max(4 * case.lanes, 200_000 // samples)),
            "LANES": str(case.lanes),
            "SHUFFLE": str(case.shuffle),
            "IMPORT_SECONDS": str(case.import_seconds),
            "MADE": str(folder / "made"),
        }
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.imports: list[tuple[float, float]] = []
        """When each worker was ready, and how long its imports took."""
        self._lines: collections.deque[str] = collections.deque(maxlen=20)
        self.url = ""
        self.ready = 0.0
        self._answered = threading.Event()
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_log, self._read_url)]
        for reader in self._readers:
            reader.start()

    def wait_ready(self) -> "Daemon":
        self._answered.wait(START_SECONDS)
        if not self.url:
            raise RuntimeError("the daemon did not start:\n" + "\n".join(self._lines))
        return self

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2].partition("/")[0])

    def workers(self) -> list[int]:
        """Wait until all workers are ready, and return their pids."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            workers = control.status(self.url, 10).workers
            if all(worker.ready for worker in workers):
                return [worker.pid for worker in workers]
            time.sleep(0.05)
        raise RuntimeError("the workers did not become ready:\n" + "\n".join(self._lines))

    def end(self) -> None:
        self.process.kill()
        with self.process:
            for reader in self._readers:
                reader.join()

    def _read_url(self) -> None:
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        self.ready = time.monotonic()
        if len(words) == 2 and words[0] == "ready":
            self.url = words[1]
        self._answered.set()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line.rstrip())
            if match := re.search(r"is ready: its imports took ([0-9.]+) s", line):
                self.imports.append((time.monotonic(), float(match[1])))


def measured(case: Case, rng: random.Random) -> Pause:
    """Measure one event."""
    daemons: list[Daemon] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            daemons.append(Daemon(case, folder).wait_ready())
            workers = daemons[0].workers()
            with FaultProxy(daemons[0].port) as proxy:
                url = daemons[0].url if case.event not in ("cut", "freeze") else f"tcp://127.0.0.1:{proxy.port}/feed"
                events: dict[str, Callable[[], object]] = {
                    "nothing": lambda: None,
                    "worker": lambda: os.kill(rng.choice(workers), signal.SIGKILL),
                    "daemon": lambda: (
                        daemons[0].process.kill(),
                        daemons.append(Daemon(case, folder, daemons[0].port)),
                    ),
                    "cut": lambda: proxy.cut(case.refusing),
                    "freeze": proxy.freeze,
                }
                with penstock.connect(url, transport=case.transport) as connection:
                    came, event = arrivals(connection, events[case.event], case, rng)
                    assert connection.stats()["reconnects"] == (case.event not in ("nothing", "worker"))
            start = imports = None
            if case.event == "daemon":
                start = daemons[1].wait_ready().ready - daemons[1].began
                imports = max(seconds for _, seconds in daemons[1].imports)
            elif case.event == "worker":
                ready, imports = next(one for one in daemons[0].imports if one[0] > event)
                start = ready - event
            return pause(came, event, made_again(folder / "made"), start, imports)
        finally:
            for daemon in daemons:
                daemon.end()


def arrivals(
    connection: penstock.Connection, do: Callable[[], object], case: Case, rng: random.Random
) -> tuple[list[float], float]:
    """Return the times at which batches came, and the time at which `do` was called."""
    came: list[float] = []
    event = 0.0
    batches = endless(connection)
    next(batches)
    until = time.monotonic() + case.quiet_seconds + rng.random()
    while True:
        next(batches)
        came.append(time.monotonic())
        if came[-1] >= until:
            if event:
                return came, event
            event = time.monotonic()
            do()
            until = event + case.watch_seconds


def endless(connection: penstock.Connection) -> Iterator[Any]:
    while True:
        yield from connection.batches()


def pause(came: Sequence[float], event: float, again: int, start: float | None, imports: float | None) -> Pause:
    before = [time_ for time_ in came if time_ <= event]
    after = [before[-1], *(time_ for time_ in came if time_ > event)]
    gaps = [late - early for early, late in itertools.pairwise(after)]
    longest = max(range(len(gaps)), key=gaps.__getitem__)
    usual = max(late - early for early, late in itertools.pairwise(before))
    rate = (before[-1] - before[0]) / (len(before) - 1)
    return Pause(
        usual=usual,
        pause=gaps[longest],
        until_then=after[longest + 1] - event,
        lost=after[-1] - after[0] - rate * (len(after) - 1),
        made_again=again,
        start=start,
        imports=imports,
    )


def made_again(path: Path) -> int:
    data = path.read_bytes()
    made = collections.Counter(data[start : start + RECORD_BYTES] for start in range(0, len(data), RECORD_BYTES))
    return sum(made.values()) - len(made)


@contextmanager
def fast_feed(lanes: int, shuffle: int) -> Iterator[str]:
    """Serve a feed whose samples take no time, to measure states."""
    with tempfile.TemporaryDirectory() as name:
        environment = {
            **os.environ,
            "SAMPLE_SECONDS": "0",
            "SPLIT_SAMPLES": "100",
            "SPLITS": str(8 * lanes),
            "LANES": str(lanes),
            "SHUFFLE": str(shuffle),
            "IMPORT_SECONDS": "0",
            "MADE": str(Path(name) / "made"),
        }
        command = [sys.executable, "-m", "penstock_server", "serve", f"{FEED}:feed", "--workers", "2"]
        command += ["--bind", "tcp://127.0.0.1:0", "--memory", "1G", "--log-level", "error"]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[1]
        finally:
            process.kill()
            with process:
                pass


def states(lanes: int, shuffle: int, steps: int) -> dict[str, Any]:
    """Take a state after each step, once all lanes have been visited. Return its size as JSON, and the cost of both."""
    nbytes, micros, json_micros = [], [], []
    with fast_feed(lanes, shuffle) as url, penstock.connect(url) as connection:
        batches = endless(connection)
        for _ in range(2 * lanes):
            next(batches)
        connection.state_dict()
        for _ in range(steps):
            next(batches)
            begun = time.perf_counter()
            state = connection.state_dict()
            made = time.perf_counter()
            text = json.dumps(state)
            micros.append(1e6 * (made - begun))
            json_micros.append(1e6 * (time.perf_counter() - made))
            nbytes.append(len(text))
    return {
        "lanes": lanes,
        "shuffle": shuffle,
        "steps": steps,
        "json_bytes": asdict(Spread.of(nbytes)),
        "state_dict_us": asdict(Spread.of(micros)),
        "json_dumps_us": asdict(Spread.of(json_micros)),
    }


def table(group: str, rows: Sequence[tuple[Case, Sequence[Pause]]]) -> str:
    columns = ["pause", "until_then", "lost", "made_again", "usual", "start", "imports"]
    if group == "link":
        columns = columns[:-2]
    cells = [["", *(column.replace("_", " ") for column in columns)]]
    for case, pauses in rows:
        values = [[getattr(one, column) for one in pauses] for column in columns]
        cells.append([case.label, *("-" if None in some else str(Spread.of(some)) for some in values)])
    return aligned(f"{TITLES[group]}; median (least-greatest)", cells)


def state_table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [["", "bytes of JSON", "state_dict, us", "json.dumps, us"]]
    for row in rows:
        label = f"{row['lanes']} lanes" + (f", shuffle={row['shuffle']}" if row["shuffle"] else "")
        spreads = (Spread(**row[key]) for key in ("json_bytes", "state_dict_us", "json_dumps_us"))
        cells.append([label, *map(str, spreads)])
    return aligned("A state after each step; median (least-greatest)", cells)


def aligned(title: str, cells: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [title]
    for label, *others in cells:
        padded = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join(["", label.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)


def options() -> argparse.Namespace:
    groups = ["state", *CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, help=f"events of each row ({REPEATS}; 3 with --quick)")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--only", help=f"some of {','.join(groups)}")
    parser.add_argument("--seed", type=int, default=0, help="for the times and victims of the events (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    chosen = parser.parse_args()
    chosen.groups = chosen.only.split(",") if chosen.only else groups
    if unknown := set(chosen.groups) - set(groups):
        parser.error(f"--only: no such part: {', '.join(sorted(unknown))}")
    if chosen.repeats is not None and chosen.repeats < 1:
        parser.error("--repeats must be at least 1")
    return chosen


def stop(*_: object) -> NoReturn:
    sys.exit(143)


def main() -> int:
    chosen = options()
    signal.signal(signal.SIGTERM, stop)  # so that `kill` ends the daemons as well
    logging.getLogger("penstock").setLevel(logging.ERROR)
    rng = random.Random(chosen.seed)
    report: dict[str, Any] = {"machine": machine(), "sample_seconds": SAMPLE_SECONDS}
    print(json.dumps(report["machine"]), end="\n\n")
    for group in chosen.groups:
        if group == "state":
            steps = 300 if chosen.quick else 2000
            report[group] = [states(lanes, shuffle, steps) for lanes in (16, 256) for shuffle in (0, 4096)]
            print(state_table(report[group]), end="\n\n", flush=True)
            write(report, chosen.json)
            continue
        repeats = chosen.repeats or (3 if chosen.quick else REPEATS[group])
        rows = []
        loads = {}
        for case in CASES[group]:
            pauses = []
            for repeat in range(min(repeats, case.repeats or repeats)):
                progress(f"{group}: {case.label}, {repeat + 1}")
                pauses.append(measured(case, rng))
            rows.append((case, pauses))
            loads[case.label] = os.getloadavg()[0]  # other work on the machine shows in the figures
        progress("")
        print(table(group, rows), end="\n\n", flush=True)
        report[group] = [
            {
                "case": asdict(case),
                "load": loads[case.label],
                "pause": statistics.median(one.pause for one in pauses),
                "until_then": statistics.median(one.until_then for one in pauses),
                "events": [asdict(one) for one in pauses],
            }
            for case, pauses in rows
        ]
        write(report, chosen.json)
    return 0


def write(report: dict[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
