"""How fast do batches get from a worker process into a trainer's TensorFlow tensors?

    python benchmarks/transport.py                      # 1 KiB to 64 MiB, a quarter of an hour
    python benchmarks/transport.py --quick              # fewer sizes, five minutes, wider spread
    python benchmarks/transport.py --batches 1K/1+2+64,256M --reading --latency --repeats 9 --json transport.json

It measures Penstock over shared memory, over TCP and over TCP with keys, a common hand-written solution (msgpack-numpy
over ZMQ), tf.data service, and four limits. Two are limits of the machine: one thread's memcpy, and a raw TCP
connection over loopback. Two are limits of TensorFlow's loops with ready batches: over a constant dataset, and over a
bare `from_generator`.

How it is measured:

- Every contestant has its own trainer process, and its producer in further processes. In one common process their CPU
  times could not be separated, and one contestant's threads, leaked closures and heap would slow the next. All trainers
  of a size, with all its numbers of leaves, start at once and wait. Only one runs at a time. So no figure includes
  importing TensorFlow and connecting.
- A trial is an eager loop over the dataset for a second, and then `Dataset.reduce`, a loop in the graph, over about as
  many batches; with --reading also an eager loop that sums all bytes of each batch. Full buffers are drained before
  each loop, untimed. The batch after each loop is checked byte for byte, also untimed.
- In each round every contestant has one trial, and each round begins with another contestant. Ratios are taken within a
  round, between neighbouring trials: on a shared machine speeds drift by more than many differences that matter. The
  first round warms up and is dropped. Tables show medians and quartiles.
- Trainer CPU is the CPU time of all threads of the trainer's process, user and system, in the first loop, divided by
  its batches. That loop does not read the tensors: a first touch would cost all contestants the same, and hide the
  copies that some avoid.
- All producers send float32 batches made beforehand. They cycle through a dozen different ones (four from 128 MiB on),
  as many as Penstock has slots here, so that large batches come from memory, not from cache. memcpy and raw TCP move as
  many bytes in one piece, whatever the number of leaves.
- Latency (--latency) is measured in separate trainers, whose producers pause before each batch, so that nothing queues.
  It runs from just before the producer yields or sends a batch (which carries that time) until the trainer has its
  tensor, and includes the write into the slot.
- Penstock has its defaults, except for `--memory`, which gives its stream as many slots as memcpy has buffers (twice
  their bytes: a stream may take half of what is free).

Batches of 64 MiB need some 17 GiB of memory for all contestants together, those of 256 MiB 21 GiB.
"""

import argparse
import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, TextIO

from contestants import CONTESTANTS
from contestants.prebuilt import Load
from measure import Quartiles, Trial, ratios

DEFAULT_BATCHES = "1K,100K/2,1M,16M/1+64,64M"
QUICK_BATCHES = "100K/2,16M/1+64,64M"
UNITS = {"K": 1 << 10, "M": 1 << 20}
START_SECONDS = 180.0
PACKAGES = "penstock-loader tensorflow numpy pyzmq msgpack-numpy scipy pillow keras torch grain tensorpack".split()
STOP_SECONDS = 10.0
LEAST_LEAF = 16  # bytes: room for the time of sending
LEAST_PAUSE, SLOWEST = 0.02, 0.4e9  # for latency: seconds between batches, at least; bytes a second, at most
MEMORY_OF_TRAINER = 600 << 20  # bytes, mostly TensorFlow
POOLS = 1.5  # memory of a contestant (batches, slots, buffers), as a multiple of its pool of batches


class Failed(Exception):
    """A contestant cannot run, or stopped running; the text says why."""


class Hung(Failed):
    """A contestant was silent for longer than any step takes."""


