"""Open files as a resource: the limit, and how slots, connections and workers share it.

A slot, a connection and a worker each need some file descriptors. Half of the limit is for connections over TCP (see
network.py). From the other half workers get what they need, connections on this host a quarter of the rest, and slots
what remains. So neither a stream nor a client that only connects can use up the descriptors for replacing a dead
worker.
"""

from __future__ import annotations

import errno
import resource

FIXED = 32
"""For the daemon itself: its loop, its listeners, the fork server, the state file, and files opened for a moment."""

PLACE = 12
"""For a worker: its connection and its successor's, its activity page and stack, its process, and its start."""

SLOT = 2
"""For a slot, and its mapping if it is sent over the network: Python keeps a descriptor for each mapping."""

LOCAL = 2
"""For a connection on this host, and the mapping of its ledger."""

HOW_TO_RAISE = "raise the limit on open files (ulimit -n, LimitNOFILE= in systemd, --ulimit nofile= in docker)"

_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.ENOSPC}


def raise_limit() -> None:
    """Raise this process's limit on open files as far as allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def for_slots(limit: int, workers: int) -> int:
    """Return how many slots there may be beside `workers` workers; negative if the workers alone need too many
    files."""
    return _left(limit, workers) * 3 // 4 // SLOT


def for_local(limit: int, workers: int) -> int:
    """Return how many connections on this host there may be."""
    return max(1, _left(limit, workers) // 4 // LOCAL)


def needed(slots: int, workers: int) -> int:
    """Return the smallest limit that allows `slots` slots and `workers` workers."""
    return 2 * (FIXED + PLACE * workers + -(-slots * SLOT * 4 // 3) + 1)


def most_workers(limit: int, slots: int) -> int:
    """Return how many workers there may be beside `slots` slots."""
    return (limit // 2 - FIXED - -(-slots * SLOT * 4 // 3) - 1) // PLACE


def scarce(error: OSError) -> bool:
    """Return whether the error is a lack of descriptors, memory or processes, which may pass."""
    return error.errno in _SCARCE


def _left(limit: int, workers: int) -> int:
    return limit // 2 - FIXED - PLACE * workers
