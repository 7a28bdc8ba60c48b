"""The greeting of a client that connects to a daemon with keys, without I/O.

If a client without keys greets libzmq, libzmq closes the connection, perhaps before the client has read our greeting,
which says that keys are needed. So the daemon does not pass such a greeting on, and the client ends the connection
itself.
"""

from __future__ import annotations

from penstock_proto.transport import zmtp


class ClientGreeting:
    """Decides which of the bytes that a client sends may reach libzmq.

    Attributes:
        plain: True if the client has no keys. Then nothing more reaches libzmq.
    """

    def __init__(self) -> None:
        self.plain = False
        self._came: bytes | None = b""  # until the greeting is complete

    def passes(self, data: bytes) -> bytes:
        """Take the client's next bytes, and return the bytes that may reach libzmq now.

        Those up to the version pass at once, because clients wait for the answer to it. The rest pass once the client
        is known to use keys.

        Raises:
            ProtocolError: the client does not speak ZeroMQ.
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