class Trainer:
    """One contestant's trainer process, which runs one trial at a time."""

    def __init__(self, process: "subprocess.Popen[str]", log: TextIO) -> None:
        self._process = process
        self._log = log

    def wait_until_ready(self) -> None:
        self.answer(START_SECONDS)

    def trial(self, seconds: float) -> Trial:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the missing answer shows that it is gone
            print(seconds, file=self._process.stdin, flush=True)
        return Trial(**self.answer(120 + 60 * seconds))

    def answer(self, seconds: float) -> Any:
        """Return the process's next line, decoded. It must come within `seconds`."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise Hung(f"no answer within {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            lines = self._log.read().strip().splitlines()
            raise Failed(lines[-1] if lines else "it ended without a message")
        return json.loads(line)


@contextmanager
def trainer(script: str, *arguments: object) -> Iterator[Trainer]:
    """Start a trainer, a script of this folder. On exit, end it and every process that it started."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # a process group, so that none of its processes survive
        )
        try:
            yield Trainer(process, log)
            process.communicate(timeout=STOP_SECONDS)  # at the end of its input it stops everything that it started
        except subprocess.TimeoutExpired:
            pass  # TensorFlow's autotuning sometimes delays the end of an iterator for a minute
        finally:  # after an interrupt, at once
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with process:
                pass  # closes the pipes and waits


def measured(
    names: Sequence[str], loads: Sequence[Load], ways: Sequence[str], repeats: int, seconds: float
) -> list[dict[str, Any]]:
    """Measure these loads, all of one size, side by side, and return an entry for each, as plain JSON.

    An entry has the trials of the contestants that ran, and the reasons of those that did not, by name. The limits of
    the machine, which have no leaves, run once.
    """
    entries: list[dict[str, Any]] = [
        {"bytes": load.nbytes, "leaves": load.leaves, "results": {}, "skipped": {}} for load in loads
    ]
    running = []
    with ExitStack() as stack:
        for entry, load in zip(entries, loads, strict=True):
            for name in names:
                if CONTESTANTS[name].tensors:
                    process = trainer("trainer.py", name, load.text(), ",".join(ways))
                elif entry is entries[0]:
                    own = (way for way in ways if way != "reduce")
                    process = trainer("trainer.py", name, replace(load, leaves=1).text(), ",".join(own))
                else:
                    continue
                running.append((entry, name, stack.enter_context(process)))
        for starting in list(running):
            entry, name, process = starting
            progress(f"{title(entry)}: starting {CONTESTANTS[name].label}")
            try:
                process.wait_until_ready()
                entry["results"][name] = []
            except Failed as reason:
                entry["skipped"][name] = str(reason)
                running.remove(starting)
        for round_ in range(repeats + 1):
            first = round_ % max(1, len(running))
            for one in running[first:] + running[:first]:
                entry, name, process = one
                progress(f"{title(entry)}: round {round_} of {repeats}, {name}")
                try:
                    trial = process.trial(seconds)
                except Failed as reason:
                    entry["skipped"][name] = str(reason)
                    del entry["results"][name]
                    running.remove(one)
                    continue
                if round_ > 0:
                    entry["results"][name].append(asdict(trial))
        progress(f"{title(entries[0])}: stopping")
    progress("")
    for entry in entries[1:]:
        for part in ("results", "skipped"):
            yardsticks = {name: found for name, found in entries[0][part].items() if not CONTESTANTS[name].tensors}
            entry[part] = {**yardsticks, **entry[part]}
    return entries


def with_latency(entries: Sequence[dict[str, Any]], paced: Sequence[dict[str, Any]]) -> None:
    """Add the latency, which was measured in another run, to the trials."""
    for entry, other in zip(entries, paced, strict=True):
        for name, trials in entry["results"].items():
            for trial, slow in zip(trials, other["results"].get(name, ()), strict=False):
                trial["latency"] = slow["latency"]
        for name, why in other["skipped"].items():
            entry["skipped"].setdefault(name, f"latency: {why}")


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def values(trials: Sequence[Any], key: str, unit: float = 1.0) -> list[float]:
    """Return a measurement of the trials that have it, times `unit`."""
    return [trial[key] * unit for trial in trials if trial[key] is not None]


def columns(entry: dict[str, Any], name: str) -> dict[str, list[float]]:
    """Return a row of the table: the measurements for each column, by its label."""
    results = entry["results"]
    trials, gigabytes = results[name], entry["bytes"] / 1e9

    def over(unit: str, key: str = "per_second") -> list[float]:
        return ratios(trials, results[unit], key) if unit in results else []

    return {
        "GB/s": values(trials, "per_second", gigabytes),
        "batches/s": values(trials, "per_second"),
        "by reduce": values(trials, "reduce_per_second"),
        "of memcpy": over("memcpy"),
        "of raw TCP": over("loopback"),
        "of the constant": over("constant"),
        "by reduce, of it": over("constant", "reduce_per_second"),
        "CPU, ms a batch": values(trials, "trainer_cpu", 1e3),
        "read, GB/s": values(trials, "read_per_second", gigabytes),
        "latency, ms": values(trials, "latency", 1e3),
    }


