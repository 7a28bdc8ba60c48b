"""Maps memory that another process shares. If a file shrinks under a mapping, the kernel kills a process that touches
the missing pages (SIGBUS). So only a memfd that is sealed against shrinking is mapped; nobody can remove that seal."""

from __future__ import annotations

import fcntl
import mmap

from ..errors import ProtocolError


def mapped(fd: int, nbytes: int, *, private: bool = False) -> mmap.mmap:
    """Map the first `nbytes` bytes of a sealed memfd, shared and writable. The caller keeps the fd. `private`: what is
    written there is seen by nobody else (copy on write).

    Raises:
        ProtocolError: it is not a memfd, its owner could shrink it, or it is smaller than that.
        OSError: it cannot be mapped.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0  # not a memfd
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("it is not a memfd that is sealed against shrinking (F_SEAL_SHRINK)")
    try:
        return mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"it does not have {nbytes} bytes: {error}") from None
