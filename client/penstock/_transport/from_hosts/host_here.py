"""A connection to a host on this machine, which lends the memory of slabs, so that they are not copied.

The client gives a slab back when the last array over it is gone. When the connection ends, the host never writes again
to memory that it did not get back, so arrays may outlive the connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence

from penstock_proto import VERSION, ConnectionLost, ProtocolError
from penstock_proto.messages import GivenBack, Greeting, HostAt, Lent, Map, NotKept, Ping, Unmap
from penstock_proto.security import unix_address
from penstock_proto.transport import seqpacket
from penstock_proto.transport.codec import encode, from_lender

from ..arriving import Arriving
from ..memfds import Memfds
from .host_connection import MAX_IDLE, HostConnection

MOST_BORROWED = 24
"""Most slabs to borrow at a time: 16 that wait to be handed over, and 8 in use, as at the head. All others are copied,
so that a program that collects batches does not use up the host's memory."""


class HostHere(HostConnection):
    """A connection that borrows slabs from a host on this machine."""

    def __init__(self, where: HostAt, trusted: frozenset[int] | None, timeout: float) -> None:
        """Connect.

        Args:
            where: the host.
            trusted: the users who may run the host; None: the one in its address.
            timeout: seconds that the host has to answer.

        Raises:
            OSError: the host is on another machine, does not admit this user, or belongs to a user who is not trusted.
            ProtocolError: the peer is not a host that speaks this version.
        """
        super().__init__(where)
        if not hasattr(socket, "AF_UNIX"):
            raise OSError("this system has no unix sockets")
        self._memfds = Memfds()
        self._borrowed = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(timeout)
            unix_address.connect(self._socket, where.unix, trusted)
            self._greeted()
            seqpacket.send(self._socket, encode(Ping()))  # the host closes connections that say nothing
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise

    def _greeted(self) -> None:
        data, fd = seqpacket.receive(self._socket)
        if fd is not None:
            os.close(fd)
        if not data:
            raise ConnectionRefusedError("the host does not admit this user")
        greeting = from_lender(data)
        if not isinstance(greeting, Greeting) or greeting.version != VERSION:
            raise ProtocolError(f"the host greeted with {greeting}, but this client speaks version {VERSION}")

    def prepare(self) -> Sequence[int]:
        """See HostConnection."""
        self._give_back()
        return (self._socket.fileno(),)

    def read(self) -> Iterator[NotKept | Arriving]:
        """See HostConnection."""
        self._give_back()
        idle = 0
        while idle < MAX_IDLE:
            try:
                data, fd = seqpacket.receive(self._socket)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionLost("the host has ended it")
            try:
                came = self._take(data, fd)
            finally:
                if fd is not None:
                    os.close(fd)
            if came is None:
                idle += 1
                continue
            self.heard = time.monotonic()
            yield came
        raise ProtocolError(f"it sent {MAX_IDLE} messages in a row that bring no slab")

    def close(self) -> None:
        """Close the connection. Borrowed memory stays mapped while arrays lie over it."""
        self._memfds.clear()
        self._socket.close()

    def forget(self) -> None:
        """See HostConnection."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _take(self, data: bytes, fd: int | None) -> NotKept | Arriving | None:
        message = from_lender(data)
        match message:
            case Map():
                self._memfds.map(message, fd)
            case Unmap():
                self._memfds.unmap(message.memfd)
            case Lent():
                return self._lent(message)
            case NotKept():
                return message
        return None

    def _lent(self, lent: Lent) -> Arriving:
        slab = self.asked.get(lent.seq)
        if slab is None:
            raise ProtocolError(f"{lent} came, but nobody asked for it")
        received = slab.received
        root = self._memfds.root(lent.memfd, received.layout.nbytes, lent.seq, private=received.slab.shared)
        if root is None:
            raise ProtocolError(f"{lent} refers to memory that was not sent")
        del self.asked[lent.seq]
        self._borrowed += 1
        if lent.brief or self._borrowed > MOST_BORROWED:
            slab.copy_from(root)
        else:
            slab.lies_at(root)
        return slab

    def _give_back(self) -> None:
        for seq in self._memfds.take_gone():
            self._borrowed -= 1
            self._unsent.append(encode(GivenBack(seq)))
        self._flush()

    def _send(self, data: bytes) -> bool:
        return seqpacket.offer(self._socket, data)
