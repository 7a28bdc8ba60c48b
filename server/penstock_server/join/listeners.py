"""At a host: where consumers get the batches that it keeps. Those on its machine borrow them (lending.py), and others
fetch them over the network (slab_server.py)."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from penstock_proto import StartError
from penstock_proto import messages as m
from penstock_proto.security.keys import ClientKeys

from ..logs.rate_limited_log import RateLimitedLog
from ..shared_memory.arena import Memfd
from .built_slots import BuiltSlots
from .lending import Lender
from .slab_server import SlabServer

log = logging.getLogger(__name__)


class Listeners:
    """Both listeners of one host, for the batches that it keeps now.

    Args:
        port: where to listen on the network; 0: any free port.
        keys: this host's keys, or None.
        uids: further users to whom memory is lent.
    """

    def __init__(self, port: int, keys: ClientKeys | None, uids: Collection[int]) -> None:
        self._port = port
        self._keys = keys
        self._log = RateLimitedLog(log)
        self._server: SlabServer | None = None
        self._lender = Lender(self._log, uids)

    def listen(self, address: str) -> int:
        """Listen on the network, at the address by which the head knows this host. Return the port; 0 if that is not
        possible, so that the head sends consumers everything."""
        if self._server is not None and self._server.address != address:
            self._server.close()
            self._server = None
        if self._server is None and address:
            try:
                self._server = SlabServer(address, self._port, self._keys, self._log)
            except StartError as error:
                text = "trainers cannot fetch batches from this host, so the head sends them all: %s"
                log.warning(text, error.message, extra={"event": "no_fetching"})
                return 0
        return 0 if self._server is None else self._server.port

    @property
    def unix(self) -> str:
        """The abstract unix address for consumers on this machine."""
        return self._lender.name

    @property
    def unsent_bytes(self) -> int:
        """How many bytes wait until the connections of consumers take them."""
        return 0 if self._server is None else self._server.unsent_bytes

    @property
    def lent_bytes(self) -> int:
        """How many bytes were lent since this host joined."""
        return self._lender.lent_bytes

    def serve(self, slots: BuiltSlots | None) -> None:
        """Serve the batches that `slots` keep, and nothing else. None: this host has not joined."""
        if self._server is not None:
            self._server.slots = slots
        self._lender.lend_from(slots)

    def admit(self, message: m.AdmitClients) -> None:
        """Admit clients with these keys, and no others once the list is complete."""
        if self._server is not None and self._keys is not None:
            self._server.admit(message)

    def gone(self, memfd: Memfd) -> None:
        """Tell consumers on this machine that this memory was returned to the system."""
        self._lender.gone(memfd)

    def another_second(self) -> None:
        """Note that a second has passed."""
        now = time.monotonic()
        self._lender.look_at_the_clock(now)
        self._log.look_at_the_clock(now)

    def close(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()
        self._lender.close()
