"""At a host: the listener from which consumers fetch the batches that it keeps (built_slots.py)."""

from __future__ import annotations

from penstock_proto import ProtocolError
from penstock_proto import messages as m
from penstock_proto.security.keys import ClientKeys
from penstock_proto.transport import codec

from ..logs.rate_limited_log import RateLimitedLog
from ..net.keys import ClientKey, ServerKeys
from ..net.network import Router
from .built_slots import BuiltSlots

MAX_CLIENTS = 65536
"""Most clients that a head may admit."""


class SlabServer:
    """The listener, and the consumers that are connected to it.

    Args:
        address: where to listen: the address by which the head knows this host.
        port: the port; 0 takes a free one.
        keys: this host's keys, or None. With keys nobody is admitted before `admit`.
        log: for peers' invalid messages.

    Attributes:
        slots: the slots that consumers can fetch; None while this host has not joined.
        router: the connections.

    Raises:
        StartError: it cannot listen at that port.
    """

    def __init__(self, address: str, port: int, keys: ClientKeys | None, log: RateLimitedLog) -> None:
        self.slots: BuiltSlots | None = None
        self.address = address
        self._log = log
        host = f"[{address}]" if ":" in address else address
        own = None if keys is None else ServerKeys(keys.folder, keys.own, {})
        self._admitted: dict[bytes, ClientKey] = {}
        self.router = Router(f"tcp://{host}:{port}", self.on_message, lambda peer: None, own)

    @property
    def port(self) -> int:
        """The port at which consumers connect."""
        return int(self.router.endpoint.rpartition(":")[2])

    @property
    def unsent_bytes(self) -> int:
        """How many bytes wait until the connections of consumers take them."""
        return self.router.all_unsent_bytes

    def admit(self, message: m.AdmitClients) -> None:
        """Admit clients with these keys, and no others once the list is complete.

        Raises:
            ProtocolError: there are too many.
        """
        if len(self._admitted) + len(message.keys) > MAX_CLIENTS:
            raise ProtocolError(f"more than {MAX_CLIENTS} clients may fetch here")
        self._admitted.update(
            (key, ClientKey(key, key[:8].decode("ascii", "replace"), host=False)) for key in message.keys
        )
        if not message.more:
            self.router.admit(self._admitted)
            self._admitted = {}

    def close(self) -> None:
        """Close all connections."""
        self.router.close()

    def on_message(self, peer: bytes, data: bytes) -> None:
        """Answer a message from this connection."""
        try:
            message = codec.from_fetcher(data)
        except ProtocolError as error:
            text = "a connection to fetch batches from %s is closed: %s"
            self._log.warning(text, self.router.address(peer), error.message, event="message_refused")
            self.router.drop(peer)
            return
        if isinstance(message, m.Ping):
            self.router.send(peer, m.Pong())
        else:
            self._send(peer, message)

    def _send(self, peer: bytes, fetch: m.Fetch) -> None:
        found = None if self.slots is None else self.slots.fetch(fetch)
        if found is None:
            self.router.send(peer, m.NotKept(fetch.seq))
            return
        slot, regions = found
        for start, stop in regions:
            slot.fetched += 1
            self.router.send_bytes(peer, fetch.seq, start, slot.memfd.view(start, stop), done=slot.on_fetched)
