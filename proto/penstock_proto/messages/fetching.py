"""Messages between a consumer and a host that has joined, over ZMTP: the consumer fetches slabs from where they are.

The consumer is a DEALER. It connects to where HostAt says (server.py), and asks for slabs that the daemon has told it
of. A host knows no sessions: who knows the secret of a slot was sent a slab of it.
"""

from __future__ import annotations

from typing import TypeAlias

from .base import Batches, Count, Message, Token
from .client import Ping
from .server import Chunk, Pong


class Fetch(Message, frozen=True):
    """Asks for `batches` batches from place `first` of the slot of `ticket` on: those of slab `seq`. Answered by
    Chunks, as the daemon sends them, or by NotKept. `secret` as in Slab."""

    seq: Count
    ticket: Count
    secret: Token
    first: Count
    batches: Batches


class NotKept(Message, frozen=True):
    """The host does not keep the bytes of slab `seq`, or the secret is wrong. The daemon has them, or gets them."""

    seq: Count


FromFetcher: TypeAlias = Fetch | Ping
FromKeeper: TypeAlias = Chunk | NotKept | Pong
