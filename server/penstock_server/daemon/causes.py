"""Looks for the causes of differences between workers, in processes of its own, as `penstock check` does."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from penstock_proto import messages as m
from penstock_proto.world import interpreter

from ..checking.observing.messages import CauseAsked, CauseFound
from ..coordinator.view import StartingView
from ..machine import memory_limits
from ..targets.file_target import shown_target
from ..workers.process import Process

log = logging.getLogger(__name__)

_MOST_NBYTES = 64 << 10
_PROCESSES = 3
"""The experiments run in two processes at a time, which a third one starts."""


class Causes:
    """Runs these processes, one at a time, and logs what they find.

    Args:
        targets: MODULE:ATTR of each feed, in the order of the command line.
        environment: variables of the workers; None as a value removes one.
        starting: knows the names of the feeds.
        workers: returns the process ids of the workers.
        warn: logs a warning about a feed, once.
    """

    def __init__(
        self,
        targets: Sequence[str],
        environment: m.Environment,
        starting: StartingView,
        workers: Callable[[], Iterable[int]],
        warn: Callable[[str], None],
    ) -> None:
        self._targets = targets
        self._environment = environment
        self._starting = starting
        self._workers = workers
        self._warn = warn
        self._stopped = False
        self._process: Process | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """Where the experiments write. The daemon removes it, since it may end them at any time."""

    def find(self, feed: str, place: int, number: int) -> None:
        """Start to look for the cause of a difference at this place of the feed, unless another search is under way.
        The log gets the answer."""
        target = dict(zip(self._starting.names, self._targets, strict=False)).get(feed)
        if self._stopped or self._process is not None or target is None:
            return
        largest = max(map(_resident, self._workers()), default=0)
        if memory_limits.available() < 2 * _PROCESSES * largest:
            self._warn(
                f"feed {feed}: there is too little memory to look for the cause now: "
                f"`penstock check {shown_target(target)}` looks for it"
            )
            return
        ours, theirs = os.pipe()
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="penstock-cause-", ignore_cleanup_errors=True)
            asked = msgspec.json.encode(CauseAsked(target, self._environment, place, number, self._folder.name))
            command = [*interpreter(), "-m", "penstock_server.checking.judging.cause", str(theirs), asked.decode()]
            self._process = Process.started(command, dict(os.environ), [theirs])
        except OSError as error:
            log.debug("cannot look for the cause of a difference: %s", error)
            os.close(ours)
            self._remove_folder()
            return
        finally:
            os.close(theirs)
        self._process.watch(lambda _: self._ended(feed, target, ours))

    def stop(self) -> None:
        """End the search, and begin no other one: workers that end may still tell of differences."""
        self._stopped = True
        self._release()

    def _release(self) -> None:
        if self._process is not None:
            self._process.forget()
            self._process = None
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _ended(self, feed: str, target: str, fd: int) -> None:
        assert self._process is not None
        self._release()
        os.set_blocking(fd, False)
        try:
            found = msgspec.json.decode(os.read(fd, _MOST_NBYTES), type=CauseFound)
        except (OSError, msgspec.MsgspecError):
            self._warn(f"feed {feed}: the cause was not found; `penstock check {shown_target(target)}` may find it")
            return
        finally:
            os.close(fd)
        where = f" ({found.where})" if found.where else ""
        self._warn(f"feed {feed}: why its samples differ: {found.why}{where}. What to do: {found.fix}")


def _resident(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
