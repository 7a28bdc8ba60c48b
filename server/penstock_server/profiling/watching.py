"""Profiles the workers of a daemon: has each of them sample its stack, and reads the samples.

The daemon only hands out the stacks files (stacks.py). Everything else happens here, in the process of the user who
asks, so several may profile at once, and one that dies leaves nothing behind: workers stop by themselves. Workers that
die meanwhile, and those that take their places, are part of the profile.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Callable, Iterator

from penstock_proto import PenstockError
from penstock_proto.keys import ClientKeys

from .. import control
from .folding import Folding
from .profile import Profile
from .worker import WatchedWorker

EVERY = 0.1
"""Seconds between two looks at the samples."""

LOOK_AGAIN = 1.0
"""Seconds between two questions which workers there are, unless one has died."""

RATE = 100
"""Samples a second, of each worker."""

MOST_SAMPLES = 1_000_000
"""Samples of a profile: longer ones, and those of many workers, have fewer in a second."""

ANSWER = 5.0
"""Seconds that a daemon may take to answer."""


def profile(
    url: str,
    seconds: float,
    *,
    tell: Callable[[float], None],
    may_go_on: Callable[[], bool],
    keys: ClientKeys | None = None,
) -> Profile:
    """Sample the stacks of a daemon's workers.

    Args:
        url: the daemon's or a feed's address.
        seconds: for how long.
        tell: called again and again with the part that is done, 0 to 1.
        may_go_on: asked again and again; the profile ends early if it returns False. Ctrl-C ends it early, too.
        keys: for a daemon with keys.

    Raises:
        Unreachable: the daemon is not on this host, belongs to another user, or does not answer.
        PenstockError: the daemon's answer, if it was an error.
    """
    state = json.loads(control.status(url, ANSWER, keys))
    result = Profile(url)
    with _Workers(url, state, result, seconds) as workers:
        began = now = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends it early
            while now < began + seconds and may_go_on():
                workers.look(now, began + seconds)
                tell((now - began) / seconds)
                time.sleep(max(0.0, min(EVERY, began + seconds - now)))
                now = time.monotonic()
        workers.read()
        result.seconds = now - began
    tell(1.0)
    return result


class _Workers:
    """The workers that are watched."""

    def __init__(self, url: str, state: dict[str, object], result: Profile, seconds: float) -> None:
        self._url = url
        self._state = state
        self._result = result
        self._seconds = seconds
        self._folding = Folding()
        self._watched: dict[int, WatchedWorker] = {}
        self._looked = float("-inf")
        self._ends = select.poll()

    def __enter__(self) -> _Workers:
        self._find(ANSWER)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._watched.values():
            worker.close()

    def look(self, now: float, until: float) -> None:
        """Read the new samples, look for workers that have come or gone, and have them go on until `until`."""
        ended = {fd for fd, _ in self._ends.poll(0)}
        self.read()
        for worker in [worker for worker in self._watched.values() if worker.pidfd in ended]:
            self._ends.unregister(worker.pidfd)
            worker.record.ended = True
            del self._watched[worker.record.pid]
            worker.close()
        if ended or now - self._looked >= LOOK_AGAIN:
            with contextlib.suppress(PenstockError):  # it is busy, or stops just now
                self._find(1.0)
        rate = min(RATE, MOST_SAMPLES / (self._seconds * max(1, len(self._watched))))
        for worker in self._watched.values():
            worker.go_on(now, until, rate)

    def read(self) -> None:
        """Read the new samples."""
        for worker in self._watched.values():
            worker.read()

    def _find(self, timeout: float) -> None:
        self._looked = time.monotonic()
        for worker in self._new(timeout):
            self._watched[worker.record.pid] = worker
            self._ends.register(worker.pidfd, select.POLLIN)

    def _new(self, timeout: float) -> Iterator[WatchedWorker]:
        for number, pid, fd in control.stacks(self._url, self._state, timeout):
            if pid in self._watched:
                os.close(fd)
            elif (worker := WatchedWorker.of(number, pid, fd, self._folding)) is not None:
                self._result.workers.append(worker.record)
                yield worker
