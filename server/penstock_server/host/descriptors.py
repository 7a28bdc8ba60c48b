"""Open files as a resource: how many of them there may be, and who gets how many.

A slot, a connection and a worker's place each take some. Half of the limit is for connections over TCP (network.py
keeps to that). Of the rest workers get what their places need, connections on this host a quarter, and slots what
remains. So no stream, and nobody who only connects, takes those with which a worker that has died is replaced.
"""

from __future__ import annotations

import errno
import resource

FIXED = 32
"""The daemon's own: its loop, its listeners, the fork server, the state file, and what it opens for a moment."""

PLACE = 12
"""A worker's place: its connection and the next one's, its status page and stack, its process, and its start."""

SLOT = 2
"""A slot, and its mapping where it is sent over the network: Python keeps a descriptor for each mapping."""

LOCAL = 2
"""A connection on this host, and the mapping of its ledger."""

MEND = "raise the limit of open files (ulimit -n, LimitNOFILE= of systemd, --ulimit nofile= of docker)"

_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.ENOSPC}


def raise_limit() -> None:
    """Allow this process as many open files as it may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def for_slots(limit: int, workers: int) -> int:
    """How many slots there may be beside so many workers; less than 0 if there is no room even for these."""
    return _left(limit, workers) * 3 // 4 // SLOT


def for_local(limit: int, workers: int) -> int:
    """How many connections on this host there may be."""
    return max(1, _left(limit, workers) // 4 // LOCAL)


def needed(slots: int, workers: int) -> int:
    """The least limit with which there can be so many slots beside so many workers."""
    return 2 * (FIXED + PLACE * workers + -(-slots * SLOT * 4 // 3) + 1)


def most_workers(limit: int, slots: int) -> int:
    """How many workers there may be so that there can still be so many slots."""
    return (limit // 2 - FIXED - -(-slots * SLOT * 4 // 3) - 1) // PLACE


def scarce(error: OSError) -> bool:
    """Whether it failed for want of descriptors, memory or processes, of which there may be more later."""
    return error.errno in _SCARCE


def _left(limit: int, workers: int) -> int:
    return limit // 2 - FIXED - PLACE * workers
