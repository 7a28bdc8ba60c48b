"""Asks a daemon one question over a connection of its own, such as for its status."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..errors import ProtocolError
from ..messages import ClientMessage, ServerMessage
from .codec import MAX_STATUS, encode, from_server
from .zmtp_dealer import Dealer

if TYPE_CHECKING:
    from .libzmq import LibzmqDealer


def ask(dealer: Dealer | LibzmqDealer, message: ClientMessage, deadline: float) -> ServerMessage | None:
    """Send a message and return the answer, or None if none comes before `deadline` (monotonic). The caller closes the
    connection.

    Raises:
        OSError: the connection broke.
        ProtocolError: the answer is not a message, or too large.
    """
    dealer.send(encode(message))
    while (frame := dealer.begin()) is None:
        if not dealer.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
            return None
    nbytes, _ = frame
    if nbytes > MAX_STATUS:
        raise ProtocolError(f"the daemon sent a message of {nbytes} bytes; at most {MAX_STATUS} are read")
    data = memoryview(bytearray(nbytes))
    while dealer.left:
        if time.monotonic() >= deadline:
            return None
        if not dealer.read_into(data[nbytes - dealer.left :]):
            dealer.wait(deadline - time.monotonic())
    return from_server(data)
