"""The daemon's side of the fork server (worker/process/fork_server.py): asks for workers, reports how they ended."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from penstock_proto.world import interpreter

from ..net.peer import Peer
from ..worker.process.fork_messages import CannotFork, Fork, Forked, ForkServerReady, FromForkServer, WorkerEnded
from ..worker_state.process_ends import ended_how
from ..worker_state.start_arguments import StartArguments
from .process import Process

log = logging.getLogger(__name__)

_IMPORTS = {"event": "imports"}

_FAREWELL = 1.0
"""Seconds that a fork server that was ready has to end on its own."""

_decode = msgspec.msgpack.Decoder(FromForkServer)


@dataclass(frozen=True, eq=False)
class _Asked:
    number: int
    fds: list[int]
    done: Callable[[Process | OSError | None], None]


class ForkServer:
    """A fork server, from its start to its end.

    Attributes:
        ready: True once it has imported the libraries and can fork.
        gone: True once it can no longer fork.

    Args:
        arguments: what each worker is told at its start.
        environment: the workers' environment, except for their number.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, arguments: StartArguments, environment: dict[str, str]) -> None:
        self.ready = False
        self.gone = False
        self._ticket = 0
        self._early: list[_Asked] = []
        self._asked: dict[int, _Asked] = {}
        self._running: dict[int, Process] = {}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [*interpreter(), "-m", "penstock_server.worker.process.fork_server", "--fd", str(theirs.fileno())]
        command += arguments.words()
        try:
            with theirs:
                self._process = Process.started(command, environment, [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        self._process.watch(self._end)
        self._peer = Peer(ours, self._said, lambda: None)

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    def fork(self, number: int, fds: list[int], done: Callable[[Process | OSError | None], None]) -> None:
        """Start a worker's process.

        Args:
            number: the worker's number.
            fds: its connection, its activity page, and its stacks file. The caller may close them at once.
            done: called with the process, with the error if none could start, or with None if the fork server cannot
                fork.

        Raises:
            OSError: no file descriptors are left; `done` is not called.
        """
        asked = _Asked(number, _dup(fds), done)
        if self.ready:
            self._ask(asked)
        else:
            self._early.append(asked)

    def replace(self) -> None:
        """Kill the fork server and its workers: another one takes its place."""
        self._process.kill()
        self._lost()

    def stop(self) -> None:
        """End the fork server. It first kills its workers, and the processes that they have started."""
        self._peer.close()
        self._process.forget(_FAREWELL if self.ready else 0.0)
        for fd in (fd for asked in self._early for fd in asked.fds):
            os.close(fd)
        self._early.clear()

    def _ask(self, asked: _Asked) -> None:
        self._ticket += 1
        self._asked[self._ticket] = asked
        for fd in asked.fds:
            self._peer.send(b"fd", fd)
            os.close(fd)
        self._peer.send(msgspec.msgpack.encode(Fork(self._ticket, asked.number)))

    def _said(self, data: bytes, fd: int | None) -> None:
        if self.gone:  # it said this before it was killed
            if fd is not None:
                os.close(fd)
            return
        match _decode.decode(data):
            case ForkServerReady(imported, left, seconds):
                self.ready = True
                if imported:
                    names = ", ".join(imported)
                    log.info("imported once for all workers, in %.2f s: %s", seconds, names, extra=_IMPORTS)
                if left:
                    names = ", ".join(f"{name} (its import {why})" for name, why in left)
                    log.info("imported by each worker separately: %s", names, extra=_IMPORTS)
                early, self._early = self._early, []
                for asked in early:
                    self._ask(asked)
            case CannotFork(why):
                log.info("each worker imports all libraries itself: %s", why, extra=_IMPORTS)
                self._lost()
            case Forked(ticket, pid, errno):
                done = self._asked.pop(ticket).done
                if fd is None:
                    done(OSError(errno, os.strerror(errno)))
                else:
                    self._running[ticket] = process = Process(pid, fd)
                    done(process)
            case WorkerEnded(ticket, status):
                self._running.pop(ticket).ended(status)

    def _end(self, status: int | None) -> None:
        self._peer.drain()
        self._peer.close()
        if not self.gone:
            text, fields = "the fork server %s, and its workers with it", {"event": "fork_server_died"}
            log.warning(text, ended_how(status), extra=fields)
            self._lost()

    def _lost(self) -> None:
        self.gone = True
        running, self._running = self._running, {}
        for process in running.values():
            process.orphaned()
        for fd in (fd for asked in self._early for fd in asked.fds):
            os.close(fd)
        waiting, self._asked, self._early = [*self._asked.values(), *self._early], {}, []
        for asked in waiting:
            asked.done(None)


def _dup(fds: list[int]) -> list[int]:
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError:
        for fd in copies:
            os.close(fd)
        raise
    return copies
