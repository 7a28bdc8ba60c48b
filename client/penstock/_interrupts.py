"""Handles Ctrl-C while the main thread waits inside TensorFlow, where Python's own handler cannot run until data comes.

Python writes the number of each signal to a wakeup fd at once, whatever the main thread does. A thread that waits for
data reads it here and stops waiting, so that TensorFlow returns and the handler runs. This happens only if nothing else
uses the wakeup fd, and only while SIGINT raises KeyboardInterrupt: it leaves a user's own handler alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading


class _Listener:
    """The wakeup fd of this process, while a dataset lives."""

    def __init__(self) -> None:
        self._users = 0
        self._count = 0
        self._ends: tuple[socket.socket, socket.socket] | None = None

    def listen(self) -> None:
        self._users += 1
        if self._ends is not None or threading.current_thread() is not threading.main_thread():
            return
        ours, signals = socket.socketpair()
        ours.setblocking(False)
        signals.setblocking(False)
        other = signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
        if other != -1:
            signal.set_wakeup_fd(other)
            ours.close()
            signals.close()
            return
        self._ends = ours, signals

    def unlisten(self) -> None:
        self._users -= 1
        if self._users == 0 and threading.current_thread() is threading.main_thread():
            self._stop()

    def _stop(self) -> None:
        if self._ends is None:
            return
        (ours, signals), self._ends = self._ends, None
        now = signal.set_wakeup_fd(-1)
        if now not in (-1, signals.fileno()):
            signal.set_wakeup_fd(now)  # something else took it over
        ours.close()
        signals.close()

    def heard(self) -> int:
        ends = self._ends
        if ends is not None:
            with contextlib.suppress(OSError):
                self._count += ends[0].recv(4096).count(signal.SIGINT)
        return self._count

    def forget(self) -> None:
        self._users = 0
        if threading.current_thread() is threading.main_thread():
            self._stop()


_listener = _Listener()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_listener.forget)


def listen() -> None:
    """Listen for Ctrl-C until `unlisten`. Takes effect only on the main thread."""
    _listener.listen()


def unlisten() -> None:
    """Stop listening for one caller of `listen`. Safe in a finalizer."""
    _listener.unlisten()


def heard() -> int:
    """Return how many interrupts came since the process began to listen. A waiting thread stops when this changes."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return 0
    return _listener.heard()
