"""A daemon that breaks the protocol on purpose, and real clients of it in another process, whose memory is measured.

    with Clients() as clients, HostileDaemon(info, attack) as daemon:
        outcome = clients.read(daemon.url, "tcp")

`attack` is called with each connection once the stream is open and the client has begun an epoch. Until then the daemon
behaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from msgspec import structs

from penstock_proto import VERSION, Leaf
from penstock_proto import messages as m
from penstock_proto.batches.layout import SlotLayout, fixed_layout
from penstock_proto.security import unix_address
from penstock_proto.transport import ledger, seqpacket, zmtp
from penstock_proto.transport.codec import encode, from_client
from tests.fakes.fake_daemon import feed_info, sealed_memfd

PATIENCE = 2.0
"""Seconds in which clients must connect, and after which they close a stream on which nothing comes."""
LIMIT = 2 << 30
"""Bytes of address space that clients may have."""

_CLIENT = f"""
import json, resource, sys, threading, time
import penstock
resource.setrlimit(resource.RLIMIT_AS, ({LIMIT}, {LIMIT}))
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))

def memory(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name + ":"))

for line in sys.stdin:
    url, transport, patience, options = json.loads(line)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM begins again
    before, began, batches, text = memory("VmRSS"), time.monotonic(), 0, ""
    try:
        with penstock.connect(url, transport=transport, timeout={PATIENCE}, reconnect=0, **options) as connection:
            watchdog = threading.Timer(patience, connection.close)
            watchdog.daemon = True
            watchdog.start()
            time.sleep(0.5)  # so that nothing is handed over meanwhile
            for batch in connection.batches():
                batches += 1
                del batch
            watchdog.cancel()
        kind = "End"
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    seconds = time.monotonic() - began
    print(json.dumps([kind, text, batches, (memory("VmHWM") - before) / 1024, seconds]), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a client: the class of its error and its text, its batches, by how many MiB its memory grew, and how
    many seconds it took."""

    kind: str
    text: str
    batches: int
    mib: float
    seconds: float


class Clients:
    """A process that reads one URL after another, with little address space and few open files. A context manager."""

    def __enter__(self) -> Clients:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("")

    def read(self, url: str, transport: str = "auto", patience: float = PATIENCE, **options: Any) -> Outcome:
        """Read the URL until its end or an error, for `patience` seconds. The process must survive that."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([url, transport, patience, options]) + "\n")
        process.stdin.flush()
        said = process.stdout.readline()
        assert said, f"the client ended with status {process.wait()}"
        return Outcome(*json.loads(said))


class Peer:
    """The daemon's end of a client's connection, over TCP or unix."""

    def __init__(self, connection: socket.socket, *, unix: bool) -> None:
        self.connection = connection
        self.unix = unix

    def raw(self, data: bytes) -> None:
        """Send bytes."""
        self.connection.sendall(data)

    def say(self, message: m.Message, fd: int | None = None) -> None:
        """Send a message, over unix perhaps with a descriptor."""
        self.say_bytes(encode(message), fd=fd)

    def say_bytes(self, data: bytes, *more: bytes, fd: int | None = None) -> None:
        """Send a message of these bytes, over TCP perhaps with more frames."""
        if self.unix:
            seqpacket.send(self.connection, data, fd)
            return
        frames = (data, *more)
        for number, frame in enumerate(frames, 1):
            self.raw(zmtp.head_of(len(frame), number < len(frames)) + frame)

    def hear(self) -> m.ClientMessage:
        """Wait for the next message.

        Raises:
            ConnectionError: there is none.
        """
        if self.unix:
            data, _ = seqpacket.receive(self.connection)
            if not data:
                raise ConnectionError
            return from_client(data)
        while True:
            flags, size = self.exactly(1)[0], 0
            size = int.from_bytes(self.exactly(8 if flags & zmtp.LONG else 1), "big")
            body = self.exactly(size)
            if not flags & zmtp.COMMAND:
                return from_client(body)

    def hear_until(self, kind: type[m.Message]) -> None:
        """Wait for a message of this kind."""
        while not isinstance(self.hear(), kind):
            pass

    def exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            some = self.connection.recv(count - len(data))
            if not some:
                raise ConnectionError
            data += some
        return data


Attack = Callable[[Peer], None]


class HostileDaemon:
    """Serves one feed. A context manager.

    Args:
        info: the feed.
        attack: called when the client has begun an epoch; until then the daemon behaves.
        greet: instead of ZeroMQ's handshake over TCP, call this.
        answer: the answer to Hello; None: Welcome.
        unix: whether it listens at its unix address.
        ledger: returns the ledger's fd.
        opened: the answer to Open; None: what was asked for.
    """

    def __init__(
        self,
        info: m.FeedInfo,
        attack: Attack = lambda peer: None,
        *,
        greet: Attack | None = None,
        answer: Attack | None = None,
        unix: bool = True,
        ledger: Callable[[], int] = lambda: sealed_memfd(ledger.NBYTES),
        opened: m.Opened | None = None,
    ) -> None:
        self.info = info
        self._attack = attack
        self._greet = greet
        self._answer = answer
        self._ledger = ledger
        self._opened = opened
        self.unix = unix_address.unused()
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if unix:
            self._local.bind("\0" + self.unix)
            self._local.listen()
        self.url = f"tcp://127.0.0.1:{self._tcp.getsockname()[1]}/{info.name}"
        self._threads: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        self._begin(self._accept, self._tcp, False)
        if unix:
            self._begin(self._accept, self._local, True)

    def __enter__(self) -> HostileDaemon:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for one in (self._tcp, self._local, *self._connections):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in list(self._threads):
            thread.join()

    def _begin(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="hostile-daemon")
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket, unix: bool) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                self._connections.append(connection)
                self._begin(self._serve, Peer(connection, unix=unix))

    def _serve(self, peer: Peer) -> None:
        with contextlib.suppress(OSError, ConnectionError, ValueError):
            (self._serve_unix if peer.unix else self._serve_tcp)(peer)
        with contextlib.suppress(OSError, ConnectionError):
            while peer.connection.recv(1 << 16):  # keep it open until the client ends it
                pass
        peer.connection.close()

    def _serve_tcp(self, peer: Peer) -> None:
        if self._greet is not None:
            return self._greet(peer)
        peer.raw(zmtp.GREETING + zmtp.ready(b"ROUTER"))
        peer.exactly(64)
        peer.hear_until(m.Hello)
        if self._answer is not None:
            return self._answer(peer)
        peer.say(m.Welcome(secrets.token_bytes(16), self.info, self.unix))
        self._open(peer)

    def _serve_unix(self, peer: Peer) -> None:
        fd = self._ledger()
        peer.say(m.Greeting(VERSION), fd)
        os.close(fd)
        self._open(peer)

    def _open(self, peer: Peer) -> None:
        while not isinstance(asked := peer.hear(), m.Open):
            pass
        peer.say(self._opened or m.Opened(asked.credit, asked.quota))
        peer.hear_until(m.Begin)
        self._attack(peer)


def small_feed(**changes: Any) -> m.FeedInfo:
    """Return a feed of batches of 4 rows, each 4 KiB."""
    return structs.replace(feed_info(Leaf("uint8", (4096,)), 4), **changes)


def layout_of(info: m.FeedInfo) -> SlotLayout:
    """Return the layout of the slots of a fixed feed."""
    return fixed_layout(info.spec, info.batch_size or 1, info.turn)


def slabs(info: m.FeedInfo, record: bytes = b"") -> Iterator[m.Slab]:
    """Yield the messages of slabs of epoch 0, one batch each, without end."""
    nbytes = layout_of(info).nbytes
    number = 0
    while True:
        yield m.Slab(number, 0, 0, number, 1, info.batch_size or 1, nbytes, record=record)
        number += 1
