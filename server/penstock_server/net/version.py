"""The protocol's version: both ends must have the same."""

from __future__ import annotations

from penstock_proto import ProtocolError
from penstock_proto.messages import VERSION


def check_version(version: int) -> None:
    """Refuse a peer of another version.

    Raises:
        ProtocolError: the versions differ; names both.
    """
    if version != VERSION:
        raise ProtocolError(
            f"the client speaks protocol version {version}, the daemon version {VERSION}: "
            "install the same release of penstock on both sides"
        )
