"""TensorSocket and tf.data service for sharing.py: one job, and four of which one comes late, beside Penstock.

Each reads the nearest to the heavy feed of sharing_feed.py that it can, sample after sample. For TensorSocket that is
the same function, in a torch DataLoader with two workers. A Python generator does not leave its process with tf.data
service, so there a sample is a TensorFlow operation that costs a few milliseconds, with two at a time in one worker.

Both keep the latest batches for a job that is behind: TensorSocket those of its rubber band, tf.data service those of
its cache. Here these have room for WINDOW batches, and the late job comes later than that. (With more room, it would
find all of them as long as it is not later still.)
"""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

BATCH = 8
BATCH_NBYTES = BATCH * (28 * 28 * 4 + 8)
WORKERS = 2
WINDOW = 16
"""Batches for which TensorSocket and tf.data service have room."""
LATE = 2.0
"""Seconds after which the late job starts."""
SILENT = 60.0
"""Seconds until a process that says nothing is ended."""
LATE_SILENT = 5.0
"""Seconds after which the late job is left alone if it has got nothing."""
MARK = "sharing: "
LABELS = {"penstock": "Penstock", "tensorsocket": "TensorSocket", "tfdata": "tf.data service"}


# --- in the processes of each loader ---


def penstock_serve() -> None:
    feed = Path(__file__).with_name("sharing_feed.py")
    command = [sys.executable, "-m", "penstock_server", "serve", f"{feed}:numbered", "--bind", "tcp://127.0.0.1:0"]
    with subprocess.Popen([*command, "--workers", str(WORKERS)], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        say(daemon.stdout.readline().split()[1])
        sys.stdin.read()
        daemon.terminate()


def penstock_job(at: str) -> Iterator[int]:
    import penstock

    with penstock.connect(at) as connection:
        for _, numbers in connection.batches():
            yield int(numbers[0])


def tensorsocket_serve() -> None:
    import torch
    from sharing_samples import heavy_sample
    from tensorsocket import TensorProducer

    class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
        def __len__(self) -> int:
            return 1 << 20

        def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
            array, number = heavy_sample(number)
            return torch.from_numpy(array), number

    ports = [free_port() for _ in range(4)]
    loader = torch.utils.data.DataLoader(Samples(), BATCH, num_workers=WORKERS)
    producer = TensorProducer(loader, ports[0], ports[1], (ports[2], ports[3]), rubber_band_pct=WINDOW / len(loader))
    say(json.dumps(ports))
    for _ in producer:
        pass


def tensorsocket_job(at: str) -> Iterator[int]:
    from tensorsocket import TensorConsumer

    ports = json.loads(at)
    for _, numbers in TensorConsumer(ports[0], ports[1], (ports[2], ports[3]), batch_size=BATCH):
        yield int(numbers[0])


def tfdata_serve() -> None:
    import tensorflow as tf
    from tensorflow.core.protobuf import service_config_pb2

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
    address = dispatcher.target.partition("://")[2]
    config = service_config_pb2.WorkerConfig(  # service.WorkerConfig has no argument for the cache, which has 10 GB
        dispatcher_address=address, port=0, protocol="grpc", cross_trainer_cache_size_bytes=WINDOW * BATCH_NBYTES
    )
    worker = service.WorkerServer(config)
    say(dispatcher.target)
    worker.join()


def tfdata_job(at: str) -> Iterator[int]:
    import tensorflow as tf

    service = tf.data.experimental.service

    def sample(number: Any) -> Any:
        value = tf.fill([256, 256], tf.cast(number, tf.float32))
        value = tf.while_loop(lambda step, _: step < 16, lambda step, one: (step + 1, tf.sin(one)), (0, value))[1]
        return value[:28, :28], number

    dataset = tf.data.Dataset.range(1 << 40).map(sample, num_parallel_calls=WORKERS).batch(BATCH).repeat()
    cache = service.CrossTrainerCache(trainer_id=str(os.getpid()))
    off = service.ShardingPolicy.OFF
    dataset = dataset.apply(service.distribute(off, at, job_name="sharing", cross_trainer_cache=cache))
    for _, numbers in dataset:
        yield int(numbers[0])


def run_job(name: str, at: str) -> None:
    """Read from the first line of the input on, until the time in the second. Print when each batch came, and the
    number of its first sample."""
    __import__({"tfdata": "tensorflow"}.get(name, name))
    say("imported")
    sys.stdin.readline()
    ends: list[float] = []
    threading.Thread(target=lambda: ends.append(float(sys.stdin.readline())), daemon=True).start()
    found: list[tuple[float, int]] = []
    for number in globals()[f"{name}_job"](at):
        found.append((time.monotonic(), number))
        if len(found) == 1:
            say("reads")
        if ends and found[-1][0] > ends[0]:
            break
    say(json.dumps(found))
    os._exit(0)  # loaders may wait for one another at the end


def say(line: str) -> None:
    """Print a line for sharing.py. (Libraries print, too.)"""
    print(f"{MARK}{line}", flush=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# --- in sharing.py ---


class Silent(RuntimeError):
    """A process said nothing for too long."""


class Process:
    """A process of a loader: its service, or a job. It is ended with `stack`."""

    def __init__(self, command: list[str], stack: ExitStack) -> None:
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        self._log = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,  # a process group, so that none of its processes survive
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        stack.callback(self._end)

    def tell(self, line: str) -> None:
        """Send it a line."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `line` says why
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def line(self, seconds: float = SILENT) -> str:
        """Return its next line, which must come within `seconds`.

        Raises:
            Silent: it did not come.
            RuntimeError: the process has ended.
        """
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise Silent(f"it was silent for {seconds:.0f} s") from None
        if line is None:
            self._log.seek(0)
            raise RuntimeError((self._log.read().strip().splitlines() or ["it ended without a message"])[-1])
        return line

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._lines.put(line[len(MARK) :].strip())
        self._lines.put(None)

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reader.join()
        with self._process, suppress(BrokenPipeError):
            pass  # closes the pipes and waits


def run(name: str, python: str, seconds: float) -> dict[str, Any]:
    """Measure one job alone, and then four of which one comes late, each time with a service of its own."""
    rates, found = [], []
    for early, late in ((1, 0), (3, 1)):
        with ExitStack() as stack:
            at = Process([python, __file__, name, "serve"], stack).line()
            jobs = [Process([python, __file__, name, "job", at], stack) for _ in range(early + late)]
            for job in jobs:
                job.line()
            for job in jobs[:early]:
                job.tell("begin")
            for job in jobs[:early]:
                job.line()
            for job in jobs[early:]:
                time.sleep(LATE)
                job.tell("begin")
                try:
                    job.line(LATE_SILENT)
                except Silent:
                    jobs.remove(job)
            begin = time.monotonic() + 0.5
            for job in jobs:
                job.tell(str(begin + seconds))
            found = [json.loads(job.line()) for job in jobs]
            rates.append([sum(begin < at <= begin + seconds for at, _ in one) / seconds for one in found])
    places = [[number // BATCH for _, number in one] for one in found]
    return {
        "alone": rates[0][0],
        "per_second": rates[1],
        "missed": [max(some) + 1 - len(set(some)) for some in places],
        "unordered": [sum(after <= before for before, after in pairwise(some)) for some in places],
    }


def measured(torch_python: str, seconds: float, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure all loaders. If one cannot run, its result is the reason."""
    found: dict[str, Any] = {}
    for name, python in (("penstock", sys.executable), ("tensorsocket", torch_python), ("tfdata", sys.executable)):
        progress(f"other loaders: {LABELS[name]}")
        try:
            found[name] = run(name, python, seconds)
        except (RuntimeError, OSError) as error:
            found[name] = str(error)
    return found


def table(found: dict[str, Any]) -> str:
    """Return the results as text."""
    from transport import aligned  # here, since an environment with torch need not have what it imports

    rows = [["1 job, then 4, the last of them late", "alone, batches/s", "each of 4, of that", "slowest"]]
    rows[0] += ["missed by the first three", "by the late one", "in another order"]
    notes = []
    for name, one in found.items():
        if isinstance(one, str):
            notes.append(f"  {LABELS[name]}: could not run, {one}")
            continue
        speeds = [speed / one["alone"] for speed in one["per_second"]]
        missed = [*one["missed"], "all" if len(one["missed"]) == 3 else ""]
        rows.append(
            [
                LABELS[name],
                f"{one['alone']:.1f}",
                f"{mean(speeds):.2f}",
                f"{min(speeds):.2f}",
                ", ".join(map(str, missed[:3])),
                str(missed[3]),
                ", ".join(map(str, one["unordered"])),
            ]
        )
    return "\n".join([*aligned(rows), *notes])


if __name__ == "__main__":
    if sys.argv[2] == "serve":
        globals()[f"{sys.argv[1]}_serve"]()
    else:
        run_job(sys.argv[1], sys.argv[3])
