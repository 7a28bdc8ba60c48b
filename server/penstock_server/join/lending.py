"""At a host: the unix listener from which consumers on its machine borrow the batches that it keeps (built_slots.py).

They map the memory, so nothing is copied. Consumers say when they give a slab back. When a connection ends, tensors of
the consumer may live on. So memory that was lent to it is never written again, and returns to the system with the last
tensor.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock_proto import ProtocolError
from penstock_proto import messages as m
from penstock_proto.transport import codec

from ..logs.rate_limited_log import RateLimitedLog
from ..net.local import Listener, LocalPeer
from ..shared_memory.arena import Memfd
from .built_slots import BuiltSlot, BuiltSlots

MOST = 256
"""Maximum number of consumers' connections."""
MOST_LENT = 64
"""Slabs that one consumer may have borrowed. Penstock's client borrows fewer."""


class Lender:
    """The listener, and the memory that is lent on each connection.

    Args:
        log: for peers' invalid messages.
        uids: users who may borrow, besides our own and root.

    Attributes:
        lent_bytes: how many bytes were lent since this host joined.
    """

    def __init__(self, log: RateLimitedLog, uids: Collection[int] = ()) -> None:
        self.lent_bytes = 0
        self._log = log
        self._slots: BuiltSlots | None = None
        self._lent: dict[LocalPeer, dict[int, BuiltSlot]] = {}
        """The slots from which each consumer has borrowed, by the number of the slab."""
        self._listener = Listener(self._on_message, self._forget, MOST, uids)

    @property
    def name(self) -> str:
        """The abstract unix address."""
        return self._listener.name

    def lend_from(self, slots: BuiltSlots | None) -> None:
        """Lend the batches that `slots` keep, and forget what was lent before: that memory is not used again. None:
        lend nothing."""
        self.lent_bytes = 0
        self._slots = slots
        self._lent.clear()

    def gone(self, memfd: Memfd) -> None:
        """Tell consumers that this memory was returned to the system, so that no message will name it again."""
        for peer in self._listener.peers:
            peer.gone(memfd)

    def look_at_the_clock(self, now: float) -> None:
        """Close connections that have sent nothing for too long."""
        self._listener.look_at_the_clock(now)

    def close(self) -> None:
        """Close all connections."""
        self._listener.close()

    def _on_message(self, peer: LocalPeer, data: bytes) -> None:
        try:
            message = codec.from_borrower(data)
        except ProtocolError as error:
            text = "a connection of a program on this machine, which borrows batches, is closed: %s"
            self._log.warning(text, error.message, event="message_refused")
            self._listener.drop(peer)
            self._forget(peer)
            return
        peer.opened()
        match message:
            case m.Ping():
                peer.send(m.Pong())
            case m.Fetch():
                self._lend(peer, message)
            case m.GivenBack():
                slot = self._lent.get(peer, {}).pop(message.seq, None)
                if slot is not None and self._slots is not None:  # else it was lent before the host joined again
                    self._slots.given_back(slot)

    def _lend(self, peer: LocalPeer, fetch: m.Fetch) -> None:
        lent = self._lent.setdefault(peer, {})
        found = None
        slots = self._slots
        if slots is not None and slots.may_lend and len(lent) < MOST_LENT and fetch.seq not in lent:
            found = slots.fetch(fetch)
        if slots is None or found is None:
            peer.send(m.NotKept(fetch.seq))
            return
        slot, regions = found
        self.lent_bytes += sum(stop - start for start, stop in regions)
        brief = slots.lend(slot)
        lent[fetch.seq] = slot
        peer.show(slot.memfd)
        peer.send(m.Lent(fetch.seq, slot.memfd.number, brief))

    def _forget(self, peer: LocalPeer) -> None:
        """Handle the end of a consumer's connection."""
        for slot in self._lent.pop(peer, {}).values():
            slot.memfd.retired = True
            if self._slots is not None:
                self._slots.given_back(slot)
