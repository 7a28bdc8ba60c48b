"""Several jobs read the same feed: what does each get, and what does it cost, with and without `share=True`?

    python benchmarks/sharing.py --json sharing.json   # four minutes
    python benchmarks/sharing.py --quick               # one minute: does everything work?

Jobs are processes that only read. They connect to one daemon, begin together, and read for the same time. Each has its
first batches uncounted. Cases with `share=True` and `share=False` alternate, each with a fresh daemon. A job is one
process, or several ranks: one case has a single reader, 2 ranks and 4 ranks.

- *heavy*: a sample is 4 ms of Python. *big*: batches of 3 MB that cost little. *small*: batches of 98 KiB of samples
  that cost next to nothing.
- Each process adds up the bytes of each batch and hashes the numbers of its samples while it reads, which counts. The
  streams of all jobs, with sharing and without, must be equal as far as they go. If not, the script fails.
- CPU is divided by the batches that all jobs got together: that of the workers, and that of the daemon, its workers and
  the jobs.
- *Made*: batches that the workers made (in the daemon's status), over those by which the first job went on. *Moves*:
  how often a job connected again, as the daemon let it go on in another stream.
- *One reader*: connections with `share=True` and `share=False` alternate in one process, with one daemon.
- *Mappings*: a slab that others have too is read from a mapping of its own. What does that cost, compared with a
  mapping that is there?
- *Other loaders*: TensorSocket and tf.data service with `cross_trainer_cache`, with one job, and with four of which one
  comes late. They need TensorFlow, or torch and tensorsocket (in an environment of their own: --torch-python).
"""

import argparse
import itertools
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import sharing_others
from measure import Quartiles, Spread
from process_tree import cpu_seconds, memory_bytes
from transport import aligned, machine, progress

import penstock

FEED = Path(__file__).with_name("sharing_feed.py")
FEEDS = {"heavy": "heavy: 4 ms a sample, 8 a batch", "big": "big: 3 MB a batch", "small": "small: 98 KiB a batch"}
JOBS = ((1,), (1,) * 2, (1,) * 4, (1,) * 8, (1, 2, 4))
"""The jobs of each case: how many processes each of them has."""
WAYS = (True, False)
MEMORY = "4G"
WORKERS = 2
SLAB = 4 << 20
POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, which the module mmap does not name."""


# --- a job ---


def digest_of(batch: tuple[np.ndarray, np.ndarray]) -> int:
    """Return the hash of a batch."""
    array, numbers = batch
    return (int(array.reshape(-1).view(np.uint64).sum()) + zlib.crc32(np.ascontiguousarray(numbers))) % (1 << 64)


def job(url: str, options: dict[str, Any]) -> None:
    """Say that it is connected, read from the first line of the input on until the time in that line, and print the
    times and the hashes of all batches as JSON. `options`: of `connect`."""
    with penstock.connect(url, **options) as connection:
        print("connected", flush=True)
        end = float(sys.stdin.readline())
        times: list[float] = []
        digests = []
        try:
            for batch in connection.batches():
                digests.append(digest_of(batch))
                times.append(time.monotonic())
                if times[-1] > end:
                    break
        except penstock.StreamClosed:  # another rank has come to the end, and left
            if time.monotonic() < end:
                raise
    print(json.dumps({"times": times, "digests": digests}))


def reader(url: str) -> None:
    """For each line of the input: read with `share` and for so many seconds, print batches and CPU seconds a second,
    and disconnect after the next line."""
    for line in sys.stdin:
        share, seconds = json.loads(line)
        with penstock.connect(url, share=share) as connection:
            batches = iter(connection.batches())
            for _ in range(10):
                digest_of(next(batches))
            cpu, begun, count = time.process_time(), time.monotonic(), 0
            while (apart := time.monotonic() - begun) < seconds:
                digest_of(next(batches))
                count += 1
            print(json.dumps([count / apart, (time.process_time() - cpu) / count]), flush=True)
            sys.stdin.readline()


# --- the daemon and its jobs ---


class Daemon(NamedTuple):
    """A daemon that runs."""

    url: str
    status: str
    pid: int
    log: Path

    def made(self) -> int:
        """Return how many batches its workers have made."""
        with urllib.request.urlopen(self.status, timeout=30) as answer:
            return int(json.load(answer)["feeds"][0]["made"])


@contextmanager
def serving(feed: str) -> Iterator[Daemon]:
    """Run a daemon that serves the feed."""
    command = [sys.executable, "-m", "penstock_server", "serve", f"{FEED}:{feed}", "--bind", "tcp://127.0.0.1:0"]
    command += ["--workers", str(WORKERS), "--memory", MEMORY, "--http", "0"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("w") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as daemon:
            assert daemon.stdout is not None
            try:
                words = daemon.stdout.readline().split()
                if len(words) != 2:
                    raise RuntimeError(f"the daemon did not start: {log.read_text()}")
                address = re.search(r"HTTP server: (\S+)", log.read_text())
                assert address is not None
                yield Daemon(words[1], f"{address[1].rstrip('/')}/api/status", daemon.pid, log)
            finally:
                daemon.send_signal(signal.SIGINT)
                daemon.send_signal(signal.SIGINT)
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()


@contextmanager
def script(*arguments: str, python: str = sys.executable, file: str = __file__) -> Iterator["subprocess.Popen[str]"]:
    """Run a script of this folder. End it at the end if it has not ended."""
    command = [python, file, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: "subprocess.Popen[str]", line: str) -> None:
    """Send a process a line."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def said(process: "subprocess.Popen[str]") -> str:
    """Return the next line of a process.

    Raises:
        RuntimeError: it has ended.
    """
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{' '.join(map(str, process.args))} ended")  # type: ignore[union-attr]
    return line.strip()


