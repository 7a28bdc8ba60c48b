"""Processes in network namespaces: those of Penstock, and the common parts of all services of hosts.py."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

import psutil
from tests.processes.namespaces import Network

FOLDER = Path(__file__).resolve().parent
FEED = FOLDER / "hosts_feed.py"
PORT = 5555
HOSTS = ("h1", "h2", "h3", "h4")
START_SECONDS = 180.0
"""Seconds in which a process must be ready, even on a busy machine."""


@dataclass(frozen=True, slots=True)
class Load:
    """The data that hosts make: the feed of hosts_feed.py, and the datasets of hosts_programs.py."""

    sample_bytes: int
    batch: int
    nap: float = 0.0
    split_samples: int = 64
    lanes: int = 16

    @property
    def batch_bytes(self) -> int:
        return self.sample_bytes * self.batch

    def environment(self) -> dict[str, str]:
        return {one.name.upper(): str(getattr(self, one.name)) for one in fields(self)}


@dataclass(frozen=True, slots=True)
class Reading:
    """A trainer's notes while it was measured."""

    times: list[float]
    """The time of each batch, in monotonic seconds."""
    cpu: dict[str, float]
    """CPU seconds, user and system, that each watched process used meanwhile."""

    @property
    def batches_per_second(self) -> float:
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])

    def megabytes_per_second(self, load: Load) -> float:
        return self.batches_per_second * load.batch_bytes / 1e6

    def milliseconds_a_megabyte(self, name: str, load: Load) -> float:
        """Return the CPU time of a watched process."""
        return self.cpu[name] * 1e3 / (len(self.times) * load.batch_bytes / 1e6)


@dataclass(frozen=True, slots=True)
class Started:
    """A process, and the files to which it writes its output and errors."""

    process: subprocess.Popen[bytes]
    output: Path
    errors: Path

    def line(self, pattern: str, seconds: float = START_SECONDS) -> str:
        """Wait until the process prints a line whose start matches this regular expression, and return the line.

        Raises:
            RuntimeError: the process ended, or printed none within `seconds`. The message has its errors.
        """
        deadline = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None
            for line in self.output.read_text().splitlines(keepends=True):
                if re.match(pattern, line) and line.endswith("\n"):
                    return line
            if ended or time.monotonic() > deadline:
                why = f"ended with {self.process.returncode}" if ended else f"is silent for {seconds:.0f} s"
                words = " ".join(map(str, self.process.args[4:]))  # after `ip netns exec NAMESPACE`
                raise RuntimeError(f"no line like {pattern!r}: it {why} ({words})\n{self.errors.read_text()}")
            time.sleep(0.01)


@dataclass
class Trainer:
    """A process that reads. It prints "warm", and the time of each batch when it has read for long enough."""

    started: Started
    watched: dict[str, psutil.Process]
    before: dict[str, float] = field(default_factory=dict)

    def wait_until_warm(self) -> None:
        self.started.line("warm")
        self.before = self._cpu()

    def result(self, seconds: float) -> Reading:
        """Wait until it has read for `seconds`, and at most a minute more. Return its notes."""
        line = self.started.line(r"\[\d", seconds + 60)
        used = {name: after - self.before[name] for name, after in self._cpu().items()}
        self.started.process.wait(60)
        return Reading(json.loads(line), used)

    def _cpu(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self.watched.items()}


