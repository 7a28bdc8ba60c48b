"""Reads whole frames from a connection over TCP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock_proto import ProtocolError
from penstock_proto.transport.codec import MAX_MESSAGE
from penstock_proto.transport.zmtp_dealer import Dealer

if TYPE_CHECKING:
    from penstock_proto.transport.libzmq import LibzmqDealer


class Frames:
    """Reads the frames of a connection.

    Attributes:
        dealer: the connection.
        more: whether another frame of the same message follows the last one.
    """

    def __init__(self, dealer: Dealer | LibzmqDealer) -> None:
        self.dealer = dealer
        self.more = False
        self._filling: memoryview | None = None

    def next(self) -> memoryview | None:
        """Return the next frame if all of it has arrived, else None.

        Raises:
            OSError: the connection broke.
            ProtocolError: the frame is larger than a message can be.
        """
        dealer = self.dealer
        if self._filling is None:
            frame = dealer.begin()
            if frame is None:
                return None
            nbytes, self.more = frame
            if nbytes > MAX_MESSAGE:
                raise ProtocolError(f"the daemon sent a message of {nbytes} bytes; the limit is {MAX_MESSAGE}")
            self._filling = memoryview(bytearray(nbytes))
        data = self._filling
        while dealer.left:
            if not dealer.read_into(data[len(data) - dealer.left :]):
                return None
        self._filling = None
        return data
