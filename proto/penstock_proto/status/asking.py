"""Asks a daemon for its status. The daemon is not trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ProtocolError
from ..messages import VERSION, Failed, StatusRequest
from ..messages import Status as StatusReply
from ..transport import one_answer
from . import status_parsing

if TYPE_CHECKING:
    from ..transport.libzmq import LibzmqDealer
    from ..transport.zmtp_dealer import Dealer
    from .status_shape import Status


def status(dealer: Dealer | LibzmqDealer, deadline: float) -> Status | None:
    """Return the status, whose texts are safe to print, or None if it does not come before `deadline` (monotonic). The
    caller closes the connection.

    Raises:
        OSError: the connection broke.
        ProtocolError: the answer is not a status.
        PenstockError: the daemon's answer, if it was an error.
    """
    reply = one_answer.ask(dealer, StatusRequest(VERSION), deadline)
    if isinstance(reply, StatusReply):
        return status_parsing.parse(reply.json)
    if isinstance(reply, Failed):
        raise reply.error.error()
    if reply is None:
        return None
    raise ProtocolError(f"the daemon answered {type(reply).__name__} to a status request")
