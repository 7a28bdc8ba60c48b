"""The stacks file of a worker: where its stack is written, once or again and again while somebody profiles it.

It is a memfd that the daemon makes for each worker, and whose size is sealed:

    0        what faulthandler writes at SIGUSR2, within `DUMP` bytes; zero bytes follow
    DUMP     int64 until: sample the stack until then, in monotonic ns; who profiles renews it
    + 8      int64 ns between two samples
    + 16     int64 of the log: how often it was begun again
    + 24     int64 of the log: bytes written
    + 4096   the log: lines of JSON (worker/stack_sampler.py says which)

Nobody samples unless `until` is in the future, and SIGPROF told the worker to look. Untouched pages take no memory.
"""

from __future__ import annotations

import fcntl
import os
import struct

DUMP = 256 * 1024
"""Bytes for faulthandler, which writes less for one thread."""

LOG = 4 << 20
"""Bytes of the log. A full one begins again."""

UNTIL, INTERVAL, BEGUN, WRITTEN = DUMP, DUMP + 8, DUMP + 16, DUMP + 24
"""Where these numbers stand."""

START = DUMP + 4096
"""Where the log begins."""

NBYTES = START + LOG

NUMBER = struct.Struct("=q")


def create() -> int:
    """Make a stacks file; return its fd.

    Raises:
        OSError: there are no descriptors or no memory for it.
    """
    fd = os.memfd_create("penstock-stacks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, NBYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def rewind(fd: int) -> None:
    """Erase what faulthandler wrote; it writes from the first byte on again. The worker's fd shares the position."""
    written = min(os.lseek(fd, 0, os.SEEK_CUR), DUMP)
    os.lseek(fd, 0, os.SEEK_SET)
    os.pwrite(fd, bytes(written), 0)


def dumped(fd: int) -> bytes:
    """Return what faulthandler has written since `rewind`."""
    written = min(os.lseek(fd, 0, os.SEEK_CUR), DUMP)
    return os.pread(fd, written, 0).rstrip(b"\0")


def number(fd: int, place: int) -> int:
    """Read one of the numbers."""
    (value,) = NUMBER.unpack(os.pread(fd, NUMBER.size, place))
    return int(value)


def put(fd: int, place: int, value: int) -> None:
    """Write one of the numbers."""
    os.pwrite(fd, NUMBER.pack(value), place)
