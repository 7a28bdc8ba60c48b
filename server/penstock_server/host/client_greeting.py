"""The greeting of a client that connects to a daemon with keys, without I/O.

libzmq breaks off at a greeting of a client without keys, perhaps before the client has read ours, which says that keys
are needed. So such a greeting does not reach libzmq; the client then ends the connection itself.
"""

from __future__ import annotations

from penstock_proto import zmtp


class ClientGreeting:
    """What libzmq may see of the bytes that a client sends.

    Attributes:
        plain: whether the client has no keys. Nothing more reaches libzmq then.
    """

    def __init__(self) -> None:
        self.plain = False
        self._came: bytes | None = b""  # until the greeting is complete

    def passes(self, data: bytes) -> bytes:
        """Take the next bytes of the client. Return those that libzmq may see now: up to the version at once, because
        clients wait for the answer to it, and the rest when it is known that the client uses keys.

        Raises:
            ProtocolError: it does not speak ZeroMQ.
        """
        if self._came is None:
            return b"" if self.plain else data
        before = len(self._came)
        self._came += data
        if len(self._came) < len(zmtp.GREETING):
            return self._came[before : zmtp.VERSION_END]
        came, self._came = self._came, None
        self.plain = zmtp.mechanism(came[: len(zmtp.GREETING)]) != zmtp.CURVE
        return came[before : zmtp.VERSION_END] if self.plain else came[min(before, zmtp.VERSION_END) :]
