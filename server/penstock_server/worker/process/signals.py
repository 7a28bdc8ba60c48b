"""Signals that are meant for the daemon: workers and the fork server survive them, processes of user code do not.

Ctrl-C, `timeout` and systemd's default KillMode signal the whole process group. The daemon then drains, and it needs
its workers until the epochs that are being read have ended. Workers and the fork server end when the daemon tells them
to, when their connection to it ends, or by SIGKILL.

SIGTERM gets a handler that does nothing. SIG_IGN would survive an exec, so the programs that user code starts could
not be terminated. A forked process keeps the handler, so a hook puts the default back there: `Process.terminate()` and
`Pool.terminate()` of multiprocessing rely on it.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

_mask_before_fork = threading.local()


def leave_to_daemon() -> None:
    """Make SIGINT and SIGTERM do nothing in this process, unless user code installs handlers of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _do_nothing)
    signal.siginterrupt(signal.SIGTERM, False)  # C code that does not expect EINTR goes on


def restore_in_children() -> None:
    """Make SIGTERM end the processes that this one forks from now on, as it does by default."""
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_restore)


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    pass


def _block() -> None:
    """Block SIGTERM: a child that is terminated as soon as it is forked must not lose the signal."""
    _mask_before_fork.value = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask_before_fork.value)


def _restore() -> None:
    if signal.getsignal(signal.SIGTERM) is _do_nothing:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock()
