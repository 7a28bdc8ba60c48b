"""Admission: decides whether a consumer can read a feed, and which stream it reads: its own, or one that it shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain

from penstock_proto import ProtocolError, StateMismatch, UnknownFeed, WorkerDied
from penstock_proto.batches.position import Position, differences

from ..delivery.delivery import Delivery, SingleDelivery
from ..delivery.group_delivery import GroupDelivery
from ..delivery.outlet import Outlet
from ..delivery.shared_delivery import SharedDelivery
from ..model import commands as do
from ..model.consumer import Consumer
from ..model.feeds import ServedFeed
from ..model.group_log import SavedGroup, check_had
from ..model.memory import MANY, Share
from ..model.open_request import OpenRequest
from ..model.positions import check, check_counts
from ..model.workers import Workers
from ..stream.budget import Budget
from ..stream.stream import MOST_STREAMS, Stream
from .groups import Groups
from .rendezvous import Rendezvous
from .sharing import Sharing, may_share


class Admission:
    """Answers `Open`, and knows the ranks that wait for others.

    Args:
        feeds: the feeds that can be read.
        streams: the streams by number; new ones are added here.
        workers: the worker processes.
        budget: grants memory and slots.
        groups: the groups that are read, or wait in the state file.
        later: `later(seconds, run)` tries the run's work again after `seconds`.
        clock: returns the time of the current event.
        after: `after(seconds, call)` makes the call in `seconds` seconds.
        on_joined: called with a consumer and the stream that it reads from now on, instead of the one in which it
            waited for other ranks.
        out: where commands go.
    """

    def __init__(
        self,
        feeds: Mapping[str, ServedFeed],
        streams: dict[int, Stream],
        *,
        workers: Workers,
        budget: Budget,
        groups: Groups,
        later: Callable[[float, int], None],
        clock: Callable[[], float],
        after: Callable[[float, Callable[[], None]], None],
        on_joined: Callable[[Consumer, Stream], None],
        out: Callable[[do.Command], None],
    ) -> None:
        self._feeds = feeds
        self._streams = streams
        self._workers = workers
        self._budget = budget
        self._groups = groups
        self._later = later
        self.sharing = Sharing(streams, budget, clock, after, out)
        self._joining: Stream | None = None
        """The stream that the latest job has joined."""
        self._clock = clock
        self._on_joined = on_joined
        self._do = out
        self._last_stream = 0
        self._rendezvous: dict[tuple[str, str, int], Rendezvous] = {}

    def unknown_feed(self, name: str) -> UnknownFeed:
        """Return the error for a feed that is not served. The error names the feeds that are."""
        served = ", ".join(sorted(self._feeds)) or "none is ready yet"
        return UnknownFeed(f"no feed {name!r} is served here; there are: {served}")

    def open(self, number: int, feed_name: str, ask: OpenRequest) -> Consumer:
        """Make a new consumer with this number.

        Raises:
            UnknownFeed: names the feeds that exist.
            StateMismatch: the position is from another feed, or differs from that of the other ranks; says how.
            MemoryBound: other streams hold the memory; says how much is needed.
            StreamClosed: the consumer comes back to a stream of a group, and that stream no longer exists.
            RankTaken: another process reads as this rank.
            WorkerDied: no worker process can start any longer.
            ProtocolError: the request is impossible.
        """
        feed = self._feeds.get(feed_name)
        if feed is None:
            raise self.unknown_feed(feed_name)
        if not self._workers.numbers:
            raise WorkerDied("no worker process is left, and none can start: see the daemon's log", feed=feed_name)
        if feed.static_splits is None or feed.info.pool > 1:
            self._workers.pick_local(0)  # raises if no worker can list splits or mix rows
        if ask.position is not None:
            _check(ask.position, feed)
        if ask.world_size:
            return self._meet(number, feed, ask)
        if ask.group:
            check_had(ask.had, feed.name)
            return self._join(number, feed, ask)
        return self._open_alone(number, feed, ask)

    def shared(self, feed: str, ask: OpenRequest) -> Stream | None:
        """Return the stream of others that `ask` would join, if there is one."""
        if ask.world_size:
            rendezvous = self._rendezvous.get((feed, ask.group, ask.world_size))
            return None if rendezvous is None else rendezvous.stream
        return self._groups.stream_of(feed, ask.group) if ask.group else self._joining

    @property
    def waiting(self) -> list[Rendezvous]:
        """The rendezvous that still wait for ranks."""
        return [rendezvous for rendezvous in self._rendezvous.values() if rendezvous.waits]

    def check_begin(self, consumer: Consumer) -> None:
        """Refuse a consumer that begins to read, but must not, before anything has changed.

        Raises:
            StateMismatch: it waits for other ranks, and one of them comes back to a job at another place.
        """
        for rendezvous in self._meetings_of(consumer):
            rendezvous.check_begin(consumer)

    def on_begun(self, consumer: Consumer) -> None:
        """Note that the consumer has begun to read."""
        for rendezvous in self._meetings_of(consumer):
            rendezvous.on_begun(consumer)

    def on_consumer_gone(self, consumer: Consumer) -> None:
        """Note that the consumer no longer waits for other ranks, if it did."""
        for rendezvous in self._meetings_of(consumer):
            rendezvous.remove(consumer)
        self._rendezvous = {key: rendezvous for key, rendezvous in self._rendezvous.items() if not rendezvous.over}

    def _open_alone(self, number: int, feed: ServedFeed, ask: OpenRequest) -> Consumer:
        """Let a job read the stream of others, if one is where the job begins, or else one of its own."""
        late = self.sharing.find_late(feed, ask)
        stream = self.sharing.find(feed, ask) if late is None else late[0]
        self._joining = stream
        share = None if stream is None else self._budget.share_of_job(stream, ask, self._feeds.values())
        if stream is not None and share is not None:
            consumer = _consumer(number, stream, ask, share)
            if late is None:
                stream.join([consumer], [ask.position])
            else:
                consumer.start = late[1]
                stream.join_front(consumer, late[1])
            return consumer
        self._joining = None
        stream = self._new_stream(feed, ask, SingleDelivery)
        consumer = _consumer(number, stream, ask)
        stream.start([consumer], [ask.position])
        self.sharing.look_at(feed)
        return consumer

    def _join(self, number: int, feed: ServedFeed, ask: OpenRequest) -> Consumer:
        group = self._groups.find(feed, ask)
        if group is None:
            return self._begin_group(number, feed, ask)
        stream = group.stream
        share = self._budget.with_one_more(stream, ask.group)
        consumer = _consumer(number, stream, ask)
        stream.join_group(consumer, share)
        group.on_arrived(ask)
        return consumer

    def _begin_group(self, number: int, feed: ServedFeed, ask: OpenRequest) -> Consumer:
        saved: SavedGroup | None = self._groups.saved(feed, ask.group)
        if saved is not None:
            _check(
                saved.position,
                feed,
                f"group {ask.group!r} cannot go on from the state file",
                "give the group another name",
            )
        delivery = partial(GroupDelivery, group_log=self._groups.log(feed, ask.group))
        stream = self._new_stream(feed, ask, delivery)
        group = self._groups.begin(stream, ask.group)
        consumer = _consumer(number, stream, ask)
        stream.start([consumer], [saved.position if saved else None])
        group.on_arrived(ask)
        return consumer

    def _meet(self, number: int, feed: ServedFeed, ask: OpenRequest) -> Consumer:
        if not ask.rank < ask.world_size:
            raise ProtocolError(f"rank {ask.rank} of {ask.world_size}: ranks go from 0", feed=feed.name)
        key = feed.name, ask.group, ask.world_size
        rendezvous = self._rendezvous.get(key)
        if rendezvous is not None and not rendezvous.over:
            rendezvous.admit(ask)
        if rendezvous is None or rendezvous.over:
            stream = self._new_stream(feed, ask, SingleDelivery)
            rendezvous = self._rendezvous[key] = Rendezvous(stream, ask.world_size, partial(self._begin_ranks, stream))
        consumer = _consumer(number, rendezvous.stream, ask)
        rendezvous.join(consumer, ask)
        return consumer

    def _begin_ranks(self, stream: Stream, consumers: list[Consumer], asks: list[OpenRequest]) -> Stream:
        """Let ranks that have waited in this stream read another one, if one is where they begin, or else this one.
        Return the stream that they read."""
        positions = [ask.position for ask in asks]
        other = self.sharing.find_for_ranks(stream.feed, asks)
        if other is None or not self._budget.has_room_for_ranks(other, consumers, stream):
            if stream.sharing is not None:
                stream.sharing.joinable = all(may_share(stream.feed, ask) for ask in asks)
            stream.start(consumers, positions, pad=asks[0].pad)
            self.sharing.look_at(stream.feed)
            return stream
        stream.outlet.waiting.clear()
        stream.end()
        other.join(consumers, positions, pad=asks[0].pad)
        for consumer in consumers:
            self._on_joined(consumer, other)
        return other

    def _meetings_of(self, consumer: Consumer) -> list[Rendezvous]:
        return [one for one in self._rendezvous.values() if one.stream.number == consumer.stream]

    def _new_stream(self, feed: ServedFeed, ask: OpenRequest, delivery: Callable[[Outlet], Delivery]) -> Stream:
        share = self._budget.grant(
            feed,
            credit=ask.credit,
            quota=ask.quota,
            consumers=max(1, ask.world_size),
            workers=len(self._workers.makers),
            feeds=self._feeds.values(),
        )
        self._last_stream = next(
            number
            for number in chain(range(self._last_stream + 1, MOST_STREAMS), range(1, MOST_STREAMS))
            if number not in self._streams
        )
        shares = may_share(feed, ask)
        if delivery is SingleDelivery and (shares or ask.world_size > 1):
            delivery = partial(
                SharedDelivery,
                room=partial(self._budget.room_for_window, self._last_stream),
                on_moved=partial(self.sharing.keep_list, feed),
                joinable=shares,
            )
        stream = Stream(
            self._last_stream,
            feed,
            share,
            delivery=delivery,
            workers=self._workers,
            later=self._later,
            clock=self._clock,
            out=self._do,
        )
        self._streams[stream.number] = stream
        return stream


def _consumer(number: int, stream: Stream, ask: OpenRequest, share: Share | None = None) -> Consumer:
    share = share or stream.share
    return Consumer(
        number,
        stream.number,
        stream.feed.name,
        share,
        credit_bytes=ask.credit_bytes,
        holds_handed=ask.quota > 0,
        rank=ask.rank,
        world_size=ask.world_size,
        group=ask.group,
        identity=ask.identity,
        machine=ask.machine,
        most=(MANY, MANY) if stream.sharing is None else (share.credit, share.quota),
    )


def _check(
    position: Position,
    feed: ServedFeed,
    what: str = "the stream cannot go on from this state",
    instead: str = "begin again from the start",
) -> None:
    found = list(differences(position.feed, feed.info))
    if found:
        raise StateMismatch(
            f"{what}, which was made with another feed: {'; '.join(found)}. Serve the feed as it was, or {instead}",
            feed=feed.name,
        )
    check_counts(position, feed.info)
    if feed.static_splits is not None:
        check(position, feed.plan, feed.static_splits)
