"""Where a group's stream stands, for a state file: what of it was handed over, and who may have been handed more.

No consumer of a group knows its position, so the delivery says here what it deals, in stream order, and what was handed
over, in any. From that comes the position behind the longest beginning of the stream of which all was handed over, and
what was handed over beyond it (*ahead*). What changes goes out as `SaveGroup`, at once: before the credit that it frees
is used, before the End that it makes possible, before a consumer hears that it is open.

So what a consumer was handed and the file does not know was under way to it when the daemon ended, and the consumer
remembers that much and says it when it comes back. A stream that begins from a file therefore deals nothing before all
consumers that the file names have come back, or have been given up: what it would deal may be in their hands.

No I/O here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock_proto import ProtocolError
from penstock_proto.cursor import Cursor
from penstock_proto.messages import FeedInfo, Had, LaneEnded, SentElsewhere
from penstock_proto.position import Position

from . import commands as do
from .consumer import Sent
from .ranges import Ranges
from .turn import Part, Source, Turn

MOST_HAD = 4096
"""Batches that a consumer may have been handed and a daemon not know of: as many as the greatest credit."""


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """What a state file has of a group.

    Attributes:
        position: all before it was handed over.
        ahead: what was handed over beyond it: lane, number of the first batch, batches.
        consumers: who was there.
    """

    position: Position
    ahead: tuple[tuple[int, int, int], ...]
    consumers: frozenset[bytes]


@dataclass(slots=True, eq=False)
class _Dealt:
    """Batches that stand in the stream, and how many of them were not handed over yet."""

    batches: SentElsewhere
    left: int


def check_had(had: Iterable[Had], feed: str) -> None:
    """Refuse more batches than a consumer can have been handed without a daemon's knowing.

    Raises:
        ProtocolError: says how many there were.
    """
    batches = sum(one.batches for one in had)
    if batches > MOST_HAD:
        raise ProtocolError(f"{batches} batches that were had; a consumer has {MOST_HAD} at the most", feed=feed)


class GroupLog:
    """See the file's head.

    Args:
        feed: what the group reads.
        group: its name.
        kept: where it begins; None for epoch 0.
        out: where commands go.

    Attributes:
        awaited: consumers that may have been handed what nobody knows of.
    """

    def __init__(self, feed: FeedInfo, group: str, kept: SavedGroup | None, out: Callable[[do.Command], None]) -> None:
        self.awaited = set(kept.consumers) if kept else set()
        self._feed = feed
        self._group = group
        self._out = out
        self._cursor = Cursor(kept.position if kept else Position(feed, 0))
        self._ahead: defaultdict[int, Ranges] = defaultdict(Ranges)
        """Batches that were handed over beyond the position, by lane."""
        self._log: deque[_Dealt | LaneEnded] = deque()
        self._dealt: dict[tuple[int, int], _Dealt] = {}
        self._moved: dict[int, int] = {}
        self._over = False
        for batches in kept.ahead if kept else ():
            self._add_ahead(*batches)

    # --- consumers ---

    def arrived(self, consumer: bytes, had: Iterable[Had]) -> None:
        """A consumer is there. If it was awaited, these are the last slabs that it was handed."""
        ahead = []
        if consumer in self.awaited:
            self.awaited.remove(consumer)
            ahead = [(one.lane, one.index, one.batches) for one in had if one.epoch == self._cursor.epoch]
        for batches in ahead:
            self._add_ahead(*batches)
        self._keep(ahead, arrived=consumer)

    def parted(self, consumer: bytes) -> None:
        """A consumer is gone: what it was not handed goes to others."""
        self._keep(parted=consumer)

    def give_up(self) -> None:
        """Those who have not come back will not."""
        awaited, self.awaited = self.awaited, set()
        for consumer in sorted(awaited):
            self.parted(consumer)

    def end(self, forget: bool) -> None:
        """The stream has ended. What is kept of it stays as it is, or is forgotten."""
        if not self._over and forget:
            self._out(do.ForgetGroup(self._feed.name, self._group))
        self._over = True

    # --- the stream, in its order ---

    def begin(self, epoch: int, digest: bytes = b"") -> None:
        """The stream is in this epoch, whose list of splits has this digest."""
        fresh = epoch > self._cursor.epoch
        if fresh:
            self._cursor.begin(epoch)
            self._log.clear()
            self._dealt.clear()
            self._moved.clear()
            self._ahead.clear()
        elif digest == self._cursor.digest:
            return
        self._cursor.digest = digest
        self._keep(fresh=fresh)

    def was_handed(self, turn: Turn, part: Part) -> bool:
        """Whether the part's first batch was handed over before the stream began here."""
        return turn.index + part.first in self._ahead[turn.lane]

    def delivers(self, epoch: int, turn: Turn, part: Part) -> None:
        """The part's first batch is dealt now; the others will be, one by one, behind it.

        They are logged together, as the lane's record is the one behind the last of them.
        """
        first = turn.index + part.first
        if (turn.lane, first) not in self._dealt:
            dealt = _Dealt(SentElsewhere(epoch, turn.lane, first, part.batches, part.rows, part.record), part.batches)
            self._log.append(dealt)
            self._dealt.update(((turn.lane, index), dealt) for index in range(first, first + part.batches))

    def passed(self, turn: Turn, batch: Part) -> None:
        """The batch was handed over before: the file has it."""
        self._done(turn, batch)
        self._advance()
        if self._moved:
            self._keep()

    def lane_ended(self, ended: LaneEnded) -> None:
        """A lane ends here."""
        self._log.append(ended)
        self._advance()

    def handed(self, sent: Iterable[Sent]) -> None:
        """These slabs were handed over."""
        ahead = [self._done(one.source, one.part) for one in sent if one.epoch == self._cursor.epoch]
        if ahead:
            self._advance()
            self._keep(ahead)

    # --- how ---

    def _add_ahead(self, lane: int, index: int, batches: int) -> None:
        self._ahead[lane].add(index, index + batches)

    def _done(self, turn: Source, batch: Part) -> tuple[int, int, int]:
        index = turn.index + batch.first
        self._dealt.pop((turn.lane, index)).left -= 1
        return turn.lane, index, 1

    def _advance(self) -> None:
        """Move the position as far as all was handed over."""
        while self._log:
            item = self._log[0]
            if isinstance(item, LaneEnded):
                self._cursor.end(item)
                self._moved[item.lane] = item.index
            elif item.left:
                return
            else:
                self._cursor.read(item.batches)
                self._moved[item.batches.lane] = item.batches.index + item.batches.batches
            self._log.popleft()

    def _keep(
        self,
        ahead: Iterable[tuple[int, int, int]] = (),
        *,
        fresh: bool = False,
        arrived: bytes = b"",
        parted: bytes = b"",
    ) -> None:
        if self._over:
            return
        cursor, moved = self._cursor, self._moved
        self._moved = {}
        self._out(
            do.SaveGroup(
                feed=self._feed,
                group=self._group,
                epoch=cursor.epoch,
                batches=cursor.batches,
                rows=cursor.rows,
                digest=cursor.digest,
                merged=cursor.merged,
                fresh=fresh,
                places=tuple((lane, *cursor.places[lane]) for lane in moved if lane in cursor.places),
                ended=tuple((lane, *cursor.ended[lane]) for lane in moved if lane in cursor.ended),
                behind=tuple(moved.items()),
                ahead=tuple(one for one in ahead if one[1] + one[2] > moved.get(one[0], 0)),
                arrived=arrived,
                parted=parted,
            )
        )
