"""Messages and fds over a unix SOCK_SEQPACKET connection: datagrams, and end of file when the peer is gone.

Used between the daemon and its workers (an inherited socketpair) and between the daemon and clients on its host.
"""

from __future__ import annotations

import contextlib
import os
import socket

from .codec import MAX_MESSAGE
from .errors import ProtocolError

MAX_FDS = 4


def send(connection: socket.socket, data: bytes, fd: int | None = None) -> None:
    """Send one datagram, with an fd if given.

    Raises:
        BlockingIOError: the connection is non-blocking and full.
        OSError: the peer is gone.
    """
    if fd is None:
        connection.send(data, socket.MSG_NOSIGNAL)
    else:
        socket.send_fds(connection, [data], [fd], socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[bytes, int | None]:
    """The next datagram and the fd that came with it (close-on-exec), or (b"", None) at end of file.

    Raises:
        BlockingIOError: the connection is non-blocking and nothing is there.
        OSError: the peer is gone.
        ProtocolError: a datagram larger than a message may be, or with more than one fd.
    """
    data, fds, flags, _ = socket.recv_fds(connection, MAX_MESSAGE + 1, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    if len(fds) > 1 or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        raise ProtocolError("an oversized datagram, or one with more than one fd")
    if fds and not data:
        os.close(fds[0])  # an empty datagram counts as end of file
        fds = []
    return data, fds[0] if fds else None
