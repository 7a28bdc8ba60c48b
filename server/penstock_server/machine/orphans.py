"""Processes that user code has started: ends those that have outlived their worker.

The parent of a process may end before it, and Linux then gives the process to its nearest ancestor that *adopts*
(prctl(2), PR_SET_CHILD_SUBREAPER). Sessions and process groups do not matter for that. Workers adopt, and so do the
fork server and the daemon (or the joined host), so no process that user code starts gets away from them:

- a worker ends: its processes come to the fork server, which kills them;
- the fork server ends, or the worker was started without it: they come to the daemon, which kills them;
- the daemon ends: the fork server notices, and kills all workers and their processes before it ends.

Without /proc/PID/task/TID/children (CONFIG_PROC_CHILDREN, which Linux distributions set), nothing is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterator

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

_MARK = "PENSTOCK_WORKER"
"""A variable in the environment of the fork server and of all workers, and so of the processes that they start."""

_LOOKS = 50
"""Looks after which a child that has ended is reaped: the part of the daemon that started it would have done so."""

_adopting: set[int] = set()
"""The id of this process, if it adopts. (A forked process does not.)"""


def adopt() -> None:
    """Make this process the parent of its descendants whose parents end."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0:
        _adopting.add(os.getpid())


def children(process: str = "self") -> set[int]:
    """Return the ids of a process's children. Those that have ended count until they are waited for.

    Args:
        process: a folder in /proc; "thread-self": those that this thread has started.
    """
    if process == "thread-self":
        return _children_of_thread("/proc/thread-self")
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{process}/task"):
            found |= _children_of_thread(f"/proc/{process}/task/{task}")
    return found


def descendants(pid: int) -> Iterator[int]:
    """Iterate over the ids of the descendants of a process."""
    for child in children(str(pid)):
        yield child
        yield from descendants(child)


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, and was not waited for."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[:1] == [b"Z"]
    return False


def kill(keep: Collection[int]) -> bool:
    """Kill this process's children, except for `keep`, and reap those that have ended.

    Returns:
        True if there were none. Otherwise call it again soon: the children of those that end now come to this process.
    """
    found = children().difference(keep)
    for pid in found:
        _kill(pid)
    return not found


def kill_all(patience: float) -> None:
    """Kill all descendants of this process. Wait up to `patience` seconds for them to end."""
    deadline = time.monotonic() + patience
    while not kill(()) and time.monotonic() < deadline:
        time.sleep(0.005)


def _children_of_thread(folder: str) -> set[int]:
    with contextlib.suppress(OSError), open(f"{folder}/children", "rb") as file:
        return {*map(int, file.read().split())}
    return set()


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):  # it is another user's
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


class OfWorkers:
    """The orphans among the children of a process that has other children too: the daemon, or a joined host."""

    def __init__(self) -> None:
        self._found: set[int] = set()
        self._ended: Counter[int] = Counter()
        """By process that has ended: how often it was seen. Its environment is gone."""

    def kill(self, keep: Collection[int]) -> bool:
        """Kill the children that workers or the fork server have started, except for `keep`, and reap those that have
        ended. Kill nothing if this process does not adopt.

        Returns:
            True if there were none. Otherwise call it again soon.
        """
        if os.getpid() not in _adopting or _MARK in os.environ:
            return True
        there = children().difference(keep)
        self._found &= there
        self._ended = Counter({pid: times for pid, times in self._ended.items() if pid in there})
        for pid in there - self._found:
            if has_ended(pid):
                self._ended[pid] += 1
            if self._ended[pid] >= _LOOKS or _is_marked(pid):
                self._found.add(pid)
        for pid in self._found:
            _kill(pid)
        return not self._found


def _is_marked(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return any(line.startswith(f"{_MARK}=".encode()) for line in file.read().split(b"\0"))
    return False
