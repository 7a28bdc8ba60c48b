"""How fast do batches get from a worker process into a trainer's TensorFlow tensors?

    python benchmarks/transport.py                      # all sizes, about five minutes
    python benchmarks/transport.py --quick              # about two minutes, wider spread
    python benchmarks/transport.py --sizes 16M --json transport.json

It measures Penstock over shared memory and over TCP and, beside it, what is often written by hand
(msgpack-numpy over ZMQ), tf.data service, and two yardsticks that say what the machine can do:
one thread's memcpy, and a raw TCP connection over loopback.

How it is measured:

- Every contestant has a trainer process of its own, and its producer in further processes. In one
  common process the CPU time could not be told apart, and one contestant's threads, leaked closures
  and heap would slow the next. All trainers of a size are started at once and wait; only one runs
  at a time, so importing TensorFlow and connecting are not part of any figure.
- A turn is an eager loop over the dataset for a second. What lay ready in buffers at its start is
  drained first, untimed. The last batch of a turn is checked byte for byte after the clock stopped.
- In each round every contestant has one turn, each round beginning with another one. Ratios are
  taken within a round, between turns that are seconds apart: on a shared machine speeds drift by
  more than many differences that matter. The first round warms up and is dropped. Medians are
  shown, with the least and the greatest.
- Trainer CPU is the CPU time of all threads of the trainer's process, user and system, over the
  number of batches. The tensors are not read: a copy that some way of moving avoids is not made up
  for by a first touch that all would pay.
- All producers send float32 batches that they made before. They send a dozen different ones in
  turn, as many as Penstock has slots here, so that large batches come from memory, not from cache.

Batches of 64 MiB need some 11 GiB of memory for all contestants together.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, TextIO

from contestants import CONTESTANTS, prebuilt
from measure import Summary, Turn, summary

UNITS = {"K": 1 << 10, "M": 1 << 20}
START_SECONDS = 180.0
PACKAGES = "penstock tensorflow numpy pyzmq msgpack-numpy scipy pillow keras torch grain tensorpack".split()
STOP_SECONDS = 10.0
MEMORY_OF_PROCESSES = 4 << 30  # all contestants together; most of it is TensorFlow, seven times
MEMORY_PER_BATCH_BYTE = 110  # their pools, slots and buffers


class Failed(Exception):
    """A contestant cannot run, or stopped running; the text says why."""


class Hung(Failed):
    """It did nothing for longer than anything takes."""


class Trainer:
    """One contestant's trainer process, asked for one turn at a time."""

    def __init__(self, process: "subprocess.Popen[str]", log: TextIO) -> None:
        self._process = process
        self._log = log

    def wait_until_ready(self) -> None:
        self.answer(START_SECONDS)

    def turn(self, seconds: float) -> Turn:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the missing answer says that it is gone
            print(seconds, file=self._process.stdin, flush=True)
        return Turn(**self.answer(60 + 20 * seconds))

    def answer(self, seconds: float) -> Any:
        """What its next line says, which must come within so many seconds."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise Hung(f"no answer within {seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            lines = self._log.read().strip().splitlines()
            raise Failed(lines[-1] if lines else "it ended without a word")
        return json.loads(line)


@contextmanager
def trainer(script: str, *arguments: object) -> Iterator[Trainer]:
    """Starts a trainer, a script of this folder; on leaving ends it and every process that it started."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # a process group, so that nothing of it can be left behind
        )
        try:
            yield Trainer(process, log)
            process.communicate(timeout=STOP_SECONDS)  # at its input's end it stops all it started
        except subprocess.TimeoutExpired:
            pass  # TensorFlow's autotuning sometimes holds the end of an iterator up for a minute
        finally:  # after an interrupt, at once
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with process:
                pass  # closes the pipes and waits


