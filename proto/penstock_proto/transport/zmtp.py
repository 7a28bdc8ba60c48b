"""ZMTP 3.1 without encryption (https://rfc.zeromq.org/spec/37, mechanism NULL) as bytes, for both ends.

Builds and parses greetings, commands and the heads of frames. Nothing here copies the body of a message. This file does
no I/O and knows no message of Penstock.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from ..errors import ProtocolError

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame: another frame of its message follows; its size takes eight bytes; it is a command."""

GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1" + b"NULL".ljust(20, b"\0") + bytes(32)
"""The first bytes that each side sends."""

CURVE = "CURVE"
"""The security mechanism with keys."""

MAX_COMMAND = 8 * 1024
"""Size in bytes of the largest command that is read. Most have fewer than 50."""

MAX_CONTEXT = 16
"""Most bytes of a PING that its PONG repeats."""

_FLAGS = (0, MORE, LONG, MORE | LONG, COMMAND, COMMAND | LONG)
VERSION_END = 12
"""Bytes of a greeting up to the mechanism. libzmq sends the rest only when it has the other side's version."""
_MECHANISM = slice(VERSION_END, 32)

Buffer: TypeAlias = bytes | bytearray | memoryview


class Silent(TimeoutError):
    """A peer accepts connections but sends nothing."""


class Head(NamedTuple):
    """How a frame begins."""

    nbytes: int
    """Of the head itself."""
    size: int
    """Of the body, which follows, in bytes."""
    more: bool
    """Whether another frame of its message follows."""
    command: bool
    """Whether the body is a command."""


class Ping(NamedTuple):
    """A heartbeat."""

    patience: float
    """Seconds of silence after which the receiver may close the connection; 0: not given."""
    pong: bytes
    """The frame with the answer."""


def mechanism(greeting: Buffer) -> str:
    """Return the security mechanism of a greeting of the same length as ours: NULL, or CURVE with keys.

    Raises:
        ProtocolError: it is not a greeting of ZMTP 3.
    """
    greeting = bytes(greeting)
    if not (greeting[0] == 0xFF and greeting[9] == 0x7F and greeting[10] >= 3):
        raise ProtocolError(f"it begins with {greeting[:12]!r}, which is not ZeroMQ")
    return greeting[_MECHANISM].rstrip(b"\0").decode(errors="replace")


def check_greeting(greeting: Buffer) -> None:
    """Check the other side's greeting, of the same length as ours.

    Raises:
        ProtocolError: the other side does not speak ZMTP 3, or wants encryption.
    """
    wanted = mechanism(greeting)
    if wanted != "NULL":
        raise ProtocolError(wants(wanted))


def wants(mechanism: str) -> str:
    """Return the error text for a peer that wants a security mechanism where none is used."""
    return f"it wants ZeroMQ's security mechanism {mechanism!r}"


def head(data: Buffer) -> Head | None:
    """Parse the head of the frame with which `data` begins. Return None if it is not complete.

    Raises:
        ProtocolError: no frame begins like this, or it is a command that is too large.
    """
    if not len(data):
        return None
    flags = data[0]
    if flags not in _FLAGS:
        raise ProtocolError(f"a ZeroMQ frame with the flags {flags:#x}")
    nbytes = 9 if flags & LONG else 2
    if len(data) < nbytes:
        return None
    size = int.from_bytes(data[1:nbytes], "big")
    if flags & COMMAND and size > MAX_COMMAND:
        raise ProtocolError(f"a ZeroMQ command of {size} bytes; at most {MAX_COMMAND} are read")
    return Head(nbytes, size, bool(flags & MORE), bool(flags & COMMAND))


def head_of(size: int, more: bool = False) -> bytes:
    """Build the head of a frame with a body of `size` bytes."""
    if size < 256:
        return bytes((MORE * more, size))
    return bytes((MORE * more | LONG,)) + size.to_bytes(8, "big")


def command(name: bytes, data: bytes = b"") -> bytes:
    """Build the frame of a command."""
    body = bytes((len(name),)) + name + data
    if len(body) < 256:
        return bytes((COMMAND, len(body))) + body
    return bytes((COMMAND | LONG,)) + len(body).to_bytes(8, "big") + body


def parse_command(body: Buffer) -> tuple[bytes, bytes]:
    """Parse the body of a command into its name and its data.

    Raises:
        ProtocolError: it has no name.
    """
    body = bytes(body)
    if not body or not 0 < body[0] < len(body):
        raise ProtocolError(f"a ZeroMQ command without a name: {body[:16]!r}")
    return body[1 : 1 + body[0]], body[1 + body[0] :]


def ready(socket_type: bytes) -> bytes:
    """Build the command that ends the handshake."""
    return command(b"READY", _property(b"Socket-Type", socket_type) + _property(b"Identity", b""))


def parse_ready(body: Buffer) -> bytes:
    """Parse the command with which the other side ends the handshake.

    Returns:
        The type of its socket, or "" if it names none.

    Raises:
        ProtocolError: it is not READY. If it is ERROR, the message says why the other side refuses the connection.
    """
    name, data = parse_command(body)
    if name == b"ERROR":
        raise ProtocolError(f"it refuses the connection: {reason(data)}")
    if name != b"READY":
        raise ProtocolError(f"it sends ZeroMQ's {name!r} where READY belongs")
    return socket_type(data)


def socket_type(data: bytes) -> bytes:
    """Return the type of socket among the properties of a READY, or "" if it is not there.

    Raises:
        ProtocolError: `data` are not properties.
    """
    found, at = b"", 0
    while at < len(data):
        name_at, at = at + 1, at + 1 + data[at]
        value_at = at + 4
        if name_at == at or len(data) < value_at:
            raise ProtocolError("READY has a property that is cut short or has no name")
        name, at = data[name_at:at], value_at + int.from_bytes(data[at:value_at], "big")
        if len(data) < at:
            raise ProtocolError("READY has a property that is cut short or has no name")
        if name.lower() == b"socket-type":
            found = data[value_at:at]
    return found


def reason(data: bytes) -> str:
    """Decode the reason why the other side refuses the connection, from the data of its ERROR."""
    return data[1 : 1 + data[0]].decode(errors="replace") if data else ""


def parse_ping(data: bytes) -> Ping:
    """Parse the data of a PING.

    Raises:
        ProtocolError: it is cut short.
    """
    if len(data) < 2:
        raise ProtocolError("a ZeroMQ PING without its two bytes of patience")
    return Ping(int.from_bytes(data[:2], "big") / 10, command(b"PONG", data[2 : 2 + MAX_CONTEXT]))


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


PING = command(b"PING", bytes(2))
"""Asks for a sign of life. Its patience is 0, so the receiver never closes the connection because of it."""
