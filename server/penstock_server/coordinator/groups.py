"""Groups: consumers that share one stream, who may join it, and when it ends.

With a state file a group outlives its daemon: what the file has of it waits here until one of its consumers comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from penstock_proto import StreamClosed

from . import commands as do
from .ask import Ask
from .consumer import Consumer
from .feeds import ServedFeed
from .group_log import GroupLog, SavedGroup
from .stream import Stream

PATIENCE = 60.0
"""Seconds for which a group's stream waits for a consumer to read it, and a saved group for its consumers."""


class Group:
    """One group.

    Args:
        stream: what its consumers share.
        saved: another daemon began it, so it is not known here who has read it.
    """

    def __init__(self, stream: Stream, *, saved: bool) -> None:
        self.stream = stream
        self._members: set[bytes] | None = None if saved else set()
        self._away: set[bytes] = set()
        """Consumers that are gone without a word, and may come back."""
        self._unread_since: float | None = None

    @property
    def over(self) -> bool:
        """Whether the stream has ended or failed, so that a new one is to begin."""
        return self.stream.error is not None or self.stream.closing

    @property
    def left(self) -> bool:
        """Whether all consumers have said that they want nothing more."""
        log = self.stream.group_log
        awaits = self._away or (log is not None and log.awaited)
        return not awaits and self._unread

    def knows(self, identity: bytes) -> bool:
        """Whether this consumer can come back: not one that read an earlier stream of the same group."""
        return self._members is None or identity in self._members

    def came(self, ask: Ask) -> None:
        """A consumer reads the stream from now on."""
        self._away.discard(ask.identity)
        if self._members is not None:
            self._members.add(ask.identity)
        if self.stream.group_log is not None:
            self.stream.group_log.arrived(ask.identity, ask.had)

    def lost(self, consumer: Consumer) -> None:
        """A consumer goes without a word: the stream does not end when the last of the others closes."""
        if not consumer.gone and consumer.identity:
            self._away.add(consumer.identity)

    def deserted(self, now: float, patience: float) -> bool:
        """Whether nobody has read the stream for `patience` seconds, so that it is to end."""
        if not self._unread:
            self._unread_since = None
            return False
        if self._unread_since is None:
            self._unread_since = now
        return now - self._unread_since > patience

    @property
    def _unread(self) -> bool:
        return all(consumer.gone for consumer in self.stream.consumers)


class Groups:
    """All groups that are read, or wait in the state file.

    Args:
        saved: what the state file has, by feed and name; None without such a file.
        out: where commands go.
        patience: seconds; None: PATIENCE.
    """

    def __init__(
        self,
        saved: Mapping[tuple[str, str], SavedGroup] | None,
        out: Callable[[do.Command], None],
        patience: float | None = None,
    ) -> None:
        self._groups: dict[tuple[str, str], Group] = {}
        self._has_file = saved is not None
        self._saved = dict(saved or {})
        self._patience = PATIENCE if patience is None else patience
        self._waiting: dict[tuple[str, str], float] = {}
        """Since when each group of the state file has been waited for."""
        self._do = out

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._groups.values()))

    @property
    def any(self) -> bool:
        """Whether there are groups to look at."""
        return bool(self._groups or self._saved)

    def of(self, stream: Stream) -> Group | None:
        """The group that shares this stream now, if one does."""
        return next((group for group in self._groups.values() if group.stream is stream), None)

    def stream_of(self, feed: str, name: str) -> Stream | None:
        """The stream that the group shares now, if it does."""
        group = self._groups.get((feed, name))
        return None if group is None else group.stream

    def saved(self, feed: ServedFeed, name: str) -> SavedGroup | None:
        """What the state file has of a group to which no consumer has come back yet."""
        return self._saved.get((feed.name, name))

    def find(self, feed: ServedFeed, ask: Ask) -> Group | None:
        """The group that `ask` can join; None if it is to begin, from what was saved or from the start.

        Raises:
            StreamClosed: the consumer comes back to a stream that no longer exists.
        """
        group = self._groups.get((feed.name, ask.group))
        if group is not None and group.over:
            group = None
        if ask.again and not (group.knows(ask.identity) if group else self.saved(feed, ask.group)):
            hint = "" if self._has_file else " (with `penstock serve --state FILE` a group outlives its daemon)"
            raise StreamClosed(
                f"the stream of group {ask.group!r} no longer exists: the daemon was started again{hint}, or nobody "
                "read it for a while. Its consumers have to start again from the beginning",
                feed=feed.name,
            )
        return group

    def log(self, feed: ServedFeed, name: str) -> GroupLog | None:
        """What tells the state file of a group that begins, if that can be told."""
        if self._has_file and feed.plan.order == "exact":  # in fast order a merged batch is another when made again
            return GroupLog(feed.info, name, self.saved(feed, name), self._do)
        return None

    def begin(self, stream: Stream, name: str) -> Group:
        """A group has this stream from now on."""
        key = stream.feed.name, name
        group = self._groups[key] = Group(stream, saved=self._saved.pop(key, None) is not None)
        return group

    def parted(self, consumer: Consumer, stream: Stream) -> None:
        """What the consumer was not handed is no longer its own, unless it has come again."""
        here = any(one.identity == consumer.identity and not one.gone for one in stream.consumers)
        if stream.group_log is not None and not here:
            stream.group_log.parted(consumer.identity)

    def not_saved(self, feed: str, name: str, saved: SavedGroup | None) -> Stream | None:
        """The state file could not be written. The group goes on from what it has when its consumers come back, as in
        another daemon. Returns the stream that is to fail, unless that has ended."""
        key = feed, name
        group = self._groups.get(key)
        if group is None or group.over:
            return None
        del self._groups[key]
        self._waiting.pop(key, None)
        if saved is not None:
            self._saved[key] = saved
        return group.stream

    def tidy(self) -> None:
        """Forget the groups that are over."""
        self._groups = {key: group for key, group in self._groups.items() if not group.over}

    def deserted(self, now: float) -> list[Stream]:
        """The streams that nobody has read for too long."""
        return [group.stream for group in self if group.deserted(now, self._patience)]

    def given_up(self, now: float) -> list[Stream]:
        """The feeds can be read: the streams that have waited too long for consumers that the state file names."""
        if not self._has_file:
            return []
        awaiting = {
            key: group.stream
            for key, group in self._groups.items()
            if group.stream.group_log is not None and group.stream.group_log.awaited
        }
        self._waiting = {key: self._waiting.get(key, now) for key in [*self._saved, *awaiting]}
        over = [key for key, since in self._waiting.items() if now - since > self._patience]
        for key in over:
            if self._saved.pop(key, None) is not None:
                self._do(do.ForgetGroup(*key))
        return [awaiting[key] for key in over if key in awaiting]
