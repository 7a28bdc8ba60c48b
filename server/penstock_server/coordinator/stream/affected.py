"""The streams that the current event affects. A failure ends only the stream that it is about.

An event may go to many streams: the death of a worker goes to all of them. If one of them raises, that stream fails,
and the others still get the event. After that, each affected stream proceeds once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from penstock_proto import MemoryBound, PenstockError
from penstock_proto.messages import IDS_PER_STREAM

from ..model import commands as do
from .stream import Stream


class AffectedStreams:
    """Finds streams for events, and keeps their failures apart.

    Args:
        streams: all streams, by number. `proceed` removes those that are done.
        out: where commands go.

    Attributes:
        now: the streams that the current event affects, as the keys of a dict.
    """

    def __init__(self, streams: dict[int, Stream], out: Callable[[do.Command], None]) -> None:
        self._streams = streams
        self._do = out
        self.current: dict[Stream, None] = {}

    def add(self, stream: Stream) -> None:
        """Note that the event affects this stream."""
        self.current[stream] = None

    def find(self, number: int) -> Stream | None:
        """Return the stream of a run or a ticket; None if it no longer exists."""
        return self._streams.get(number // IDS_PER_STREAM)

    def affect(self, number: int) -> Stream | None:
        """Return the stream of a run or a ticket, and note that the event affects it; None if it no longer exists."""
        stream = self._streams.get(number // IDS_PER_STREAM)
        if stream is not None:
            self.current[stream] = None
        return stream

    def all(self) -> Iterator[Stream]:
        """Iterate over the streams that exist now. Streams may end during the iteration."""
        return iter(list(self._streams.values()))

    @contextlib.contextmanager
    def alone(self, stream: Stream) -> Iterator[None]:
        """Fail only this stream if the block raises."""
        self.add(stream)
        try:
            yield
        except Exception as error:
            self.fail(stream, error)

    def fail(self, stream: Stream, error: Exception) -> None:
        """Fail the stream. An error other than a PenstockError is a bug, and is reported."""
        self.add(stream)
        if isinstance(error, OSError | MemoryError):
            error = MemoryBound(
                f"the daemon has no memory or no file descriptors left ({error!r}): raise its limits (ulimit -n), or "
                "close other streams",
                feed=stream.feed.name,
            )
        if not isinstance(error, PenstockError):
            self._do(do.ReportBug(error))
            error = a_bug(error)
        try:
            stream.fail(error)
            cannot_fail = stream.half_stopped
        except Exception as another:
            self._do(do.ReportBug(another))
            cannot_fail = True
        if cannot_fail:
            self._abandon(stream, error)

    def _abandon(self, stream: Stream, error: PenstockError) -> None:
        """Remove a stream that cannot even fail. Its consumers are told, and still give back the slots that they
        hold."""
        self._streams.pop(stream.number, None)
        try:
            stream.abandon(error)
        except Exception as another:
            self._do(do.ReportBug(another))

    def proceed(self) -> None:
        """Let the affected streams send and grant what they can, and remove those that are done."""
        failed = None
        while self.current:
            stream, _ = self.current.popitem()
            try:
                stream.proceed()
            except Exception as error:
                if stream is not failed:
                    failed = stream
                    self.fail(stream, error)
                else:  # it has failed, and must not proceed for ever
                    self._do(do.ReportBug(error))
            if stream.closed and stream.done and self._streams.get(stream.number) is stream:
                del self._streams[stream.number]


def a_bug(error: Exception) -> PenstockError:
    """Return the error that consumers are told instead of an unexpected one."""
    return PenstockError(f"the daemon failed: {error!r}. This is a bug; its log has the traceback, please report it")
