"""The samples of workers of hosts that have joined: they come from the daemon, over a connection that lasts as long as
the profile."""

from __future__ import annotations

import contextlib
import socket
import time

from penstock_proto import ProtocolError
from penstock_proto import messages as m
from penstock_proto.status.status_shape import Status
from penstock_proto.transport import codec, seqpacket

from ..to_daemon import control
from .pieces import received, shown
from .profile import Sampled, Stack

PATIENCE = 3.0
"""Seconds that a host may take, after the end, to send the last samples."""

_GONE = "was lost, as the daemon has ended"


class OfHosts:
    """One profile of the workers of hosts.

    Args:
        url: the daemon's or a feed's address.
        state: the daemon's status.
        seconds: how long the hosts sample.
        rate: samples a second of each worker.
        timeout: seconds that the daemon may take to answer.

    Raises:
        Unreachable: the daemon is not on this host, or belongs to another user.

    Attributes:
        hosts: by their names: how each was lost or why samples are missing; empty if all have come.
        records: those of all processes so far.
    """

    def __init__(self, url: str, state: Status, seconds: float, rate: float, timeout: float) -> None:
        self.hosts: dict[str, str] = {}
        self._sampling: set[str] = set()
        self._records: dict[tuple[int, int], Sampled] = {}
        self._known: dict[Stack, Stack] = {}
        self._stack = contextlib.ExitStack()
        self._connection: socket.socket | None = self._stack.enter_context(
            control.profile_hosts(url, state, seconds, rate, timeout)
        )

    def __enter__(self) -> OfHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def records(self) -> list[Sampled]:
        """The samples of each process, in order of the workers."""
        return [self._records[key] for key in sorted(self._records)]

    def read(self) -> None:
        """Read the messages that have arrived."""
        while self._connection is not None:
            try:
                data, fd = seqpacket.receive(self._connection)
                if fd is not None or not data:
                    raise ConnectionResetError
                self._take(codec.from_server(data))
            except BlockingIOError:
                return
            except (OSError, ProtocolError):
                self._lost()

    def finish(self, *, whole: bool) -> None:
        """The time is over: wait until all hosts have sent what they have; not if it ended early (`whole` is False)."""
        deadline = time.monotonic() + PATIENCE
        self.read()
        while whole and self._sampling and time.monotonic() < deadline:
            time.sleep(0.02)
            self.read()
        if whole:
            for host in self._sampling:
                self.hosts[host] = f"has not sent all of its samples within {PATIENCE:g} s of the end"

    def _take(self, message: m.ServerMessage) -> None:
        match message:
            case m.HostSampled():
                host = shown(message.host)
                if message.ended:
                    self._sampling.discard(host)
                    self.hosts[host] = shown(message.how)
                else:
                    self._sampling.add(host)
                    self.hosts.setdefault(host, "")
            case m.WorkerSampled():
                key = message.worker, message.samples.pid
                if key not in self._records:
                    self._records[key] = Sampled(*key, name=shown(message.name))
                received(self._records[key], message.samples, self._known)
            case m.Failed():
                self._lost()

    def _lost(self) -> None:
        self._connection = None
        for host in self._sampling:
            self.hosts[host] = _GONE
        self._sampling.clear()
