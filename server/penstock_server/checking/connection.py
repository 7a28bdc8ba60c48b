"""Tries each step of a connection to a daemon, from its name to its batches; connection_findings.py judges that.

The steps are those of a client. Only the last one, which reads batches, needs the client itself: the caller brings it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import zmq

from penstock_proto import PenstockError, ProtocolError, codec, seqpacket, unix_address
from penstock_proto import messages as m
from penstock_proto.keys import client_keys

from .. import control

CONNECT_SECONDS = 5.0
"""Seconds to wait for a TCP connection, and for an answer over it."""

PINGS = 20

OTHER_USER, OTHER_HOST, WORKS = "other user", "other host", "works"
"""Whether the unix connection works: the daemon has another user; its address does not exist here; it does."""


@dataclass(frozen=True, slots=True)
class Read:
    """What a client has read.

    Attributes:
        transport: "local" or "tcp".
        seconds: from the first batch on.
        batches, nbytes: that came in this time.
        waiting: the share of it in which no batch was there.
        unsent: whether the daemon had more bytes for it than the connection took.
    """

    transport: str
    seconds: float
    batches: int
    nbytes: int
    waiting: float
    unsent: bool


ReadFeed = Callable[[str, float, "str | None"], Read]
"""Reads a feed (its URL) for some seconds, as a trainer does, with this folder of keys."""


@dataclass(slots=True)
class Connection:
    """How far a connection came.

    Attributes:
        url: what was asked for.
        host, port, feed: its parts; `feed` may be empty.
        addresses: what the host's name resolves to, and `resolved` how many seconds that took.
        unresolved: why there are none.
        refused: by address: why no TCP connection came about.
        reached: the address that answered, or empty; `connected` the seconds that it took.
        same_host: whether it is an address of this host.
        error: what the daemon answered instead of its status, or why it did not.
        state: its status.
        unix: OTHER_USER, OTHER_HOST, WORKS, or another error of the unix connection; empty if it was not tried.
        trips: seconds of messages there and back.
        read: batches that were read; None if that was not tried.
        unread: why none could be read.
    """

    url: str
    host: str
    port: int
    feed: str
    addresses: list[str] = field(default_factory=list)
    resolved: float = 0.0
    unresolved: str = ""
    refused: dict[str, OSError] = field(default_factory=dict)
    reached: str = ""
    connected: float = 0.0
    same_host: bool = False
    error: PenstockError | None = None
    state: dict[str, Any] | None = None
    unix: str = ""
    encrypted: bool = False
    trips: list[float] = field(default_factory=list)
    read: Read | None = None
    unread: str = ""


def attempt(
    url: str, seconds: float, read: ReadFeed | None, tell: Callable[[str, float], None], keys: str | None = None
) -> Connection:
    """Try each step until one fails.

    Args:
        url: the daemon's or a feed's address.
        seconds: for which batches are read.
        read: reads them; None: they are not read.
        tell: called with the present step, and the part that is done.
        keys: a client's folder of keys; None: what PENSTOCK_KEYS says, or none.

    Raises:
        StartError: `url` is not of the form tcp://HOST:PORT[/FEED], or the folder of keys is not one.
    """
    control.endpoint_of(url)
    own = client_keys(keys)
    parts = urlsplit(url)
    seen = Connection(url, parts.hostname or "", parts.port or 0, parts.path.strip("/"))
    tell("looking up the name", 0.0)
    _resolve(seen)
    tell("connecting", 0.1)
    _reach(seen)
    if not seen.reached:
        return seen
    tell("asking the daemon", 0.2)
    try:
        seen.state = json.loads(control.status(url, CONNECT_SECONDS, own))
    except PenstockError as error:
        seen.error = error
        return seen
    seen.unix = _unix(seen.state["unix"])
    feeds = [feed["name"] for feed in seen.state["feeds"]]
    if not seen.state["ready"] or not feeds:
        return seen
    feed = seen.feed or feeds[0]
    seen.encrypted = own is not None
    if own is None:
        tell("measuring the round trip", 0.3)
        with contextlib.suppress(PenstockError, zmq.ZMQError):
            seen.trips = _trips(control.endpoint_of(url), feed)
    if read is not None:
        tell(f"reading {feed}", 0.4)
        try:
            seen.read = read(f"{control.endpoint_of(url)}/{feed}", seconds, keys)
        except PenstockError as error:
            seen.unread = error.message
    return seen


def _resolve(seen: Connection) -> None:
    began = time.perf_counter()
    try:
        found = socket.getaddrinfo(seen.host, seen.port, type=socket.SOCK_STREAM)
    except OSError as error:
        seen.unresolved = error.strerror or str(error)
        return
    seen.resolved = time.perf_counter() - began
    seen.addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))


def _reach(seen: Connection) -> None:
    for address in seen.addresses:
        began = time.perf_counter()
        try:
            with socket.create_connection((address, seen.port), CONNECT_SECONDS) as connection:
                seen.connected = time.perf_counter() - began
                seen.reached = address
                seen.same_host = connection.getsockname()[0] == connection.getpeername()[0]
                return
        except OSError as error:
            seen.refused[address] = error


def _unix(name: str) -> str:
    """Connect to the daemon's unix address, as a client does that wants shared memory."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(CONNECT_SECONDS)
            unix_address.connect(connection, name)
            greeting, ledger = seqpacket.receive(connection)
            if ledger is not None:
                os.close(ledger)
            if greeting:
                return WORKS if ledger is not None else "no descriptor came with the greeting"
            return f"{OTHER_USER} {unix_address.user(connection)}"
    except OSError as error:
        if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
            return OTHER_HOST
        if error.errno in (errno.ECONNRESET, errno.EPIPE):
            return OTHER_USER
        return str(error)


def _trips(endpoint: str, feed: str) -> list[float]:
    """Send messages that the daemon answers at once, and return how long each took. They open no stream."""
    context = zmq.Context()
    connection = context.socket(zmq.DEALER)
    connection.setsockopt(zmq.LINGER, 0)

    def ask(message: m.Message) -> m.ServerMessage:
        connection.send(codec.encode(message))
        if not connection.poll(int(CONNECT_SECONDS * 1000)):
            raise ProtocolError("no answer")
        return codec.from_server(connection.recv())

    trips = []
    try:
        connection.connect(endpoint)
        ask(m.Hello(m.VERSION, feed, f"{socket.gethostname()}:{os.getpid()} (check)"))
        for _ in range(PINGS):
            began = time.perf_counter()
            ask(m.Ping())
            trips.append(time.perf_counter() - began)
        connection.send(codec.encode(m.Close()))
    finally:
        connection.close(100)
        context.term()
    return trips
