"""The interface of a transport to its session, and the transports that were lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from penstock_proto.messages import ServerMessage

from .._state.consumer_state import Received


class Transport(Protocol):
    """The methods of local_transport.py, tcp_transport.py and in_process.py that an open session uses."""

    @property
    def name(self) -> str:
        """`local`, `tcp`, or `process` if this process makes the stream."""

    @property
    def sends_anywhere(self) -> bool:
        """Whether any thread may call `send`, not only the receiver thread."""

    @property
    def quota(self) -> int | None:
        """How many slabs may stay aliased after they are handed over, or None if slabs lie in private memory."""

    def wait(self, timeout: float, for_room: bool) -> None: ...
    def limit(self, quota: int) -> None: ...
    def silent(self) -> bool: ...
    def receive(self) -> ServerMessage | Received | None: ...
    def take_released(self) -> Iterator[int]: ...
    def send(self, data: bytes) -> bool: ...
    def mark(self, handed: int) -> None: ...
    def tell(self, handed: int) -> None: ...
    def close(self) -> None: ...
    def forget(self) -> None: ...


class LostTransports:
    """Transports whose connection was lost, each with the slabs that arrays still use.

    Each stays open until the last of these arrays is gone, because the daemon at its other end may still live, and
    would use the slots again.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Transport, set[int]]] = []

    def __len__(self) -> int:
        """Return how many slabs are held."""
        return sum(len(slabs) for _, slabs in self._held)

    def add(self, transport: Transport, slabs: set[int]) -> None:
        """Keep `transport` until no array lies over the slots of `slabs`."""
        self._held.append((transport, slabs))
        self.close_unused()

    def close_unused(self) -> None:
        """Close the transports whose slots no array uses any longer."""
        for transport, slabs in self._held:
            slabs.difference_update(transport.take_released())
            if not slabs:
                transport.close()
        self._held = [(transport, slabs) for transport, slabs in self._held if slabs]

    def close(self) -> None:
        """Close all transports."""
        for transport, _ in self._held:
            transport.close()
        self._held.clear()

    def forget(self) -> None:
        """In a forked child: leave the connections to the parent."""
        for transport, _ in self._held:
            transport.forget()
