"""The conversations that PROTOCOL.md prints are those of today's daemon: each is held again, and compared.

`python -m tests.proto.test_transcripts` holds them and writes them into PROTOCOL.md. It replaces random numbers
(sessions, nonces, the unix address) with fixed ones, and nothing else.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import struct
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

import penstock_proto
from penstock_proto import messages as m
from penstock_proto.transport import codec, seqpacket
from tests.conftest import Daemon, Serve, command

PROTOCOL = Path(penstock_proto.__file__).parent / "PROTOCOL.md"
FEED = """
    import numpy as np
    from penstock_server import Feed

    def samples(split):
        for i in range(9):
            yield np.full(2, i, "float32"), np.int64(i)

    train = Feed(samples, splits=[0], samples=9, batch_size=4, turn=2, lanes=1, seed=7)
"""
ATTEMPTS = 20
"""How often a conversation is tried: on a busy machine a turn may come in parts, which looks different."""
CREDIT = 16, 64 << 20


class Transcript:
    """A conversation as text. `bytes_too`: with the bytes of each message."""

    def __init__(self, bytes_too: bool = False) -> None:
        self.lines: list[str] = []
        self._bytes_too = bytes_too
        self._names: dict[object, object] = {}
        self._memfds: list[int] = []

    def call(self, real: object, name: object) -> None:
        """Show `name` instead of a random value."""
        self._names[real] = name

    def note(self, text: str) -> None:
        self.lines.append(text)

    def said(self, side: str, message: m.Message) -> None:
        values = {name: getattr(message, name) for name in message.__struct_fields__}
        changed = {name: self._names[value] for name, value in values.items() if _hashable(value) in self._names}
        if values.get("memfd"):  # which number is free depends on what was read before
            if values["memfd"] not in self._memfds:
                self._memfds.append(values["memfd"])
            changed["memfd"] = self._memfds.index(values["memfd"]) + 1
        message = msgspec.structs.replace(message, **changed)
        shown = msgspec.to_builtins(message)
        if isinstance(message, m.Welcome) and not self._bytes_too:
            shown["feed"] = "(as above)"
        self.lines += wrapped(f"{side} {msgspec.json.encode(shown).decode()}")
        if self._bytes_too:
            dumped = codec.encode(message).hex()
            self.lines += [f"  {dumped[at : at + 96]}" for at in range(0, len(dumped), 96)]

    def __str__(self) -> str:
        return "\n".join(self.lines) + "\n"


def _hashable(value: object) -> object:
    return value if isinstance(value, bytes | str) else None


def wrapped(line: str, width: int = 118) -> list[str]:
    """Return the line in pieces, broken after commas where there are any."""
    pieces = []
    while len(line) > width:
        at = line.rfind(",", width // 2, width) + 1 or width
        pieces.append(line[:at])
        line = "    " + line[at:]
    return [*pieces, line]


class Plain:
    """A ZMTP 3.0 DEALER, the least that PROTOCOL.md asks for, that writes its messages down."""

    def __init__(self, daemon: Daemon, transcript: Transcript) -> None:
        place = urlsplit(daemon.url)
        self._socket = socket.create_connection((place.hostname, place.port), timeout=10)
        self.transcript = transcript
        self._socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        greeting = self._read(64)
        assert (greeting[0], greeting[9], greeting[10]) == (0xFF, 0x7F, 3)
        ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        self._socket.sendall(bytes((0x04, len(ready))) + ready)

    def close(self) -> None:
        self._socket.close()

    def say(self, message: m.Message) -> None:
        self.transcript.said(">", message)
        data = codec.encode(message)
        head = bytes((0x00, len(data))) if len(data) < 256 else b"\x02" + struct.pack(">Q", len(data))
        self._socket.sendall(head + data)

    def hear(self, *kinds: type[m.Message]) -> Any:
        """Return the next message, which must be of one of these kinds."""
        while True:
            first, *others = self._frames()
            message = codec.from_server(first)
            if not isinstance(message, m.Pong):
                break
        self.transcript.said("<", message)
        if others:
            self.transcript.note(f"  and a second frame of {len(others[0])} bytes")
        assert isinstance(message, kinds), message
        return message

    def _frames(self) -> list[bytes]:
        """Return the frames of the next message. Skip commands, such as PING."""
        frames = []
        while True:
            flags = self._read(1)[0]
            size = struct.unpack(">Q", self._read(8))[0] if flags & 0x02 else self._read(1)[0]
            body = self._read(size)
            if not flags & 0x04:
                frames.append(body)
                if not flags & 0x01:
                    return frames

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += self._socket.recv(count - len(data)) or pytest.fail("the daemon closed the connection")
        return data


@contextmanager
def connected(daemon: Daemon, transcript: Transcript) -> Iterator[Plain]:
    plain = Plain(daemon, transcript)
    try:
        yield plain
    finally:
        plain.close()


def greeted(plain: Plain, transcript: Transcript, number: int = 0) -> m.Welcome:
    """Exchange Hello and Welcome. Show the session's token as one that ends with `number`."""
    plain.transcript = hidden = Transcript()  # until the names are known
    hello = m.Hello(m.VERSION, "train", "example")
    plain.say(hello)
    welcome: m.Welcome = plain.hear(m.Welcome)
    plain.transcript = transcript
    assert len(hidden.lines) > 1
    transcript.call(welcome.session, bytes(range(15)) + bytes((number,)))
    transcript.call(welcome.unix, "penstock-1000-0123456789abcdef0123456789abcdef")
    transcript.said(">", hello)
    transcript.said("<", welcome)
    return welcome


