"""One session of a client: its connection, its consumer, and the slabs under way to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from penstock_proto.messages import Message

from .coordinator.commands import SendSlab
from .host.arena import Memfd
from .host.local import LocalPeer
from .keys import ClientKey


@dataclass(eq=False)
class Session:
    """One session: how it is connected, what it reads, and when it was last heard."""

    token: bytes
    feed: str
    client: str
    routing_id: bytes
    heard: float
    key: ClientKey | None = None
    """The client's key; None without keys."""
    peer: LocalPeer | None = None
    consumer: int | None = None
    """Its number, by which the coordinator knows the consumer; None until it is opened."""
    position: bytearray = field(default_factory=bytearray)
    """The packed position at which its stream is to begin, as far as it has come."""
    identity: bytes = b""
    """The same in all sessions of one client."""
    shares: bool = False
    """It is a member of a group. If its connection breaks, it may come back and say what it was handed."""
    sending: deque[tuple[int, Memfd, int]] = field(default_factory=deque)
    """Slabs that were sent over ZeroMQ and are not acknowledged: number, memfd and bytes."""
    fetches: bool = False
    """Its consumer can fetch slabs from other hosts."""
    reached: set[int] = field(default_factory=set)
    """The hosts from which it can, by number."""
    fetching: dict[int, tuple[SendSlab, Memfd, int]] = field(default_factory=dict)
    """Slabs that it was told to fetch, and has neither acknowledged nor asked for again, by number; with the number of
    their host."""
    behind: deque[tuple[SendSlab, Memfd] | Message] = field(default_factory=deque)
    """What waits to be sent: a slab whose bytes another host keeps, and everything behind it."""
    opened: bool = False
    """Its stream exists."""
    failed: bool = False
    """It has failed, over a connection on this host: its messages are ignored, and its slots come back at end of
    file."""
    muted: bool = False
    """Nothing more is sent to it, except why it failed."""

    @property
    def who(self) -> str:
        """The client, for the log."""
        return f"{self.client} with the key {self.key.name}" if self.key else self.client

    @property
    def transport(self) -> str:
        """The transport of its batches: `local` or `tcp`."""
        return "tcp" if self.peer is None else "local"
