"""Helpers: processes that the generators of this process start. Ends those that a generator leaves behind.

multiprocessing ends its processes when the interpreter ends, but a worker goes on to the next split. So when a
generator has ended, the worker ends the generator's helpers that nothing in this process uses, at once or after a
garbage collection, which runs the finalizers of pools. A helper is in use if

- a pipe or socket that came with it is still open here, as those of a queue or of `Popen.stdout` are;
- or none came with it, and it shares one that the modules have opened when they were imported;
- or a variable holds its `Process` or `Popen`;
- or nobody can tell (os.fork, a C library), because no pipe or socket came with it.

So a helper that a module keeps for all generators goes on, even if the first generator has started it. A helper that is
in use is looked at again later. The rest ends with the worker (orphans.py).
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...machine import orphans

PATIENCE = 0.5
"""Seconds that a helper has to end after SIGTERM, before it is killed."""

_SHARE = 0.05
"""The most of the time that is spent on looking for helpers that are no longer in use."""

_Link: TypeAlias = tuple[int, int]
"""A pipe or socket: device and inode."""


@dataclass(eq=False)
class _Helper:
    pid: int
    owner: object
    """The open split that started it; None if that has ended."""
    links: set[_Link]
    """The pipes and sockets that it may use to talk to this process."""


class Helpers:
    """The helpers of this process, in which other code may start processes too (see `look`).

    Attributes:
        only_this_thread: processes that other threads start are not of generators.
        most: the most helpers that one generator has had at a time.
    """

    def __init__(self) -> None:
        self.only_this_thread = False
        self.most = 0
        self._known: dict[int, _Helper] = {}
        self._of_modules: set[_Link] | None = None
        """The pipes and sockets that the modules have opened; None before the first look."""
        self._links: set[_Link] = set()
        self._due = 0.0

    def others(self) -> None:
        """Note the processes that have come since the last call of `look`: they belong to no generator."""
        if self._of_modules is None:
            self._links = _links("self")
            self._of_modules = self._links - {_link(f"/proc/self/fd/{fd}") for fd in range(3)}
        self.look(self)

    def look(self, owner: object) -> None:
        """Note the helpers that have come since the last call: user code of `owner` has run."""
        if not _has_children():
            self._known.clear()
            return
        there = self._running()
        for pid in self._known.keys() - there:
            del self._known[pid]
        if new := there - self._known.keys():
            links, processes = _links("self"), _multiprocessing()
            fresh, self._links = links - self._links - _of_multiprocessing(), links
            for pid in new:
                own = _of_process(processes[pid]) if pid in processes else set()
                theirs = _links(str(pid)) - own
                self._known[pid] = _Helper(pid, owner, theirs & fresh or theirs & (self._of_modules or set()))
            if owner is not self:
                self.most = max(self.most, sum(helper.owner is owner for helper in self._known.values()))

    def pass_on(self, owner: object, successor: object) -> None:
        """Give the helpers of `owner` to `successor`, which continues with the same generator."""
        for helper in self._known.values():
            if helper.owner is owner:
                helper.owner = successor

    def end_of(self, owner: object) -> None:
        """End the helpers of `owner`, a generator that has ended and that nothing refers to any longer, if they are
        not in use."""
        self.look(owner)
        own = [helper for helper in self._known.values() if helper.owner is owner]
        for helper in own:
            helper.owner = None
        if own:
            self._end_unused(own)
            self.settle()

    def settle(self, *, now: bool = False) -> None:
        """End the helpers of generators that have ended and that are no longer in use, as far as garbage collection
        shows. This may wait for a later call, unless it is to be done `now`."""
        if not self._known:
            return
        left = [helper for helper in self._known.values() if helper.owner is None]
        began = time.monotonic()
        if left and (now or began >= self._due):
            gc.collect()
            self._end_unused(left)
            self._due = time.monotonic() + (time.monotonic() - began) / _SHARE

    def _end_unused(self, helpers: list[_Helper]) -> None:
        there, links = self._running(), _links("self")
        processes = _multiprocessing()
        unused = _only_held_by_multiprocessing(processes.values())
        ending = []
        for helper in helpers:
            if helper.pid not in there:
                del self._known[helper.pid]
            elif not helper.links & links - _unread(helper.pid) and _is_unused(helper, processes, unused):
                ending.append(helper.pid)
                del self._known[helper.pid]
        _end(ending, processes)

    @property
    def left(self) -> int:
        """How many helpers of generators that have ended still run."""
        there = self._running() if self._known else set()
        return sum(helper.owner is None and helper.pid in there for helper in self._known.values())

    def _running(self) -> set[int]:
        """Return the ids of the children, and of the processes that a fork server of multiprocessing has started."""
        found = orphans.children("thread-self" if self.only_this_thread else "self")
        return found | (_multiprocessing().keys() - orphans.children())


of_this_process = Helpers()


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _multiprocessing() -> dict[int, Any]:
    """Return the `Process` objects of multiprocessing, and of packages that copy it, by process id."""
    found = {}
    for package in ("multiprocessing", "multiprocess", "billiard"):
        module = sys.modules.get(f"{package}.process")
        for process in tuple(getattr(module, "_children", ())):
            if process.pid is not None:
                found[process.pid] = process
    return found


def _only_held_by_multiprocessing(processes: Iterable[Any]) -> set[int]:
    """Return the ids of these processes, which are values of a dict, that only the set of multiprocessing refers to."""
    control: Any = object()
    held, as_here = {control}, {0: control}
    del control
    (least,) = [sys.getrefcount(one) for one in as_here.values()]
    found = {process.pid for process in processes if sys.getrefcount(process) <= least}
    held.clear()
    return found


def _is_unused(helper: _Helper, processes: dict[int, Any], unused: set[int]) -> bool:
    if helper.pid in processes:
        return helper.pid in unused
    if any(popen.pid == helper.pid for popen in _forgotten()):
        return True
    kind = getattr(sys.modules.get("subprocess"), "Popen", None)
    if kind is not None and any(issubclass(type(one), kind) and one.pid == helper.pid for one in gc.get_objects()):
        return False
    return bool(helper.links) or orphans.has_ended(helper.pid)


def _end(pids: list[int], processes: dict[int, Any]) -> None:
    """End these processes with all of their descendants: by SIGTERM, then by SIGKILL."""
    descendants = _opened(one for pid in pids for one in orphans.descendants(pid))
    helpers = _opened(pids)
    for fds, number in ((helpers, signal.SIGTERM), (helpers, signal.SIGKILL), (descendants, signal.SIGKILL)):
        for fd in fds:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, number)
        _wait(fds)
        for pid in fds.values():
            _reap(pid, processes)
    for fd in (*helpers, *descendants):
        os.close(fd)


def _opened(pids: Iterable[int]) -> dict[int, int]:
    """Return the processes by pidfd."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            found[os.pidfd_open(pid)] = pid
    return found


