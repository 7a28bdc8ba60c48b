"""Profiles the workers of a daemon: has each of them sample its stack, and reads the samples.

The daemon only hands out the stacks files (stacks.py). Everything else happens here, in the process of the user who
asks, so several may profile at once, and one that dies leaves nothing behind: workers stop by themselves. Workers that
die meanwhile, and those that take their places, are part of the profile. So are those of hosts that have joined, which
sample their workers in the same way (join/sampling.py) and send what they have seen (of_hosts.py).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from penstock_proto import PenstockError, StartError
from penstock_proto.security.keys import ClientKeys
from penstock_proto.status.status_shape import Status

from ..to_daemon import control
from .of_hosts import OfHosts
from .profile import Profile
from .sampled_workers import SampledWorkers, rate_of

EVERY = 0.1
"""Seconds between two looks at the samples."""

LOOK_AGAIN = 1.0
"""Seconds between two questions which workers there are, unless one has died."""

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
        StartError: /proc is hidden, so nobody knows whether a signal would end a worker.
        Unreachable: the daemon is not on this host, belongs to another user, or does not answer.
        PenstockError: the daemon's answer, if it was an error.
    """
    if not os.path.exists("/proc/self/status"):
        raise StartError("profiling needs /proc, which is hidden here: mount it (a proc file system)")
    state = control.status(url, ANSWER, keys)
    result = Profile(url)
    rate = rate_of(seconds, len(state.workers))
    with contextlib.closing(SampledWorkers()) as own, OfHosts(url, state, seconds, rate, ANSWER) as others:
        result.workers, result.hosts = own.records, others.hosts
        own.found(control.stacks(url, state, ANSWER))
        began = now = asked = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends it early
            while now < began + seconds and may_go_on():
                if own.read() or now - asked >= LOOK_AGAIN:
                    asked = now
                    own.found(_stacks(url, state))
                others.read()
                own.go_on(now, began + seconds, rate)
                tell((now - began) / seconds)
                time.sleep(max(0.0, min(EVERY, began + seconds - now)))
                now = time.monotonic()
        own.read()
        result.seconds = now - began
        others.finish(whole=now >= began + seconds)
        result.workers = own.records + others.records
    tell(1.0)
    return result


def _stacks(url: str, state: Status) -> list[tuple[int, int, int]]:
    try:
        return control.stacks(url, state, 1.0)
    except PenstockError:  # it is busy, or stops just now
        return []
