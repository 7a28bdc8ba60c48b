"""Does the verdict name what limits a feed, and does it help to take its advice?

    python benchmarks/verdicts.py                     # a quarter of an hour, on an idle machine with two cores or more
    python benchmarks/verdicts.py --only lanes,turn --json verdicts.json

Each situation is built on purpose: a daemon with a feed of verdicts_feed.py that is limited by one thing, and trainers
that read it. After some seconds `penstock status` must name that limit for the trainer that waits. Where the verdict
has an advice that can be taken, the same is measured with the advice taken. The table has the speed before and after,
and what the verdict had promised at most. The exit code is 1 if a verdict is wrong, or an advice does not help.

Trainers are processes that read NumPy batches and sleep for their step. A slow network is a proxy
(tests/fakes/fault_proxy.py), other work is processes that compute, and a slow host is a `penstock join` whose samples
take longer. A CPU quota needs root and cgroups of version 1 or 2, and is left out elsewhere.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transport import aligned, machine, progress

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.fakes.fault_proxy import FaultProxy

FEEDS = Path(__file__).with_name("verdicts_feed.py")
PENSTOCK = [sys.executable, "-m", "penstock_server"]


@dataclass(frozen=True)
class Setup:
    """How a feed is served and read.

    Attributes:
        feed: a feed of verdicts_feed.py.
        workers: workers of the daemon.
        options: further options of `penstock serve`.
        steps: the seconds of a step of each trainer; several trainers are ranks.
        burst, rest: after every `burst` steps each trainer sleeps for `rest` seconds.
        throttle: bytes per second of the network; None: shared memory.
        load: how many processes compute beside it.
        quota: CPUs that the cgroup of daemon and workers allows; None: no quota.
        slow_host: further seconds for each sample on a host with two workers that joins; None: no host.
        during: called with the daemon's process and its URL when trainers read.
    """

    feed: str
    workers: int = 2
    options: tuple[str, ...] = ()
    steps: tuple[float, ...] = (0.0,)
    burst: int = 10
    rest: float = 0.0
    throttle: int | None = None
    load: int = 0
    quota: float | None = None
    slow_host: float | None = None
    during: Callable[[subprocess.Popen[Any], str], None] | None = None


@dataclass(frozen=True)
class Situation:
    """A setup, its one right verdict (a limit), the advice taken, and by how much that must help at least."""

    name: str
    limit: str
    setup: Setup
    advice: Setup | None = None
    gain: float = 1.2


def _scale(count: int) -> Callable[[subprocess.Popen[Any], str], None]:
    def during(daemon: subprocess.Popen[Any], url: str) -> None:
        subprocess.run([*PENSTOCK, "scale", url, str(count)], check=True, stdout=subprocess.DEVNULL)

    return during


def _stop_a_worker(daemon: subprocess.Popen[Any], url: str) -> None:
    workers = [one for one in _status(url)["workers"] if one["ready"]]
    os.kill(workers[0]["pid"], signal.SIGSTOP)


SLOW = Setup("slow_generator")
COMPUTES = Setup("computes_feed", workers=1)
SITUATIONS = [
    Situation("slow generator", "generator", SLOW, replace(SLOW, workers=4), 1.6),
    Situation(
        "slow generator, fast order", "generator", Setup("slow_in_any_order"), Setup("slow_in_any_order", 4), 1.6
    ),
    Situation("slow indexable feed", "generator", Setup("slow_items"), Setup("slow_items", 4), 1.6),
    Situation("one worker that computes", "generator", COMPUTES, replace(COMPUTES, workers=2)),
    Situation("more workers than CPUs", "cpus", replace(COMPUTES, workers=2 * (os.cpu_count() or 2))),
    Situation("Python numbers", "collating", Setup("python_numbers", 1), Setup("whole_batches", 1)),
    Situation("one split", "lanes", Setup("one_split", 3), Setup("three_splits", 3), 2),
    Situation("two lanes", "lanes", Setup("two_lanes", 4), Setup("four_lanes", 4), 1.6),
    Situation("six lanes, four workers", "lanes", Setup("six_lanes", 4), Setup("six_lanes", 6), 1.3),
    Situation("one split is longer", "lanes", Setup("uneven_splits", 8)),
    Situation("long turns", "turn", Setup("long_turns", 4), Setup("short_turns", 4), 2),
    Situation("slow split", "split", Setup("slow_split", 4), Setup("slow_split_in_any_order", 4), 2),
    Situation(
        "slow split, little memory",
        "split",
        Setup("slow_split", 4, ("--memory", "50M")),
        Setup("slow_split_in_any_order", 4, ("--memory", "50M")),
        2,
    ),
    Situation("uneven batches", "order", Setup("uneven_batches", 4), Setup("uneven_in_any_order", 4)),
    Situation(
        "little memory",
        "memory",
        Setup("large_batches", 4, ("--memory", "60M")),
        Setup("large_batches", 4, ("--memory", "1G")),
    ),
    Situation("slow trainer", "consumer", replace(SLOW, steps=(0.3,))),
    Situation("uneven steps", "pace", Setup("large_batches", 2, ("--memory", "160M"), burst=60, rest=2.0)),
    Situation("slow network", "transport", Setup("quick_feed", throttle=20_000_000), Setup("quick_feed"), 2),
    Situation("slow rank", "ranks", replace(SLOW, steps=(0.0, 0.4)), replace(SLOW, steps=(0.0, 0.0)), 2),
    Situation("other work", "contention", replace(COMPUTES, load=6), COMPUTES),
    Situation("other work, sleeping feed", "generator", replace(SLOW, load=6), replace(SLOW, load=6, workers=4), 1.6),
    Situation("quota", "cpus", replace(COMPUTES, workers=2, quota=0.5), replace(COMPUTES, workers=2)),
    Situation("pinned workers", "unknown", Setup("pinned_feed", 4), Setup("computes_feed", 4)),
    Situation("first batch takes half a minute", "start", Setup("long_first_batch")),
    Situation("scaled a second ago", "unknown", replace(SLOW, during=_scale(8))),
    Situation("stopped worker", "workers", replace(SLOW, during=_stop_a_worker)),
    Situation("workers die", "workers", Setup("dying", 4)),
    Situation("user code raises", "workers", Setup("raising", 2)),
    Situation("slow splits=", "listing", Setup("slow_listing", 2), Setup("quick_listing", 2), 2),
    Situation("cold cache", "generator", Setup("cached")),
    Situation("slow host", "host", replace(SLOW, slow_host=0.1)),
]


def reader(
    url: str, warmup: float, step: float, burst: int, rest: float, rank: int, ranks: int, transport: Any
) -> None:
    """Read until SIGTERM, then print how many batches came after `warmup` seconds, and how long that was."""
    import penstock

    count, before, since = 0, 0, time.monotonic()

    def end(*_: object) -> None:
        print(json.dumps({"batches": count - before, "seconds": time.monotonic() - since}), flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    place: dict[str, Any] = {"rank": rank, "world_size": ranks} if ranks > 1 else {}
    with penstock.connect(url, transport=transport, **place) as connection:
        print("begun", flush=True)
        warm = time.monotonic() + warmup
        while True:  # epoch after epoch
            for _ in connection.batches():
                count += 1
                if time.monotonic() < warm:
                    before, since = count, time.monotonic()
                time.sleep(step + (rest if count % burst == 0 else 0.0))


def _status(url: str) -> dict[str, Any]:
    said = subprocess.run([*PENSTOCK, "status", url, "--json"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(said)


@contextmanager
def _process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _quota(cpus: float) -> Iterator[Path]:
    """Make a cgroup with this quota. Raise OSError if that is not possible here."""
    v1 = Path("/sys/fs/cgroup/cpu")
    group = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"penstock-verdicts-{os.getpid()}"
    group.mkdir()
    try:
        if v1.is_dir():
            (group / "cpu.cfs_quota_us").write_text(str(int(100_000 * cpus)))
        else:
            (group / "cpu.max").write_text(f"{int(100_000 * cpus)} 100000")
        yield group
    finally:
        for _ in range(50):
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


@contextmanager
def _served(setup: Setup, folder: Path) -> Iterator[tuple[subprocess.Popen[Any], str]]:
    """Serve the feed, and yield the daemon and the URL of the feed for trainers."""
    with ExitStack() as stack:
        command = [*PENSTOCK, "serve", f"{FEEDS}:{setup.feed}", "--workers", str(setup.workers), *setup.options]
        if setup.quota is not None:
            group = stack.enter_context(_quota(setup.quota))
            command = ["sh", "-c", f'echo $$ > "{group}/cgroup.procs"; exec "$@"', "sh", *command]
        env = {**os.environ, "CACHE": str(folder)}
        daemon = stack.enter_context(
            _process(
                [*command, "--bind", "tcp://127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
            )
        )
        assert daemon.stdout is not None
        url = daemon.stdout.readline().split()[1]
        for _ in range(setup.load):
            stack.enter_context(_process([sys.executable, "-c", "while True: pass"]))
        if setup.slow_host is not None:
            endpoint = url.rpartition("/")[0]
            join = [*PENSTOCK, "join", endpoint, f"{FEEDS}:{setup.feed}", "--workers", "2"]
            stack.enter_context(_process(join, stderr=subprocess.DEVNULL, env={**env, "SLOW": str(setup.slow_host)}))
            while not any(host["state"] == "working" for host in _status(url)["hosts"]):
                time.sleep(0.2)
        if setup.throttle is not None:
            port = int(url.rpartition("/")[0].rpartition(":")[2])
            proxy = stack.enter_context(FaultProxy(port))
            proxy.throttle(setup.throttle, 600)
            url = url.replace(f":{port}/", f":{proxy.port}/")
        yield daemon, url


@dataclass
class Found:
    """What was found: batches a second, the verdict on the trainer that waits most, and what its advice promises."""

    speed: float
    limit: str
    headline: str


def measured(setup: Setup, seconds: float) -> Found:
    """Serve and read a setup for `seconds` seconds. The speed is that of the last two thirds."""
    with tempfile.TemporaryDirectory() as folder, _served(setup, Path(folder)) as (daemon, url), ExitStack() as stack:
        ranks, transport = len(setup.steps), "auto" if setup.throttle is None else "tcp"
        trainers = [
            stack.enter_context(
                _process(
                    [sys.executable, __file__, "--reader", url]
                    + [str(word) for word in (seconds / 3, step, setup.burst, setup.rest, rank, ranks, transport)],
                    stdout=subprocess.PIPE,
                )
            )
            for rank, step in enumerate(setup.steps)
        ]
        for trainer in trainers:
            assert trainer.stdout is not None
            trainer.stdout.readline()
        time.sleep(seconds)
        if setup.during is not None:
            setup.during(daemon, url)
        judged = max(_status(url)["streams"], key=lambda stream: stream["waiting"] or 0.0)
        speed = 0.0
        for trainer in trainers:
            trainer.terminate()
            said = json.loads(trainer.communicate()[0])
            speed += said["batches"] / max(said["seconds"], 1e-9)
    return Found(speed, judged["limit"], judged["headline"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="of reading, for each measurement")
    parser.add_argument("--only", help="situations whose names contain one of these words")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--reader", nargs=8, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.reader:
        url, warmup, step, burst, rest, rank, ranks, transport = options.reader
        reader(url, float(warmup), float(step), int(burst), float(rest), int(rank), int(ranks), transport)
        return 0
    words = options.only.split(",") if options.only else [""]
    chosen = [one for one in SITUATIONS if any(word in one.name or word == one.limit for word in words)]
    rows, results, wrong = [["situation", "verdict", "speed", "with the advice", "ratio"]], [], 0
    for number, one in enumerate(chosen):
        progress(f"{number + 1}/{len(chosen)} {one.name}")
        try:
            before = measured(one.setup, options.seconds)
        except OSError as error:
            rows.append([one.name, f"left out: {error}", "", "", ""])
            continue
        after = measured(one.advice, options.seconds) if one.advice is not None else None
        ratio = None if after is None else after.speed / max(before.speed, 1e-9)
        right = before.limit == one.limit and (ratio is None or ratio >= one.gain)
        wrong += not right
        rows.append(
            [
                one.name,
                before.limit if before.limit == one.limit else f"WRONG: {before.limit} for {one.limit}",
                f"{before.speed:.1f}",
                "" if after is None else f"{after.speed:.1f}",
                "" if ratio is None else f"{ratio:.2f}{'' if ratio >= one.gain else ' TOO LITTLE'}",
            ]
        )
        results.append(
            {"situation": one.name, "limit": one.limit, "found": asdict(before), "ratio": ratio, "right": right}
            | ({"advice": asdict(after)} if after is not None else {})
        )
        print(" | ".join([*rows[-1], before.headline]), file=sys.stderr, flush=True)
    print("\n".join(aligned(rows)))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
