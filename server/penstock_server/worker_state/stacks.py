"""The stacks file of a worker, into which its stack is written, once or repeatedly while somebody profiles it.

It is a memfd with a sealed size, which the daemon makes for each worker:

    0        faulthandler's output at SIGUSR2, within `DUMP` bytes; zero bytes follow
    DUMP     int64 until: sample the stack until then, in monotonic ns; the profiler renews it
    + 8      int64 ns between two samples
    + 16     int64 of the log: how many times it was begun again
    + 24     int64 of the log: bytes written
    + 4096   the log: lines of JSON (worker/process/stack_sampler.py defines them)

The worker samples only if `until` is in the future, and SIGPROF told it to look. Untouched pages take no memory.
"""

from __future__ import annotations

import fcntl
import os
import struct

DUMP = 256 * 1024
"""Bytes for faulthandler, which writes less for one thread."""

LOG = 4 << 20
"""Bytes of the log. A full log begins again."""

UNTIL, INTERVAL, BEGUN, WRITTEN = DUMP, DUMP + 8, DUMP + 16, DUMP + 24
"""Offsets of these numbers."""

START = DUMP + 4096
"""Offset of the log."""

NBYTES = START + LOG

NUMBER = struct.Struct("=q")


def create() -> int:
    """Make a stacks file, and return its fd.

    Raises:
        OSError: there are no file descriptors or no memory left.
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
    """Erase faulthandler's output, so that it writes from the first byte on again. The worker's fd shares the file
    position."""
    written = min(os.lseek(fd, 0, os.SEEK_CUR), DUMP)
    os.lseek(fd, 0, os.SEEK_SET)
    os.pwrite(fd, bytes(written), 0)


def dumped(fd: int) -> bytes:
    """Return faulthandler's output since `rewind`."""
    written = min(os.lseek(fd, 0, os.SEEK_CUR), DUMP)
    return os.pread(fd, written, 0).rstrip(b"\0")


def number(fd: int, place: int) -> int:
    """Read the number at the offset `place`."""
    (value,) = NUMBER.unpack(os.pread(fd, NUMBER.size, place))
    return int(value)


def put(fd: int, place: int, value: int) -> None:
    """Write the number at the offset `place`."""
    os.pwrite(fd, NUMBER.pack(value), place)