def read_to_the_end(plain: Plain, ended: int = 0) -> None:
    """Acknowledge each slab, until the epoch's End."""
    while not isinstance(message := plain.hear(m.Slab, m.Chunk, m.SentElsewhere, m.LaneEnded, m.End), m.End):
        if isinstance(message, m.Slab):
            handed, left = message.seq + 1, message.nbytes
            while left:  # the feed's leaves take 8 bytes each, and each batch has a header of 64
                plain.hear(m.Chunk)
                left -= int(plain.transcript.lines[-1].split()[-2])
            plain.say(m.Ack(handed, (), ended))
    plain.say(m.Ack(handed, (), ended + 1))
    plain.say(m.Close())


def over_zeromq(daemon: Daemon) -> str:
    transcript = Transcript(bytes_too=True)
    with connected(daemon, transcript) as plain:
        welcome = greeted(plain, transcript)
        plain.say(m.Open(welcome.session, b"", *CREDIT, 0))
        plain.hear(m.Opened)
        plain.say(m.Begin(0))
        plain.hear(m.Begun)
        read_to_the_end(plain)
    return str(transcript)


def over_unix(daemon: Daemon) -> str:
    transcript = Transcript()
    with connected(daemon, transcript) as plain:
        welcome = greeted(plain, transcript)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(10)
            connection.connect("\0" + welcome.unix)
            transcript.note("  here the client connects to that address; all that follows is said there")

            def say(message: m.Message) -> None:
                transcript.said(">", message)
                connection.send(codec.encode(message))

            def hear(*kinds: type[m.Message]) -> Any:
                data, fd = seqpacket.receive(connection)
                message = codec.from_server(data)
                transcript.said("<", message)
                if fd is not None:
                    transcript.note(f"  with the descriptor of {'the ledger' if len(kinds) == 1 else 'the memfd'}")
                    if kinds == (m.Greeting,):
                        nonces.append(os.pread(fd, 16, 64))
                    os.close(fd)
                assert isinstance(message, kinds), message
                return message

            nonces: list[bytes] = []
            hear(m.Greeting)
            transcript.call(nonces[0], bytes(range(16, 32)))
            say(m.Open(welcome.session, nonces[0], *CREDIT, 4))
            hear(m.Opened)
            say(m.Begin(0))
            while not isinstance(message := hear(m.Begun, m.Map, m.Slab, m.LaneEnded, m.End), m.End):
                if isinstance(message, m.Slab):
                    handed = message.seq + 1
                    transcript.note(f"  the client writes {handed} to the ledger, and hands the slab over")
                    say(m.Ack(handed))
            transcript.note("  no array over the slabs is left")
            say(m.Ack(handed, tuple(range(handed)), 1))
            say(m.Close())
    return str(transcript)


