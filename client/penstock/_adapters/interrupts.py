"""Makes Ctrl-C raise KeyboardInterrupt while the main thread waits inside TensorFlow, where Python cannot handle it.

Three parts work together, while a dataset lives and unless something else handles SIGINT or uses the wakeup fd:

- Python writes the number of each signal to a wakeup fd at once, whatever the main thread does. A thread that waits for
  data reads it there, sees that the main thread does not handle the interrupt, and fails, so that TensorFlow returns.
- TensorFlow then calls Python from C++, to make its exception. A KeyboardInterrupt raised in that call would become a
  RuntimeError. (In `TensorShape.__len__`, which an eager loop calls before each batch, it would even become a write
  past the end of a buffer.) So our handler of SIGINT has KeyboardInterrupt raised in the Python code that called C++,
  as soon as that call returns. Only a trace function can do this. If a debugger has set one, the exception is
  TensorFlow's.
- The handler also says which interrupts the main thread has handled.

A notebook sets Python's own handler again for each cell. Then the exception may be TensorFlow's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

_GRACE = 0.1
"""Seconds in which the main thread handles an interrupt, unless it waits."""

_LOOK = 0.05
"""Seconds between two looks at the wakeup fd. A look costs a system call, and may hand the GIL to another thread."""

_CALLED_FROM_C = tuple(
    os.path.join("tensorflow", "python", *names)
    for names in (("framework", "errors_impl.py"), ("eager", "core.py"), ("framework", "tensor_shape.py"))
)
"""Files whose functions TensorFlow calls from C++, where a KeyboardInterrupt must not be raised."""


class _Listener:
    """The wakeup fd and the handler of this process, while a dataset lives."""

    def __init__(self) -> None:
        self._users = 0
        self._heard = 0
        self._handled = 0
        self._since: float | None = None
        self._due = 0.0
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._lock = threading.RLock()  # the handler may interrupt its owner

    def listen(self) -> None:
        self._users += 1
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _handle)
        if self._ends is not None:
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
        self._handled = self._heard

    def unlisten(self) -> None:
        self._users -= 1
        if self._users == 0 and threading.current_thread() is threading.main_thread():
            self._stop()

    def _stop(self) -> None:
        if signal.getsignal(signal.SIGINT) is _handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._ends is None:
            return
        (ours, signals), self._ends = self._ends, None
        now = signal.set_wakeup_fd(-1)
        if now not in (-1, signals.fileno()):
            signal.set_wakeup_fd(now)  # something else took it over
        ours.close()
        signals.close()

    def pending(self) -> bool:
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + _LOOK
        if signal.getsignal(signal.SIGINT) not in (_handle, signal.default_int_handler):
            self.handled()
            return False
        self._hear()
        if self._heard == self._handled:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= _GRACE

    def handled(self) -> None:
        with self._lock:
            self._hear()
            self._handled = self._heard

    def _hear(self) -> None:
        ends = self._ends
        if ends is not None:
            with self._lock, contextlib.suppress(OSError):
                self._heard += ends[0].recv(4096).count(signal.SIGINT)

    def forget(self) -> None:
        self._users = 0
        if threading.current_thread() is threading.main_thread():
            self._stop()


def _handle(number: int, frame: FrameType | None) -> None:
    caller = frame
    while caller is not None and caller.f_code.co_filename.endswith(_CALLED_FROM_C):
        caller = caller.f_back
    if caller is None or caller is frame or sys.gettrace() is not None:
        _raise()
    else:
        _raise_in(caller)


def _raise() -> NoReturn:
    _listener.handled()
    raise KeyboardInterrupt


def _raise_in(frame: FrameType) -> None:
    """Raise KeyboardInterrupt in a frame of this thread when it continues."""

    def interrupt(*_: object) -> NoReturn:
        sys.settrace(None)
        frame.f_trace = None
        _raise()

    frame.f_trace = interrupt
    sys.settrace(lambda *_: None)  # no other frame is traced


_listener = _Listener()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_listener.forget)


def listen() -> None:
    """Handle Ctrl-C until `unlisten`. Takes effect only on the main thread, and only in place of Python's handler."""
    _listener.listen()


def unlisten() -> None:
    """Undo one call of `listen`. Safe in a finalizer."""
    _listener.unlisten()


def begin_wait() -> None:
    """Begin to wait for an element. Python's own handler does not say what it has handled: count all as handled."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _listener.handled()


def pending() -> bool:
    """Return whether the main thread has not handled an interrupt for 0.1 s, because it waits inside TensorFlow. The
    call that it waits for should then fail."""
    return _listener.pending()