def table(entry: dict[str, Any]) -> str:
    """Return one load's table, without empty columns."""
    rows = {name: columns(entry, name) for name in CONTESTANTS if name in entry["results"]}
    heads = [head for head in next(iter(rows.values()), {}) if any(row[head] for row in rows.values())]
    cells = [["", *heads]]
    for name, row in rows.items():
        found = (str(Quartiles.of(row[head])) if row[head] else "-" for head in heads)
        cells.append([CONTESTANTS[name].label, *found])
    lines = [f"{title(entry)}; median (quartiles)", *aligned(cells)]
    lines += [f"  {CONTESTANTS[name].label}: skipped, {why}" for name, why in entry["skipped"].items()]
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            ["", first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        )
        for first, *rest in rows
    ]


def figures(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the targets and their measured figures, as plain JSON."""
    loads = {(entry["bytes"], entry["leaves"]): entry["results"] for entry in entries}

    def trials(name: str, nbytes: int, leaves: int = 1) -> list[Any]:
        return loads.get((nbytes, leaves), {}).get(name, [])

    kib, mib = 1 << 10, 1 << 20
    small = [trials(name, 100 * kib, 2) for name in ("penstock-local", "constant")]
    one, many = trials("penstock-local", 16 * mib), trials("penstock-local", 16 * mib, 64)
    generator = trials("generator", 16 * mib)
    cpu = [(ours["trainer_cpu"] - bare["trainer_cpu"]) * 1e3 for ours, bare in zip(one, generator, strict=False)]
    aims: list[tuple[str, list[float], str, float]] = []
    for nbytes in (16 * mib, 64 * mib):
        shared = ratios(trials("penstock-local", nbytes), trials("memcpy", nbytes))
        aims.append((f"shared memory, GB/s over memcpy's, {size_name(nbytes)}", shared, ">=", 0.8))
    aims.append(("trainer's CPU less bare from_generator's, ms a batch of 16 MiB", cpu, "<=", 0.3))
    for nbytes in (16 * mib, 64 * mib):
        network = ratios(trials("penstock-tcp", nbytes), trials("loopback", nbytes))
        aims.append((f"TCP, GB/s over raw loopback's, {size_name(nbytes)}", network, ">=", 0.85))
        encrypted = ratios(trials("penstock-keys", nbytes), trials("penstock-tcp", nbytes))
        aims.append((f"encrypted, GB/s over unencrypted TCP's, {size_name(nbytes)}", encrypted, ">=", 0.2))
    for way, key in (("eager", "per_second"), ("reduce", "reduce_per_second")):
        aims.append((f"100 KiB, 2 leaves, batches/s over the constant loop's, {way}", ratios(*small, key), ">=", 0.8))
    aims.append(("16 MiB in 64 leaves, time over that of one leaf", ratios(one, many), "<=", 1.5))
    found = []
    for name, measured_, sign, bound in aims:
        if measured_:
            spread = Quartiles.of(measured_)
            reached = spread.median >= bound if sign == ">=" else spread.median <= bound
            found.append({"name": name, **asdict(spread), "target": f"{sign} {bound}", "reached": reached})
    return found


def figures_table(found: Sequence[dict[str, Any]]) -> str:
    rows = [["figure", "measured", "target", "reached"]]
    for one in found:
        spread = Quartiles(one["median"], one["lower"], one["upper"])
        rows.append([one["name"], str(spread), one["target"], "yes" if one["reached"] else "no"])
    return "\n".join(aligned(rows))


def machine() -> dict[str, object]:
    """Return the machine and the versions that were measured, for readers of the figures."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    versions = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
    }


