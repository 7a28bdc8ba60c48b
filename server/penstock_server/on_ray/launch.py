"""The head's side: starts the Ray driver as a child process, writes its news to the log, and starts another if it dies.

Nothing here imports Ray.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from penstock_proto import StartError, distribution
from penstock_proto.security.keys import host_keys

from ..daemon.config import DaemonConfig
from ..net.accepting import only_this_host
from ..net.keys import ServerKeys, server_keys
from . import shipping
from .orders import WILDCARDS, HeadAt, News, Plan, Wanted

log = logging.getLogger(__name__)

HOST = "ray"
"""The name of the key with which all hosts on Ray join, and the prefix of their own names."""
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_PAUSE = 5.0
"""Seconds before another driver replaces one that died."""
_END = 15.0
"""Seconds that a driver has to end."""


class Head(Protocol):
    """The part of the daemon that this file uses."""

    endpoint: str

    @property
    def ready(self) -> bool: ...

    def stop(self) -> None: ...


@contextlib.contextmanager
def hosts_on_ray(config: DaemonConfig) -> Iterator[RayDriver]:
    """Run hosts on Ray inside the `with` statement: at first the fewest, each on its own node.

    Args:
        config: the head's options. The hosts get those that concern workers.

    Raises:
        StartError: Ray is not installed, there is no cluster, the hosts have no key, or their code cannot be collected.
    """
    assert config.hosts is not None
    assert config.workers_per_host is not None
    keys = None if config.keys is None else server_keys(config.keys)
    if importlib.util.find_spec("ray") is None:
        raise StartError(f"--on ray needs Ray, the version of your cluster: {distribution.pip_install('ray')}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # otherwise the folder would be left
    with tempfile.TemporaryDirectory(prefix="penstock-code-") as code:
        there = shipping.collect(config.feeds, Path(code))
        shipped = code if any(Path(code).iterdir()) else ""
        plan = Plan(
            name=HOST,
            hosts=config.hosts[0],
            workers=config.workers_per_host,
            code=shipped,
            feeds=there,
            options=config.join_words(),
            keys={} if keys is None else _key_files(keys),
        )
        driver = RayDriver(plan, config.hosts, local=only_this_host(config.bind))
        try:
            driver.wait_connected()
            yield driver
        finally:
            driver.close()
    if driver.failure:
        raise StartError(driver.failure)


class RayDriver:
    """The engine that `serve --on ray` uses: the driver process, and what it reports.

    Args:
        plan: what to start.
        bounds: fewest and most hosts while their number is adjusted.
        local: whether only programs on this machine can reach the head.

    Attributes:
        bounds: as given.
        failure: why the driver cannot do its work, or "".
    """

    def __init__(self, plan: Plan, bounds: tuple[int, int], *, local: bool) -> None:
        self._plan = plan
        self.bounds = bounds
        self._local = local
        self._head = b""
        self._closing = threading.Event()
        self._connected = threading.Event()
        self._lock = threading.Lock()  # _process, _plan and _head belong together
        self._again = False
        """True after the first driver has died: then the cluster may only be away for a while."""
        self.failure = ""
        self._process = self._popen()
        self._thread = threading.Thread(target=self._keep, name="penstock-ray")
        self._thread.start()

    @property
    def name(self) -> str:
        """The names of its hosts begin with this and a hyphen."""
        return self._plan.name

    @property
    def hosts(self) -> int:
        """How many hosts should run now."""
        return self._plan.hosts

    @property
    def workers(self) -> int:
        """The number of workers of each host."""
        return self._plan.workers

    def scale(self, hosts: int) -> None:
        """Run `hosts` hosts from now on."""
        with self._lock:
            self._plan = structs.replace(self._plan, hosts=hosts)
            self._tell(msgspec.json.encode(Wanted(hosts)) + b"\n")

    def wait_connected(self) -> None:
        """Wait until the driver has found the cluster.

        Raises:
            StartError: it cannot find one; the message says why.
        """
        while not self._connected.wait(0.2):
            if self.failure:
                raise StartError(self.failure)

    def look(self, head: Head) -> None:
        """Tell the driver where the head is, once its feeds are ready. Call it every second."""
        if self.failure:
            head.stop()
        if self._head or not head.ready:
            return
        parts = urlsplit(head.endpoint)
        assert parts.hostname is not None
        assert parts.port is not None
        host = "*" if parts.hostname in WILDCARDS else parts.hostname
        with self._lock:
            self._head = msgspec.json.encode(HeadAt(host, parts.port, self._local)) + b"\n"
            self._tell(self._head)

    def close(self) -> None:
        """End the driver, and the hosts if they have not ended with the head."""
        self._closing.set()
        with self._lock, contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join()

    def _popen(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "penstock_server.on_ray.driver"]
        # In its own process group: Ctrl-C is for the head, whose epochs end first.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, process_group=0)
        self._process = process
        self._tell(msgspec.json.encode(self._plan) + b"\n" + self._head)
        return process

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the driver has ended, which `_keep` notices
            while line:
                line = line[self._process.stdin.write(line) :]

    def _keep(self) -> None:
        """Handle the driver's news, and start another driver when it has ended."""
        while True:
            process = self._process
            stdout: Any = process.stdout
            with contextlib.closing(os.fdopen(os.dup(stdout.fileno()), "rb")) as lines:
                for line in lines:
                    self._hear(line)
            stdout.close()
            status = process.wait()
            if self._closing.is_set() or self.failure:
                return
            if not self._connected.is_set():
                self.failure = f"the Ray driver ended with status {status}; see its messages above"
                return
            text = "the Ray driver ended with status %d; the hosts end with it. Another is started in %.0f s"
            log.error(text, status, _PAUSE, extra={"event": "ray"})
            if self._closing.wait(_PAUSE):
                return
            with self._lock:
                if self._closing.is_set():
                    return
                assert process.stdin is not None
                process.stdin.close()
                self._again = True
                self._popen()

    def _hear(self, line: bytes) -> None:
        try:
            news = msgspec.json.decode(line, type=News)
        except msgspec.MsgspecError:
            sys.stderr.write(line.decode(errors="replace"))
            return
        if news.level == "connected":
            self._connected.set()
        elif news.level != "failed":
            log.log(_LEVELS[news.level], "%s", news.text, extra={"event": "ray"})
        elif self._again:
            log.error("%s", news.text, extra={"event": "ray"})
        else:
            self.failure = news.text


def _key_files(keys: ServerKeys) -> dict[str, bytes]:
    """Return the files of the hosts' key, by name.

    Raises:
        StartError: there is no key, or the head does not admit it.
    """
    folder = keys.folder.parent / "hosts" / HOST
    make = f"penstock keygen {keys.folder.parent} --host {HOST}"
    if not folder.is_dir():
        raise StartError(f"--on ray with --keys: the hosts need a key in {folder}. To make it: {make}")
    found = host_keys(str(folder))
    assert found is not None
    if found.own.public not in keys.admitted:
        raise StartError(f"{folder} is not a key that {keys.folder / 'hosts'} admits. To make another: {make}")
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}
