"""What do further hosts add, and what does the loss of one cost?

    python benchmarks/hosts.py                              # needs root: it makes network namespaces
    python benchmarks/hosts.py --only links,kill --json hosts.json

Each host is a network namespace of this machine (tests/namespaces.py), with a cable to a common bridge. The head is
`penstock serve --workers 0`, so all batches come from hosts that joined, and the trainer runs on the head's machine: it
reads as fast as batches come, over shared memory. Measuring begins 3 s after its first batch.

- **links**: samples are ready-made, so the network is the limit. Each host's cable carries 200 Mbit/s each way, and
  the head's 1000, or 400. *Linear* is the speed of one host times the hosts, but no more than the head's cable.
- **workers**: each sample sleeps for 50 ms, over 4 hosts. CPU-bound code cannot show how hosts scale here, since all
  of them share the CPUs of one machine.
- **kill**: 4 hosts of 4 workers, samples of 10 ms in splits of 0.5 s. One host is killed with all its processes, or its
  cable is cut. *Pause* is the longest time between two batches from then on; *recovered* says when batches came at 0.9
  of the speed of the last 4 s again, in steps of 0.25 s. Until then workers read again what was lost with the host. Of
  three hosts 0.75 of the speed before can be expected.
- **head**: CPU time of the daemon's process, for batches that hosts send, and for batches of its own two workers.

Whether a daemon without hosts became slower is measured by compare.py.
"""

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import psutil
from measure import Spread
from namespaces import Network
from transport import aligned, machine, progress

FEED = Path(__file__).with_name("hosts_feed.py")
PORT = 5555
WARM = 3.0
STEP = 0.25
"""Seconds for which speeds are counted."""
LAST = round(4 / STEP)
NAMES = ("h1", "h2", "h3", "h4")


@dataclass(frozen=True, slots=True)
class Load:
    """A feed of hosts_feed.py."""

    sample_bytes: int
    batch: int
    nap: float = 0.0
    split_samples: int = 64
    lanes: int = 16

    def environment(self) -> dict[str, str]:
        return {name.upper(): str(getattr(self, name)) for name in self.__dataclass_fields__}


@dataclass
class Reading:
    """What a trainer noted while it was measured."""

    times: list[float]
    """Of each batch, in monotonic seconds."""
    head_cpu: float
    """Seconds of the daemon's process meanwhile."""

    @property
    def batches_per_second(self) -> float:
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


@dataclass
class Trainer:
    """A process that reads. `head` is the daemon's."""

    process: subprocess.Popen[str]
    head: psutil.Process
    before: float = 0.0

    def wait_until_warm(self) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "warm\n":
            raise RuntimeError("the trainer failed; see above")
        self.before = _cpu(self.head)

    def result(self) -> Reading:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        used = _cpu(self.head) - self.before
        self.process.wait(60)
        return Reading(json.loads(line), used)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@dataclass
