"""Sends messages and slabs to consumers, over ZeroMQ or over a connection on this host.

A message that cannot be encoded fails its stream.

If a host keeps the bytes of a slab, a consumer that can reach that host is told to fetch them. For other consumers, the
host first sends the bytes into their slot. Meanwhile all later slabs and messages wait behind that slab.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from penstock_proto import PenstockError, ProtocolError
from penstock_proto import messages as m

from ..coordinator import CoordinatorView, worker_messages
from ..coordinator.model import events as on
from ..coordinator.model.commands import SendSlab
from ..net.addresses import is_loopback
from ..net.keys import ClientKey
from ..net.local import LocalPeer
from ..net.network import Router
from ..shared_memory.arena import Memfd
from ..shared_memory.kept import KeptBatches
from .link import TcpLink
from .session import Session


class ToConsumers:
    """The way to each consumer, with the slabs that wait for their bytes.

    Args:
        coordinator: makes the decisions.
        tell: tells the coordinator of an event.
        router: the connections over ZeroMQ.
        kept: the batches that other hosts keep.

    Attributes:
        look: called with the feed, a slab that is about to be sent, and its memfd; must not raise. None: not called.
    """

    look: Callable[[str, SendSlab, Memfd], None] | None = None

    def __init__(
        self, coordinator: CoordinatorView, tell: Callable[[on.Event], None], router: Router, kept: KeptBatches
    ) -> None:
        self._coordinator = coordinator
        self._tell = tell
        self._router = router
        self._kept = kept

    def slab(self, session: Session, slab: SendSlab, memfd: Memfd) -> None:
        """Send one slab."""
        if session.behind or self._must_wait(session, slab):
            session.behind.append((slab, memfd))
            if len(session.behind) == 1:
                self._wait(session, slab)
            elif self._must_wait(session, slab):
                self._kept.bring(slab.ticket, lambda whole: None)  # so that the bytes are there when it can be sent
        else:
            self._slab(session, slab, memfd)

    def resend(self, session: Session, seq: int) -> None:
        """Send the bytes of a slab that its consumer could not fetch.

        Raises:
            ProtocolError: the consumer was not told to fetch this slab, or has asked for it before.
        """
        told = session.fetching.pop(seq, None)
        if told is None:
            raise ProtocolError(f"slab {seq} was not to be fetched, or was asked for before")
        slab, memfd, _ = told
        self._kept.bring(slab.ticket, lambda whole: self._resent(session, slab, memfd, whole))

    def _must_wait(self, session: Session, slab: SendSlab) -> bool:
        kept = self._kept.of(slab.ticket)
        return kept is not None and (kept.host is None or kept.host.number not in session.reached)

    def _wait(self, session: Session, slab: SendSlab) -> None:
        """Bring the bytes of the first waiting slab into its slot, and then go on with what waits behind it."""
        self._kept.bring(slab.ticket, lambda whole: self._go_on(session, whole))

    def _resent(self, session: Session, slab: SendSlab, memfd: Memfd, whole: bool) -> None:
        if whole and session.consumer is not None:  # otherwise the slot may be in use for another turn
            self._bytes(session, slab, memfd)

    def _go_on(self, session: Session, whole: bool) -> None:
        """Send the first waiting slab, whose bytes are in its slot now, and what waits behind it."""
        if not whole:  # the stream has failed
            session.behind.clear()
        while session.behind and session.consumer is not None:
            waiting = session.behind[0]
            if isinstance(waiting, tuple):
                if self._must_wait(session, waiting[0]):
                    self._wait(session, waiting[0])
                    return
                session.behind.popleft()
                self._slab(session, *waiting)
            else:
                session.behind.popleft()
                self._send(session, waiting)

    def _slab(self, session: Session, slab: SendSlab, memfd: Memfd) -> None:
        kept = self._kept.of(slab.ticket)
        if kept is not None and kept.host is not None:
            where = m.Kept(kept.host.number, slab.ticket, kept.secret)
            if self._send(session, worker_messages.slab(slab, 0, where)):
                session.fetching[slab.seq] = slab, memfd, kept.host.number
                kept.host.fetched += slab.nbytes
            return
        if self.look is not None:
            self.look(session.feed, slab, memfd)
        if session.muted:
            return
        link = session.link
        if self._send(session, worker_messages.slab(slab, link.show(memfd))) and not link.maps_slots:
            self._bytes(session, slab, memfd)

    def _bytes(self, session: Session, slab: SendSlab, memfd: Memfd) -> None:
        """Send the bytes of a slab."""
        layout = self._coordinator.feeds[session.feed].layout(slab.shapes)
        session.link.send_bytes(slab.seq, memfd, layout.regions(slab.first, slab.batches, slab.stride))

    def host_at(self, session: Session, where: m.HostAt) -> None:
        """Tell a consumer at which address it can fetch slabs from a host. A loopback address means this machine only
        to consumers on it."""
        consumer = self._router.address(session.routing_id).rpartition(":")[0]
        if is_loopback(consumer) or not is_loopback(urlsplit(where.endpoint).hostname or ""):
            self.send(session, where)

    def send(self, session: Session, message: m.Message) -> bool:
        """Send a message to a session, or queue it behind a waiting slab. Return whether that was possible."""
        if session.behind:
            if not isinstance(message, m.Failed):
                session.behind.append(message)
                return True
            session.behind.clear()
        return self._send(session, message)

    def _send(self, session: Session, message: m.Message) -> bool:
        if session.failed or (session.muted and not isinstance(message, m.Failed)):
            return False
        try:
            return session.link.send(message)
        except ProtocolError as error:
            stream = None if session.consumer is None else self.stream_of(session.consumer)
            if stream is not None:
                self._tell(on.StreamFailed(stream, error))
            return False

    def answer(self, to: bytes | LocalPeer, message: m.Message) -> bool:
        """Answer a connection, which may have no session. Return whether that was possible."""
        try:
            return self._put(to, message)
        except ProtocolError as error:
            self._put(to, failed(error))  # this one is never too large to encode
            return False

    def link(self, routing_id: bytes) -> TcpLink:
        """Return the link of a connection over ZeroMQ."""
        return TcpLink(self._router, routing_id)

    def key(self, routing_id: bytes) -> ClientKey | None:
        """Return the client's key of a connection over ZeroMQ; None without keys."""
        return self._router.key(routing_id)

    def machine(self, routing_id: bytes) -> str:
        """Return the machine at the other end of a connection over ZeroMQ, see Router.machine."""
        return self._router.machine(routing_id)

    def drop(self, session: Session) -> None:
        """Drop what still waits to be sent to the session, because it would keep slots in use."""
        session.behind.clear()
        session.fetching.clear()
        session.link.drop()

    def stream_of(self, consumer: int) -> int | None:
        """Return the number of the stream that the consumer reads, if its session still exists."""
        reads = self._coordinator.consumers.get(consumer)
        return None if reads is None else reads.stream

    def _put(self, to: bytes | LocalPeer, message: m.Message) -> bool:
        return self._router.send(to, message) if isinstance(to, bytes) else to.send(message)


def failed(error: PenstockError) -> m.Failed:
    """Return the message that tells a client of an error."""
    return m.Failed(m.ErrorReport.of(error))
