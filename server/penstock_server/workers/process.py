"""A process by its pidfd, which never names another process, even when this one has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable

from penstock_proto.world import inherited


class Process:
    """A process that the daemon has started, or its fork server has forked.

    Args:
        pid: its id.
        pidfd: owned by this object from here on.
        child: the child process if the daemon has started it; None if the fork server has. Then `ForkServer` calls
            `ended`.
    """

    def __init__(self, pid: int, pidfd: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._child = child
        self._watched = False
        self._on_end: Callable[[int | None], None] | None = None

    @classmethod
    def started(cls, command: list[str], environment: dict[str, str], fds: list[int]) -> Process:
        """Start `command` as a child of this process; it inherits `fds`, and the trainer's world.

        Raises:
            OSError: it cannot be started. The attempt leaves nothing behind.
        """
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            env=environment,
            pass_fds=[*fds, *inherited()],
        )
        try:
            return cls(child.pid, os.pidfd_open(child.pid), child)
        except OSError:
            child.kill()
            child.wait()
            raise

    def watch(self, on_end: Callable[[int | None], None]) -> None:
        """Call `on_end` once, when the process has ended: with its exit status, with minus the number of the signal
        that killed it, or with None if neither is known."""
        self._on_end = on_end
        if self._child is not None:
            self._look()

    def ended(self, status: int | None) -> None:
        """Note that it has ended, as its fork server reported or this process saw."""
        self._unwatch()
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(status)

    def orphaned(self) -> None:
        """Kill the process if it still runs: its fork server is gone."""
        if self._pidfd >= 0:
            self.kill()
            self._look()

    def running(self) -> bool:
        """Return whether it has not ended yet."""
        look = select.poll()
        look.register(self._pidfd, select.POLLIN)
        return not look.poll(0)

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send it SIGKILL, if it has not ended."""
        self.send_signal(signal.SIGKILL)

    def forget(self, patience: float = 0.0) -> None:
        """Wait up to `patience` seconds for the process to end, then kill it, and release it. `on_end` is no longer
        called."""
        self._on_end = None
        end = select.poll()
        end.register(self._pidfd, select.POLLIN)
        if not end.poll(patience * 1000):
            self.kill()
            end.poll()
        self._unwatch()
        self._reap()
        os.close(self._pidfd)
        self._pidfd = -1

    def _look(self) -> None:
        self._watched = True
        asyncio.get_running_loop().add_reader(self._pidfd, self._readable)

    def _readable(self) -> None:
        self.ended(self._reap())

    def _reap(self) -> int | None:
        if self._child is not None:
            return self._child.wait()
        with contextlib.suppress(ChildProcessError):  # it is ours only if its fork server has died
            os.waitpid(self.pid, os.WNOHANG)
        return None

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            asyncio.get_running_loop().remove_reader(self._pidfd)
