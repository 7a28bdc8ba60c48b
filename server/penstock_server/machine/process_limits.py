"""Limits that a process sets for itself: the end of its life with its parent's, and the most memory it may have."""

from __future__ import annotations

import ctypes
import resource
import signal

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h


def end_with_parent(name: str) -> None:
    """Make the kernel kill this process when its parent ends, and give it this name."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    libc.prctl(_PR_SET_NAME, name.encode())


def outlive_parent() -> None:
    """Undo the first half of `end_with_parent`."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def limit_memory(nbytes: int | None) -> None:
    """Let this process have at most `nbytes` bytes of memory of its own: private and writable, from then on also in the
    processes that it starts. Slots, which are shared, do not count. None: no limit.

    The kernel refuses to map more, so user code gets a MemoryError, and nobody is killed. See RLIMIT_DATA in
    getrlimit(2).
    """
    if nbytes is not None:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        if most != resource.RLIM_INFINITY:
            nbytes = min(nbytes, most)
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, most))


def own_memory() -> int:
    """Return the bytes of this process that count for `limit_memory`; 0 if the kernel does not say."""
    try:
        with open("/proc/self/status") as status:
            return next((int(line.split()[1]) << 10 for line in status if line.startswith("VmData:")), 0)
    except OSError:
        return 0
