"""Messages and fds over a unix SOCK_SEQPACKET connection: datagrams, and end of file when the peer is gone.

The daemon talks like this to its workers (over an inherited socketpair) and to clients on its host.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading

from ..errors import ProtocolError
from .codec import MAX_MESSAGE

MAX_FDS = 4

_CUT, _FDS_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC), int(socket.MSG_CTRUNC)
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_ROOM_FOR_FDS = socket.CMSG_LEN(MAX_FDS * array.array("i").itemsize)


class _Buffer(threading.local):
    """A thread's buffer for arriving datagrams. Allocating one of the largest size each time would cost 10 us or more,
    because malloc maps blocks of that size separately."""

    def __init__(self) -> None:
        self.bytes = bytearray(MAX_MESSAGE + 1)


_buffer = _Buffer()


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


def offer(connection: socket.socket, data: bytes) -> bool:
    """Send one datagram over a non-blocking connection. Return False if there is no room. A peer that is gone counts as
    sent: `receive` reports it after the datagrams that came before."""
    try:
        connection.send(data)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def receive(connection: socket.socket) -> tuple[bytes, int | None]:
    """Return the next datagram and the fd that came with it (close-on-exec), or (b"", None) at end of file.

    Raises:
        BlockingIOError: the connection is non-blocking and nothing has come.
        OSError: the peer is gone.
        ProtocolError: the datagram is larger than a message may be, or has more than one fd, or this process cannot
            have another fd.
    """
    arrived = _buffer.bytes
    count, control, flags, _ = connection.recvmsg_into([arrived], _ROOM_FOR_FDS, _CLOSE_ON_EXEC)
    fds = _fds(control) if control else []
    if len(fds) > 1 or flags & _CUT:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        if not fds and flags & _CUT == _FDS_CUT:
            raise ProtocolError(
                "a file descriptor came, and this process may have no more open files: raise the limit on open files "
                "(ulimit -n, LimitNOFILE= in systemd, --ulimit nofile= in docker)"
            )
        raise ProtocolError("an oversized datagram, or one with more than one fd")
    if fds and not count:
        os.close(fds[0])  # an empty datagram counts as end of file
        fds = []
    return bytes(memoryview(arrived)[:count]), fds[0] if fds else None


def _fds(control: list[tuple[int, int, bytes]]) -> list[int]:
    """Return the fds in ancillary data, which may be cut off within one if there was no room for all."""
    fds = array.array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()
