"""Messages by which the daemon shares the arena's memfds with clients on the same host and with workers."""

from __future__ import annotations

from .base import Count, Index, Message


class Map(Message, frozen=True):
    """A memfd of the arena, `nbytes` long, with its fd. Sent before the first message that names it."""

    memfd: Index
    nbytes: Count


class Unmap(Message, frozen=True):
    """No message will name this memfd again. Unmap it when the last array over it is gone."""

    memfd: Index
