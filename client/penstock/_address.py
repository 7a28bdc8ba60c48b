"""What the `url` of `connect` and `dataset` may be, and the sentence for each way in which it can be wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock_proto import StartError

_FORMS = "use tcp://HOST:PORT/FEED for a daemon that runs, or MODULE:ATTR to start a private one"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a feed is served."""

    host: str
    port: int
    feed: str

    @property
    def endpoint(self) -> str:
        """The daemon's address, as ZeroMQ and `penstock status` take it."""
        return f"tcp://{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.endpoint}/{self.feed}"


def is_private(url: str) -> bool:
    """Whether `url` names a feed by MODULE:ATTR, for which a daemon has to be started.

    Raises:
        StartError: it is neither that nor a URL.
    """
    if not isinstance(url, str):
        raise TypeError(
            f"a feed is given by its URL or as MODULE:ATTR, not as {type(url).__name__}: workers import it themselves, "
            'so name it, such as penstock.dataset("scenes.py:feed")'
        )
    if "://" in url:
        return False
    module, _, attribute = url.rpartition(":")
    if module and attribute[:1].isdigit():
        raise StartError(f"{url!r} looks like an address without its tcp://: {_FORMS}")
    if not module or not attribute.isidentifier():
        raise StartError(f"{url!r} is neither a URL nor MODULE:ATTR: {_FORMS}")
    return True


def parse(url: str) -> Address:
    """The address that `url`, `tcp://HOST:PORT/FEED`, names. An IPv6 host stands in brackets.

    Raises:
        StartError: it has not that form; the message says what is wrong with it.
    """
    scheme, _, rest = url.partition("://")
    if scheme != "tcp":
        raise StartError(f"{url!r} has the scheme {scheme!r}, but Penstock is reached by tcp: {_FORMS}")
    place, _, feed = rest.rstrip("/").partition("/")
    host, colon, port = place.rpartition(":")
    if not colon or place.endswith("]"):
        raise StartError(f"{url!r} names no port: write tcp://HOST:PORT/FEED")
    if not re.fullmatch(r"\[[0-9A-Fa-f:.%\w]+\]|[^\s\[\]:]+", host):
        raise StartError(f"{url!r} names no host: write tcp://HOST:PORT/FEED, an IPv6 address in brackets")
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise StartError(f"{url!r} has the port {port!r}: a port is a number from 1 to 65535")
    if not feed:
        raise StartError(
            f"{url!r} names no feed: write {url.rstrip('/')}/FEED; `penstock status {url.rstrip('/')}` lists the feeds"
        )
    return Address(host, int(port), feed)
