"""The daemon of a scenario, and the hosts that have joined it.

All of them can be killed or ended, and are then started again, the daemon on the same port."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from penstock_proto.security.keys import ClientKeys, client_keys
from penstock_proto.status.status_shape import Status
from penstock_server.cli import keygen
from penstock_server.status.json_text import json_text
from penstock_server.to_daemon import control
from tests.conftest import Daemon, wait_until
from tests.fakes.fault_proxy import FaultProxy

from . import files
from .scenario import FeedCase

FEEDS = Path(__file__).with_name("feeds.py")


_started: list[Daemon] = []


def end_all() -> None:
    """Kill all daemons at once, whatever this process was doing. Their workers end with them."""
    for daemon in _started:
        if daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.wait()


def workers_of(daemon: psutil.Process) -> list[psutil.Process]:
    """Return the workers of a daemon."""
    found = []
    for process in daemon.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("penstock-w"):
                found.append(process)
    return found


class Service:
    """`penstock serve` with these feeds. `folder` has its counts of failures, its state file and its logs.

    Args:
        hosts: this many hosts join it, with a worker each.
        keys: whether it has keys.
        host_slots: the hosts' memory, in slots of the feed with the largest; None: it is ample.

    Attributes:
        keys: the folder of a client's keys; None without keys.
        links: the connections of the hosts to the daemon.
    """

    def __init__(
        self,
        cases: Sequence[FeedCase],
        folder: Path,
        *,
        workers: int,
        memory: float | None = None,
        hang_timeout: float | None = None,
        state: bool = False,
        hosts: int = 0,
        keys: bool = False,
        host_slots: int | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._feeds = [f"{FEEDS}:feed{number}" for number in range(len(cases))]
        self._folder = folder
        for case in cases:
            if case.kind == "file":
                files.write(case, folder)
        (folder / "feeds.json").write_text(json.dumps([asdict(case) for case in cases]))
        self._options: dict[str, Any] = {"hang-timeout": hang_timeout}
        if state:
            self._options["state"] = folder / "state.sqlite"
        self.keys: Path | None = None
        if keys:
            keygen.generate(folder / "keys", ["trainer"], [f"host{number}" for number in range(hosts)])
            self._options["keys"], self.keys = folder / "keys", folder / "keys/clients/trainer"
        self._port = 0
        self._started = 0
        self._memory = memory
        self._draining: int | None = None
        self._ends_with: tuple[int, ...] = ()
        self.daemon: Daemon | None = None
        self.unwell: list[str] = []
        self._hosts: list[Daemon] = []
        self._hosts_may_end = False
        self._host_slots = host_slots
        self.start(workers)
        self._links = contextlib.ExitStack()
        self.links = [self._links.enter_context(FaultProxy(self._port)) for _ in range(hosts)]
        for number in range(hosts):
            self._hosts.append(self._join(number))
        self._wait_for_hosts()

    def start(self, workers: int) -> None:
        """Start the daemon, on the port that it had before, if any."""
        if self._memory is not None and "memory" not in self._options:
            self._options["memory"] = max(4096, round(self._memory * self._least()))
        self.daemon = self._launch(workers)
        try:
            self.daemon.wait_ready(len(self._feeds))
        except AssertionError as error:
            self.unwell.append(f"the daemon did not start: {str(error)[-1500:]}")
            self.daemon.stop()
            raise
        self._port = int(self.daemon.urls["feed0"].rpartition("/")[0].rpartition(":")[2])

    def _least(self) -> int:
        """Return the --memory that a daemon asks for if it has too little."""
        self._options["memory"] = 1
        refused = self._launch(1)
        with contextlib.suppress(AssertionError):
            refused.wait_ready(len(self._feeds))
        refused.stop()
        found = re.search(r"Give --memory (\d+)([KM])", refused.stderr())
        del self._options["memory"]
        if found is None:
            self.unwell.append(f"a daemon with --memory 1 does not say what it needs: {refused.stderr()[-600:]}")
            raise AssertionError(self.unwell[-1])
        return int(found[1]) << (10 if found[2] == "K" else 20)

    def _wait_for_hosts(self) -> None:
        assert self.daemon is not None
        try:
            for number in range(len(self._hosts)):
                wait_until(lambda: f"host{number} works" in self.daemon.stderr(), 60, self.log)  # noqa: B023
        except AssertionError as error:
            self.unwell.append(f"a host does not work: {str(error)[-3000:]}")
            self.stop()
            raise

    def _launch(self, workers: int) -> Daemon:
        words = ["serve", *self._feeds, "--bind", f"tcp://127.0.0.1:{self._port}", "--workers", str(workers)]
        for name, value in self._options.items():
            if value is not None:
                words += [f"--{name}", str(value)]
        return self._run(words)

    def _join(self, number: int) -> Daemon:
        words = ["join", f"tcp://127.0.0.1:{self.links[number].port}", *self._feeds, "--host-name", f"host{number}"]
        words += ["--workers", "1"]
        if self._host_slots is not None:
            words += ["--memory", f"{self._host_slots * self._slot_kib()}K"]
        if self.keys is not None:
            words += ["--keys", str(self._folder / f"keys/hosts/host{number}")]
        if self._options["hang-timeout"] is not None:
            words += ["--hang-timeout", str(self._options["hang-timeout"])]
        return self._run(words)

    def _slot_kib(self) -> int:
        """Return the KiB of a slot of the feed with the largest, rounded up."""
        assert self.daemon is not None
        found = re.findall(r"slots of ([\d.]+) (K|M)iB", self.daemon.stderr())
        return max(math.ceil((float(number) + 0.05) * (1 if unit == "K" else 1024)) for number, unit in found)

    def _run(self, words: list[str]) -> Daemon:
        words = [sys.executable, "-m", "penstock_server", *words]
        self._started += 1
        log = self._folder / f"log{self._started}"
        _started[:] = [daemon for daemon in _started if daemon.process.poll() is None]
        _started.append(Daemon(words, self._folder, log, {**os.environ, **self.environment}))
        return _started[-1]

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of processes that import feeds.py."""
        return {"CHAOS_FEEDS": str(self._folder / "feeds.json"), "PYTHONFAULTHANDLER": "1"}

    @property
    def port(self) -> int:
        return self._port

    def workers(self) -> list[psutil.Process]:
        """Return the workers of the running daemon and of the hosts: none of one that has just ended."""
        assert self.daemon is not None
        found = []
        for daemon in (self.daemon, *self._hosts):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += workers_of(psutil.Process(daemon.process.pid))
        return found

    def host(self, number: int) -> psutil.Process:
        """Return the process of a host. Raises NoSuchProcess if it has just ended."""
        return psutil.Process(self._hosts[number].process.pid)

    def forks(self) -> psutil.Process | None:
        """Return the fork server, or None."""
        assert self.daemon is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.daemon.process.pid).children():
                if child.name().startswith("penstock-f"):
                    return child
        return None

    def kill(self, workers: int) -> None:
        """Kill the daemon and start another."""
        assert self.daemon is not None
        self.daemon.process.kill()
        self.daemon.stop()
        self._draining = None
        self.start(workers)

    def kill_host(self, number: int) -> None:
        """Kill a host and start another with its name."""
        self._hosts[number].stop(signal.SIGKILL)
        self._hosts[number] = self._join(number)

    def end_host(self, number: int) -> None:
        """Ask a host to leave. Another with its name is started when it has left."""
        self._hosts_may_end = True
        with contextlib.suppress(ProcessLookupError):
            self._hosts[number].process.send_signal(signal.SIGTERM)

    def drain(self, workers: int, signals: int = 1) -> None:
        """Ask the daemon to stop after the current epochs, with one signal, or at once, with two."""
        assert self.daemon is not None
        if self._draining is not None:
            return
        self._draining = workers
        self._hosts_may_end = True  # they end with their daemon
        self._ends_with = (0,) if signals == 1 else (0, -signal.SIGTERM)  # the second one may come after its end
        for _ in range(signals):
            with contextlib.suppress(ProcessLookupError):
                self.daemon.process.send_signal(signal.SIGTERM)
            time.sleep(0.02)

    def look(self) -> None:
        """Start others if the daemon has drained, or a host has left. Note a failure if one ended unasked."""
        assert self.daemon is not None
        status = self.daemon.process.poll()
        if status is None:
            if self._draining is None:
                self._look_at_hosts()
            return
        if self._draining is None or status not in self._ends_with:
            self.unwell.append(f"the daemon ended with {status}: {self.daemon.stderr()[-1500:]}")
        workers, self._draining = self._draining or 1, None
        self.daemon.stop()
        self.start(workers)

    def _look_at_hosts(self) -> None:
        for number, host in enumerate(self._hosts):
            status = host.process.poll()
            if status is None:
                continue
            if not (self._hosts_may_end and status in (0, -signal.SIGTERM)):  # the signal may come while it starts
                self.unwell.append(f"host {number} ended with {status}: {host.stderr()[-1500:]}")
            host.stop()
            self._hosts[number] = self._join(number)

    def status(self) -> Status:
        return control.status(f"tcp://127.0.0.1:{self._port}", 5.0, self._client_keys)

    def scale(self, workers: int, *, now: bool, host: str = "") -> None:
        """Tell the daemon, or a host, to run this number of workers."""
        url = f"tcp://127.0.0.1:{self._port}"
        control.scale(url, workers, now=now, timeout=5, keys=self._client_keys, host=host)

    @property
    def _client_keys(self) -> ClientKeys | None:
        return None if self.keys is None else client_keys(self.keys)

    def nothing_held(self, patience: float = 5.0) -> str:
        """Wait until the daemon holds no stream and no reserved memory. Return what it still holds in the end, or "".

        A draining daemon is not checked, because it ends instead.
        """
        if self._draining is not None:
            return ""
        deadline = time.monotonic() + patience
        while True:
            status = self.status()
            if not status.streams and not status.memory.reserved and not status.memory.arena:
                return ""
            if time.monotonic() > deadline:
                return f"nobody reads, and the daemon still holds {status.memory} for {status.streams}"
            time.sleep(0.02)

    def dump(self) -> str:
        """Abort the daemon, the hosts and the workers, which write their stacks to the log. Return the last status."""
        assert self.daemon is not None
        text = ""
        with contextlib.suppress(Exception):
            text += json_text(self.status())[:6000]
        daemons = [daemon.process.pid for daemon in (*self._hosts, self.daemon)]
        for pid in [*(worker.pid for worker in self.workers()), *daemons]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGABRT)
            time.sleep(0.1)
        time.sleep(0.3)
        return text

    def log(self) -> str:
        """Return the logs of all its daemons and hosts."""
        files = sorted(self._folder.glob("log*"), key=lambda file: int(file.name[3:]))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')}" for file in files)

    def stop(self) -> None:
        """Stop the daemon and the hosts. Note a failure unless all of them exit with status 0."""
        assert self.daemon is not None
        running = self.daemon.process.poll() is None
        for worker in self.workers():
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()
        try:
            for number in range(len(self._hosts)):
                self._stop_host(number)
            if self._draining is not None:
                self.daemon.process.wait(20)
            status = self.daemon.stop(timeout=20)
        except subprocess.TimeoutExpired:
            self.unwell.append("the daemon or a host does not end at SIGTERM, although nobody reads")
            self.daemon.stop(signal.SIGKILL)
            return
        finally:
            self._links.close()
        if running and status != 0 and self._draining is None:
            self.unwell.append(f"the daemon ended with {status}: {self.daemon.stderr()[-1500:]}")

    def _stop_host(self, number: int) -> None:
        host = self._hosts[number]
        running = host.process.poll() is None
        if running:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.host(number).resume()
        status = host.stop(timeout=20)
        if running and status not in (0, -signal.SIGTERM):
            self.unwell.append(f"host {number} ended with {status}: {host.stderr()[-1500:]}")
