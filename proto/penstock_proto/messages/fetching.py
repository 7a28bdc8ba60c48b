"""Messages between a consumer and a joined host, from which the consumer fetches slabs.

The consumer connects to the endpoint in HostAt (server.py), and asks for slabs that the daemon has announced to it. A
host knows no sessions: a consumer that knows the secret of a slot was sent a slab of it.

Over ZMTP the consumer is a DEALER, and gets the bytes. On the host's machine it uses the unix connection, and the host
lends it the memory in which they lie.
"""

from __future__ import annotations

from typing import TypeAlias

from .base import Batches, Count, Index, Message, Token
from .client import Ping
from .memory import Map, Unmap
from .server import Chunk, Greeting, Pong


class Fetch(Message, frozen=True):
    """Asks for the batches of slab `seq`: `batches` of them, from place `first` of the slot of `ticket` on, each
    `stride` places after the one before. Answered by Chunks, as the daemon sends them; over unix by Lent; or by
    NotKept. `secret` as in Slab."""

    seq: Count
    ticket: Count
    secret: Token
    first: Count
    batches: Batches
    stride: Batches = 1


class NotKept(Message, frozen=True):
    """The host does not keep the bytes of slab `seq`, or the secret is wrong. The daemon has them, or gets them."""

    seq: Count


class Lent(Message, frozen=True):
    """Slab `seq` lies in `memfd`, which a Map has brought. The consumer maps it, and sends GivenBack when nobody uses
    the slab any longer. Until then the host does not write there. If the host needs the memory earlier, it leaves the
    memfd to the consumer (Unmap), and takes another. `brief`: consumers hold much of the host's memory, so the consumer
    must copy the slab and give it back at once."""

    seq: Count
    memfd: Index
    brief: bool = False


class GivenBack(Message, frozen=True):
    """The consumer no longer uses slab `seq`, which was lent to it."""

    seq: Count


FromFetcher: TypeAlias = Fetch | Ping
FromKeeper: TypeAlias = Chunk | NotKept | Pong
FromBorrower: TypeAlias = Fetch | GivenBack | Ping
FromLender: TypeAlias = Greeting | Map | Unmap | Lent | NotKept | Pong
