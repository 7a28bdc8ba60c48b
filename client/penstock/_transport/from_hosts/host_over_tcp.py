"""A connection to a host over the network: the bytes of slabs arrive in chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock_proto import ProtocolError
from penstock_proto.messages import Chunk, HostAt, NotKept
from penstock_proto.security.trusted_users import check_peer
from penstock_proto.transport.codec import from_keeper
from penstock_proto.transport.zmtp_dealer import Dealer, connected

from ..arriving import Arriving, Landing
from ..frames import Frames
from .host_connection import MAX_IDLE, HostConnection

if TYPE_CHECKING:
    from penstock_proto.security.keys import ClientKeys
    from penstock_proto.transport.libzmq import LibzmqDealer

_AT_ONCE = 64 * 1024
"""Most bytes for which a poll waits."""


class HostOverTcp(HostConnection):
    """A connection over which a host sends slabs in chunks."""

    def __init__(
        self,
        where: HostAt,
        keys: ClientKeys | None,
        trusted: frozenset[int] | None,
        timeout: float,
        watch: Callable[[], None],
    ) -> None:
        """Connect.

        Args:
            where: the host.
            keys: the client's keys, or None.
            trusted: the users who may run the host if it is on this machine; None: any.
            timeout: seconds that the host has to answer.
            watch: called while nothing comes; it may raise to give up.

        Raises:
            OSError, PenstockError, ValueError: the host cannot be reached, or does not admit this client.
        """
        super().__init__(where)
        self._dealer = _dealer(where, keys, trusted, timeout, watch)
        self._frames = Frames(self._dealer)
        self._landing = Landing()

    @property
    def unsent(self) -> bool:
        """Whether messages wait for room to be sent."""
        return super().unsent or self._dealer.unsent

    @property
    def pending(self) -> bool:
        """Whether something has come that no descriptor reports."""
        return self._dealer.pending

    def prepare(self) -> Sequence[int]:
        """See HostConnection."""
        self._flush()
        if isinstance(self._dealer, Dealer):
            self._dealer.wake_at(min(self._dealer.left, _AT_ONCE))
        return self._dealer.descriptors

    def read(self) -> Iterator[NotKept | Arriving]:
        """See HostConnection."""
        idle = 0
        while idle < MAX_IDLE:
            if self._landing:
                left = self._dealer.left
                slab = self._landing.go_on(self._dealer)
                if self._dealer.left != left:
                    self.heard = time.monotonic()
                if slab is not None:
                    self.asked.pop(slab.received.slab.seq, None)
                    yield slab
                elif self._landing:
                    return
                continue
            data = self._frames.next()
            if data is None:
                return
            message = from_keeper(data)
            if isinstance(message, Chunk):
                self.heard = time.monotonic()
                slab = self.asked.get(message.seq)
                if slab is None:
                    raise ProtocolError(f"{message} came, but nobody asked for it")
                self._landing.begin(message, slab, self._frames.more)
            elif isinstance(message, NotKept):
                yield message
            else:
                idle += 1
        raise ProtocolError(f"it sent {MAX_IDLE} messages in a row that say nothing")

    def close(self) -> None:
        """Close the connection."""
        self._dealer.close(0)

    def forget(self) -> None:
        """See HostConnection."""
        self._dealer.forget()

    def _send(self, data: bytes) -> bool:
        return self._dealer.send(data)


def _dealer(
    where: HostAt,
    keys: ClientKeys | None,
    trusted: frozenset[int] | None,
    timeout: float,
    watch: Callable[[], None],
) -> Dealer | LibzmqDealer:
    place = urlsplit(where.endpoint)
    host, port = place.hostname or "", place.port or 0
    if keys is None:
        dealer = connected(host, port, timeout, watch)
        if trusted is not None:
            try:
                check_peer(dealer.socket, where.endpoint, trusted)
            except BaseException:
                dealer.forget()
                raise
        return dealer
    import zmq

    from penstock_proto.transport import libzmq

    try:
        return libzmq.dealer(keys._replace(server=where.key), host, port, timeout, watch)
    except zmq.ZMQError as error:  # the key is not a key
        raise OSError(str(error)) from None
