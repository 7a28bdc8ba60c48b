"""One session of a client: its connection, the consumer that it became, and what is under way to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .host.arena import Memfd
from .host.local import LocalPeer


@dataclass(eq=False)
class Session:
    """One consumer: where it is, what it reads, and when it was last heard."""

    token: bytes
    feed: str
    client: str
    routing_id: bytes
    heard: float
    peer: LocalPeer | None = None
    consumer: int | None = None
    """Its number, by which the coordinator knows the consumer; None until it is opened."""
    position: bytearray = field(default_factory=bytearray)
    """What has come of the packed position from which its stream shall begin."""
    identity: bytes = b""
    """The same in all sessions of one client."""
    shares: bool = False
    """It takes from a group's stream. When its connection breaks, it may come back and tell what it was handed."""
    sending: deque[tuple[int, Memfd]] = field(default_factory=deque)
    """Slabs that went out over ZeroMQ and are not acknowledged, by number."""
    opened: bool = False
    """Its stream exists."""
    failed: bool = False
    """Over a connection on this host: nothing that it says counts now, and its slots come back at end of file."""
    muted: bool = False
    """Nothing is sent to it now, but for why it failed."""

    @property
    def transport(self) -> str:
        """How its batches go: `local` or `tcp`."""
        return "tcp" if self.peer is None else "local"
