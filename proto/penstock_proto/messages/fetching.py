"""Messages between a consumer and a host that has joined: the consumer fetches slabs from where they are.

It connects to where HostAt says (server.py), and asks for slabs that the daemon has told it of. A host knows no
sessions: who knows the secret of a slot was sent a slab of it.

Over ZMTP the consumer is a DEALER, and gets the bytes. On the host's machine it uses the unix connection: the host then
lends it the memory in which they lie.
"""

from __future__ import annotations

from typing import TypeAlias

from .base import Batches, Count, Index, Message, Token
from .client import Ping
from .memory import Map, Unmap
from .server import Chunk, Greeting, Pong


class Fetch(Message, frozen=True):
    """Asks for `batches` batches from place `first` of the slot of `ticket` on: those of slab `seq`. Answered by
    Chunks, as the daemon sends them; over unix by Lent; or by NotKept. `secret` as in Slab."""

    seq: Count
    ticket: Count
    secret: Token
    first: Count
    batches: Batches


class NotKept(Message, frozen=True):
    """The host does not keep the bytes of slab `seq`, or the secret is wrong. The daemon has them, or gets them."""

    seq: Count


class Lent(Message, frozen=True):
    """Slab `seq` lies in `memfd`, which a Map has brought. The consumer maps it, and says when nobody uses the slab any
    longer (GivenBack). Until then the host does not write there. If it needs the memory before, it leaves the memfd to
    the consumer (Unmap), and takes another. `brief`: consumers hold much of the host's memory, so the slab is to be
    copied, and given back at once."""

    seq: Count
    memfd: Index
    brief: bool = False


class GivenBack(Message, frozen=True):
    """The consumer uses slab `seq`, which was lent to it, no longer."""

    seq: Count


FromFetcher: TypeAlias = Fetch | Ping
FromKeeper: TypeAlias = Chunk | NotKept | Pong
FromBorrower: TypeAlias = Fetch | GivenBack | Ping
FromLender: TypeAlias = Greeting | Map | Unmap | Lent | NotKept | Pong
