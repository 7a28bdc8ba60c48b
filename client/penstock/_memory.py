"""Memory under arrays: who owns it, and how its owner learns that the last array (or tensor) over it is gone.

NumPy collapses chains of views, so a weak reference on an array fires too early. What fires exactly when the last
array or tensor dies is the object at the root of them all, which exports its memory by `__array_interface__`.

This file knows no slab and no message.
"""

from __future__ import annotations

import collections
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGN = 64


class Gone(weakref.ref["Root"]):
    """What the last array over a piece of memory leaves behind: `token` says which piece it was."""

    __slots__ = ("token",)
    token: Any


class Root:
    """The root of all arrays over a piece of memory; `np.asarray(root)` is the whole piece as uint8, writable.

    When the last array over it is gone `gone(Gone)` is called, on any thread and at any point of any code: it must
    take no lock and do next to nothing. Where that can be the main thread in the middle of training, let it be
    written in C, such as the `append` of a deque: in a finalizer in Python a Ctrl-C would be raised and swallowed.
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
        self._gone = Gone(self, gone)  # weak references are cleared, and call back, before an object lets go of its own
        self._gone.token = token


class Mapping:
    """A shared segment, mapped writable: TensorFlow writes in place into what it thinks it owns.

    It is unmapped when this object and all roots over it are gone.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map `nbytes` bytes of `fd`, which stays the caller's.

        Raises:
            OSError, ValueError: it cannot be mapped, or is smaller than that.
        """
        self.nbytes = nbytes
        self._memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._address = address_of(np.frombuffer(self._memory, np.uint8))

    def root(self, nbytes: int, gone: Callable[[Gone], object], token: object) -> Root:
        """The root of its first `nbytes` bytes, which it must have."""
        return Root(self._memory, self._address, nbytes, gone, token)


class Pool:
    """Private 64-byte aligned buffers, used again when the last array over them is gone; the newest `keep` are kept."""

    def __init__(self, keep: int) -> None:
        self._free: collections.deque[Gone] = collections.deque(maxlen=keep)

    def take(self, nbytes: int) -> Root:
        """The root of `nbytes` bytes whose content is undefined."""
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
        memory = np.empty(nbytes + ALIGN, np.uint8)
        start = -address_of(memory) % ALIGN
        return memory[start : start + nbytes]


def address_of(array: npt.NDArray[np.uint8]) -> int:
    """Where the first byte of `array` lies."""
    address: int = array.__array_interface__["data"][0]
    return address
