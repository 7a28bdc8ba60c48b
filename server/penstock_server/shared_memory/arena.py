"""The arena: the shared memory in which slabs are built.

Each slot has its own memfd of sealed size, which workers and local clients receive with SCM_RIGHTS. So there are no
names to leak, docker's small /dev/shm does not matter, each slot can be returned to the system separately, and slots of
different sizes do not fragment one another. The arena reuses a free slot for the next ticket that it fits.

Growing takes time (0.3 s per GiB), so the arena checks how much memory is left and then reserves the pages on a thread.
Copies from one slot to another run on threads too.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock_proto import MemoryBound
from penstock_proto.status.figures import size

from ..machine import descriptors
from ..machine.memory_limits import available

Bytes: TypeAlias = npt.NDArray[np.uint8]

_PAGE = mmap.PAGESIZE
_SPARE = 64 << 20
"""Bytes of the machine's memory that the arena leaves to other processes."""


@dataclass(slots=True, eq=False)
class Memfd:
    """The memory of one slot.

    Attributes:
        number: identifies it in messages; never reused.
        nbytes: its size.
        fd: the file.
        retired: True if nothing may overwrite it: its bytes may still wait to be sent for a session that has ended, or
            a consumer on this host, whose connection the daemon has closed, may have tensors in it.
    """

    number: int
    nbytes: int
    fd: int
    retired: bool = False
    _memory: Bytes | None = None
    _writable: memoryview | None = None

    def view(self, start: int, stop: int) -> Bytes:
        """Return bytes of the memfd. The first call maps it (only slabs for the network need that). If no descriptor or
        address space is left for a mapping, return a copy."""
        if self._memory is None:
            try:
                mapped = mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
            except OSError:
                return self._copied(start, stop)
            self._memory = np.frombuffer(mapped, np.uint8)
        return self._memory[start:stop]

    def writable(self, start: int, stop: int) -> memoryview:
        """Return writable bytes of the memfd. The first call maps it (only slots that other hosts fill need that).

        Raises:
            OSError: no descriptor or address space is left for a mapping.
        """
        if self._writable is None:
            mapped = mmap.mmap(self.fd, self.nbytes)
            self._writable = memoryview(mapped)
            self._memory = np.frombuffer(mapped, np.uint8)  # one mapping for both saves a descriptor
        return self._writable[start:stop]

    def _copied(self, start: int, stop: int) -> Bytes:
        copy = np.empty(stop - start, np.uint8)
        at = 0
        while at < len(copy):
            at += os.preadv(self.fd, [copy[at:].data], start + at)
        return copy

    def drop(self) -> None:
        """Close the fd. A mapping lasts until its last waiting bytes have been sent."""
        self._memory = self._writable = None
        os.close(self.fd)


class Arena:
    """All memfds, in use or free: `count` of them, `nbytes` bytes in total. The caller decides how much it may hold."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.count = 0
        self._last = 0
        self._free: list[Memfd] = []
        self._growing = 0

    @property
    def spare(self) -> bool:
        """Whether there are free memfds."""
        return bool(self._free)

    def reuse(self, nbytes: int) -> Memfd | None:
        """Return the smallest free memfd that holds `nbytes` and is at most twice as large, or None."""
        fits = [s for s in self._free if nbytes <= s.nbytes <= max(2 * nbytes, _PAGE)]
        if not fits:
            return None
        memfd = min(fits, key=lambda s: s.nbytes)
        self._free.remove(memfd)
        return memfd

    async def grow(self, nbytes: int) -> Memfd:
        """Make a memfd of at least `nbytes`, with its pages reserved.

        Raises:
            MemoryBound: the machine or the cgroup does not have that much left, or no file descriptor is left.
        """
        nbytes = -(-nbytes // _PAGE) * _PAGE
        self.nbytes += nbytes
        self.count += 1
        self._last += 1
        number = self._last
        fd = -1
        others = self._growing
        self._growing += nbytes
        try:
            room = available() - _SPARE - others
            if nbytes > room:
                raise MemoryBound(
                    f"a slot of {size(nbytes)} is needed, but this machine (or its cgroup) has {size(max(0, room))} "
                    "left: close other programs, raise the container's limit, or make --memory smaller"
                )
            fd = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            await asyncio.get_running_loop().run_in_executor(None, os.posix_fallocate, fd, 0, nbytes)
        except BaseException as error:
            self.nbytes -= nbytes
            self.count -= 1
            if fd >= 0:
                os.close(fd)
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise MemoryBound(
                    f"a slot of {size(nbytes)} is needed, and no file descriptor is left for it ({error.strerror}): "
                    f"{descriptors.HOW_TO_RAISE}, or read fewer streams"
                ) from None
            if isinstance(error, OSError | RuntimeError | MemoryError):  # RuntimeError: no thread can be started
                why = error.strerror if isinstance(error, OSError) else error
                raise MemoryBound(f"a slot of {size(nbytes)} could not be reserved: {why}") from None
            raise
        finally:
            self._growing -= nbytes
        return Memfd(number, nbytes, fd)

    def free(self, memfd: Memfd) -> None:
        """Take back a memfd that is no longer used."""
        self._free.append(memfd)

    def retire(self, memfd: Memfd) -> None:
        """Return the memfd to the system; its memory lasts while bytes of it wait to be sent."""
        self.nbytes -= memfd.nbytes
        self.count -= 1
        memfd.drop()

    def trim(self, reserved: int, count: int) -> list[Memfd]:
        """Return free memfds to the system until at most `reserved` bytes in `count` memfds are held.

        Returns:
            The memfds that are gone.
        """
        gone = []
        while self._free and (self.nbytes > reserved or self.count > count):
            memfd = self._free.pop(0)
            self.retire(memfd)
            gone.append(memfd)
        return gone