def _wait(fds: Iterable[int]) -> None:
    """Wait until these processes have ended, or for `PATIENCE` seconds."""
    deadline = time.monotonic() + PATIENCE
    for fd in fds:
        end = select.poll()
        end.register(fd, select.POLLIN)
        end.poll(max(0.0, deadline - time.monotonic()) * 1000)


def _reap(pid: int, processes: dict[int, Any]) -> None:
    if pid in processes:
        processes[pid].join(0)
    else:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _unread(pid: int) -> set[_Link]:
    """Return the pipes of a `Popen` that no variable holds, except for those of which a variable holds the file."""
    control = _Holder()
    least = sys.getrefcount(control.stdout)
    found = set()
    for popen in _forgotten():
        if popen.pid == pid:
            for name in ("stdin", "stdout", "stderr"):
                file = vars(popen)
                if file[name] is not None and not file[name].closed and sys.getrefcount(file[name]) <= least:
                    found.add(_link(f"/proc/self/fd/{file[name].fileno()}"))
    return {link for link in found if link}


class _Holder:
    def __init__(self) -> None:
        self.stdout = object()


def _forgotten() -> list[Any]:
    """Return each running `Popen` that no variable holds."""
    return list(getattr(sys.modules.get("subprocess"), "_active", None) or ())


def _of_process(process: Any) -> set[_Link]:
    """Return the pipes of a `Process` itself, which tell that the other side has ended."""
    fds = getattr(getattr(process._popen, "finalizer", None), "_args", ())
    return {link for fd in fds if (link := _link(f"/proc/self/fd/{fd}"))}


def _of_multiprocessing() -> set[_Link]:
    """Return the pipes to the processes that multiprocessing keeps for itself."""
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    fds = getattr(tracker, "_fd", None), getattr(server, "_forkserver_alive_fd", None)
    return {link for fd in fds if fd is not None and (link := _link(f"/proc/self/fd/{fd}"))}


def _links(process: str) -> set[_Link]:
    """Return the pipes and sockets that a process has open."""
    found = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{process}/fd"):
            if link := _link(f"/proc/{process}/fd/{fd}"):
                found.add(link)
    return found


def _link(path: str) -> _Link | None:
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return (seen.st_dev, seen.st_ino) if stat.S_ISFIFO(seen.st_mode) or stat.S_ISSOCK(seen.st_mode) else None