def measured(feed: str, jobs: tuple[int, ...], share: bool, seconds: float, warmup: float) -> dict[str, Any]:
    """Measure one case. `jobs`: how many processes each job has."""
    options: list[dict[str, Any]] = []
    for job, count in enumerate(jobs):
        ranks = [{"rank": rank, "world_size": count, "group": f"job {job}"} for rank in range(count)]
        options += [{"share": share, **(rank if count > 1 else {})} for rank in ranks]
    with serving(feed) as daemon, ExitStack() as stack:
        some = [stack.enter_context(script("--job", daemon.url, json.dumps(one))) for one in options]
        for one in some:
            said(one)
        begin = time.monotonic() + warmup
        end = begin + seconds
        for one in some:
            told(one, str(end + 0.2))
        time.sleep(max(0.0, begin - time.monotonic()))
        before = (time.monotonic(), daemon.made(), cpu_seconds(daemon.pid), cpu_seconds())
        time.sleep(max(0.0, end - time.monotonic()))
        after = (time.monotonic(), daemon.made(), cpu_seconds(daemon.pid), cpu_seconds())
        memory = memory_bytes()
        found = [json.loads(said(one)) for one in some]
        moved = daemon.log.read_text().count(" reads it") - len(options)
    found_of = iter(found)
    times = [[at for _ in range(count) for at in next(found_of)["times"]] for count in jobs]
    counts = [sum(before[0] < at <= after[0] for at in some) for some in times]
    ahead = max(sum(at <= after[0] for at in some) for some in times)
    behind = max(sum(at <= before[0] for at in some) for some in times)
    total = sum(counts)
    return {
        "feed": feed,
        "jobs": len(jobs),
        "processes": jobs,
        "share": share,
        "per_second": [count / (after[0] - before[0]) for count in counts],
        "workers_cpu": (after[2] - before[2]) / total,
        "cpu": (after[3] - before[3]) / total,
        "made": (after[1] - before[1]) / (ahead - behind),
        "memory": memory,
        "moved": moved,
        "streams": [
            (one.get("rank", 0), one.get("world_size", 1), some["digests"])
            for one, some in zip(options, found, strict=True)
        ],
    }


def check(streams: list[tuple[int, int, list[int]]], what: str) -> None:
    """Compare the streams of all processes as far as each two of them go: rank, world size and hashes of batches.

    Raises:
        SystemExit: two differ.
    """
    known: dict[int, int] = {}
    for rank, world, digests in streams:
        for place, digest in enumerate(digests):
            if known.setdefault(place * world + rank, digest) != digest:
                sys.exit(f"{what}: two jobs got different streams, from batch {place * world + rank} on")


