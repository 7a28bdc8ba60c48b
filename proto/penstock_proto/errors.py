"""Every error that Penstock raises on purpose, as one tree.

    PenstockError
    ├── ProtocolError            a message that breaks the protocol, or a peer that speaks another version
    │   └── RankTaken            that rank reads the feed already, or has left the stream that the others still read
    ├── Unreachable              no daemon answered at that address in time
    ├── KeyRefused               one side has no key, or a key that the other side does not accept
    ├── ConnectionLost           the daemon, or the way to it, is gone while a stream was open
    │   └── StreamMoved          the job goes on in another stream of the same daemon; clients connect again at once
    ├── DaemonStopped            the daemon said that it stops
    ├── StreamClosed             the connection or another rank's was closed, a newer iterator took the stream over, or
    │                            the group's stream no longer exists
    ├── EndOfStream              the feed has `epochs=` and all of them were read
    ├── MemoryBound              not enough memory is allowed (or free)
    ├── StartError               `serve` cannot start: what was asked for does not exist or cannot work
    └── FeedError                the feed itself is wrong or failed
        ├── UnknownFeed          the daemon serves no feed of that name
        ├── SpecError            samples do not fit the element spec, or have none that can be served
        ├── GeneratorError       user code raised; carries the worker's traceback
        ├── WorkerDied           a split killed its worker process again and again, or no worker can start
        ├── StateMismatch        the stream cannot continue from a position that was made with another feed
        └── IncompleteEpoch      an epoch's counts are wrong

An error crosses the wire as an `ErrorReport` (see messages/base.py) and is raised at the other end as the same class.
"""

from __future__ import annotations

from .text import named_split, printable


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose. Its texts are safe to print (text.py), even those of a peer.

    Attributes:
        feed: name of the feed, or None.
        worker: number of the worker process, or None.
        split: a short text that shows the split being read, or None.
        remote_traceback: the traceback of the process in which it happened, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        feed: str | None = None,
        worker: int | None = None,
        split: str | None = None,
        remote_traceback: str | None = None,
    ) -> None:
        super().__init__(printable(message))
        self.feed = None if feed is None else printable(feed)
        self.worker = worker
        self.split = None if split is None else printable(split)
        self.remote_traceback = None if remote_traceback is None else printable(remote_traceback)

    @property
    def message(self) -> str:
        """The cause and the fix, without the place and the traceback."""
        return str(self.args[0])

    def __str__(self) -> str:
        place = [
            f"{word} {value}" for word, value in (("feed", self.feed), ("worker", self.worker)) if value is not None
        ]
        if self.split is not None:
            place.append(named_split(self.split))
        text = self.message
        if place:
            text += f"\n  in {', '.join(place)}"
        if self.remote_traceback:
            text += f"\n\n{self.remote_traceback.rstrip()}"
        return text


class ProtocolError(PenstockError):
    """A message breaks the protocol, or the peer speaks another version of it."""


class RankTaken(ProtocolError):
    """That rank reads the feed already, or has left the stream that the other ranks still read."""


class Unreachable(PenstockError):
    """No daemon answered at the address within the timeout."""


class KeyRefused(PenstockError):
    """One side has no key, or a key that the other side does not accept."""


class ConnectionLost(PenstockError):
    """The daemon, or the way to it, is gone while a stream was open."""


class StreamMoved(ConnectionLost):
    """The job no longer shares the stream that it has read: it goes on in another one. Clients connect again at once,
    with their position, and never raise this."""


class DaemonStopped(PenstockError):
    """The daemon announced that it stops."""


class StreamClosed(PenstockError):
    """The connection or another rank's was closed, a newer iterator took the stream over, or the group's stream no
    longer exists."""


class EndOfStream(PenstockError):
    """The feed has a fixed number of epochs, and all of them were read."""


class MemoryBound(PenstockError):
    """There is not enough memory: the allowed amount, or what the machine has left, is too small."""


class StartError(PenstockError):
    """An argument at start names something that does not exist, or cannot work."""


class FeedError(PenstockError):
    """The feed is wrong or failed."""


class UnknownFeed(FeedError):
    """The daemon serves no feed of that name."""


class SpecError(FeedError):
    """Samples do not fit the element spec, or have none that can be served."""


class GeneratorError(FeedError):
    """User code raised; `remote_traceback` is the worker's."""


class WorkerDied(FeedError):
    """A split killed its worker process again and again, or no worker process can start."""


class StateMismatch(FeedError):
    """The stream cannot continue from a position that was made with another feed or other splits."""


class IncompleteEpoch(FeedError):
    """An epoch's counts are wrong."""


def _tree(cls: type[PenstockError]) -> dict[str, type[PenstockError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found.update(_tree(sub))
    return found


BY_NAME: dict[str, type[PenstockError]] = _tree(PenstockError)
"""Each error class by the name that it has on the wire."""
