"""Parses the URLs of daemons and feeds, with a message for each kind of mistake."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import StartError


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a feed, or of a daemon: then `feed` is empty. `host` has brackets if it is an IPv6 address."""

    host: str
    port: int
    feed: str

    @property
    def endpoint(self) -> str:
        """The daemon's address, as for ZeroMQ and `penstock status`."""
        return f"tcp://{self.host}:{self.port}"

    @property
    def hostname(self) -> str:
        """The host without brackets, as for sockets."""
        return self.host.strip("[]")

    def __str__(self) -> str:
        return f"{self.endpoint}/{self.feed}" if self.feed else self.endpoint


def shown(url: str) -> str:
    """Return `url` for a message: without a user's name, a password and a query, which may be secret."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    _, userinfo, rest = rest.rpartition("@")
    rest, query, _ = rest.partition("?")
    return f"{scheme}{separator}{userinfo and '...@'}{rest}{query and '?...'}"


def is_address_alone(text: str) -> bool:
    """Return whether `text` has the form HOST:PORT or HOST:PORT/FEED, perhaps with a user's name: a URL without its
    tcp://."""
    return re.fullmatch(r"[^/]+:[0-9]+(/.*)?", text) is not None


def parse(url: str) -> Address:
    """Return the address in `url`, which has the form `tcp://HOST:PORT` or `tcp://HOST:PORT/FEED`, with an IPv6 host in
    brackets.

    Raises:
        StartError: it is no such URL; the message says why, and repeats no secret.
    """
    said = shown(url)
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise StartError(f"expected a daemon's address, such as tcp://127.0.0.1:5555, got {said!r}")
    if scheme != "tcp":
        raise StartError(f"{said!r} has the scheme {scheme!r}, but Penstock uses tcp: write tcp://HOST:PORT")
    if "@" in rest:
        raise StartError(
            f"{said!r}: such a URL takes no user name and no password: write tcp://HOST:PORT. `penstock keygen` makes "
            "keys, by which a daemon admits clients"
        )
    if "?" in rest:
        raise StartError(f"{said!r}: such a URL takes no query: write tcp://HOST:PORT or tcp://HOST:PORT/FEED")
    place, _, feed = rest.rstrip("/").partition("/")
    host, colon, port = place.rpartition(":")
    if not colon or place.endswith("]"):
        raise StartError(f"{said!r} names no port: write tcp://HOST:PORT")
    if not re.fullmatch(r"\[[0-9A-Fa-f:.%\w]+\]|[^\s\[\]:@]+", host):
        raise StartError(f"{said!r} names no host: write tcp://HOST:PORT, an IPv6 address in brackets")
    if not host.startswith("[") and not all(0 < len(label) < 64 for label in host.removesuffix(".").split(".")):
        raise StartError(f"{said!r} has the host {host!r}: its parts between the dots need 1 to 63 characters each")
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise StartError(f"{said!r} has the port {port!r}: must be a number from 1 to 65535")
    if not re.fullmatch("[A-Za-z0-9_.-]{0,128}", feed):
        raise StartError(
            f"expected the address of a daemon or a feed, such as tcp://127.0.0.1:5555/train, got {said!r}"
        )
    return Address(host, int(port), feed)
