"""The memory and the slots that all streams share: grants each stream its part, or says what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from penstock_proto import MemoryBound
from penstock_proto.status.figures import size

from ..model.consumer import Consumer
from ..model.feeds import ServedFeed, whole_pages
from ..model.memory import Share, least_slots, regrown, round_of, share, share_of_job, with_consumers, with_workers
from ..model.open_request import OpenRequest
from .stream import Stream


class Budget:
    """What is reserved of the memory and of the slots, and the plan for each stream.

    Args:
        memory: the most bytes that slots and shuffle blocks may take in all.
        slots: the most slots that all streams may have in all.
        streams: the streams by number.

    Attributes:
        memory, slots: as given; `slots` may change.
    """

    def __init__(self, memory: int, slots: int, streams: Mapping[int, Stream]) -> None:
        self.memory = memory
        self.slots = slots
        self._streams = streams

    @property
    def nbytes_reserved(self) -> int:
        """Bytes that all streams have reserved."""
        return sum(stream.reserved[0] for stream in self._streams.values())

    @property
    def slots_reserved(self) -> int:
        """Slots that all streams have reserved."""
        return sum(stream.reserved[1] for stream in self._streams.values())

    def grant(
        self, feed: ServedFeed, *, credit: int, quota: int, consumers: int, workers: int, feeds: Iterable[ServedFeed]
    ) -> Share:
        """Return the share of a new stream with `consumers` consumers. It leaves room for those of `feeds` that nobody
        reads.

        Raises:
            MemoryBound: says how much it needs, and how much others hold.
        """
        kept = self._kept_for(other for other in feeds if other is not feed)
        while True:
            granted = share(
                free=self.memory - self.nbytes_reserved,
                kept=kept,
                slot=feed.slot_nbytes,
                blocks=feed.blocks_nbytes,
                workers=workers,
                credit=credit,
                quota=quota,
                consumers=consumers,
                pool=feed.info.pool,
                stripe=feed.info.stripe,
                most=self.slots - self.slots_reserved,
            )
            if granted is not None:
                return granted
            if not self._take_windows():
                break
        least = least_slots(quota, consumers, feed.info.pool, feed.info.stripe)
        others = "1 other stream holds" if len(self._streams) == 1 else f"{len(self._streams)} other streams hold"
        if least > self.slots - self.slots_reserved:
            raise MemoryBound(
                f"a stream needs {least} slots, but {others} {self.slots_reserved} of the {self.slots} for which the "
                "daemon may have files open: close one, or raise the daemon's limit of open files (ulimit -n)",
                feed=feed.name,
            )
        raise MemoryBound(
            f"a stream needs {size(feed.blocks_nbytes + least * feed.slot_nbytes)}, but {others} "
            f"{size(self.nbytes_reserved)} of the {size(self.memory)} that --memory allows: close one, or start the "
            "daemon with a larger --memory",
            feed=feed.name,
        )

    def with_one_more(self, stream: Stream, group: str) -> Share:
        """Return the share of a group's stream with one more consumer.

        Raises:
            MemoryBound: there is too little left.
        """
        larger = None
        while larger is None:
            larger = with_consumers(
                stream.share,
                len(stream.consumers) + 1,
                free=self.memory - self.nbytes_reserved,
                slot=stream.slots.slot_nbytes,
                most=self.slots - self.slots_reserved,
            )
            if larger is None and not self._take_windows():
                break
        if larger is None:
            raise MemoryBound(
                f"there is no memory (or there are no file descriptors) for one more consumer of group {group!r}: "
                "start the daemon with more, or close a consumer",
                feed=stream.feed.name,
            )
        return larger

    def share_of_job(self, stream: Stream, ask: OpenRequest, feeds: Iterable[ServedFeed]) -> Share | None:
        """Return the share of one more job that reads this stream; None if there is too little left. It leaves room for
        those of `feeds` that nobody reads."""
        kept, slot = self._kept_for(feeds), stream.slots.slot_nbytes
        while True:
            free, most = self.memory - self.nbytes_reserved, self.slots - self.slots_reserved
            nbytes, slots = stream.needs()
            least = 1, min(1, ask.quota)
            for (credit, quota), part in (((ask.credit, ask.quota), 2), (least, 1)):
                granted = share_of_job(free=free, kept=kept, slot=slot, credit=credit, quota=quota, most=most)
                if granted is not None:
                    more_nbytes, more_slots = stream.needs(granted)
                    if more_nbytes - nbytes <= free // part and more_slots - slots <= most // part:
                        return granted
            if not self._take_windows(but=stream):
                return None

    def has_room_for_ranks(self, stream: Stream, consumers: Sequence[Consumer], waited_in: Stream) -> bool:
        """Whether ranks can join this stream with the shares that they have, if the stream in which they have waited
        gives its memory back."""
        job = replace(consumers[0].share, production=0, consumers=len(consumers), round=round_of(len(consumers)))
        (nbytes, slots), (more_nbytes, more_slots) = stream.needs(), stream.needs(job)
        back_nbytes, back_slots = waited_in.reserved
        return (
            more_nbytes - nbytes <= self.memory - self.nbytes_reserved + back_nbytes
            and more_slots - slots <= self.slots - self.slots_reserved + back_slots
        )

    def room_for_window(self, number: int) -> tuple[int, int]:
        """Return the most bytes and the most slots that the window of this stream may hold now: half of what is free
        without it. The rest is for streams that open later."""
        stream = self._streams.get(number)
        if stream is None or stream.sharing is None:
            return 0, 0
        reserved = [other.reserved for other in self._streams.values()]
        window, (own_nbytes, own_slots) = stream.sharing.window, stream.reserved
        needed_nbytes, needed_slots = stream.needs()
        nbytes = self.memory - sum(one for one, _ in reserved) + min(window.nbytes, own_nbytes - needed_nbytes)
        slots = self.slots - sum(one for _, one in reserved) + min(window.slots, own_slots - needed_slots)
        return max(0, nbytes // 2), max(0, slots // 2)

    def _kept_for(self, feeds: Iterable[ServedFeed]) -> int:
        """Return the bytes that are kept for those of these feeds that nobody reads."""
        reading = {stream.feed for stream in self._streams.values()}
        return sum(feed.least_nbytes for feed in feeds if feed not in reading)

    def _take_windows(self, but: Stream | None = None) -> bool:
        """Take the memory of all windows, except that of a stream, for something that needs it more. Return whether
        there was any."""
        streams = [stream for stream in self._streams.values() if stream is not but]
        found = [stream.sharing for stream in streams if stream.sharing is not None]
        given_up = [shared.give_up_window() for shared in found if shared.window]
        return any(given_up)

    def with_those_left(self, stream: Stream, consumers: int) -> Share:
        """Return the share of a stream that has only `consumers` consumers left."""
        if stream.sharing is not None:
            return stream.share  # each job has its own
        free, slot = self.memory - self.nbytes_reserved, stream.slots.slot_nbytes
        smaller = with_consumers(stream.share, consumers, free=free, slot=slot)
        assert smaller is not None, "it needs less"
        return smaller

    def plan_for(self, stream: Stream, workers: int) -> None:
        """Let the stream hold more slots if there are more workers than its share was planned for. It keeps them when
        workers go, because others may come. Half of all memory stays free for consumers that open later."""
        if workers <= stream.planned_for:
            return
        slot = stream.slots.slot_nbytes
        larger = with_workers(
            stream.share,
            stream.planned_for,
            workers,
            free=max(0, self.memory // 2 - self.nbytes_reserved),
            slot=slot,
            blocks=stream.feed.blocks_nbytes,
            pool=stream.feed.info.pool,
            stripe=stream.feed.info.stripe,
            most=max(0, self.slots // 2 - self.slots_reserved),
        )
        stream.planned_for = workers
        stream.resize(larger, slot)

    def grow(self, stream: Stream, nbytes: int) -> MemoryBound | None:
        """Make the stream's slots large enough for `nbytes`, with some to spare if there is room.

        Returns:
            The error that says what is missing if there is no room, else None.
        """
        while True:
            for slot in (whole_pages(nbytes + nbytes // 8), whole_pages(nbytes)):
                larger = regrown(
                    stream.whole_share,
                    free=self.memory - self.nbytes_reserved,
                    held=stream.slots.nbytes,
                    blocks=stream.feed.blocks_nbytes,
                    slot=slot,
                )
                if larger is not None:
                    stream.resize(larger, slot)
                    return None
            if not self._take_windows():
                break
        old = stream.whole_share
        least = least_slots(old.quota, old.consumers)
        needed = least * whole_pages(nbytes) + stream.slots.nbytes + stream.feed.blocks_nbytes
        missing = needed - old.nbytes - (self.memory - self.nbytes_reserved)
        return MemoryBound(
            f"a batch of {size(nbytes)} came. With such batches the stream needs {size(needed)}, {size(missing)} more "
            f"than it can have. Give --memory {enough(2 * (self.memory + missing))}, or make the batches smaller",
            feed=stream.feed.name,
        )

    def check_start(self, feeds: Iterable[ServedFeed]) -> MemoryBound | None:
        """Return the error if the feeds cannot all be read at the same time, else None."""
        needed = sum(feed.least_nbytes for feed in feeds)
        if needed <= self.memory:
            return None
        needs = []
        for feed in feeds:
            blocks = f" and {size(feed.blocks_nbytes)} of shuffle blocks" if feed.blocks_nbytes else ""
            least = least_slots(1, pool=feed.info.pool, stripe=feed.info.stripe)
            needs.append(f"feed {feed.name}: {least} slots of {size(feed.slot_nbytes)}{blocks}")
        return MemoryBound(
            f"--memory {size(self.memory)} is too small: at least {size(needed)} is needed ({'; '.join(needs)}). Give "
            f"--memory {enough(needed)} or more, or make the batches, `turn` or `shuffle` smaller"
        )


def enough(nbytes: int) -> str:
    """Return a value of `--memory` that is at least `nbytes`: whole MiB, or KiB below 1 MiB."""
    shift, unit = (10, "K") if nbytes < 1 << 20 else (20, "M")
    return f"{-(-nbytes // (1 << shift))}{unit}"
