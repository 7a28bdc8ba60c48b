"""Groups: consumers that share one stream. Decides which consumers may join it, and when it ends.

With a state file a group outlives its daemon. A group from the file waits here until one of its consumers comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from penstock_proto import StreamClosed

from ..model import commands as do
from ..model.consumer import Consumer
from ..model.feeds import ServedFeed
from ..model.group_log import GroupLog, SavedGroup
from ..model.open_request import OpenRequest
from ..stream.stream import Stream

PATIENCE = 60.0
"""Seconds for which a group's stream waits for a consumer to read it, and a saved group for its consumers."""

MOST_FORGOTTEN = 50
"""Maximum number of saved groups to forget at one look, which is once a second: each takes 0.5 ms."""


class Group:
    """One group.

    Args:
        stream: the stream that its consumers share.
        saved: whether another daemon began it. This daemon then does not know which consumers have read it.
    """

    def __init__(self, stream: Stream, *, saved: bool) -> None:
        self.stream = stream
        self._members: set[bytes] | None = None if saved else set()
        self._away: set[bytes] = set()
        """Consumers that have gone without Close, and may come back."""
        self._unread_since: float | None = None

    @property
    def over(self) -> bool:
        """Whether the stream has ended or failed, so that the group needs another one."""
        return self.stream.error is not None or self.stream.closed

    @property
    def left(self) -> bool:
        """Whether all consumers have closed, and none may come back."""
        log = self.stream.group_log
        awaits = self._away or (log is not None and log.awaited)
        return not awaits and self._unread

    def knows(self, identity: bytes) -> bool:
        """Whether this consumer can come back. One that read an earlier stream of the group cannot."""
        return self._members is None or identity in self._members

    def on_arrived(self, ask: OpenRequest) -> None:
        """Note that a consumer reads the stream from now on."""
        self._away.discard(ask.identity)
        if self._members is not None:
            self._members.add(ask.identity)
        if self.stream.group_log is not None:
            self.stream.group_log.on_arrived(ask.identity, ask.had)

    def on_consumer_lost(self, consumer: Consumer) -> None:
        """Note that a consumer goes without Close and may come back. So the stream does not end when the last of the
        others closes."""
        if not consumer.gone and consumer.identity:
            self._away.add(consumer.identity)

    def deserted(self, now: float, patience: float) -> bool:
        """Whether the stream is to end, because nobody has read it for `patience` seconds."""
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
        saved: the groups in the state file, by feed and name; None without such a file.
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
        """When the wait for each group of the state file began."""
        self._do = out

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._groups.values()))

    @property
    def any(self) -> bool:
        """Whether there are groups to look at."""
        return bool(self._groups or self._saved)

    def of(self, stream: Stream) -> Group | None:
        """Return the group that shares this stream now, if there is one."""
        return next((group for group in self._groups.values() if group.stream is stream), None)

    def stream_of(self, feed: str, name: str) -> Stream | None:
        """Return the stream that the group shares now, if there is one."""
        group = self._groups.get((feed, name))
        return None if group is None else group.stream

    def saved(self, feed: ServedFeed, name: str) -> SavedGroup | None:
        """Return the group from the state file, if none of its consumers has come back yet."""
        return self._saved.get((feed.name, name))

    def find(self, feed: ServedFeed, ask: OpenRequest) -> Group | None:
        """Return the group that `ask` can join; None if it has to begin, from the state file or from the start.

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

    def awaits(self, feed: str, ask: OpenRequest) -> bool:
        """Whether `ask` comes from a consumer in the state file for which the group's stream waits."""
        group = self._groups.get((feed, ask.group))
        log = None if group is None or group.over else group.stream.group_log
        return log is not None and ask.identity in log.awaited

    def log(self, feed: ServedFeed, name: str) -> GroupLog | None:
        """Return the log of a group that begins; None if its position is not saved."""
        if self._has_file and feed.plan.order == "exact":  # in fast order a merged batch differs when it is made again
            return GroupLog(feed.info, name, self.saved(feed, name), self._do)
        return None

    def begin(self, stream: Stream, name: str) -> Group:
        """Begin a group with this stream."""
        key = stream.feed.name, name
        group = self._groups[key] = Group(stream, saved=self._saved.pop(key, None) is not None)
        return group

    def on_parted(self, consumer: Consumer, stream: Stream) -> None:
        """Log that the consumer has gone, unless the same client has come back."""
        here = any(one.identity == consumer.identity and not one.gone for one in stream.consumers)
        if stream.group_log is not None and not here:
            stream.group_log.on_parted(consumer.identity)

    def on_not_saved(self, feed: str, name: str, saved: SavedGroup | None) -> Stream | None:
        """Forget a group whose state could not be written to the file. When its consumers come back, the group goes on
        from the file, as in another daemon. Return the stream that has to fail; None if it has ended."""
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
        """Return the streams that nobody has read for too long."""
        return [group.stream for group in self if group.deserted(now, self._patience)]

    def give_up(self, now: float) -> list[Stream]:
        """Return the streams that have waited too long for consumers in the state file, now that the feeds are
        ready."""
        if not self._has_file:
            return []
        awaiting = {
            key: group.stream
            for key, group in self._groups.items()
            if group.stream.group_log is not None and group.stream.group_log.awaited
        }
        self._waiting = {key: self._waiting.get(key, now) for key in [*self._saved, *awaiting]}
        over = [key for key, since in self._waiting.items() if now - since > self._patience]
        for key in [key for key in over if key in self._saved][:MOST_FORGOTTEN]:
            del self._saved[key]
            self._do(do.ForgetGroup(*key))
        return [awaiting[key] for key in over if key in awaiting]
