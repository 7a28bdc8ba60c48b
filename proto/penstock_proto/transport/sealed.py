"""Maps memory that another process shares. If a file shrinks under a mapping, the kernel kills a process that touches
the missing pages (SIGBUS). So only a memfd that is sealed against shrinking is mapped; nobody can remove that seal."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from ..errors import ProtocolError

_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def mapped(fd: int, nbytes: int, *, private: bool = False) -> mmap.mmap:
    """Map the first `nbytes` bytes of a sealed memfd, shared and writable. The caller keeps the fd. `private`: what is
    written there is seen by nobody else (copy on write).

    The mapping keeps no descriptor. Python keeps one for each mapping of a file, so this maps anonymous memory, and
    then the file in its place. Python unmaps it like any other, without running Python code.

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
    if not 0 < nbytes <= os.fstat(fd).st_size:
        raise ProtocolError(f"it does not have {nbytes} bytes")
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a shared one would get an inode
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    if _mmap(address, nbytes, _PROTECTION, kind | _MAP_FIXED, fd, 0) == _FAILED:
        raise OSError(ctypes.get_errno(), f"cannot map {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
    return memory