def one_reader(feed: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure a single reader: batches a second, its CPU seconds a batch, and bytes of memory, for each way."""
    found: dict[str, Any] = {"feed": feed, **{str(share): [] for share in WAYS}}
    with serving(feed) as daemon, script("--reader", daemon.url) as process:
        for number in range(rounds + 1):
            for share in WAYS if number % 2 else WAYS[::-1]:
                told(process, json.dumps([share, seconds]))
                per_second, cpu = json.loads(said(process))
                memory = memory_bytes()
                told(process, "")
                if number:  # the first round warms up
                    found[str(share)].append({"per_second": per_second, "cpu": cpu, "memory": memory})
    return found


# --- mappings ---


def private_pages(mapping: mmap.mmap, entries: bytearray) -> bool:
    """Return whether a private mapping has pages of its own, because somebody wrote to it. `entries` is a buffer."""
    address = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)
    os.preadv(pagemap, [entries], address // mmap.PAGESIZE * 8)
    os.close(pagemap)
    flags = np.frombuffer(entries, np.uint64) >> np.uint64(61)  # bit 63: present, 62: swapped, 61: of a file
    return bool(((flags > 1) & (flags & np.uint64(1) == 0)).any())


def mappings(rounds: int) -> dict[str, Any]:
    """Return GB/s of `sum` and `copyto` of a slab through each mapping, from before it is mapped until it is unmapped.
    A mapping that cannot be made has the reason instead."""
    fd = os.memfd_create("slab")
    os.ftruncate(fd, SLAB)
    shared, private = mmap.mmap(fd, SLAB, mmap.MAP_SHARED), mmap.mmap(fd, SLAB, mmap.MAP_PRIVATE)
    shared.write(np.random.default_rng(0).bytes(SLAB))
    entries = bytearray(SLAB // mmap.PAGESIZE * 8)
    copy = np.zeros(SLAB // 8, np.uint64)

    def new(flags: int) -> mmap.mmap:
        return mmap.mmap(fd, SLAB, flags)

    def populated() -> mmap.mmap:
        mapping = new(mmap.MAP_PRIVATE)
        mapping.madvise(POPULATE_READ)
        return mapping

    def dropped() -> mmap.mmap:
        private.madvise(mmap.MADV_DONTNEED)
        return private

    def looked_at() -> mmap.mmap:
        return dropped() if private_pages(private, entries) else private

    ways: dict[str, Callable[[], mmap.mmap]] = {
        "a shared mapping that is there": lambda: shared,
        "a new shared mapping": lambda: new(mmap.MAP_SHARED),
        "a new private mapping": lambda: new(mmap.MAP_PRIVATE),
        "the same, with MADV_POPULATE_READ": populated,
        "the same, with MAP_POPULATE": lambda: new(mmap.MAP_PRIVATE | mmap.MAP_POPULATE),
        "a private mapping that is there, after MADV_DONTNEED": dropped,
        "the same, only if /proc/self/pagemap shows that it was written to": looked_at,
    }
    uses: dict[str, Callable[[np.ndarray], Any]] = {"sum": np.sum, "copyto": lambda array: np.copyto(copy, array)}
    found: dict[str, Any] = {name: {use: [] for use in uses} for name in ways}
    for (name, way), (use, call) in itertools.product(ways.items(), uses.items()):
        for number in range(rounds + 3):
            begun = time.perf_counter()
            try:
                mapping = way()
            except OSError as error:  # MADV_POPULATE_READ needs Linux 5.14
                found[name][use] = str(error)
                break
            array = np.frombuffer(mapping, np.uint64)
            call(array)
            del array
            if mapping not in (shared, private):
                mapping.close()
            if number >= 3:  # the first warm up
                found[name][use].append(SLAB / 1e9 / (time.perf_counter() - begun))
    os.close(fd)
    return found


# --- tables ---


def cases_table(cases: list[dict[str, Any]]) -> str:
    """Return the results of one feed as text. The jobs alone are those with share=False."""
    rows = [["jobs", "share", "batches/s of a job", "slowest", "of one alone", "slowest"]]
    rows[0] += ["workers' CPU, ms a batch", "CPU of all, ms a batch", "made", "memory, MiB", "moves"]
    base = next(mean(case["per_second"]) for case in cases if case["jobs"] == 1 and not case["share"])
    for case in sorted(cases, key=lambda case: (max(_processes(case)) > 1, case["jobs"], not case["share"])):
        rate, least = mean(case["per_second"]), min(case["per_second"])
        rows.append(
            [
                label(_processes(case)),
                str(case["share"]),
                f"{rate:.1f}",
                f"{least:.1f}",
                f"{rate / base:.2f}",
                f"{least / base:.2f}",
                f"{1000 * case['workers_cpu']:.3g}",
                f"{1000 * case['cpu']:.3g}",
                f"{case['made']:.2f}",
                f"{case['memory'] / (1 << 20):.0f}",
                str(case["moved"]),
            ]
        )
    return "\n".join([FEEDS[cases[0]["feed"]], *aligned(rows)])


def _processes(case: dict[str, Any]) -> list[int]:
    return list(case.get("processes", [1] * case["jobs"]))


def label(processes: list[int]) -> str:
    """Return the jobs of a case in words, by how many processes each has."""
    ranks = [f"{count} ranks" for count in processes if count > 1]
    return ", ".join([str(processes.count(1)), *ranks])


def alone_table(found: list[dict[str, Any]]) -> str:
    """Return share=True over share=False for one reader, as text."""
    rows = [["one reader, share=True over False; median (least-greatest)", "batches/s", "its CPU a batch", "memory"]]
    for one in found:
        pairs = list(zip(one["True"], one["False"], strict=True))
        ratios = [[a[key] / b[key] for a, b in pairs] for key in ("per_second", "cpu", "memory")]
        rows.append([FEEDS[one["feed"]], *(str(Spread.of(some)) for some in ratios)])
    return "\n".join(aligned(rows))


def mappings_table(found: dict[str, Any]) -> str:
    """Return GB/s through each mapping, as text."""
    rows = [["a slab of 4 MiB, GB/s; median (quartiles)", "sum", "copyto"]]
    for name, uses in found.items():
        rows.append([name, *(some if isinstance(some, str) else str(Quartiles.of(some)) for some in uses.values())])
    return "\n".join(aligned(rows))


def tables(result: dict[str, Any]) -> list[str]:
    """Return all results as text."""
    feeds = [[case for case in result["cases"] if case["feed"] == feed] for feed in FEEDS]
    texts = [*(cases_table(some) for some in feeds if some), alone_table(result["alone"])]
    texts.append(mappings_table(result["mappings"]))
    return texts + ([sharing_others.table(result["others"])] if result["others"] else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short, for some jobs: does everything work?")
    parser.add_argument("--feeds", default=",".join(FEEDS), help="some of heavy, big and small (all)")
    parser.add_argument("--seconds", type=float, help="how long each case is measured (2; 1 with --quick)")
    parser.add_argument(
        "--torch-python", default=sys.executable, help="the Python that imports tensorsocket (this one)"
    )
    parser.add_argument("--no-others", action="store_true", help="leave the other loaders out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    parser.add_argument("--note", help="a sentence for the readers of FILE, such as what else the machine did")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.job:
        job(chosen.job[0], json.loads(chosen.job[1]))
        return
    if chosen.reader:
        reader(chosen.reader)
        return
    seconds = chosen.seconds or (1.0 if chosen.quick else 2.0)
    rounds = 3 if chosen.quick else 7
    feeds = chosen.feeds.split(",")
    result: dict[str, Any] = {"machine": machine(), "workers": WORKERS, "seconds": seconds, "cases": [], "alone": []}
    if chosen.note:
        result["note"] = chosen.note
    for feed in feeds:
        streams = []
        for number, jobs in enumerate(JOBS[::2] if chosen.quick else JOBS):
            for share in WAYS if number % 2 else WAYS[::-1]:
                progress(f"{feed}, {label([*jobs])} jobs, share={share}")
                case = measured(feed, jobs, share, seconds, warmup=1.0)
                streams += case.pop("streams")
                result["cases"].append(case)
        check(streams, feed)
    for feed in feeds:
        progress(f"{feed}, one reader")
        result["alone"].append(one_reader(feed, rounds, seconds / 4))
    progress("mappings")
    result["mappings"] = mappings(50 if chosen.quick else 200)
    result["others"] = {} if chosen.no_others else sharing_others.measured(chosen.torch_python, seconds, progress)
    progress("")
    print("\n\n".join(tables(result)))
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
