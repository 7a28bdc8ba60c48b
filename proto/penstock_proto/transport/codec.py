"""Encodes and decodes messages strictly: any input that is not a message of the expected set is a ProtocolError."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from ..errors import ProtocolError
from ..messages import (
    ClientMessage,
    FromBorrower,
    FromFetcher,
    FromHead,
    FromHost,
    FromKeeper,
    FromLender,
    FromWorker,
    Message,
    ServerMessage,
    ToWorker,
)
from ..text import one_line
from ..value_text import shown

MAX_MESSAGE = 128 * 1024
"""Largest control message in bytes; below the 208 KiB that a SOCK_SEQPACKET datagram may have on an untuned Linux."""

MAX_STATUS = 1024 * 1024
"""Largest message in bytes over ZeroMQ, which only Status may need."""

MAX_CHUNK = 4 * 1024 * 1024
"""Most bytes of a slab in one message over ZeroMQ. The daemon sends pieces of this size."""

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message, most: int = MAX_MESSAGE) -> bytes:
    """Encode `message`.

    Raises:
        ProtocolError: it takes more than `most` bytes, or has a value that cannot be sent. Nothing else is raised.
    """
    try:
        data = _encoder.encode(message)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a {type(message).__name__} message that cannot be encoded: {error}") from None
    if len(data) > most:
        raise ProtocolError(f"a {type(message).__name__} message of {len(data)} bytes; at most {most} are sent")
    return data


class _Typed(msgspec.Struct):
    type: str


_typed = msgspec.msgpack.Decoder(_Typed)


def _type_of(data: bytes | memoryview) -> str:
    """Return the type that a malformed message claims, for the text of an error."""
    try:
        return f" of type {shown(_typed.decode(data).type, 40)}"
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""


class Decoder(Generic[M]):
    """Decodes one set of messages."""

    def __init__(self, messages: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)

    def __call__(self, data: bytes | memoryview) -> M:
        """Decode a message.

        Raises:
            ProtocolError: `data` are not a message of this set, exceed a bound, or are too many.
        """
        if len(data) > MAX_STATUS:
            raise ProtocolError(f"a message of {len(data)} bytes; at most {MAX_STATUS} are read")
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
            raise ProtocolError(f"malformed message{_type_of(data)}: {one_line(str(error)[:400])}") from None


from_client: Decoder[ClientMessage] = Decoder(ClientMessage)
from_server: Decoder[ServerMessage] = Decoder(ServerMessage)
to_worker: Decoder[ToWorker] = Decoder(ToWorker)
from_worker: Decoder[FromWorker] = Decoder(FromWorker)
from_host: Decoder[FromHost] = Decoder(FromHost)
from_head: Decoder[FromHead] = Decoder(FromHead)
from_fetcher: Decoder[FromFetcher] = Decoder(FromFetcher)
from_keeper: Decoder[FromKeeper] = Decoder(FromKeeper)
from_borrower: Decoder[FromBorrower] = Decoder(FromBorrower)
from_lender: Decoder[FromLender] = Decoder(FromLender)
