"""The base class of all messages, the bounds of numbers and texts, and errors as messages."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from .. import errors
from ..security import unix_address
from ..text import both_ends, one_line, printable

VERSION = 17
"""The protocol's version. Both ends must have the same."""

IDS_PER_STREAM = 1 << 40
"""The daemon numbers runs and tickets of stream s from s * IDS_PER_STREAM, so that an id tells its stream. A stream
lives as long as its trainer: at 10,000 turns a second its numbers last for three years. A daemon can have 4 million
streams."""

MAX_TEXT = 32 * 1024
MAX_SHAPES = 1024
MAX_START = 64 * 1024
"""Most bytes of the position at which a daemon lets a late client begin."""
MAX_WORLD = 1024
"""Most ranks that read one stream together."""

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Line = Annotated[str, Meta(max_length=1024)]
UnixName = Annotated[str, Meta(pattern=rf"\A({unix_address.PATTERN})?\Z")]
"""An abstract unix address that a host listens at, or none. Only Penstock's addresses are allowed, as clients
connect."""
GROUP = r"[^\x00-\x1f\x7f-\x9f]{0,128}"
"""The pattern of a group's name: text without control characters."""
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Epoch = Annotated[int, Meta(ge=0, le=2**53)]
"""The number of an epoch that a client asks for. Its bound is below Count's, because the daemon counts up from it."""
Progress = Annotated[int, Meta(ge=0, le=2**53)]
"""How many batches or rows a client says it has read. Its bound is below Count's for the same reason."""
Seed = Annotated[int, Meta(ge=0, le=2**62)]
Index = Annotated[int, Meta(ge=0, lt=2**31)]
Lane = Annotated[int, Meta(ge=-2, lt=2**31)]
"""The number of a lane; -1 for batches that were merged from the leftovers of several lanes, -2 for those of pools."""
Batches = Annotated[int, Meta(ge=1, le=2**16)]
"""How many batches a slab has."""
Version = Annotated[int, Meta(ge=0, le=2**31)]
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Record = Annotated[bytes, Meta(max_length=32 * 1024)]
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Digests = Annotated[bytes, Meta(max_length=8 * MAX_SHAPES)]
Shape = Annotated[tuple[Count, ...], Meta(max_length=16)]
Shapes = Annotated[tuple[Shape, ...], Meta(max_length=MAX_SHAPES)]


class Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=str.lower):
    """Base of all messages: `type` is the class's name in lower case."""


def clean(message: Struct, *fields: str, most: int = 1024) -> None:
    """Make texts of a message safe to print, each on one line of at most `most` characters (text.py). Call it in
    `__post_init__`: users see these texts, and a peer may have written them."""
    for name in fields:
        text = getattr(message, name)
        if text is not None and (safe := one_line(text)) != text:
            force_setattr(message, name, safe[:most])


class ErrorReport(Struct, frozen=True, forbid_unknown_fields=True):
    """An error on its way to the process that raises it. `kind` is a name in `errors.BY_NAME`."""

    kind: Name
    message: Text
    feed: Line | None = None
    worker: Index | None = None
    split: Line | None = None
    remote_traceback: Text | None = None

    @classmethod
    def of(cls, error: errors.PenstockError) -> ErrorReport:
        """Make the report of `error`. Long texts keep both ends, so that the report fits a message."""
        traceback = error.remote_traceback
        return cls(
            type(error).__name__,
            _cut(error.message, MAX_TEXT // 4),
            None if error.feed is None else _cut(error.feed, 1024),
            error.worker,
            None if error.split is None else _cut(error.split, 1024),
            None if traceback is None else _cut(traceback, MAX_TEXT // 4),
        )

    def error(self) -> errors.PenstockError:
        """Make the error to raise, which cleans its texts. An unknown kind becomes a PenstockError that names it."""
        cls = errors.BY_NAME.get(self.kind)
        message = self.message if cls else f"{self.kind}: {self.message}"
        return (cls or errors.PenstockError)(
            message, feed=self.feed, worker=self.worker, split=self.split, remote_traceback=self.remote_traceback
        )


def _cut(text: str, most: int) -> str:
    return both_ends(printable(text), most)
