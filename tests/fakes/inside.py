"""The inside of a connection, which users do not see: the tests look at it only through these functions."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import penstock

if TYPE_CHECKING:
    from penstock._state.consumer_state import ConsumerState
    from penstock._stream.stream_handle import StreamHandle


def handle_of(connection: penstock.Connection) -> StreamHandle:
    return connection._handle


def state_of(connection: penstock.Connection) -> ConsumerState:
    return connection._handle.handoff._state


def transport_of(connection: penstock.Connection) -> Any:
    """Return the transport; None while there is none."""
    return connection._handle.handoff.transport


def receiver_of(connection: penstock.Connection) -> threading.Thread:
    """Return the thread that receives."""
    return connection._handle.receiver._thread


def warn_again(connection: penstock.Connection) -> None:
    """Have the client warn of a long wait although it has warned of it."""
    connection._handle.handoff._counters._warned = False