def measured(
    names: Sequence[str], size: int, repeats: int, seconds: float
) -> tuple[dict[str, Summary], dict[str, str]]:
    """Summaries of those contestants that ran, and the reasons of those that did not, by name."""
    turns: dict[str, list[Turn]] = {}
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        trainers = {name: stack.enter_context(trainer("trainer.py", name, size)) for name in names}
        for name, one in trainers.items():
            progress(f"{size_name(size)}: starting {CONTESTANTS[name].label}")
            try:
                one.wait_until_ready()
                turns[name] = []
            except Failed as reason:
                skipped[name] = str(reason)
        for round_ in range(repeats + 1):
            running = list(turns)
            for position in range(len(running)):
                name = running[(round_ + position) % len(running)]
                progress(f"{size_name(size)}: round {round_} of {repeats}, {name}")
                try:
                    turn = trainers[name].turn(seconds)
                except Failed as reason:
                    skipped[name] = str(reason)
                    del turns[name]
                    continue
                if round_ > 0:
                    turns[name].append(turn)
        progress(f"{size_name(size)}: stopping")
    progress("")
    return {name: summary(own, turns) for name, own in turns.items()}, skipped


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def table(size: int, results: dict[str, Summary], skipped: dict[str, str]) -> str:
    rows: list[tuple[str, ...]] = [("", "GB/s", "of memcpy", "of raw TCP", "trainer CPU, ms a batch")]
    for name, result in results.items():
        columns = (
            result.gb_per_second,
            result.of_memcpy,
            result.of_loopback,
            result.cpu_ms_per_batch,
        )
        rows.append((CONTESTANTS[name].label, *(str(column or "-") for column in columns)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{size_name(size)} a batch; median (least-greatest)"]
    for label, *cells in rows:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join(["", label.ljust(widths[0]), *padded]))
    lines += [f"  {CONTESTANTS[name].label}: skipped, {why}" for name, why in skipped.items()]
    return "\n".join(lines)


def machine() -> dict[str, object]:
    """What a reader of the figures wants to know of where they were taken."""
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
    """Bytes that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def size_of(text: str) -> int:
    """Bytes from "100K" or "16M", which `argparse` shows as an error where they make no batch."""
    number, unit = text[:-1], text[-1:].upper()
    if not number.isdigit() or unit not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 100K or 16M")
    size = int(number) * UNITS[unit]
    if size == 0 or size % prebuilt.ROW_BYTES:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of {prebuilt.ROW_BYTES} bytes")
    return size


def size_name(size: int) -> str:
    return f"{size >> 20} MiB" if size % (1 << 20) == 0 else f"{size / 1024:g} KiB"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="100K,1M,16M,64M", help="of a batch (%(default)s)")
    parser.add_argument("--repeats", type=int, help="rounds that count (5, or 3 with --quick)")
    parser.add_argument("--quick", action="store_true", help="shorter turns, fewer repeats")
    parser.add_argument("--only", help=f"some of {','.join(CONTESTANTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    chosen = parser.parse_args()
    try:
        chosen.sizes = [size_of(text) for text in chosen.sizes.split(",")]
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


def stop(*_: object) -> NoReturn:
    sys.exit(143)


def main() -> int:
    chosen = options()
    signal.signal(signal.SIGTERM, stop)  # so that `kill` ends the trainers as well
    seconds = 0.3 if chosen.quick else 1.0
    report: dict[str, Any] = {"machine": machine(), "turn_seconds": seconds, "sizes": []}
    print(json.dumps(report["machine"]), end="\n\n")
    complete = True
    for size in chosen.sizes:
        if available_memory() < MEMORY_OF_PROCESSES + size * MEMORY_PER_BATCH_BYTE:
            print(f"{size_name(size)} a batch: skipped, not enough memory\n")
            complete = False
            continue
        results, skipped = measured(chosen.names, size, chosen.repeats, seconds)
        print(table(size, results, skipped), end="\n\n", flush=True)
        complete = complete and not any(CONTESTANTS[name].required for name in skipped)
        report["sizes"].append(
            {
                "bytes": size,
                "results": {name: result.as_json() for name, result in results.items()},
                "skipped": skipped,
            }
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if complete else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
