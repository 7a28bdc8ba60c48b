"""Groups: consumers that share one stream, who may join it, and when it ends.

With a state file a group outlives its daemon: what the file has of it waits here until one of its consumers comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from penstock_proto import StreamClosed

from . import commands as do
from .consumer import Consumer
from .feeds import ServedFeed
from .group_log import GroupLog, SavedGroup
from .rendezvous import Ask
from .stream import Stream

PATIENCE = 60.0
"""Seconds for which a group's stream waits for somebody to read it, and a group of the state file for its consumers."""


class Group:
    """One group.

    Attributes:
        stream: what its consumers share.
    """

    def __init__(self, stream: Stream, *, kept: bool) -> None:
        """`kept`: another daemon began it, and who has read it is not known here."""
        self.stream = stream
        self._members: set[bytes] | None = None if kept else set()
        self._away: set[bytes] = set()
        """Consumers that are gone without a word, and may come back."""
        self._deserted: float | None = None

    @property
    def over(self) -> bool:
        """Whether the stream has ended or failed, so that a new one is to begin."""
        return self.stream.error is not None or self.stream.closing

    @property
    def left(self) -> bool:
        """Whether all consumers have said that they want nothing more."""
        group_log = self.stream.group_log
        awaits = self._away or (group_log is not None and group_log.awaited)
        return not awaits and self._unread

    def knows(self, consumer: bytes) -> bool:
        """Whether it can come back: not one that read a stream before this, of the same group."""
        return self._members is None or consumer in self._members

    def came(self, ask: Ask) -> None:
        """A consumer reads the stream from now on."""
        self._away.discard(ask.identity)
        if self._members is not None:
            self._members.add(ask.identity)
        if self.stream.group_log is not None:
            self.stream.group_log.arrived(ask.identity, ask.had)

    def lost(self, consumer: Consumer) -> None:
        """A consumer goes without a word: the stream does not end with the last that says Bye."""
        if not consumer.gone and consumer.identity:
            self._away.add(consumer.identity)

    def deserted(self, now: float) -> bool:
        """Whether nobody has read the stream for so long that it is to end."""
        if not self._unread:
            self._deserted = None
            return False
        if self._deserted is None:
            self._deserted = now
        return now - self._deserted > PATIENCE

    @property
    def _unread(self) -> bool:
        return all(consumer.gone for consumer in self.stream.consumers)


class Groups:
    """All groups that are read, or wait in the state file.

    Args:
        kept: what the state file has, by feed and name; None without such a file.
        out: where commands go.
    """

    def __init__(self, kept: Mapping[tuple[str, str], SavedGroup] | None, out: Callable[[do.Command], None]) -> None:
        self._groups: dict[tuple[str, str], Group] = {}
        self._keeps = kept is not None
        self._kept = dict(kept or {})
        self._waiting: dict[tuple[str, str], float] = {}
        """Since when each group of the state file has been waited for."""
        self._do = out

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._groups.values()))

    def of(self, stream: Stream) -> Group | None:
        """The group that shares this stream now, if one does."""
        return next((group for group in self._groups.values() if group.stream is stream), None)

    def stream_of(self, feed: str, name: str) -> Stream | None:
        """The stream that the group shares now, if it does."""
        group = self._groups.get((feed, name))
        return None if group is None else group.stream

    def kept(self, feed: ServedFeed, name: str) -> SavedGroup | None:
        """What the state file has of a group to which nobody has come back yet."""
        return self._kept.get((feed.name, name))

    def find(self, feed: ServedFeed, ask: Ask) -> Group | None:
        """The group that `ask` can join, or None where it is to begin, from `kept` or anew.

        Raises:
            StreamClosed: the consumer comes back to a stream that is not here.
        """
        group = self._groups.get((feed.name, ask.group))
        if group is not None and group.over:
            group = None
        if ask.again and not (group.knows(ask.identity) if group else self.kept(feed, ask.group)):
            mend = "" if self._keeps else " (with `penstock serve --state FILE` a group outlives its daemon)"
            raise StreamClosed(
                f"the stream of group {ask.group!r} is not here any more: the daemon was started again{mend}, or "
                "nobody read it for a while. Its consumers have to begin anew",
                feed=feed.name,
            )
        return group

    def group_log(self, feed: ServedFeed, name: str) -> GroupLog | None:
        """What tells the state file of a group that begins, if that can be told."""
        if self._keeps and feed.plan.order == "exact":  # in fast order what is merged is another batch when made again
            return GroupLog(feed.info, name, self.kept(feed, name), self._do)
        return None

    def begin(self, stream: Stream, name: str) -> Group:
        """A group has this stream from now on."""
        key = stream.feed.name, name
        group = self._groups[key] = Group(stream, kept=self._kept.pop(key, None) is not None)
        return group

    def not_kept(self, feed: str, name: str, kept: SavedGroup | None) -> Stream | None:
        """The state file could not be written. The group goes on from what it has when its consumers come back, as in
        another daemon. Returns the stream that is to fail, unless that has ended."""
        key = feed, name
        group = self._groups.get(key)
        if group is None or group.over:
            return None
        del self._groups[key]
        self._waiting.pop(key, None)
        if kept is not None:
            self._kept[key] = kept
        return group.stream

    def tidy(self) -> None:
        """Forget the groups that are over."""
        self._groups = {key: group for key, group in self._groups.items() if not group.over}

    def given_up(self, now: float) -> list[Stream]:
        """The feeds are there: the streams that have waited for long enough for consumers that the state file names."""
        if not self._keeps:
            return []
        awaiting = {
            key: group.stream
            for key, group in self._groups.items()
            if group.stream.group_log is not None and group.stream.group_log.awaited
        }
        self._waiting = {key: self._waiting.get(key, now) for key in [*self._kept, *awaiting]}
        over = [key for key, since in self._waiting.items() if now - since > PATIENCE]
        for key in over:
            if self._kept.pop(key, None) is not None:
                self._do(do.ForgetGroup(*key))
        return [awaiting[key] for key in over if key in awaiting]
