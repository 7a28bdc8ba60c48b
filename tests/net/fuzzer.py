"""Sends arbitrary, damaged and misplaced messages to every port of a daemon. It runs in its own process.

    python tests/net/fuzzer.py '{"tcp": ["127.0.0.1", 5555], "unix": NAME, "http": [HOST, PORT], "keys": null, ...}'

A thread for each port makes one attack after another, until stdin ends. Some attacks send a client's messages in a
wrong order; the others send damaged ones. At the end it prints the number of attacks of each kind. It never sends the
requests that are reserved for the user of the daemon: to stop, or to change the number of workers or hosts.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import zmq

from penstock_proto import ProtocolError
from penstock_proto import messages as m
from penstock_proto.security.keys import client_keys
from penstock_proto.transport import codec, ledger, seqpacket, zmtp

TIMEOUT = 2.0
"""Seconds that an attack waits for an answer."""

LEFT_OPEN = 8
"""The number of connections to each port that stay open after their attack."""

CURVE_GREETING = zmtp.GREETING.replace(b"NULL\0", b"CURVE")
HELLO = zmtp.command(b"HELLO", b"\1\0" + bytes(72) + bytes(32) + bytes(8) + bytes(80))
READY = zmtp.ready(b"DEALER")
SESSION = b"\xa7session\xc4\x10"
"""The bytes of a Welcome before the 16 bytes of the session."""

PATHS = ("/", "/metrics", "/healthz", "/readyz", "/api/status", "/api/live", "/api/preview", "/static/page.js", "/%00")


class Fuzzer:
    """Makes the attacks of one thread.

    Args:
        place: the JSON argument of the file's head.
        dice: the source of all random choices.
    """

    def __init__(self, place: dict[str, Any], dice: random.Random) -> None:
        self.place = place
        self.dice = dice
        self._open: deque[socket.socket] = deque()

    # --- the messages ---

    def noise(self, most: int) -> bytes:
        return self.dice.randbytes(self.dice.randrange(most))

    def damaged(self, data: bytes) -> bytes:
        """Return the same bytes half of the time. Otherwise return changed, shorter, longer or other bytes."""
        dice, out = self.dice, bytearray(data or b"\0")
        match dice.randrange(8):
            case 0:
                for _ in range(dice.randint(1, 6)):
                    out[dice.randrange(len(out))] = dice.randrange(256)
            case 1:
                del out[dice.randrange(len(out)) :]
            case 2:
                out[(at := dice.randrange(len(out))) : at] = self.noise(40)
            case 3:
                out = bytearray(self.noise(300))
        return bytes(out)

    def message(self, session: bytes = b"", proof: bytes = b"") -> bytes:
        """Return a message of a client, perhaps damaged."""
        dice = self.dice
        count = dice.choice((0, 0, 1, 2, 3, 100, 2**31, 2**53))
        version = dice.choice((m.VERSION, m.VERSION, 0, 2**31))
        feed = dice.choice((*self.place["feeds"], *self.place["feeds"], "", "x" * 1000, "\0/"))
        said: m.Message = dice.choice(
            (
                m.Hello(version, feed, dice.choice(("eve:1", "", "\x1b[31m" * 100))),
                m.StatusRequest(version),
                m.PositionPart(session or dice.randbytes(16), self.noise(2000)),
                m.Open(
                    session or dice.randbytes(16),
                    proof,
                    dice.choice((1, 4, 4096)),
                    dice.choice((0, 1 << 20, 2**53)),
                    dice.choice((0, 4, 4096)),
                    again=dice.random() < 0.2,
                    group=dice.choice(("", "", "", "gang")),
                    rank=dice.choice((0, 0, 1)),
                    world_size=dice.choice((0, 0, 0, 2)),
                    fetches=dice.random() < 0.3,
                ),
                m.Reaches(count, dice.random() < 0.7),
                m.Resend(count),
                m.Fetch(count, count, dice.randbytes(16), dice.choice((0, count)), dice.choice((1, 2**16))),
                m.Begin(count),
                m.Ack(count, tuple(range(dice.choice((0, 3, 100)))), dice.choice((0, 1))),
                m.Leave(count, count),
                m.Ping(),
                m.Close(count),
                m.StacksRequest(),
                m.ProfileHosts(dice.choice((0, 1, 3600)), 100),
            )
        )
        data = self.damaged(codec.encode(said))
        return self.message(session, proof) if _is_for_the_user(data) else data

    def frame(self, data: bytes) -> bytes:
        """Return a ZMTP frame. Its length or flags may be damaged, or it may be a command instead of a message."""
        whole = zmtp.head_of(len(data), self.dice.random() < 0.05) + data
        if self.dice.random() < 0.1:
            return zmtp.command(self.dice.choice((b"PING", b"PONG", b"ERROR", b"READY", b"NONE")), self.noise(60))
        return self.damaged(whole) if self.dice.random() < 0.2 else whole

    # --- the ports ---

    def tcp(self) -> None:
        """Attack with ZMTP, without keys. About a third of the attacks say Hello first, and may open a stream."""
        with self._connected(tuple(self.place["tcp"])) as connection:
            head = zmtp.GREETING + READY
            if self.dice.random() < 0.3:
                connection.sendall(self.damaged(head) + self.noise(500))
                self._hear(connection)
                return
            session = b""
            if self.dice.random() < 0.5:
                session = self._greeted(connection)
                opening = codec.encode(m.Open(session or bytes(16), b"", 4, 1 << 20, 0))
                connection.sendall(zmtp.head_of(len(opening)) + opening)
            else:
                connection.sendall(head)
            for _ in range(self.dice.randint(1, 20)):
                connection.sendall(self.frame(self.message(session)))
            self._hear(connection)

    def curve(self) -> None:
        """Attack with ZMTP, as somebody without keys, on a daemon that requires them."""
        with self._connected(tuple(self.place["tcp"])) as connection:
            connection.sendall(self.damaged(self.dice.choice((CURVE_GREETING, CURVE_GREETING, zmtp.GREETING))))
            for _ in range(self.dice.randint(0, 4)):
                connection.sendall(self.damaged(self.dice.choice((HELLO, READY, self.frame(self.message())))))
            self._hear(connection)

    def admitted(self) -> None:
        """Attack with ZMTP, with the keys of a client that the daemon admits."""
        keys = client_keys(self.place["keys"])
        assert keys is not None
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RECONNECT_IVL, -1)
            dealer.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT))
            dealer.setsockopt(zmq.SNDTIMEO, int(1000 * TIMEOUT))
            dealer.curve_serverkey = keys.server
            dealer.curve_publickey, dealer.curve_secretkey = keys.own
            dealer.connect("tcp://{}:{}".format(*self.place["tcp"]))
            with suppress(zmq.ZMQError):
                session = b""
                if self.dice.random() < 0.5:
                    dealer.send(codec.encode(m.Hello(m.VERSION, self.dice.choice(self.place["feeds"]))))
                    session = dealer.recv().partition(SESSION)[2][:16]
                    dealer.send(codec.encode(m.Open(session or bytes(16), b"", 4, 1 << 20, 0)))
                for _ in range(self.dice.randint(1, 20)):
                    parts = [self.message(session) for _ in range(self.dice.choice((1, 1, 1, 1, 3)))]
                    dealer.send_multipart(parts)
                dealer.recv()

    def unix(self) -> None:
        """Attack with datagrams over the unix connection, some with an fd.

        About half of the connections use the ledger's nonce. If the daemon has no keys, a third begin as a client on
        this host does, and open a stream.
        """
        with ExitStack() as stack:
            there = self._connected("\0" + self.place["unix"], socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection = stack.enter_context(there)
            _, fd = seqpacket.receive(connection)
            proof, session = self.dice.randbytes(16), b""
            if fd is not None:
                if self.dice.random() < 0.6:
                    proof = os.pread(fd, 16, ledger.NONCE.start)
                    if not self.place["keys"] and self.dice.random() < 0.6:
                        greeted = stack.enter_context(self._connected(tuple(self.place["tcp"])))
                        session = self._greeted(greeted)
                        seqpacket.send(connection, codec.encode(m.Open(session or bytes(16), proof, 4, 1 << 20, 4)))
                os.close(fd)
            for _ in range(self.dice.randint(1, 20)):
                data = self.message(session, proof) if self.dice.random() < 0.9 else self.noise(200_000)
                if data and not _is_for_the_user(data):
                    seqpacket.send(connection, data, 0 if self.dice.random() < 0.1 else None)
            connection.settimeout(0.05)
            while self.dice.random() < 0.8 and seqpacket.receive(connection)[0]:
                pass

    def http(self) -> None:
        """Attack with HTTP requests: damaged, cut off, too long, with unwanted bodies, and several in a row."""
        dice = self.dice
        with self._connected(tuple(self.place["http"])) as connection:
            for _ in range(dice.randint(1, 5)):
                method = dice.choice(("GET", "GET", "GET", "HEAD", "POST", "OPTIONS", "X" * 100))
                query = dice.choice(
                    ("", f"?seconds={dice.choice((0, -1, 10**9, 10**30))}", "?feed=x&number=1", "?" + "a" * 9000)
                )
                head = dice.choice(
                    (
                        "",
                        "",
                        "Upgrade: websocket\r\n",
                        "Transfer-Encoding: chunked\r\n",
                        "Content-Length: 99999999\r\n",
                        "Content-Encoding: gzip\r\nContent-Length: 3000\r\n",
                        "Expect: 100-continue\r\n",
                    )
                )
                more = "".join(
                    f"X{i}: {'y' * dice.choice((1, 1, 20_000))}\r\n" for i in range(dice.choice((0, 1, 200)))
                )
                first = f"{method} {dice.choice(PATHS)}{query} HTTP/1.1\r\nHost: {dice.choice(('localhost', 'x'))}\r\n"
                connection.sendall(
                    self.damaged(f"{first}{head}{more}\r\n".encode()) + dice.choice((b"", b"", self.noise(3000)))
                )
            self._hear(connection)

    # --- connections ---

    def _connected(self, at: Any, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """Return a new connection. It is closed or reset after the attack, or stays open for a few more attacks."""
        connection = socket.socket(family, kind)
        connection.settimeout(TIMEOUT)
        if kind == socket.SOCK_STREAM and self.dice.random() < 0.3:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            connection.connect(at)
        except BaseException:
            connection.close()
            raise
        if self.dice.random() < 0.2:
            self._open.append(connection.dup())
            if len(self._open) > LEFT_OPEN:
                self._open.popleft().close()
        return connection

    def _greeted(self, connection: socket.socket) -> bytes:
        """Say Hello over TCP, and return the session, or b"" if no Welcome came."""
        hello = codec.encode(m.Hello(m.VERSION, self.dice.choice(self.place["feeds"]), f"eve:{os.getpid()}"))
        connection.sendall(zmtp.GREETING + READY + zmtp.head_of(len(hello)) + hello)
        return self._hear(connection, SESSION).partition(SESSION)[2][:16]

    def _hear(self, connection: socket.socket, wanted: bytes = b"\0" * 99) -> bytes:
        """Read until `wanted` comes, or nothing comes for a moment. Sometimes read nothing. Return what was read."""
        heard = b""
        if self.dice.random() < 0.2 and len(wanted) == 99:
            return heard
        connection.settimeout(TIMEOUT if len(wanted) < 99 else 0.05)
        with suppress(TimeoutError):
            while wanted not in heard[:-16] and len(heard) < 1 << 20 and (data := connection.recv(1 << 16)):
                heard += data
        connection.settimeout(TIMEOUT)
        return heard

    def close(self) -> None:
        for connection in self._open:
            connection.close()


def _is_for_the_user(data: bytes) -> bool:
    """Return whether it is a request that is reserved for the user of the daemon."""
    try:
        return isinstance(codec.from_client(data), m.StopRequest | m.ScaleRequest | m.ScaleHostsRequest)
    except ProtocolError:
        return False


def main() -> None:
    place = json.loads(sys.argv[1])
    over, made, refused = threading.Event(), Counter[str](), Counter[str]()
    failed: list[BaseException] = []

    def attack(name: str, number: int) -> None:
        try:
            repeat(name, number)
        except BaseException as error:
            failed.append(error)

    def repeat(name: str, number: int) -> None:
        fuzzer = Fuzzer(place, random.Random(f"{place['seed']} {name} {number}"))
        act: Callable[[], object] = getattr(fuzzer, name)
        while not over.is_set():
            try:
                act()
            except (OSError, ProtocolError):  # the daemon has closed the connection, or no longer reads
                refused[name] += 1
            made[name] += 1
            time.sleep(place["pause"])
        fuzzer.close()

    names = [*(("curve", "admitted") if place["keys"] else ("tcp", "tcp")), "unix", "http"]
    threads = [threading.Thread(target=attack, args=(name, number)) for number, name in enumerate(names)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    over.set()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    print(json.dumps({"made": made, "refused": refused}))


if __name__ == "__main__":
    main()
