"""The same-host transport: a unix SOCK_SEQPACKET connection that brings memfds as fds, and slabs as places in them.

The connection is the lease: when it ends, the daemon takes back the client's slots. So it stays open until the last
array over a slot is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence

from penstock_proto import VERSION, ConnectionLost, ProtocolError, Unreachable
from penstock_proto.messages import (
    Failed,
    Greeting,
    Map,
    Open,
    Opened,
    PositionPart,
    ServerMessage,
    Slab,
    Unmap,
    Welcome,
)
from penstock_proto.security import unix_address
from penstock_proto.transport import ledger, sealed, seqpacket
from penstock_proto.transport.codec import encode, from_server

from .._state.consumer_state import Received
from .._state.credit import Credit
from .._state.deadline import Deadline
from .._state.mailbox import Mailbox
from .memfds import Memfds
from .slab_views import SlabViews

CREDIT = 4
CREDIT_BYTES = 2**62
QUOTA = 8
MAX_IDLE = 131072
"""Most messages in a row that only map or unmap memory: twice as many as memfds can be mapped."""
STEP = 0.1
"""Longest wait in seconds for the daemon's answer before other events are checked."""


class LocalTransport:
    """An open session over a unix connection."""

    name = "local"
    sends_anywhere = True

    def __init__(
        self,
        welcome: Welcome,
        views: SlabViews,
        mailbox: Mailbox,
        until: Deadline,
        opening: Callable[..., Open],
        start: Sequence[bytes] = (),
        watch: Callable[[], None] | None = None,
        *,
        trusted: frozenset[int] | None,
        shares: bool,
    ) -> None:
        """Connect and open the session's stream.

        Args:
            welcome: the daemon's answer to Hello.
            views: views slabs as batches.
            mailbox: the mailbox of the stream.
            until: when the stream must be open.
            opening: returns the Open to send.
            start: the pieces of the position at which the stream begins.
            watch: called regularly while waiting; it may raise to stop.
            trusted: the users who may run the daemon; None: the one in its address.
            shares: whether others read the stream too, in a group or as ranks.

        Raises:
            OSError: the daemon cannot be reached this way (it is on another host, or a user who is not trusted listens
                there), and nothing was opened.
            PenstockError: the daemon refused, or did not answer in time.
        """
        if not hasattr(socket, "AF_UNIX"):
            raise OSError("this system has no unix sockets")
        self._views = views
        self._mailbox = mailbox
        self._memfds = Memfds()
        self._reset = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(until.left or STEP)
            unix_address.connect(self._socket, welcome.unix, trusted)
            self._page = self._greeted()
            self._mark = ledger.Mark(self._page)
            message = opening(welcome.session, self._page[ledger.NONCE], CREDIT, CREDIT_BYTES, QUOTA)
            try:
                for piece in start:
                    self._socket.settimeout(until.left or STEP)
                    seqpacket.send(self._socket, encode(PositionPart(welcome.session, piece)))
                opened = self._open(encode(message), until, watch)
            except OSError as error:
                raise ConnectionLost(f"the daemon closed the connection while it was being opened ({error})") from None
            self.opened = opened
            self.limit(opened.quota)
            self._credit = Credit.granted(opened, CREDIT, CREDIT_BYTES, shares=shares)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        self._poll = select.poll()
        if mailbox.wakeup is not None:
            self._poll.register(mailbox.wakeup, select.POLLIN)

    def _greeted(self) -> mmap.mmap:
        data, fd = seqpacket.receive(self._socket)
        if fd is None:
            raise OSError("the daemon sent no ledger")
        try:
            greeting = from_server(data)
            if not isinstance(greeting, Greeting) or greeting.version != VERSION:
                raise ProtocolError(f"the daemon greeted with {greeting}, but this client speaks version {VERSION}")
            return sealed.mapped(fd, ledger.NBYTES)
        except ProtocolError as error:
            raise ProtocolError(f"the ledger is not as it must be: {error}") from None
        finally:
            os.close(fd)

    def _open(self, opening: bytes, until: Deadline, watch: Callable[[], None] | None) -> Opened:
        seqpacket.send(self._socket, opening)
        opened = select.poll()  # not `select`, which cannot have descriptors from 1024 on
        opened.register(self._socket, select.POLLIN)
        while not opened.poll(STEP * 1000):
            if watch is not None:
                watch()
            if not until.left:
                raise Unreachable(f"the daemon did not open the session within {until.seconds:g} s")
        data, fd = seqpacket.receive(self._socket)
        if fd is not None:
            os.close(fd)
        answer = from_server(data) if data else None
        if isinstance(answer, Failed):
            raise answer.error.error()
        if answer is None:
            raise ConnectionResetError("end of file")
        if not isinstance(answer, Opened):
            raise ProtocolError(f"the daemon answered Open with {answer}")
        return answer

    def limit(self, quota: int) -> None:
        """Alias at most `quota` slabs from now on, and never more than the client asked for."""
        self.quota = min(quota, QUOTA)

    def wait(self, timeout: float, for_room: bool) -> None:
        """Wait at most `timeout` seconds for data, a wakeup, or (with `for_room`) room to send."""
        self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if for_room else 0))
        ready = self._poll.poll(timeout * 1000)
        if self._mailbox.wakeup is not None and any(fd != self._socket.fileno() for fd, _ in ready):
            self._mailbox.wakeup.clear()

    def receive(self) -> ServerMessage | Received | None:
        """Return the next slab or message, or None if none has arrived.

        Raises:
            ConnectionLost: the daemon is gone.
            ProtocolError: the daemon sent something that it must not send.
        """
        for _ in range(MAX_IDLE):
            try:
                data, fd = seqpacket.receive(self._socket)
            except BlockingIOError:
                return None
            except OSError as error:
                # The daemon closed without reading all our messages. Linux reports this once, before the daemon's data.
                if self._reset:
                    raise ConnectionLost(f"the connection to the daemon broke: {error}") from None
                self._reset = True
                continue
            if not data:
                raise ConnectionLost("the daemon is gone: it was killed, or it crashed (see its log)")
            try:
                message = from_server(data)
                if type(message) is Slab:
                    return self._slab(message)
                if type(message) is Map:
                    self._memfds.map(message, fd)
                elif type(message) is Unmap:
                    self._memfds.unmap(message.memfd)
                else:
                    return message
            finally:
                if fd is not None:
                    os.close(fd)
        raise ProtocolError(f"the daemon sent {MAX_IDLE} messages about memory in a row")

    def _slab(self, slab: Slab) -> Received:
        layout = self._views.layout(slab)
        self._credit.on_slab(slab)
        root = self._memfds.root(slab.memfd, layout.nbytes, slab.seq, private=slab.shared and not slab.scattered)
        if root is None:
            raise ProtocolError(f"{slab} refers to a slot that was not sent")
        return Received(slab, layout, root)

    def send(self, data: bytes) -> bool:
        """Send one message if there is room. Return whether it was sent, or need not be because the daemon is gone."""
        return seqpacket.offer(self._socket, data)

    def take_released(self) -> Iterator[int]:
        """Yield the slabs of this connection whose last array has gone since the last call. See `Memfds.take_gone`."""
        return self._memfds.take_gone()

    def silent(self) -> bool:
        """Return False: only the end of the connection means that the daemon took the slots back."""
        return False

    def tell(self, handed: int) -> None:
        """Note that the daemon is about to learn that the first `handed` slabs were handed over. Any thread."""
        self._credit.tell(handed)

    def mark(self, handed: int) -> None:
        """Record in the ledger that the first `handed` slabs were handed over, in case this process dies."""
        self._mark.write(handed)

    def close(self) -> None:
        """End the lease."""
        self._memfds.clear()
        self._socket.close()
        self._mark.release()
        self._page.close()

    def forget(self) -> None:
        """In a forked child: leave the lease to the parent."""
        with contextlib.suppress(OSError):
            self._socket.close()
