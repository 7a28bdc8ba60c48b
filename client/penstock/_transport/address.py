"""The forms of `url` in `connect` and `dataset`, and the error messages for wrong ones."""

from __future__ import annotations

from penstock_proto import StartError
from penstock_proto.params import split_params
from penstock_proto.transport import urls
from penstock_proto.transport.urls import Address

_FORMS = "use tcp://HOST:PORT/FEED for a running daemon, or MODULE:ATTR to start a private one"


def is_private(url: str) -> bool:
    """Return whether `url` has the form MODULE:ATTR, which needs a private daemon.

    Raises:
        StartError: `url` has neither this form nor that of a URL.
    """
    if "://" in url:
        return False
    module, _, attribute = split_params(url)[0].rpartition(":")
    if module and attribute[:1].isdigit():
        raise StartError(f"{urls.shown(url)!r} looks like an address without tcp://: {_FORMS}")
    if url.endswith(".py"):
        raise StartError(
            f"{url}: which feed in it? Write {url}:ATTR, such as {url}:feed. For a feed of a running daemon, give "
            "tcp://HOST:PORT/FEED"
        )
    if not module or not attribute.isidentifier():
        raise StartError(f"{urls.shown(url)!r} is neither a URL nor MODULE:ATTR: {_FORMS}")
    return True


def parse(url: str) -> Address:
    """Return the address of the feed at `url`, which has the form `tcp://HOST:PORT/FEED`.

    Raises:
        StartError: it is no such URL; the message says why.
    """
    address = urls.parse(url)
    if not address.feed:
        raise StartError(
            f"{url!r} names no feed: write {url.rstrip('/')}/FEED; `penstock status {url.rstrip('/')}` lists the feeds"
        )
    return address
