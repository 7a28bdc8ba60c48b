"""Messages between the daemon and the fork server (fork_server.py), over their SOCK_SEQPACKET connection.

They have a file of their own so that the daemon does not import a worker's code.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class ForkServerReady(msgspec.Struct, frozen=True, tag=True):
    """Workers can be forked. Names the libraries imported for all workers, and those left to each worker, with what
    their imports do. The imports took `seconds`."""

    imported: tuple[str, ...]
    left: tuple[tuple[str, str], ...]
    seconds: float


class CannotFork(msgspec.Struct, frozen=True, tag=True):
    """Workers cannot be forked, and why."""

    why: str


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker with the three fds that came before: its connection, its activity page, its stacks file."""

    ticket: int
    number: int


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The worker of this ticket runs, and the message carries its pidfd. Or it does not run, for the reason `errno`."""

    ticket: int
    pid: int
    errno: int = 0


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """The worker of this ticket has ended. `status` is its exit status, or minus the number of the signal that killed
    it."""

    ticket: int
    status: int


FromForkServer: TypeAlias = ForkServerReady | CannotFork | Forked | WorkerEnded
