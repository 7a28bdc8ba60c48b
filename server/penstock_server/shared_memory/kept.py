"""At the head: batches whose bytes are not in their slots, because the hosts that made them keep them.

Their slots stay reserved. So the host can send the bytes there at any time: for a consumer that cannot fetch them, for
a copy, or because the host needs its memory or leaves. If the host is lost, the batches are made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


class Keeper(Protocol):
    """A host that keeps batches.

    Attributes:
        number: its number, which is never reused.
        fetched: bytes of batches that consumers were told to fetch from it.
    """

    number: int
    fetched: int

    def send_kept(self, ticket: int) -> None:
        """Tell the host to send the batches that it keeps for the ticket."""

    def release(self, ticket: int) -> None:
        """Tell the host that nobody needs the batches that it keeps for the ticket."""


@dataclass(slots=True)
class Kept:
    """The kept batches of a ticket.

    Attributes:
        host: the host that keeps them; None if it is lost, and they are made again.
        secret: consumers that name it may fetch them.
        asked: whether the host was asked to send them.
        waiting: called with True when they are in the slot, or with False if they never will be.
    """

    host: Keeper | None
    secret: bytes
    asked: bool = False
    waiting: list[Callable[[bool], None]] = field(default_factory=list)


class KeptBatches:
    """The kept batches of all hosts, by ticket."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}

    def of(self, ticket: int) -> Kept | None:
        """Return the kept batches of the ticket; None if its bytes are in the slot."""
        return self._kept.get(ticket)

    def begin(self, ticket: int, host: Keeper, secret: bytes) -> None:
        """Note that the host keeps the batches that it has just reported for the ticket."""
        if ticket not in self._kept:
            self._kept[ticket] = Kept(host, secret)

    def bring(self, ticket: int, then: Callable[[bool], None]) -> None:
        """Bring the bytes into the slot, and call `then(True)`; at once if they are there. If they were lost and are
        not made again, call `then(False)`."""
        kept = self._kept.get(ticket)
        if kept is None:
            then(True)
            return
        kept.waiting.append(then)
        if kept.host is not None and not kept.asked:
            kept.asked = True
            kept.host.send_kept(ticket)

    def there(self, ticket: int, whole: bool = True) -> None:
        """Note that the bytes are in the slot: the host has sent them, or they were made again. Not `whole`: they will
        never come."""
        kept = self._kept.pop(ticket, None)
        if kept is not None:
            for then in kept.waiting:
                then(whole)

    def freed(self, ticket: int) -> None:
        """Release what the host keeps for the ticket: its slot is free."""
        kept = self._kept.pop(ticket, None)
        if kept is not None and kept.host is not None:
            kept.host.release(ticket)

    def lost(self, host: Keeper) -> tuple[int, ...]:
        """Note that the host is lost. Return the tickets whose batches it kept."""
        found = [(ticket, kept) for ticket, kept in self._kept.items() if kept.host is host]
        for _, kept in found:
            kept.host = None
        return tuple(ticket for ticket, _ in found)
