"""What do further hosts add, and what does the loss of a host cost?

    python benchmarks/hosts.py                              # needs root: it makes network namespaces
    python benchmarks/hosts.py --only links,kill --json hosts.json
    python benchmarks/hosts.py --quick                      # whether all of it works, in minutes

Each host is a network namespace of this machine (tests/processes/namespaces.py), with a cable to a common bridge. The
head is `penstock serve --workers 0`, so all batches come from hosts that joined, and the trainer runs on the head's
machine: it reads as fast as batches come, over shared memory. The measurement begins 3 s after its first batch.

- **links**: samples are ready-made, so the network is the limit. Each host's cable carries 200 Mbit/s each way, and
  the head's 1000, or 400. *Linear* is the speed of one host times the hosts, but no more than the head's cable.
- **others**: the same with tf.data service and Ray Data, one after the other on the same machines. All have the same
  samples and batches, two workers a host (tf.data service has one process a host, with as many threads as CPUs), each
  sample once, and the trainer at the head. Nothing is compressed: tf.data service's compression is off. Ray Data's
  trainer prefetches two blocks of 16 MiB a host, so that all hosts send at once. Measure it for 20 s, since blocks come
  in bursts. *Linear* is the speed of one host of the same service times the hosts. Ray need not be installed in
  Penstock's environment: `--ray-python` names a Python that has it (`pip install 'ray[data]'`). Services that cannot be
  imported are left out, and the table says so.
- **third**: trainers on a third machine with a cable of 1000 Mbit/s, while the head's cable carries 200 Mbit/s, as much
  as a host's. In each round a trainer at the head reads from the same hosts just before.
- **ranks**: four machines train, each with two workers and a cable of 200 Mbit/s; one is the head. If the number of
  lanes is a multiple of the ranks, each rank's batches are made on its own machine. With one lane fewer they are made
  anywhere.
- **workers**: each sample sleeps for 50 ms, over 4 hosts. CPU-bound code cannot show how hosts scale here, since all
  of them share the CPUs of one machine.
- **kill**: 4 hosts of 4 workers, samples of 10 ms in splits of 0.5 s. One host is killed with all its processes, or its
  cable is cut. *Pause* is the longest time between two batches from then on. *Recovered* says when batches again came
  at 0.9 of the speed of the last 4 s, in steps of 0.25 s. Until then workers replay the work that was lost with the
  host. Three hosts can be expected to reach 0.75 of the speed before.
- **head**: CPU time of the daemon's process for batches that hosts send, and for batches of its own two workers.
- **keys**: a host that joins with keys, so that everything it sends is encrypted, and one without. Cables have no
  limit. The CPUs are the limit, and head, host, workers and trainer share them. The host's CPU time is that of its own
  process, without its workers.

compare.py measures whether a daemon without hosts became slower.
"""

import argparse
import itertools
import json
import signal
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

sys.path.append(str(Path(__file__).resolve().parents[1]))

from hosts_cluster import HOSTS, Cluster, Load, laid
from hosts_others import WORKERS, RayData, TfDataService, version
from hosts_tables import LABELS, STEP, TABLES
from transport import machine, progress

LAST = round(4 / STEP)
PAYLOAD = Load(sample_bytes=64 << 10, batch=16)
COUNTS = (1, 2, 4)
"""Hosts."""


