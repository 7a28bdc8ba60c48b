"""Sharing: which jobs read one stream together. Jobs that read the same feed share what is made for them.

A job joins a stream if the stream has what the job needs next: it is there, or still in its window. Otherwise it gets a
stream of its own, and its batches are made again. Later the two may meet: the one that is behind comes to a place that
the other one still has. Then the jobs of the first move to the other. For that, the stream that is ahead keeps in its
window what it delivers, as long as the other is near enough and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from penstock_proto.batches.position import Position

from ..delivery.jobs import Place
from ..delivery.shared_delivery import SharedDelivery
from ..model import commands as do
from ..model.feeds import ServedFeed
from ..model.known_lists import SplitsInfo
from ..model.open_request import OpenRequest
from ..stream.budget import Budget
from ..stream.stream import Stream

AGAIN = 10.0
"""Seconds in which a job does not move twice because streams have met."""


def may_share(feed: ServedFeed, ask: OpenRequest) -> bool:
    """Whether the job may read a stream together with others.

    It reads the whole stream, alone or as ranks, and the order is exact.
    """
    return ask.shares and (ask.world_size > 0 or not ask.group) and feed.plan.order == "exact"


class Sharing:
    """Brings jobs of the same feed together.

    Args:
        streams: all streams, by number.
        budget: says how much memory windows may take.
        clock: returns the time of the current event.
        after: `after(seconds, call)` makes the call in `seconds` seconds.
        out: where commands go.
    """

    def __init__(
        self,
        streams: Mapping[int, Stream],
        budget: Budget,
        clock: Callable[[], float],
        after: Callable[[float, Callable[[], None]], None],
        out: Callable[[do.Command], None],
    ) -> None:
        self._streams = streams
        self._budget = budget
        self._clock = clock
        self._after = after
        self._do = out
        self._fronts: dict[int, Place] = {}
        """Where each stream was at the last look."""
        self._moved: dict[bytes, float] = {}
        """When each job moved last."""

    @property
    def any(self) -> bool:
        """Whether there are streams that may meet."""
        feeds = [stream.feed for stream, _ in self._open()]
        return len(set(feeds)) < len(feeds)

    def find(self, feed: ServedFeed, ask: OpenRequest) -> Stream | None:
        """Return the stream that the job can join at its position: of several, the one with the most jobs."""
        return self.find_for_ranks(feed, [ask])

    def find_for_ranks(self, feed: ServedFeed, asks: Sequence[OpenRequest]) -> Stream | None:
        """Return the stream that ranks can join at the earliest of their positions: of several, the one with the most
        jobs."""
        if not all(may_share(feed, ask) for ask in asks):
            return None
        positions = [ask.position or Position(feed.info, 0) for ask in asks]
        places = [(position.epoch, position.batches) for position in positions]
        first = min(places)
        digest = positions[places.index(first)].digest
        rest = max((position.epoch, position.batches + position.skip) for position in positions)
        least = len(asks) + (rest[1] - first[1] if rest[0] == first[0] else 0)
        found = [
            (len(shared.jobs), stream)
            for stream, shared in self._open(feed)
            if shared.covers(first, digest, least) and (rest == first or shared.reaches(rest))
        ]
        return max(found, key=lambda one: one[0])[1] if found else None

    def find_late(self, feed: ServedFeed, ask: OpenRequest) -> tuple[Stream, Position] | None:
        """Return the stream with the most jobs that a late job can join, and where it begins: with the next batch, or
        with the next epoch. Return None if there is none, or the job does not ask for that."""
        if ask.start == "beginning" or ask.position is not None or ask.again or not may_share(feed, ask):
            return None
        found: list[tuple[int, Stream, Position]] = []
        for stream, shared in self._open(feed):
            position = shared.front_position if ask.start == "latest" else None
            if position is None and shared.next_epoch is not None and not feed.plan.endless:
                position = Position(feed.info, shared.next_epoch)
            if position is not None:
                found.append((len(shared.jobs), stream, position))
        return max(found, key=lambda one: one[0])[1:] if found else None

    def apart_because(self, stream: Stream) -> str:
        """Return why a job shares its stream with no other job of the feed; "" if it does, or if there is none."""
        others = [other for other in self._streams.values() if other.feed is stream.feed and other is not stream]
        others = [other for other in others if other.view.jobs and other.outlet.live]
        if stream.view.jobs != 1 or not others:
            return ""
        if stream.feed.plan.order != "exact":
            return f'the order is "{stream.feed.plan.order}", so each job has its own'
        if stream.feed.plan.on_error == "skip":
            return 'with on_error="skip" jobs come together only where an epoch begins'
        if stream.sharing is None or not stream.sharing.joinable:
            return "it was opened with share=False, or by an older client"
        own = stream.sharing.front
        fronts = [
            (other.sharing.front, other)
            for other in others
            if other.sharing is not None and other.sharing.joinable and other.sharing.front is not None
        ]
        if own is None or not fronts:
            return "the other job was opened with share=False, or by an older client" if own else ""
        same = [(batches - own[1], other) for (epoch, batches), other in fronts if epoch == own[0]]
        if not same:
            return f"it reads epoch {own[0]}, and the others read epoch {min(front for front, _ in fronts)[0]}"
        apart, nearest = min(same, key=lambda one: abs(one[0]))
        if self._is_near(stream, nearest) or self._is_near(nearest, stream):
            return f"it is {_apart(apart)} the nearest other job, and soon shares with it"
        return f"it is {_apart(apart)} the nearest other job, more than the memory for shared batches holds"

    def keep_list(self, feed: ServedFeed, epoch: int, splits: SplitsInfo) -> None:
        """Keep the list of splits of the epoch for a while: a job that moves goes on with it."""
        if feed.static_splits is None:
            feed.lists.hold(epoch, splits)
            self._after(AGAIN, partial(self._release_list, feed, splits))

    def _release_list(self, feed: ServedFeed, splits: SplitsInfo) -> None:
        if feed.lists.release(splits):
            self._do(do.ForgetSplits(splits.number))

    def look(self) -> None:
        """Let jobs move where streams have met. Called once a second, as long as `any`."""
        now = self._clock()
        self._moved = {job: at for job, at in self._moved.items() if now - at < AGAIN}
        for feed in {stream.feed for stream, _ in self._open()}:
            self.look_at(feed)
            self._bring_together(feed, now)
        self._fronts = {stream.number: shared.front for stream, shared in self._open() if shared.front}

    def look_at(self, feed: ServedFeed) -> None:
        """Decide which streams of the feed keep what they deliver, for others that are behind."""
        streams = list(self._open(feed))
        for stream, shared in streams:
            shared.keep_for_others(
                any(
                    other is not stream
                    and self._is_near(other, stream)
                    and self._fronts.get(other.number) != behind.front  # it does not stand
                    for other, behind in streams
                )
            )

    def _bring_together(self, feed: ServedFeed, now: float) -> None:
        """Move jobs to a stream that is ahead and has what they need next."""
        margin = feed.info.most * feed.info.pool if feed.info.pool > 1 else 0
        """A job's position may be that many batches before what it was handed: within a pool it is the pool's start."""
        for stream, shared in self._open(feed):
            for job in list(shared.jobs):
                place = shared.place_of(job)
                identity = job.consumers[0].identity
                if place is None or identity in self._moved:
                    continue
                epoch, batches = place
                splits = shared.list_of(epoch)
                digest = splits.digest if splits is not None and batches else b""
                for other, ahead in self._open(feed):
                    if other is stream or not _is_ahead(ahead, other, shared, stream):
                        continue
                    first = epoch, max(0, batches - margin)
                    least = max(1, job.round)
                    if ahead.covers(place, digest, least) and (not batches or ahead.covers(first, digest)):
                        self._moved[identity] = now
                        shared.move(job)
                        break

    def _is_near(self, stream: Stream, other: Stream) -> bool:
        """Whether a stream follows the other one so closely that it may come to what that one still has.

        Of two streams that are level each follows the other. It is chance which of them is ahead at the next look.
        """
        behind, ahead = stream.sharing, other.sharing
        if behind is None or ahead is None or behind.front is None or ahead.front is None:
            return False
        place, front = behind.front, ahead.front
        if min(_places(behind), default=place) > front:
            return False
        nbytes, slots = self._budget.room_for_window(other.number)
        room = min(nbytes // other.slots.slot_nbytes, slots) * max(other.feed.info.room, 1)
        apart = front[1] - (place[1] if place[0] == front[0] else 0)
        if place[0] + 1 == front[0]:
            apart += max(0, (other.feed.info.batches or place[1]) - place[1])
        elif place[0] != front[0]:
            return False
        return apart <= room

    def _open(self, feed: ServedFeed | None = None) -> Iterator[tuple[Stream, SharedDelivery]]:
        """Iterate over the streams that jobs can join (of one feed)."""
        for stream in list(self._streams.values()):
            shared = stream.sharing
            if shared is None or not shared.joinable or not stream.outlet.live or stream.stopping or not shared.readers:
                continue
            if feed is None or stream.feed is feed:
                yield stream, shared


def _apart(batches: int) -> str:
    """Return where a job is, in words, if the other one is this many batches ahead."""
    if not batches:
        return "level with"
    number = f"{abs(batches)} batch{'es' * (abs(batches) > 1)}"
    return f"{number} ahead of" if batches < 0 else f"{number} behind"


def _places(shared: SharedDelivery) -> Iterator[Place]:
    """Iterate over the places of the stream's jobs, as far as they are known."""
    for job in shared.jobs:
        place = shared.place_of(job)
        if place is not None:
            yield place


def _is_ahead(ahead: SharedDelivery, one: Stream, behind: SharedDelivery, other: Stream) -> bool:
    """Whether the first of two streams is ahead, or the older one if both are at the same place."""
    if ahead.front is None or behind.front is None:
        return False
    return (ahead.front, -one.number) > (behind.front, -other.number)