@contextmanager
def laid(*names: str) -> Iterator[tuple[Network, ExitStack]]:
    """Yield a network of these machines, and a stack that is closed before the network ends. No signal interrupts
    that."""
    stack = ExitStack()
    try:
        yield stack.enter_context(Network(*names)), stack
    finally:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            stack.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Processes:
    """Processes on the machines of a network. They end with `stack`, and so do all processes that they started.

    Args:
        load: the data that hosts make. Each process has it in its environment.
        network: has "head", where the trainer runs unless it has a separate machine, and the hosts.
        stack: ends before the network does.
    """

    python = sys.executable
    programs = str(FOLDER / "hosts_programs.py")

    def __init__(self, load: Load, network: Network, stack: ExitStack) -> None:
        self.load = load
        self.network = network
        # Ray makes unix sockets in it, whose paths must be short
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-", dir="/tmp")))
        self.environment = {**os.environ, **load.environment(), "PYTHONUNBUFFERED": "1"}
        self.machines: set[str] = set()
        self.started: list[Started] = []
        stack.callback(self.end)

    def start(self, at: str, *words: str, name: str = "") -> Started:
        """Run Python with these words on machine `at`. Its output files are named `name`, or like the machine."""
        self.machines.add(at)
        output, errors = (self.folder / f"{name or at}.{kind}" for kind in ("output", "errors"))
        with open(output, "w") as stdout, open(errors, "w") as stderr:
            process = subprocess.Popen(
                [*self.network[at].within, self.python, *words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,  # so that Ctrl-C reaches this script only, which then ends all of them
            )
        started = Started(process, output, errors)
        self.started.append(started)
        return started

    def trainer(self, at: str, *words: str, watched: dict[str, psutil.Process] | None = None) -> Trainer:
        """Start a trainer of hosts_programs.py on machine `at`."""
        return Trainer(self.start(at, self.programs, *words, name=f"trainer at {at}"), watched or {})

    def end(self) -> None:
        """Kill all processes on the machines that were used."""
        for at in self.machines:
            for pid in self.network[at].pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for started in self.started:
            started.process.wait()


class Cluster(Processes):
    """Penstock: a head, hosts that join it, and trainers. With `keys` all of them have keys."""

    def __init__(self, load: Load, network: Network, stack: ExitStack, *, keys: bool = False) -> None:
        super().__init__(load, network, stack)
        self.hosts: dict[str, psutil.Process] = {}
        self.keys: Path | None = None
        if keys:
            from penstock_server.cli.keygen import generate

            self.keys = self.folder / "keys"
            generate(self.keys, hosts=HOSTS)

    def serve(self, workers: int) -> None:
        """Start the head."""
        bind = f"tcp://{self.network['head'].address}:{PORT}"
        words = ["serve", f"{FEED}:feed", "--bind", bind, "--memory", "1G", "--workers", str(workers)]
        words += ["--insecure"] if self.keys is None else ["--keys", str(self.keys)]
        self.daemon = self.start("head", "-m", "penstock_server", *words)
        self.url = self.daemon.line("ready ").split()[1]
        self.head = psutil.Process(self.daemon.process.pid)

    def join(self, names: Sequence[str], workers: int) -> None:
        """Start hosts, and wait until all their workers are ready."""
        for name in names:
            words = ["join", self.url.rpartition("/")[0], f"{FEED}:feed", "--workers", str(workers)]
            words += ["--memory", "256M", "--host-name", name]
            if self.keys is not None:
                words += ["--keys", str(self.keys / "hosts" / name)]
            self.hosts[name] = psutil.Process(self.start(name, "-m", "penstock_server", *words).process.pid)
        deadline = time.monotonic() + START_SECONDS
        while len(re.findall(r"worker \d+ of host", self.daemon.errors.read_text())) < len(names) * workers:
            if time.monotonic() > deadline:
                logs = "\n".join(one.errors.read_text() for one in self.started)
                raise RuntimeError(f"the hosts did not join:\n{logs}")
            time.sleep(0.05)

    def read(self, seconds: float, at: str = "head") -> Trainer:
        """Start a trainer that reads for `seconds` once it is warm, and watch the processes of head and hosts."""
        keys = [] if self.keys is None else [str(self.keys / "clients" / "trainer")]
        return self.trainer(at, "penstock", str(seconds), self.url, *keys, watched={"head": self.head, **self.hosts})

    def read_as_ranks(self, seconds: float, machines: Sequence[str]) -> list[Trainer]:
        """Start a rank on each of these machines."""
        count = str(len(machines))
        return [
            self.trainer(at, "penstock-rank", str(seconds), self.url, str(rank), count)
            for rank, at in enumerate(machines)
        ]

    def kill(self, name: str) -> float:
        """Kill all processes of a host, and return the time of that."""
        processes = [self.hosts[name], *self.hosts[name].children(recursive=True)]
        when = time.monotonic()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return when
