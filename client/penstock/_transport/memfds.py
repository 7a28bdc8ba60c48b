"""The memory that another process on this machine shares with this one, and which parts are no longer used here."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from penstock_proto import ConnectionLost, ProtocolError
from penstock_proto.messages import Map

from .._state.memory import Gone, Mapping, Root

MAX_MEMFDS = 65536
"""Most memfds of one connection at a time. By default Linux lets a process map about as many (vm.max_map_count)."""


class Memfds:
    """The memfds that arrived over one connection, and the roots over them."""

    def __init__(self) -> None:
        self._mapped: dict[int, Mapping] = {}
        self._gone: collections.deque[Gone] = collections.deque()

    def map(self, message: Map, fd: int | None) -> None:
        """Map a memfd that has come. The caller keeps the fd.

        Raises:
            ProtocolError: it came without its fd, or twice, or is one too many, or cannot be mapped.
        """
        if fd is None or message.memfd in self._mapped:
            raise ProtocolError(f"{message} came {'without its fd' if fd is None else 'twice'}")
        if len(self._mapped) >= MAX_MEMFDS:
            raise ProtocolError(f"{message} came, but {MAX_MEMFDS} memfds are mapped already")
        try:
            self._mapped[message.memfd] = Mapping(fd, message.nbytes)
        except (OSError, ProtocolError) as error:
            raise ProtocolError(f"{message} cannot be mapped: {error}") from None

    def unmap(self, memfd: int) -> None:
        """Unmap a memfd when the last array over it is gone. No message will name it again."""
        self._mapped.pop(memfd, None)

    def root(self, memfd: int, nbytes: int, token: object, *, private: bool) -> Root | None:
        """Return the root of the first `nbytes` bytes of a memfd, or None if it was not sent or is smaller.

        `private`: others have the memory, too, and must not see what is written to it.

        Raises:
            ConnectionLost: it cannot be mapped once more.
        """
        mapping = self._mapped.get(memfd)
        if mapping is None or nbytes > mapping.nbytes:
            return None
        if not private:
            return mapping.root(nbytes, self._gone.append, token)
        try:
            return mapping.private_root(nbytes, self._gone.append, token)
        except (OSError, ProtocolError) as error:
            raise ConnectionLost(f"shared memory cannot be mapped: {error}") from None

    def take_gone(self) -> Iterator[int]:
        """Yield the tokens of the roots whose last array has gone since the last call. A token is dropped when the next
        one is asked for: a signal that interrupts the caller loses none."""
        while self._gone:
            yield self._gone[0].token
            self._gone.popleft()

    def clear(self) -> None:
        """Unmap everything, as with `unmap`."""
        self._mapped.clear()
