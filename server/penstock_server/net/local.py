"""The unix listener: consumers on this host, each on one SOCK_SEQPACKET connection.

The address is in the abstract namespace, so no file is left behind. Such an address has no permissions. So the listener
asks the kernel for the user of each connection (SO_PEERCRED), and accepts only the daemon's own user, root, and the
users that `--allow-uid` names. The daemon sends first: a ledger whose nonce proves that the other side maps its memory.

Connections without a session are limited in time and number; when there are too many, the oldest is closed. A
connection that does not read its messages is closed too. So connections that a program leaves open by mistake take no
descriptors and no memory from consumers that read.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

from penstock_proto.messages import VERSION, Greeting, Map, Message, Unmap
from penstock_proto.security import unix_address
from penstock_proto.transport import ledger
from penstock_proto.transport.codec import encode

from ..machine import descriptors
from ..shared_memory import arena
from .peer import Peer

log = logging.getLogger(__name__)

_REFUSED = {"event": "connection_refused"}
_OVERFLOW = 65534
"""The usual overflow id."""

SECONDS = 30.0
"""Seconds that a connection has to open a session."""

MOST_WAITING = 128
"""Maximum number of connections without a session."""

MOST_UNREAD = 16 << 20
"""Bytes that may wait for a consumer to read them. The messages about slabs within its credit need less."""


class LocalPeer:
    """One connection of a consumer on this host: its ledger, and the memfds that it knows.

    Attributes:
        trusted: whether it belongs to the daemon's own user or to root, who may stop and scale the daemon.
        pid: its process when it connected; 0 if that is not visible here.
    """

    def __init__(
        self,
        connection: socket.socket,
        trusted: bool,
        pid: int,
        on_data: Callable[[LocalPeer, bytes], None],
        on_end: Callable[[LocalPeer], None],
        on_opened: Callable[[LocalPeer], None],
    ) -> None:
        fd = os.memfd_create("penstock-ledger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, ledger.NBYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._page = mmap.mmap(fd, ledger.NBYTES)
            self.nonce = secrets.token_bytes(16)
            self._page[ledger.NONCE] = self.nonce
            self.trusted = trusted
            self.pid = pid
            self._known: dict[int, arena.Memfd] = {}
            self._on_data = on_data
            self._on_opened = on_opened
            self._peer = Peer(connection, self._data, lambda: on_end(self), most_unread=MOST_UNREAD)
            self._peer.send(encode(Greeting(VERSION)), fd)
        finally:
            os.close(fd)

    def send(self, message: Message, fd: int | None = None) -> bool:
        """Send a message, perhaps with a file descriptor, which stays the caller's. Always possible: return True."""
        self._peer.send(encode(message), fd)
        return True

    @property
    def unread(self) -> bool:
        """Whether the other side has not read everything that was sent to it."""
        return self._peer.unread

    def show(self, memfd: arena.Memfd) -> int:
        """Make sure that the consumer knows the memfd. Return its number."""
        if memfd.number not in self._known:
            self._known[memfd.number] = memfd
            self._peer.send(encode(Map(memfd.number, memfd.nbytes)), memfd.fd)
        return memfd.number

    def gone(self, memfd: arena.Memfd) -> None:
        """Tell the consumer that a memfd was returned to the system."""
        if self._known.pop(memfd.number, None) is not None:
            self._peer.send(encode(Unmap(memfd.number)))

    def opened(self) -> None:
        """Note that a session was opened, so that the connection may stay open."""
        self._on_opened(self)

    @property
    def handed(self) -> int:
        """The number of slabs that the client has marked as handed over."""
        return ledger.handed(self._page)

    def forsake(self) -> None:
        """Handle the end of the connection. If this side closed it, the consumer's tensors may live on, so retire its
        memfds: then nothing overwrites them."""
        if self._peer.cut:
            for memfd in self._known.values():
                memfd.retired = True

    def close(self) -> None:
        """Close the connection."""
        self._peer.close()
        self._page.close()

    def _data(self, data: bytes, fd: int | None) -> None:
        if fd is not None:
            os.close(fd)
        self._on_data(self, data)


class Listener:
    """Accepts consumers on this host.

    Args:
        on_data: called with (peer, datagram).
        on_end: called with a peer whose other side is gone.
        most: the maximum number of connections.
        uids: further users to accept.
    """

    def __init__(
        self,
        on_data: Callable[[LocalPeer, bytes], None],
        on_end: Callable[[LocalPeer], None],
        most: int,
        uids: Collection[int] = (),
    ) -> None:
        self._most = most
        self._uids = uids
        self.name = unix_address.unused()
        self.peers: set[LocalPeer] = set()
        self._waiting: dict[LocalPeer, float] = {}
        """When each connection that has no session yet was accepted, in monotonic seconds."""
        self._said = False
        self._users = _users()
        self._on_data = on_data
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("\0" + self.name)
        self._socket.listen(64)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Close the listener and every connection."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for peer in list(self.peers):
            self.drop(peer)

    def drop(self, peer: LocalPeer) -> None:
        """Close one connection."""
        self.peers.discard(peer)
        self._waiting.pop(peer, None)
        peer.close()

    def look_at_the_clock(self, now: float) -> None:
        """Close the connections that have been without a session for too long."""
        for peer in [peer for peer, since in self._waiting.items() if now - since > SECONDS]:
            self.drop(peer)

    def _accept(self) -> None:
        if len(self.peers) >= self._most and not self._waiting:
            self._pause(f"there are {self._most}")
            return
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._pause(error)
            return
        uid = unix_address.user(connection)
        trusted = uid in self._users
        if not trusted and uid not in self._uids:
            text, fields = "refused a connection on this host from user %d: the daemon runs as %d", _REFUSED
            log.debug(text, uid, os.geteuid(), extra=fields)
            connection.close()
            return
        try:
            peer = LocalPeer(
                connection, trusted, unix_address.process(connection), self._on_data, self._ended, self._opened
            )
            self.peers.add(peer)
            self._waiting[peer] = time.monotonic()
            self._said = False
            if len(self._waiting) > MOST_WAITING or len(self.peers) > self._most:
                self.drop(next(iter(self._waiting)))
        except OSError as error:
            connection.close()
            self._pause(error)

    def _pause(self, why: OSError | str) -> None:
        """Stop accepting for a second: there is no room, file descriptor or memory for another connection."""
        if not self._said:  # log once, until another connection is accepted
            self._said = True
            text = "cannot take a connection on this host (%s): close others, or %s"
            log.error(text, why, descriptors.HOW_TO_RAISE, extra=_REFUSED)
        self._loop.remove_reader(self._socket.fileno())
        self._loop.call_later(1, self._resume)

    def _resume(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _opened(self, peer: LocalPeer) -> None:
        self._waiting.pop(peer, None)

    def _ended(self, peer: LocalPeer) -> None:
        peer.forsake()
        self._on_end(peer)
        self.drop(peer)


def _users(proc: Path = Path("/proc")) -> set[int]:
    """Return the ids of the users that are admitted: root and our own.

    In a user namespace, all users without an id there appear as the overflow id, which is also the id of the user
    nobody. So if our own id is the overflow id, it identifies no one. Without `proc` we may be in such a namespace.
    """
    users = {0, os.geteuid()}
    try:
        mapped, overflow = (proc / "self/uid_map").read_text(), int((proc / "sys/kernel/overflowuid").read_text())
    except OSError:
        return users - {_OVERFLOW}
    everybody = mapped.split() == ["0", "0", "4294967295"]  # the first namespace: all users have ids
    return users if everybody else users - {overflow}
