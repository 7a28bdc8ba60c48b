"""Tells systemd, or another service manager, about the daemon's progress: sd_notify(3).

The manager names a datagram socket in NOTIFY_SOCKET. Without that variable, nothing is sent.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

PATIENCE = 15
"""Seconds without a message after which the manager should consider the daemon stuck."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The daemon's progress: `ready` once all feeds can be read, `draining` when it is about to stop."""

    ready: bool
    draining: bool
    text: str


class ServiceManager:
    """The socket that NOTIFY_SOCKET names. This removes sd_notify's variables from the environment, so that workers do
    not get them.

    Args:
        private: whether the daemon belongs to a trainer. The manager then waits only for the trainer, so nothing is
            sent.
    """

    def __init__(self, *, private: bool = False) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        self._address = "" if private else address
        self._watched = "WATCHDOG_USEC" in os.environ
        for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
            os.environ.pop(name, None)
        self._said: set[str] = set()

    @property
    def listens(self) -> bool:
        """Whether there is a service manager."""
        return bool(self._address)

    def tell(self, phase: Phase) -> None:
        """Send the daemon's progress. Call it every second: each message extends the manager's time limit for the start
        or the stop, so that it does not expire while the daemon makes progress."""
        lines = {f"STATUS={phase.text}"}
        if phase.draining:
            lines.add("STOPPING=1")
        elif phase.ready:
            lines.add("READY=1")
        again = [line for line in sorted(lines) if line not in self._said]
        if phase.draining or not phase.ready:
            again.append(f"EXTEND_TIMEOUT_USEC={PATIENCE * 1_000_000}")
        if self._watched:
            again.append("WATCHDOG=1")
        if self._address and again:
            with contextlib.suppress(OSError):  # the manager may listen again in a second
                self._send("\n".join(again))
                self._said = lines

    def _send(self, text: str) -> None:
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.setblocking(False)
            connection.sendto(text.encode(), address)
