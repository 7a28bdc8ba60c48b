"""The forms of `url` in `connect` and `dataset`, and the error messages for wrong ones."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock_proto import StartError

_FORMS = "use tcp://HOST:PORT/FEED for a running daemon, or MODULE:ATTR to start a private one"


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a feed."""

    host: str
    port: int
    feed: str

    @property
    def endpoint(self) -> str:
        """The daemon's address, as for ZeroMQ and `penstock status`."""
        return f"tcp://{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.endpoint}/{self.feed}"


def is_private(url: str) -> bool:
    """Return whether `url` has the form MODULE:ATTR, which needs a private daemon.

    Raises:
        StartError: `url` has neither this form nor that of a URL.
    """
    if "://" in url:
        return False
    module, _, attribute = url.rpartition(":")
    if module and attribute[:1].isdigit():
        raise StartError(f"{url!r} looks like an address without tcp://: {_FORMS}")
    if not module or not attribute.isidentifier():
        raise StartError(f"{url!r} is neither a URL nor MODULE:ATTR: {_FORMS}")
    return True


def parse(url: str) -> Address:
    """Return the address in `url`, which has the form `tcp://HOST:PORT/FEED`, with an IPv6 host in brackets.

    Raises:
        StartError: it has another form; the message says what is wrong.
    """
    scheme, _, rest = url.partition("://")
    if scheme != "tcp":
        raise StartError(f"{url!r} has the scheme {scheme!r}, but Penstock uses tcp: {_FORMS}")
    place, _, feed = rest.rstrip("/").partition("/")
    host, colon, port = place.rpartition(":")
    if not colon or place.endswith("]"):
        raise StartError(f"{url!r} names no port: write tcp://HOST:PORT/FEED")
    if not re.fullmatch(r"\[[0-9A-Fa-f:.%\w]+\]|[^\s\[\]:]+", host):
        raise StartError(f"{url!r} names no host: write tcp://HOST:PORT/FEED, an IPv6 address in brackets")
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise StartError(f"{url!r} has the port {port!r}: must be a number from 1 to 65535")
    if not feed:
        raise StartError(
            f"{url!r} names no feed: write {url.rstrip('/')}/FEED; `penstock status {url.rstrip('/')}` lists the feeds"
        )
    return Address(host, int(port), feed)
