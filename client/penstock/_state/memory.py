"""Memory under arrays: its owner, and how the owner learns that the last array (or tensor) over it is gone.

NumPy collapses chains of views, so a weak reference to an array fires too early. A weak reference to the object at the
root of all views, which exports its memory by `__array_interface__`, fires exactly when the last array or tensor dies.

This module knows no slabs and no messages.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_proto import MemoryBound
from penstock_proto.transport import sealed

ALIGN = 64
CHECKED = 64 << 20
"""Bytes from which on a buffer is compared with the memory that this machine has left, before it is allocated."""


class Gone(weakref.ref["Root"]):
    """A weak reference to a `Root`, passed on when the last array over it is gone. `token` identifies the memory."""

    __slots__ = ("token",)
    token: Any


class Root:
    """The root of all arrays over a piece of memory. `np.asarray(root)` is the whole piece as uint8, writable.

    When the last array over it is gone, it calls `gone(Gone)`, on any thread and at any point in any code. So `gone`
    must take no lock and do next to nothing. If that thread can be the main thread during training, `gone` should be
    written in C, such as the `append` of a deque: a finalizer in Python would swallow Ctrl-C.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_gone", "_memory")

    def __init__(
        self, memory: object, address: int, nbytes: int, gone: Callable[[Gone], object], token: object
    ) -> None:
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
        self._memory = memory
        self._gone = Gone(self, gone)  # it calls back before this object drops its other references
        self._gone.token = token


class Mapping:
    """A shared memfd, mapped writable: TensorFlow writes in place to memory that it thinks it owns.

    It is unmapped when this object and all roots over it are gone.

    `private_root` needs the memfd again. Slots can be more than the files that this process may have open, and its own
    code needs some of these. So only descriptors in the lower half of the numbers are kept. Without one, `private_root`
    copies. (Raising the limit is not for a library to do: `select` fails with descriptors from 1024 on.)
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map `nbytes` bytes of `fd`. The caller keeps the fd.

        Raises:
            OSError, ProtocolError: as `sealed.mapped`.
        """
        self.nbytes = nbytes
        self._memory = sealed.mapped(fd, nbytes)
        self._address = address_of(np.frombuffer(self._memory, np.uint8))
        self._fd: int | None = None
        with contextlib.suppress(OSError):  # none is left
            self._fd = os.dup(fd)
            if self._fd >= _most_files() // 2:
                self._close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def root(self, nbytes: int, gone: Callable[[Gone], object], token: object) -> Root:
        """Return the root of its first `nbytes` bytes. It must be that long."""
        return Root(self._memory, self._address, nbytes, gone, token)

    def private_root(self, nbytes: int, gone: Callable[[Gone], object], token: object) -> Root:
        """Return the root of its first `nbytes` bytes, mapped once more (or copied) for this root alone: what is
        written there is seen by nobody else.

        Raises:
            OSError, ProtocolError: as `sealed.mapped`.
        """
        if self._fd is not None:
            memory = sealed.mapped(self._fd, nbytes, private=True)
        else:
            memory = mmap.mmap(-1, nbytes)
            memory[:] = memoryview(self._memory)[:nbytes]
        return Root(memory, address_of(np.frombuffer(memory, np.uint8)), nbytes, gone, token)


class Pool:
    """Private 64-byte aligned buffers, reused when the last array over them is gone. It keeps the newest `keep`."""

    def __init__(self, keep: int) -> None:
        self._free: collections.deque[Gone] = collections.deque(maxlen=keep)

    def take(self, nbytes: int) -> Root:
        """Return the root of `nbytes` bytes with undefined content.

        Raises:
            MemoryBound: this machine does not have that much memory left.
        """
        buffer = self._buffer(nbytes)
        return Root(buffer, address_of(buffer), nbytes, self._free.append, buffer)

    def _buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        try:
            buffer: npt.NDArray[np.uint8] = self._free.pop().token
        except IndexError:
            pass
        else:
            if nbytes <= buffer.nbytes <= 2 * nbytes:
                return buffer
        available = _available() if nbytes >= CHECKED else nbytes
        try:
            if nbytes > available:
                raise MemoryError
            memory = np.empty(nbytes + ALIGN, np.uint8)
        except (MemoryError, ValueError):  # ValueError: more than any array can have
            raise MemoryBound(
                f"a slab of {nbytes} bytes came, which this process cannot hold (this machine has {_available()} bytes "
                "left): use smaller batches, or free memory"
            ) from None
        start = -address_of(memory) % ALIGN
        return memory[start : start + nbytes]


def _most_files() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def _available() -> int:
    """Return how many bytes this machine has left, or many if that is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


def address_of(array: npt.NDArray[np.uint8]) -> int:
    """Return the address of the first byte of `array`."""
    address: int = array.__array_interface__["data"][0]
    return address
