"""tf.data service and Ray Data on the machines of hosts.py: a process for each host, and the trainer at the head."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hosts_cluster import PORT, Load, Processes, Trainer
from tests.processes.namespaces import Network

OBJECT_STORE = 512 << 20
"""Bytes of the object store of each Ray node."""
WORKERS = 2
"""Workers of each host."""


class TfDataService(Processes):
    """A dispatcher at the head, and a worker process on each host, which has as many threads as there are CPUs."""

    def begin(self, names: Sequence[str]) -> None:
        """Start all processes, and wait until the dispatcher knows them."""
        self.dispatcher = f"{self.network['head'].address}:{PORT}"
        dispatcher = self.start("head", self.programs, "tfdata-dispatcher", str(PORT), str(len(names)))
        dispatcher.line("listens")
        for name in names:
            address = self.network[name].address
            self.start(name, self.programs, "tfdata-worker", self.dispatcher, address, str(PORT))
        dispatcher.line("complete")

    def read(self, seconds: float) -> Trainer:
        return self.trainer("head", "tfdata", str(seconds), self.dispatcher)


class RayData(Processes):
    """A raylet on each machine. The head's raylet has no CPUs, so that the hosts do all the work."""

    def __init__(self, load: Load, network: Network, stack: ExitStack, python: str) -> None:
        super().__init__(load, network, stack)
        self.python = python
        slow = {"RAY_agent_register_timeout_ms": "200000", "RAY_raylet_start_wait_time_s": "200"}
        self.environment |= {"RAY_USAGE_STATS_ENABLED": "0", **slow}
        self.cpus = 0

    def begin(self, names: Sequence[str]) -> None:
        """Start all raylets, one after another, since they share a folder here and choose names of sockets in it."""
        self.address = f"{self.network['head'].address}:{PORT}"
        own = ["--head", "--port", str(PORT), "--num-cpus", "0", "--include-dashboard", "false"]
        self._raylet("head", *own, "--temp-dir", str(self.folder / "ray"))
        for name in names:
            self._raylet(name, "--address", self.address, "--num-cpus", str(WORKERS))
        self.cpus = len(names) * WORKERS

    def _raylet(self, at: str, *words: str) -> None:
        place = ("--node-ip-address", self.network[at].address, "--object-store-memory", str(OBJECT_STORE))
        raylet = self.start(at, "-m", "ray.scripts.scripts", "start", "--block", *place, *words)
        raylet.line(".*Ray runtime started")

    def read(self, seconds: float) -> Trainer:
        return self.trainer("head", "ray", str(seconds), self.address, str(self.cpus))


def version(library: str, python: str | Path = sys.executable) -> str:
    """Return the version of a library that `python` imports.

    Raises:
        ImportError: it cannot; the message has the reason.
    """
    code = f"import {library}; print({library.partition('.')[0]}.__version__)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300)
    except OSError as error:
        raise ImportError(f"{python}: {error.strerror}") from None
    if done.returncode:
        raise ImportError(f"{python}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
    return done.stdout.split()[-1]
