"""The same-host transport: one unix SOCK_SEQPACKET connection, where segments come as fds and slabs as places in them.

Its end of file is the lease: the daemon takes back the slots of a client when this connection ends. So it stays open
until the last array over a slot is gone.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import select
import socket
import time
from collections.abc import Callable, Sequence

from penstock_proto import VERSION, ConnectionLost, ProtocolError, Unreachable, ledger, seqpacket
from penstock_proto.codec import encode, from_server
from penstock_proto.messages import (
    Failed,
    Greeting,
    Open,
    Opened,
    Resume,
    Segment,
    SegmentGone,
    ServerMessage,
    Slab,
    Welcome,
)

from ._consumer_state import Received
from ._mailbox import Mailbox
from ._memory import Gone, Mapping
from ._slab_views import SlabViews

CREDIT = 4
CREDIT_BYTES = 2**62
QUOTA = 8
STEP = 0.1
"""Seconds after which a wait for the daemon's answer looks around."""


class LocalTransport:
    """An open session over a unix connection."""

    name = "local"
    sends_anywhere = True

    def __init__(
        self,
        welcome: Welcome,
        views: SlabViews,
        mailbox: Mailbox,
        timeout: float,
        opening: Callable[..., Open],
        start: Sequence[bytes] = (),
        watch: Callable[[], None] | None = None,
    ) -> None:
        """Connect and open the session's stream.

        Args:
            welcome: the daemon's answer to Hello.
            views: how slabs are cut.
            mailbox: the session's.
            timeout: seconds that the daemon has to answer.
            opening: makes the Open.
            start: the pieces of the position from which the stream is to begin.
            watch: called now and then while waiting; it may raise to break off.

        Raises:
            OSError: this way to the daemon is not there (another host), and nothing has been opened.
            PenstockError: the daemon refused, or did not answer for `timeout` seconds.
        """
        if not hasattr(socket, "AF_UNIX"):
            raise OSError("this system has no unix sockets")
        self._views = views
        self._mailbox = mailbox
        self._released: collections.deque[Gone] = collections.deque()
        self._segments: dict[int, Mapping] = {}
        self._reset = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect("\0" + welcome.unix)
            self._page = self._greeted()
            self._mark = ledger.Mark(self._page)
            message = opening(welcome.session, self._page[ledger.NONCE], CREDIT, CREDIT_BYTES, QUOTA)
            try:
                for piece in start:
                    seqpacket.send(self._socket, encode(Resume(welcome.session, piece)))
                opened = self._opened(encode(message), timeout, watch)
            except OSError as error:
                raise ConnectionLost(f"the daemon closed the connection while it was being opened ({error})") from None
            self.epoch = opened.epoch
            self.limit(opened.quota)
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
                raise ProtocolError(f"the daemon greets with {greeting}, this client speaks version {VERSION}")
            return mmap.mmap(fd, ledger.NBYTES, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except ValueError as error:
            raise OSError(f"the ledger cannot be mapped: {error}") from None
        finally:
            os.close(fd)

    def _opened(self, opening: bytes, timeout: float, watch: Callable[[], None] | None) -> Opened:
        seqpacket.send(self._socket, opening)
        deadline = time.monotonic() + timeout
        while not select.select([self._socket], [], [], STEP)[0]:
            if watch is not None:
                watch()
            if time.monotonic() > deadline:
                raise Unreachable(f"the daemon did not open the session within {timeout:g} s")
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
        """Keep at most this many slabs aliased from now on, and never more than were asked for."""
        self.quota = min(quota, QUOTA)

    def wait(self, timeout: float, for_room: bool) -> None:
        """Wait until something came, the bell rang, or there is room to send (if wanted); at most `timeout` seconds."""
        self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if for_room else 0))
        ready = self._poll.poll(timeout * 1000)
        if self._mailbox.wakeup is not None and any(fd != self._socket.fileno() for fd, _ in ready):
            self._mailbox.wakeup.clear()

    def receive(self) -> ServerMessage | Received | None:
        """The next slab or message, or None if none is here.

        Raises:
            ConnectionLost: the daemon is gone.
            ProtocolError: it sent what it must not.
        """
        while True:
            try:
                data, fd = seqpacket.receive(self._socket)
            except BlockingIOError:
                return None
            except OSError as error:
                # The daemon closed with messages of ours unread: Linux says so once, before what it had sent.
                if self._reset:
                    raise ConnectionLost(f"the connection to the daemon broke: {error}") from None
                self._reset = True
                continue
            if not data:
                raise ConnectionLost("the daemon is gone: it was killed, or crashed (its log says more)")
            try:
                message = from_server(data)
                if type(message) is Slab:
                    return self._slab(message)
                if type(message) is Segment:
                    self._segment(message, fd)
                elif type(message) is SegmentGone:
                    self._segments.pop(message.segment, None)
                else:
                    return message
            finally:
                if fd is not None:
                    os.close(fd)

    def _segment(self, message: Segment, fd: int | None) -> None:
        if fd is None or message.segment in self._segments:
            raise ProtocolError(f"{message} came {'without its fd' if fd is None else 'twice'}")
        try:
            self._segments[message.segment] = Mapping(fd, message.nbytes)
        except (OSError, ValueError, OverflowError) as error:
            raise ProtocolError(f"{message} cannot be mapped: {error}") from None

    def _slab(self, slab: Slab) -> Received:
        layout = self._views.layout(slab)
        segment = self._segments.get(slab.segment)
        if segment is None or layout.nbytes > segment.nbytes:
            raise ProtocolError(f"{slab} names no slot that was sent")
        return Received(slab, layout, segment.root(layout.nbytes, self._released.append, slab.seq))

    def send(self, data: bytes) -> bool:
        """Send one message, if there is room; returns whether it was sent (or need not be: the daemon is gone)."""
        try:
            self._socket.send(data)
        except BlockingIOError:
            return False
        except OSError:
            pass  # `receive` says so, after what had come before
        return True

    def released(self) -> list[int]:
        """The slabs of this connection over which no array lives any more, since the last call."""
        released = []
        while self._released:
            released.append(self._released.popleft().token)
        return released

    def silent(self) -> bool:
        """Never: the end of the connection, and nothing else, says that the daemon took the slots back."""
        return False

    def mark(self, handed: int) -> None:
        """Mark the first `handed` slabs as handed, where the daemon reads it when this process dies."""
        self._mark.write(handed)

    def close(self) -> None:
        """End the lease."""
        self._segments.clear()
        self._socket.close()
        self._mark.release()
        self._page.close()

    def forget(self) -> None:
        """In a forked child: the lease is the parent's."""
        with contextlib.suppress(OSError):
            self._socket.close()