def a_round_of_ranks(daemon: Daemon) -> str:
    ranks = [Transcript(), Transcript()]
    with connected(daemon, ranks[0]) as first, connected(daemon, ranks[1]) as second:
        for number, plain in enumerate((first, second)):
            welcome = greeted(plain, ranks[number], number)
            plain.say(m.Open(welcome.session, b"", *CREDIT, 0, rank=number, world_size=2, pad=True))
            plain.hear(m.Opened)
            if not number:
                first.hear(m.MissingRanks)
        for plain in (first, second):
            plain.say(m.Begin(0))
        for plain in (first, second):
            while not isinstance(plain.hear(m.MissingRanks, m.Begun), m.Begun):
                pass
            read_to_the_end(plain)
    return f"rank 0\n\n{ranks[0]}\nrank 1\n\n{ranks[1]}"


def a_resume(daemon: Daemon) -> str:
    with connected(daemon, Transcript()) as plain:
        welcome = greeted(plain, plain.transcript)
        plain.say(m.Open(welcome.session, b"", 1, 0, 0))
        plain.hear(m.Opened)
        plain.say(m.Begin(0))
        begun, slab = plain.hear(m.Begun), plain.hear(m.Slab)
        assert slab.batches == 2
    position = {
        "feed": msgspec.to_builtins(welcome.feed),
        "epoch": 0,
        "batches": 0,
        "rows": 0,
        "digest": begun.digest,
        "places": [[0, 0, b"", slab.record]],
        "skip": 1,
    }
    transcript = Transcript()
    with connected(daemon, transcript) as plain:
        welcome = greeted(plain, transcript)
        plain.say(m.PositionPart(welcome.session, msgspec.msgpack.encode(position)))
        transcript.note("  which is the msgpack of")
        shown = {**position, "feed": "(as in Welcome)"}
        text = json.dumps(shown, separators=(",", ":"), default=lambda data: base64.b64encode(data).decode())
        transcript.lines += wrapped("  " + text)
        plain.say(m.Open(welcome.session, b"", *CREDIT, 0))
        plain.hear(m.Opened)
        plain.say(m.Begin(0))
        plain.hear(m.Begun)
        read_to_the_end(plain)
    return str(transcript)


CONVERSATIONS: dict[str, Callable[[Daemon], str]] = {
    "### Over ZeroMQ": over_zeromq,
    "### Over a unix connection": over_unix,
    "### A rank round": a_round_of_ranks,
    "### A resume": a_resume,
}


def printed(text: str, heading: str) -> re.Match[str]:
    """Return the first block of `text` below the heading."""
    found = re.compile(rf"^{heading}\n.*?^```\n(.*?)^```\n", re.DOTALL | re.MULTILINE).search(text)
    assert found is not None, f"PROTOCOL.md has no block below {heading}"
    return found


@pytest.mark.parametrize("heading", CONVERSATIONS)
def test_a_conversation_of_the_protocol_is_the_one_that_a_daemon_holds(serve: Serve, heading: str) -> None:
    daemon = serve(FEED, "train", workers=1)
    want, found = printed(PROTOCOL.read_text(), heading)[1], ""
    for _ in range(ATTEMPTS):
        found = CONVERSATIONS[heading](daemon)
        if found == want:
            return
    assert found == want


def main() -> None:
    """Write today's conversations into PROTOCOL.md."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "feeds.py").write_text(textwrap.dedent(FEED))
        words = [*command({}), "serve", "feeds.py:train", "--workers", "1", "--bind", "tcp://127.0.0.1:0"]
        daemon = Daemon(words, Path(folder), Path(folder) / "log", dict(os.environ))
        try:
            daemon.wait_ready(1)
            text = PROTOCOL.read_text()
            for heading, held in CONVERSATIONS.items():
                start, stop = printed(text, heading).span(1)
                text = text[:start] + held(daemon) + text[stop:]
            PROTOCOL.write_text(text)
        finally:
            daemon.stop()


if __name__ == "__main__":
    main()
