"""One session of a client: its connection, its consumer, and the slabs under way to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from penstock_proto.messages import Message

from ..coordinator.model.commands import SendSlab
from ..net.keys import ClientKey
from ..shared_memory.arena import Memfd
from .link import Link


@dataclass(eq=False)
class Session:
    """One session: its connection, its feed, and when its client last sent something."""

    token: bytes
    feed: str
    client: str
    routing_id: bytes
    """The connection over ZeroMQ on which it was greeted."""
    link: Link
    """The connection over which it gets its batches, and until it is opened its messages."""
    heard: float
    key: ClientKey | None = None
    """The client's key; None without keys."""
    consumer: int | None = None
    """The coordinator's number for its consumer; None until it is opened."""
    position: bytearray = field(default_factory=bytearray)
    """The received part of the packed position at which its stream begins."""
    identity: bytes = b""
    """Identifies the client: the same in all its sessions."""
    shares: bool = False
    """Whether it is a member of a group. If its connection breaks, it may come back and say which slabs were handed
    over."""
    fetches: bool = False
    """Whether its consumer can fetch slabs from other hosts."""
    reached: set[int] = field(default_factory=set)
    """The numbers of the hosts that its consumer can reach."""
    fetching: dict[int, tuple[SendSlab, Memfd, int]] = field(default_factory=dict)
    """Slabs that its consumer was told to fetch, and has neither acknowledged nor asked to be sent, by number; each
    with the number of its host."""
    behind: deque[tuple[SendSlab, Memfd] | Message] = field(default_factory=deque)
    """The queue to be sent: a slab whose bytes another host keeps, and everything after it."""
    opened: bool = False
    """Whether its stream exists."""
    failed: bool = False
    """Whether it has failed, and its client maps slots: its messages are ignored, and the end of its connection
    releases its slots."""
    muted: bool = False
    """Whether nothing more is sent to it, except why it failed."""

    @property
    def who(self) -> str:
        """The client's description for the log."""
        return f"{self.client} with the key {self.key.name}" if self.key else self.client