def links(repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Measure the MB/s that 1, 2 and 4 hosts deliver together."""
    found = [
        {"head_megabits": cap, "hosts": hosts, "megabytes_per_second": []} for cap in (1000, 400) for hosts in COUNTS
    ]
    for round_ in range(repeats):
        for case in found:
            progress(
                f"links, round {round_ + 1} of {repeats}: {case['hosts']} hosts, the head's {case['head_megabits']}"
            )
            with laid("head", *HOSTS) as (network, stack):
                network["head"].limit(case["head_megabits"])
                for name in HOSTS:
                    network[name].limit(200)
                cluster = Cluster(PAYLOAD, network, stack)
                cluster.serve(0)
                cluster.join(HOSTS[: case["hosts"]], WORKERS)
                trainer = cluster.read(seconds)
                trainer.wait_until_warm()
                case["megabytes_per_second"].append(trainer.result(seconds).megabytes_per_second(PAYLOAD))
    return found


def others(repeats: int, seconds: float, ray_python: str) -> dict[str, Any]:
    """Measure the MB/s that 1, 2 and 4 hosts deliver through Penstock, tf.data service and Ray Data."""
    versions, left_out = {}, {}
    for loader, library, python in (("tfdata", "tensorflow", sys.executable), ("ray", "ray.data", ray_python)):
        try:
            versions[loader] = version(library, python)
        except ImportError as reason:
            left_out[loader] = str(reason)
            print(f"{LABELS[loader]} is left out: {reason}", file=sys.stderr)
    cases: list[dict[str, Any]] = [
        {"loader": loader, "hosts": hosts, "megabytes_per_second": [], "failures": []}
        for hosts in COUNTS
        for loader in ("penstock", *versions)
    ]
    for round_ in range(repeats):
        for case in cases:
            loader = case["loader"]
            progress(f"others, round {round_ + 1} of {repeats}: {case['hosts']} hosts, {LABELS[loader]}")
            speed = None
            try:
                speed = through(loader, HOSTS[: case["hosts"]], seconds, ray_python)
            except RuntimeError as error:
                if loader == "penstock":
                    raise
                print(f"{LABELS[loader]}, {case['hosts']} hosts: {error}", file=sys.stderr)
                case["failures"].append(str(error).splitlines()[0])
            case["megabytes_per_second"].append(speed)
    return {"versions": versions, "left_out": left_out, "cases": cases}


def through(loader: str, names: tuple[str, ...], seconds: float, ray_python: str) -> float:
    """Measure the MB/s that these hosts deliver through a loader."""
    with laid("head", *names) as (network, stack):
        network["head"].limit(1000)
        for name in names:
            network[name].limit(200)
        service: Cluster | TfDataService | RayData
        if loader == "penstock":
            service = Cluster(PAYLOAD, network, stack)
            service.serve(0)
            service.join(names, WORKERS)
        elif loader == "tfdata":
            service = TfDataService(PAYLOAD, network, stack)
            service.begin(names)
        else:
            service = RayData(PAYLOAD, network, stack, ray_python)
            service.begin(names)
        trainer = service.read(seconds)
        trainer.wait_until_warm()
        return trainer.result(seconds).megabytes_per_second(PAYLOAD)


def third(repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Measure the MB/s of trainers at the head and on a third machine."""
    found: list[dict[str, Any]] = [
        {"hosts": hosts, "at": at, "runs": []} for hosts in COUNTS for at in ("head", "trainer")
    ]
    for round_ in range(repeats):
        for hosts, cases in itertools.groupby(found, key=lambda case: case["hosts"]):
            with laid("head", "trainer", *HOSTS) as (network, stack):
                for name, megabits in (("head", 200), ("trainer", 1000), *((name, 200) for name in HOSTS)):
                    network[name].limit(megabits)
                cluster = Cluster(PAYLOAD, network, stack)
                cluster.serve(0)
                cluster.join(HOSTS[:hosts], WORKERS)
                for case in cases:
                    progress(f"third, round {round_ + 1} of {repeats}: {hosts} hosts, the trainer at {case['at']}")
                    trainer = cluster.read(seconds, at=case["at"])
                    trainer.wait_until_warm()
                    reading = trainer.result(seconds)
                    case["runs"].append(
                        {
                            "megabytes_per_second": reading.megabytes_per_second(PAYLOAD),
                            "head_ms_a_megabyte": reading.milliseconds_a_megabyte("head", PAYLOAD),
                        }
                    )
    return found


def ranks(repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Measure the MB/s that four ranks read together, and the traffic that this causes between machines."""
    found: list[dict[str, Any]] = [{"lanes": lanes, "runs": []} for lanes in (15, 16)]
    machines = ("head", *HOSTS[:3])
    for round_ in range(repeats):
        for case in found:
            progress(f"ranks, round {round_ + 1} of {repeats}: {case['lanes']} lanes")
            load = replace(PAYLOAD, lanes=case["lanes"])
            with laid(*machines) as (network, stack):
                for name in machines:
                    network[name].limit(200)
                cluster = Cluster(load, network, stack)
                cluster.serve(WORKERS)
                cluster.join(machines[1:], WORKERS)
                trainers = cluster.read_as_ranks(seconds, machines)
                for trainer in trainers:
                    trainer.wait_until_warm()
                before = sum(network[name].sent() for name in machines)
                readings = [trainer.result(seconds) for trainer in trainers]
                crossed = sum(network[name].sent() for name in machines) - before
                read = sum(len(reading.times) for reading in readings) * load.batch_bytes
                speed = sum(reading.megabytes_per_second(load) for reading in readings)
                case["runs"].append({"megabytes_per_second": speed, "crossed": crossed / read})
    return found


def workers(repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Measure the samples/s of 1 to 64 workers, over up to 4 hosts."""
    load = Load(sample_bytes=1024, batch=8, nap=0.05, lanes=128)
    found = [
        {"hosts": hosts, "workers": hosts * each, "samples_per_second": []}
        for hosts, each in ((1, 1), (4, 1), (4, 4), (4, 16))
    ]
    for round_ in range(repeats):
        for case in found:
            progress(f"workers, round {round_ + 1} of {repeats}: {case['workers']}")
            with laid("head", *HOSTS) as (network, stack):
                cluster = Cluster(load, network, stack)
                cluster.serve(0)
                cluster.join(HOSTS[: case["hosts"]], case["workers"] // case["hosts"])
                trainer = cluster.read(seconds)
                trainer.wait_until_warm()
                case["samples_per_second"].append(trainer.result(seconds).batches_per_second * load.batch)
    return found


def kill(repeats: int) -> list[dict[str, Any]]:
    """Measure how the loss of one of four hosts affects a trainer."""
    load = Load(sample_bytes=16 << 10, batch=8, nap=0.01, split_samples=50, lanes=48)
    found: list[dict[str, Any]] = []
    for event, after, times in (("killed", 10.0, repeats), ("cut off", 26.0, max(1, repeats // 2))):
        runs = []
        for round_ in range(times):
            progress(f"kill, round {round_ + 1} of {times}: {event}")
            with laid("head", *HOSTS) as (network, stack):
                cluster = Cluster(load, network, stack)
                cluster.serve(0)
                cluster.join(HOSTS, 4)
                trainer = cluster.read(5.0 + after)
                trainer.wait_until_warm()
                time.sleep(5.0)
                if event == "killed":
                    when = cluster.kill("h2")
                else:
                    when = time.monotonic()
                    network["h2"].unplug()
                runs.append(effect(trainer.result(after).times, when, load.batch))
        found.append({"event": event, "runs": runs})
    return found


def effect(times: list[float], when: float, batch: int) -> dict[str, Any]:
    """Return the pause around an event, and the speeds before it, after it and in steps, in samples/s."""
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
    """Measure the daemon's CPU time for batches of hosts, and for its own."""
    found = [
        {"source": source, "batch_bytes": size, "runs": []}
        for size in (16 << 10, 1 << 20)
        for source in ("hosts", "own")
    ]
    for round_ in range(repeats):
        for case in found:
            progress(f"head, round {round_ + 1} of {repeats}: {case['source']}, {case['batch_bytes']} B")
            load = Load(sample_bytes=case["batch_bytes"] // 16, batch=16)
            with laid("head", *HOSTS) as (network, stack):
                cluster = Cluster(load, network, stack)
                cluster.serve(0 if case["source"] == "hosts" else 2)
                if case["source"] == "hosts":
                    cluster.join(HOSTS[:2], 1)
                trainer = cluster.read(seconds)
                trainer.wait_until_warm()
                reading = trainer.result(seconds)
                case["runs"].append(
                    {
                        "batches_per_second": reading.batches_per_second,
                        "us_a_batch": reading.cpu["head"] / len(reading.times) * 1e6,
                        "ms_a_megabyte": reading.milliseconds_a_megabyte("head", load),
                    }
                )
    return found


def keys(repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Measure batches/s and CPU time with a host that joins with keys, and with one without."""
    found: list[dict[str, Any]] = [
        {"batch_bytes": size, "keys": encrypted, "runs": []}
        for size in (100 << 10, 4 << 20)
        for encrypted in (False, True)
    ]
    for round_ in range(repeats):
        for case in found:
            progress(
                f"keys, round {round_ + 1} of {repeats}: {case['batch_bytes']} B, with{'' if case['keys'] else 'out'}"
            )
            load = Load(sample_bytes=case["batch_bytes"] // 16, batch=16)
            with laid("head", "h1") as (network, stack):
                cluster = Cluster(load, network, stack, keys=case["keys"])
                cluster.serve(0)
                cluster.join(HOSTS[:1], WORKERS)
                trainer = cluster.read(seconds)
                trainer.wait_until_warm()
                reading = trainer.result(seconds)
                case["runs"].append(
                    {
                        "batches_per_second": reading.batches_per_second,
                        "head_ms_a_megabyte": reading.milliseconds_a_megabyte("head", load),
                        "host_ms_a_megabyte": reading.milliseconds_a_megabyte("h1", load),
                    }
                )
    return found


def stop(number: int, _: object) -> NoReturn:
    """End in order. Ignore further signals, which must not interrupt that."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", default=",".join(TABLES), help=f"some of {','.join(TABLES)} (all)")
    parser.add_argument("--repeats", type=int, help="rounds (5, or 1 with --quick)")
    parser.add_argument("--seconds", type=float, help="for which a trainer is measured (8, or 2 with --quick)")
    parser.add_argument("--quick", action="store_true", help="one short round: figures mean little")
    parser.add_argument("--ray-python", metavar="PATH", default=sys.executable, help="a Python that has Ray (this one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE, beside those in it")
    chosen = parser.parse_args()
    wanted = chosen.only.split(",")
    if not {*wanted} <= {*TABLES}:
        parser.error("--only takes names of " + ",".join(TABLES))
    repeats = chosen.repeats or (1 if chosen.quick else 5)
    seconds = chosen.seconds or (2.0 if chosen.quick else 8.0)
    report: dict[str, Any] = {"machine": machine()}
    if chosen.json and chosen.json.exists():
        report = json.loads(chosen.json.read_text())
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, stop)
    try:
        with laid("head"):
            pass
    except OSError as error:
        print(f"network namespaces cannot be made here: {error}", file=sys.stderr)
        return 1
    for name in wanted:
        match name:
            case "links":
                report[name] = links(repeats, seconds)
            case "others":
                report[name] = others(repeats, seconds, chosen.ray_python)
            case "third":
                report[name] = third(repeats, seconds)
            case "ranks":
                report[name] = ranks(repeats, seconds)
            case "workers":
                report[name] = workers(repeats, seconds)
            case "kill":
                report[name] = kill(repeats)
            case "head":
                report[name] = head(repeats, seconds)
            case "keys":
                report[name] = keys(repeats, seconds)
        progress("")
        print(TABLES[name](report[name]), end="\n\n", flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