class Cluster:
    """A head, hosts and a trainer for one load; all end with `stack`."""

    load: Load
    stack: ExitStack
    network: Network
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    hosts: dict[str, psutil.Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        self.stack.callback(self._end)
        self.environment = {**os.environ, **self.load.environment()}

    def _start(self, at: str, *words: str, log: str = "") -> subprocess.Popen[str]:
        with open(self.folder / (log or at), "w") as stderr:
            process = subprocess.Popen(
                [*self.network[at].within, sys.executable, *words],
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        assert process.stdout is not None
        self.stack.callback(process.stdout.close)
        self.processes.append(process)
        return process

    def _end(self) -> None:
        """End the head, and with it the hosts."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def serve(self, workers: int) -> None:
        """Start the head."""
        bind = f"tcp://{self.network['head'].address}:{PORT}"
        words = ["-m", "penstock_server", "serve", f"{FEED}:feed", "--bind", bind, "--insecure", "--memory", "1G"]
        process = self._start("head", *words, "--workers", str(workers))
        assert process.stdout is not None
        line = process.stdout.readline().split()
        if not line:
            raise RuntimeError("the head did not start:\n" + (self.folder / "head").read_text())
        self.url = line[1]
        self.head = psutil.Process(process.pid)

    def join(self, names: tuple[str, ...], workers: int) -> None:
        """Start hosts, and wait until they work."""
        for name in names:
            words = ("-m", "penstock_server", "join", self.url.rpartition("/")[0], f"{FEED}:feed")
            words += ("--workers", str(workers), "--memory", "256M", "--host-name", name)
            self.hosts[name] = psutil.Process(self._start(name, *words).pid)
        deadline = time.monotonic() + 60 + workers
        while len(re.findall(r"worker \d+ of host", said := (self.folder / "head").read_text())) < len(names) * workers:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the hosts did not join:\n{said}")
            time.sleep(0.05)

    def read(self, seconds: float) -> Trainer:
        """Start a trainer that reads for so long when it is warm."""
        return Trainer(self._start("head", __file__, "--trainer", self.url, str(seconds), log="trainer"), self.head)

    def kill(self, name: str) -> float:
        """Kill all processes of a host, and return when."""
        processes = [self.hosts[name], *self.hosts[name].children(recursive=True)]
        when = time.monotonic()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return when


def train(url: str, seconds: float) -> None:
    """Print "warm", and then the time of each batch as JSON."""
    import penstock

    times: list[float] = []
    with penstock.connect(url) as connection:
        batches = connection.batches()
        next(batches)
        until = time.monotonic() + WARM
        while time.monotonic() < until:
            next(batches)
        print("warm", flush=True)
        until = time.monotonic() + seconds
        while not times or times[-1] < until:
            next(batches)
            times.append(time.monotonic())
    print(json.dumps([round(one, 5) for one in times]), flush=True)


# --- what is measured ---

PAYLOAD = Load(sample_bytes=64 << 10, batch=16)


def links(repeats: int, seconds: float) -> list[dict[str, Any]]:
    """MB/s that 1, 2 and 4 hosts deliver together."""
    found = [
        {"head_megabits": cap, "hosts": hosts, "megabytes_per_second": []} for cap in (1000, 400) for hosts in (1, 2, 4)
    ]
    for round_ in range(repeats):
        for case in found:
            progress(
                f"links, round {round_ + 1} of {repeats}: {case['hosts']} hosts, the head's {case['head_megabits']}"
            )
            with ExitStack() as stack:
                network = stack.enter_context(Network("head", *NAMES))
                network["head"].limit(case["head_megabits"])
                for name in NAMES:
                    network[name].limit(200)
                cluster = Cluster(PAYLOAD, stack, network)
                cluster.serve(0)
                cluster.join(NAMES[: case["hosts"]], 2)
                trainer = cluster.read(seconds)
                trainer.wait_until_warm()
                speed = trainer.result().batches_per_second * PAYLOAD.sample_bytes * PAYLOAD.batch / 1e6
                case["megabytes_per_second"].append(speed)
    return found


def workers(repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Samples/s of 1 to 64 workers, over up to 4 hosts."""
    load = Load(sample_bytes=1024, batch=8, nap=0.05, lanes=128)
    found = [
        {"hosts": hosts, "workers": hosts * each, "samples_per_second": []}
        for hosts, each in ((1, 1), (4, 1), (4, 4), (4, 16))
    ]
    for round_ in range(repeats):
        for case in found:
            progress(f"workers, round {round_ + 1} of {repeats}: {case['workers']}")
            with ExitStack() as stack:
                cluster = Cluster(load, stack, stack.enter_context(Network("head", *NAMES)))
                cluster.serve(0)
                cluster.join(NAMES[: case["hosts"]], case["workers"] // case["hosts"])
                trainer = cluster.read(seconds)
                trainer.wait_until_warm()
                case["samples_per_second"].append(trainer.result().batches_per_second * load.batch)
    return found


def kill(repeats: int) -> list[dict[str, Any]]:
    """What a trainer notices when one of four hosts is lost."""
    load = Load(sample_bytes=16 << 10, batch=8, nap=0.01, split_samples=50, lanes=48)
    found: list[dict[str, Any]] = []
    for event, after, times in (("killed", 10.0, repeats), ("cut off", 26.0, max(1, repeats // 2))):
        runs = []
        for round_ in range(times):
            progress(f"kill, round {round_ + 1} of {times}: {event}")
            with ExitStack() as stack:
                network = stack.enter_context(Network("head", *NAMES))
                cluster = Cluster(load, stack, network)
                cluster.serve(0)
                cluster.join(NAMES, 4)
                trainer = cluster.read(5.0 + after)
                trainer.wait_until_warm()
                time.sleep(5.0)
                if event == "killed":
                    when = cluster.kill("h2")
                else:
                    when = time.monotonic()
                    network["h2"].unplug()
                runs.append(effect(trainer.result().times, when, load.batch))
        found.append({"event": event, "runs": runs})
    return found


def effect(times: list[float], when: float, batch: int) -> dict[str, Any]:
    """The pause, and the speed before, after and in steps, in samples/s, of what was read around an event."""
    before = [one for one in times if one < when]
    usual = (len(before) - 1) / (before[-1] - before[0])
    gaps = [later - max(one, when) for one, later in itertools.pairwise(times) if later > when]
    steps = [0] * int((times[-1] - when) / STEP)
    for one in times:
        if one > when and (one - when) / STEP < len(steps):
            steps[int((one - when) / STEP)] += 1
    speeds = [count / STEP for count in steps]
    return {
        "before": usual * batch,
        "after": statistics.mean(speeds[-LAST:]) * batch,
        "pause": max(gaps),
        "recovered": recovered(speeds),
        "steps": [speed * batch for speed in speeds],
    }


def recovered(speeds: list[float]) -> float:
    """Return the seconds until the speed, over a second, is 0.9 of that of the last 4 seconds."""
    wanted = 0.9 * statistics.mean(speeds[-LAST:])
    second = round(1 / STEP)  # batches come in bursts
    return next(n for n in range(len(speeds)) if statistics.mean(speeds[n : n + second]) >= wanted) * STEP


def head(repeats: int, seconds: float) -> list[dict[str, Any]]:
    """CPU time of the daemon for batches of hosts, and for its own."""
    found = [
        {"source": source, "batch_bytes": size, "runs": []}
        for size in (16 << 10, 1 << 20)
        for source in ("hosts", "own")
    ]
    for round_ in range(repeats):
        for case in found:
            progress(f"head, round {round_ + 1} of {repeats}: {case['source']}, {case['batch_bytes']} B")
            load = Load(sample_bytes=case["batch_bytes"] // 16, batch=16)
            with ExitStack() as stack:
                cluster = Cluster(load, stack, stack.enter_context(Network("head", *NAMES)))
                cluster.serve(0 if case["source"] == "hosts" else 2)
                if case["source"] == "hosts":
                    cluster.join(NAMES[:2], 1)
                trainer = cluster.read(seconds)
                trainer.wait_until_warm()
                reading = trainer.result()
                count = len(reading.times)
                case["runs"].append(
                    {
                        "batches_per_second": reading.batches_per_second,
                        "us_a_batch": reading.head_cpu / count * 1e6,
                        "ms_a_megabyte": reading.head_cpu / count / case["batch_bytes"] * 1e9,
                    }
                )
    return found


# --- what is printed ---


def tables(result: dict[str, Any]) -> list[str]:
    return [TABLES[name](result[name]) for name in TABLES if name in result]


def links_table(found: list[dict[str, Any]]) -> str:
    rows = [["hosts behind 200 Mbit/s each; median (least-greatest)", "MB/s", "of linear"]]
    for case in found:
        one = next(other for other in found if other["head_megabits"] == case["head_megabits"] and other["hosts"] == 1)
        speeds, ones = case["megabytes_per_second"], one["megabytes_per_second"]
        # of the head's cable, as of a host's, what one connection gets
        most = [single * case["head_megabits"] / 200 for single in ones]
        linear = [min(single * case["hosts"], limit) for single, limit in zip(ones, most, strict=True)]
        share = [speed / full for speed, full in zip(speeds, linear, strict=True)]
        label = (
            f"{case['hosts']} host{'s' if case['hosts'] > 1 else ''}, the head's link {case['head_megabits']} Mbit/s"
        )
        rows.append([label, str(Spread.of(speeds)), str(Spread.of(share))])
    return "\n".join(aligned(rows))


def workers_table(found: list[dict[str, Any]]) -> str:
    rows = [["samples of 50 ms; median (least-greatest)", "samples/s", "of 20/s a worker"]]
    for case in found:
        speeds = case["samples_per_second"]
        label = f"{case['workers']} worker{'s' if case['workers'] > 1 else ''} on {case['hosts']} host"
        label += "s" if case["hosts"] > 1 else ""
        rows.append([label, str(Spread.of(speeds)), str(Spread.of([one / case["workers"] / 20 for one in speeds]))])
    return "\n".join(aligned(rows))


def kill_table(found: list[dict[str, Any]]) -> str:
    rows = [
        ["1 of 4 hosts; median (least-greatest)", "samples/s before", "after", "of before", "pause, s", "recovered, s"]
    ]
    steps = []
    for case in found:
        runs = case["runs"]
        values = [[run[key] for run in runs] for key in ("before", "after")]
        values.append([run["after"] / run["before"] for run in runs])
        values += [[run[key] for run in runs] for key in ("pause", "recovered")]
        rows.append([case["event"], *(str(Spread.of(one)) for one in values)])
        first = runs[0]
        width = 1 if case["event"] == "killed" else 8
        speeds = [statistics.mean(first["steps"][n : n + width]) for n in range(0, len(first["steps"]), width)]
        shown = " ".join(f"{speed / first['before']:.1f}" for speed in speeds[:16])
        steps.append(f"{case['event']}: speed over that before, in steps of {STEP * width:g} s from then on: {shown}")
    return "\n".join([*aligned(rows), "", *steps])


def head_table(found: list[dict[str, Any]]) -> str:
    rows = [["CPU of the head's daemon; median (least-greatest)", "us a batch", "ms a MB", "batches/s"]]
    for case in found:
        label = f"batches of {case['batch_bytes'] >> 10} KiB, "
        label += "of two hosts" if case["source"] == "hosts" else "of its own two workers"
        keys = ("us_a_batch", "ms_a_megabyte", "batches_per_second")
        rows.append([label, *(str(Spread.of([run[key] for run in case["runs"]])) for key in keys)])
    return "\n".join(aligned(rows))


TABLES = {
    "links": links_table,
    "workers": workers_table,
    "kill": kill_table,
    "head": head_table,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TABLES), help="groups (all)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (5)")
    parser.add_argument("--seconds", type=float, default=8.0, help="for which a trainer is measured (8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE, beside those in it")
    parser.add_argument("--trainer", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.trainer:
        train(chosen.trainer[0], float(chosen.trainer[1]))
        return 0
    wanted = chosen.only.split(",")
    if not {*wanted} <= {*TABLES}:
        parser.error("--only takes names of " + ",".join(TABLES))
    report: dict[str, Any] = {"machine": machine()}
    if chosen.json and chosen.json.exists():
        report = json.loads(chosen.json.read_text())
    for name in wanted:
        match name:
            case "links":
                report[name] = links(chosen.repeats, chosen.seconds)
            case "workers":
                report[name] = workers(chosen.repeats, chosen.seconds)
            case "kill":
                report[name] = kill(chosen.repeats)
            case "head":
                report[name] = head(chosen.repeats, chosen.seconds)
        progress("")
        print(TABLES[name](report[name]), end="\n\n", flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
