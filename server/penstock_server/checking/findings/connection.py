"""Tries each step of a connection to a daemon, from resolving its name to reading batches.

connection_findings.py judges the outcome. The steps are those of a client. Only the last step, which reads batches,
needs the client itself, so the caller passes in a function for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from penstock_proto import PenstockError, ProtocolError
from penstock_proto import messages as m
from penstock_proto.security import trusted_users, unix_address
from penstock_proto.security.keys import client_keys
from penstock_proto.status.status_shape import Status
from penstock_proto.transport import codec, seqpacket, urls

from ...to_daemon import control

CONNECT_SECONDS = 5.0
"""Seconds to wait for a TCP connection, and for each answer over it."""

PINGS = 20

OTHER_USER, OTHER_HOST, WORKS = "other user", "other host", "works"
"""Outcomes of the unix connection: the daemon has another user; its address does not exist here; it works."""


@dataclass(frozen=True, slots=True)
class Read:
    """The outcome of a client's reading.

    Attributes:
        transport: "local" or "tcp".
        seconds: how long it read, from the first batch on.
        batches, nbytes: how much came in this time.
        waiting: the share of this time in which it waited for a batch.
        unsent: whether the daemon had more bytes to send than the connection took.
    """

    transport: str
    seconds: float
    batches: int
    nbytes: int
    waiting: float
    unsent: bool


ReadFeed = Callable[[str, float, "str | None"], Read]
"""Called with a feed's URL, seconds, and a folder of keys or None: reads the feed for that long, as a trainer does."""


@dataclass(slots=True)
class Connection:
    """How far a connection came.

    Attributes:
        url: the URL that the user gave.
        host, port, feed: the URL's parts; `feed` may be empty.
        addresses, resolved: the addresses that the host's name resolves to, and the seconds that resolving it took.
        unresolved: why the name has no address, or empty.
        refused: why the TCP connection failed, by address.
        reached, connected: the address that answered, or empty, and the seconds that connecting took.
        same_host: whether `reached` is an address of this host.
        error: the error that the daemon answered, or the reason why it did not answer; None if it sent its status.
        state: the daemon's status.
        unix: OTHER_USER, OTHER_HOST, WORKS, or another error of the unix connection; empty if it was not tried.
        encrypted: whether the daemon answered to a client's keys, so that TCP is encrypted.
        trips: round-trip times of messages, in seconds.
        read: the outcome of reading batches; None if they were not read.
        unread: why no batch could be read, or empty.
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
    state: Status | None = None
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
        seconds: how long to read batches.
        read: reads batches; None to read none.
        tell: called with the current step, and the finished share of all steps (0 to 1).
        keys: a client's folder of keys; None for the one that PENSTOCK_KEYS names, if any.

    Raises:
        StartError: `url` is not of the form tcp://HOST:PORT[/FEED], or the folder of keys is not one.
    """
    address = urls.parse(url)
    own = client_keys(keys)
    seen = Connection(url, address.hostname, address.port, address.feed)
    tell("looking up the name", 0.0)
    _resolve(seen)
    tell("connecting", 0.1)
    _reach(seen)
    if not seen.reached:
        return seen
    tell("asking the daemon", 0.2)
    try:
        seen.state = control.status(url, CONNECT_SECONDS, own)
    except PenstockError as error:
        seen.error = error
        return seen
    seen.unix = _unix(seen.state.unix, None if own else trusted_users.users(None))
    feeds = [feed.name for feed in seen.state.feeds]
    if not seen.state.ready or not feeds:
        return seen
    feed = seen.feed or feeds[0]
    seen.encrypted = own is not None
    if own is None:
        tell("measuring the round trip", 0.3)
        with contextlib.suppress(PenstockError, zmq.ZMQError):
            seen.trips = _trips(address.endpoint, feed)
    if read is not None:
        tell(f"reading {feed}", 0.4)
        try:
            seen.read = read(f"{address.endpoint}/{feed}", seconds, keys)
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


def _unix(name: str, users: frozenset[int] | None) -> str:
    """Connect to the daemon's unix address, as a client that wants shared memory and trusts `users` does; see
    `Connection.unix`."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(CONNECT_SECONDS)
            unix_address.connect(connection, name, users)
            greeting, ledger = seqpacket.receive(connection)
            if ledger is not None:
                os.close(ledger)
            if greeting:
                return WORKS if ledger is not None else "no descriptor came with the greeting"
            return f"{OTHER_USER} {unix_address.user(connection)}"
    except PermissionError:  # the client does not trust that user
        return OTHER_USER
    except OSError as error:
        if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
            return OTHER_HOST
        if error.errno in (errno.ECONNRESET, errno.EPIPE):
            return OTHER_USER
        return str(error)


def _trips(endpoint: str, feed: str) -> list[float]:
    """Measure round trips of messages that the daemon answers at once, in seconds. This opens no stream."""
    context = zmq.Context()
    connection = context.socket(zmq.DEALER)
    connection.setsockopt(zmq.LINGER, 0)
    connection.setsockopt(zmq.MAXMSGSIZE, codec.MAX_MESSAGE)

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