def available_memory() -> int:
    """Return the bytes that are available without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def loads_of(text: str) -> list[Load]:
    """Parse loads such as "100K" or "16M/1+64". Raises ArgumentTypeError, which `argparse` shows, if they are
    invalid."""
    size, _, counts = text.partition("/")
    number, unit = size[:-1], size[-1:].upper()
    leaves = counts.split("+") if counts else ["1"]
    if not number.isdigit() or unit not in UNITS or not all(count.isdigit() and int(count) for count in leaves):
        raise argparse.ArgumentTypeError(f"expected a size and numbers of leaves, such as 100K or 16M/1+64: {text!r}")
    loads = [Load(int(number) * UNITS[unit], int(count)) for count in leaves]
    if any(load.nbytes % (LEAST_LEAF * load.leaves) for load in loads) or not loads[0].nbytes:
        raise argparse.ArgumentTypeError(f"{text}: a leaf must have a positive multiple of {LEAST_LEAF} bytes")
    return loads


def size_name(size: int) -> str:
    return f"{size >> 20} MiB" if size % (1 << 20) == 0 else f"{size / 1024:g} KiB"


def title(entry: dict[str, Any]) -> str:
    leaves = f" in {entry['leaves']} leaves" if entry["leaves"] > 1 else ""
    return f"{size_name(entry['bytes'])} a batch{leaves}"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--batches",
        help="sizes of batches, and numbers of leaves, which run side by side if joined by + "
        f"({DEFAULT_BATCHES}, or {QUICK_BATCHES} with --quick)",
    )
    parser.add_argument("--reading", action="store_true", help="also measure a trainer that reads all bytes")
    parser.add_argument("--latency", action="store_true", help="also measure the time from sending to tensor")
    parser.add_argument("--repeats", type=int, help="rounds that count (5, or 3 with --quick)")
    parser.add_argument("--quick", action="store_true", help="shorter trials, fewer repeats, fewer sizes")
    parser.add_argument("--only", help=f"some of {','.join(CONTESTANTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    chosen = parser.parse_args()
    if chosen.batches is None:
        chosen.batches = QUICK_BATCHES if chosen.quick else DEFAULT_BATCHES
    try:
        chosen.loads = [loads_of(text) for text in chosen.batches.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if chosen.repeats is None:
        chosen.repeats = 3 if chosen.quick else 5
    if chosen.repeats < 1:
        parser.error("--repeats must be at least 1")
    chosen.names = chosen.only.split(",") if chosen.only else list(CONTESTANTS)
    if unknown := set(chosen.names) - set(CONTESTANTS):
        parser.error(f"--only: no such contestant: {', '.join(sorted(unknown))}")
    return chosen


def memory_needed(names: Sequence[str], loads: Sequence[Load]) -> int:
    """Return the approximate bytes that all these contestants take together."""
    return sum(round(MEMORY_OF_TRAINER + POOLS * load.pool * load.nbytes) for load in loads for _ in names)


def stop(*_: object) -> NoReturn:
    sys.exit(143)


def main() -> int:
    chosen = options()
    signal.signal(signal.SIGTERM, stop)  # so that `kill` ends the trainers as well
    seconds = 0.3 if chosen.quick else 1.0
    ways = ["eager", "reduce", *(["read"] if chosen.reading else [])]
    report: dict[str, Any] = {"machine": machine(), "trial_seconds": seconds, "loads": []}
    print(json.dumps(report["machine"]), end="\n\n")
    complete = True
    for loads in chosen.loads:
        if available_memory() < memory_needed(chosen.names, loads):
            print(f"{size_name(loads[0].nbytes)} a batch: skipped, not enough memory\n")
            complete = False
            continue
        entries = measured(chosen.names, loads, ways, chosen.repeats, seconds)
        if chosen.latency:
            paced = [replace(load, pause=LEAST_PAUSE + load.nbytes / SLOWEST) for load in loads]
            stamped = [name for name in chosen.names if CONTESTANTS[name].paced]
            with_latency(entries, measured(stamped, paced, ["latency"], chosen.repeats, seconds))
        for entry in entries:
            print(table(entry), end="\n\n", flush=True)
            complete = complete and not any(CONTESTANTS[name].required for name in entry["skipped"])
        report["loads"] += entries
        report["figures"] = figures(report["loads"])
        if chosen.json:
            chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    if report.get("figures"):
        print(figures_table(report["figures"]))
    return 0 if complete else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
