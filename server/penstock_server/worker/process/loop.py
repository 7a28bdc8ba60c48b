"""The worker's loop: reads the daemon's messages, and lets the tasks (tasks.py) take small steps in between.

The worker checks for messages after each step. So it drops an unwanted run within one step, and rows for a merged batch
never wait for a turn. It reads all messages that wait before it carries out the next one. So when a DropRun has come,
the worker writes nothing more for its run after the present step, even if other messages came before the DropRun.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from penstock_proto import PenstockError, ProtocolError
from penstock_proto import messages as m
from penstock_proto.transport import codec, seqpacket

from ...worker_state.activity import ActivityPage
from ..reading.loaded_feed import LoadedFeed
from ..tasks.memfds import Memfds
from ..tasks.tasks import Tasks
from .process_guard import ProcessGuard, above_standard


class WorkerLoop:
    """Serves the daemon at the other end of a connection.

    Args:
        connection: blocking, SOCK_SEQPACKET.
        number: the worker's number, for errors.
        feeds: the served feeds, by name.
        page: the worker's activity page.
        guard: keeps the worker's own resources from user code.
    """

    def __init__(
        self,
        connection: socket.socket,
        number: int,
        feeds: dict[str, LoadedFeed],
        page: ActivityPage,
        guard: ProcessGuard,
    ) -> None:
        self._connection = connection
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._page = page
        self._guard = guard
        memfds = Memfds()
        guard.on_fork(memfds.abandon)
        self._tasks = Tasks(number, feeds, memfds, page, self)
        self._stopping = False
        self._waiting: deque[Callable[[], None]] = deque()
        """Carries out the messages that were read."""

    def serve(self) -> None:
        """Serve until Shutdown. If the daemon is gone, end the process at once."""
        while not self._stopping:
            if not self._tasks.step():
                patience = self._tasks.patience
                self._page.idle(partial(self._readable.poll, None if patience is None else 1000 * patience))
                self._tasks.tidy()
            self._take_all()
        self._tasks.close()

    # --- called by the work ---

    def send(self, message: m.FromWorker, fd: int | None = None) -> None:
        """Send a message. End the process if the daemon is gone, or if this is no longer the worker's process."""
        self._guard.check()
        try:
            seqpacket.send(self._connection, codec.encode(message), fd)
        except ConnectionError:
            os._exit(0)

    def report_failed_run(self, run: int, error: PenstockError) -> None:
        """Report that a run failed."""
        self.send(m.RunFailed(run=run, error=m.ErrorReport.of(error)))

    # --- messages ---

    def _take_all(self) -> None:
        """Carry out the messages that wait."""
        while not self._stopping:
            while self._readable.poll(0):
                self._receive()
            if not self._waiting:
                return
            self._waiting.popleft()()

    def _receive(self) -> None:
        try:
            data, fd = seqpacket.receive(self._connection)
        except ConnectionError:
            data, fd = b"", None
        except OSError:
            self._guard.check()
            raise
        if not data:
            os._exit(0)  # user code's threads and exit handlers must not outlive the daemon
        if fd is not None:
            fd = above_standard(fd)
        try:
            message = codec.to_worker(data)
        except ProtocolError as error:
            self._waiting.append(partial(self._cannot_read, data, fd, error))
            return
        if isinstance(message, m.DropRun):
            self._tasks.revoke(message.run)
        if isinstance(message, m.Shutdown):
            self._waiting.append(self._stop)
        else:
            self._waiting.append(partial(self._tasks.take, message, fd))

    def _stop(self) -> None:
        self._stopping = True

    def _cannot_read(self, data: bytes, fd: int | None, error: ProtocolError) -> None:
        """Fail the run of a message that cannot be decoded. If the message belongs to no run, only log it: a run that
        needs it fails later."""
        if fd is not None:
            os.close(fd)
        try:
            run = msgspec.msgpack.decode(data, type=_AboutARun).run
        except (msgspec.MsgspecError, ValueError, RecursionError):
            print(f"penstock: ignored a message from the daemon: {error}", file=sys.stderr)
        else:
            self._tasks.fail(run, None, error)


class _AboutARun(msgspec.Struct):
    """The part of a message that names its run."""

    run: m.Count
