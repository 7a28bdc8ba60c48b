"""Where a group's stream stands, for the state file: what was handed over, and who may have been handed more.

No consumer of a group knows the position of the stream. So the delivery policy reports here what it delivers, in stream
order, and what was handed over, in any order. The position is the longest beginning of the stream that was handed over
completely. What was handed over beyond it is *ahead*. Each change goes out as `SaveGroup` at once: before the credit
that it frees is used, before the End that it makes possible, and before a consumer is told that it is open.

So if the daemon ends, the file can lack only batches that were under way to a consumer. A consumer remembers as many as
that, and names those that it was handed when it comes back. Therefore a stream that begins from a file delivers nothing
until all consumers in the file have come back or have been given up: they may have been handed what it would deliver.

No I/O here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock_proto import ProtocolError
from penstock_proto.cursor import Cursor
from penstock_proto.layout import POOL_LANE
from penstock_proto.messages import FeedInfo, Had, LaneEnded, PoolBegun, SentElsewhere
from penstock_proto.position import Position

from . import commands as do
from .consumer import Sent
from .ranges import Ranges
from .turn import Part, Source, Turn

MOST_HAD = 4096
"""Most batches that a consumer may have been handed without the daemon's knowledge: the greatest possible credit."""


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A group in a state file.

    Attributes:
        position: everything before it was handed over.
        ahead: what was handed over beyond it: lane, number of the first batch, number of batches.
        consumers: the consumers that were connected.
    """

    position: Position
    ahead: tuple[tuple[int, int, int], ...]
    consumers: frozenset[bytes]


@dataclass(slots=True, eq=False)
class _Dealt:
    """Batches at one place of the stream, and how many of them were not handed over yet."""

    batches: SentElsewhere
    left: int


def check_had(had: Iterable[Had], feed: str) -> None:
    """Refuse more batches than a consumer can have been handed without the daemon's knowledge.

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
        kept: where it goes on; None: at epoch 0.
        out: where commands go.

    Attributes:
        awaited: consumers that may have been handed batches that the file does not name.
    """

    def __init__(self, feed: FeedInfo, group: str, kept: SavedGroup | None, out: Callable[[do.Command], None]) -> None:
        self.awaited = set(kept.consumers) if kept else set()
        self._feed = feed
        self._group = group
        self._out = out
        self._cursor = Cursor(kept.position if kept else Position(feed, 0))
        self._ahead: defaultdict[int, Ranges] = defaultdict(Ranges)
        """Batches that were handed over beyond the position, by lane."""
        self._log: deque[_Dealt | LaneEnded | PoolBegun] = deque()
        self._dealt: dict[tuple[int, int], _Dealt] = {}
        self._moved: dict[int, int] = {}
        self._over = False
        for batches in kept.ahead if kept else ():
            self._add_ahead(*batches)

    # --- consumers ---

    def arrived(self, consumer: bytes, had: Iterable[Had]) -> None:
        """A consumer has come. If it was awaited, `had` are the last slabs that it was handed."""
        ahead = []
        if consumer in self.awaited:
            self.awaited.remove(consumer)
            ahead = [(one.lane, one.index, one.batches) for one in had if one.epoch == self._cursor.epoch]
        for batches in ahead:
            self._add_ahead(*batches)
        self._keep(ahead, arrived=consumer)

    def parted(self, consumer: bytes) -> None:
        """A consumer has gone: batches that it was not handed go to others."""
        self._keep(parted=consumer)

    def give_up(self) -> None:
        """The consumers that are still awaited will not come back."""
        awaited, self.awaited = self.awaited, set()
        for consumer in sorted(awaited):
            self.parted(consumer)

    def end(self, forget: bool) -> None:
        """The stream has ended. Leave the group in the file as it is, or have it forgotten."""
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
        """Whether the part's first batch was handed over by an earlier daemon."""
        return turn.index + part.first in self._ahead[turn.lane]

    def delivers(self, epoch: int, turn: Turn, part: Part) -> None:
        """The part's first batch is delivered now, and its others follow one by one.

        They are logged together, because the lane's record belongs after the last of them.
        """
        first = turn.index + part.first
        if (turn.lane, first) not in self._dealt:
            dealt = _Dealt(SentElsewhere(epoch, turn.lane, first, part.batches, part.rows, part.record), part.batches)
            self._log.append(dealt)
            self._dealt.update(((turn.lane, index), dealt) for index in range(first, first + part.batches))

    def passed(self, turn: Turn, batch: Part) -> None:
        """The batch was handed over by an earlier daemon: the file has it."""
        self._done(turn, batch)
        self._advance()
        if self._moved:
            self._keep()

    def lane_ended(self, ended: LaneEnded) -> None:
        """A lane ends here."""
        self._log.append(ended)
        self._advance()

    def pool_begins(self, pool: PoolBegun) -> None:
        """A pool begins here. The position stays at its start until all of it was handed over."""
        self._log.append(pool)
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
        """Move the position as far as everything before it was handed over."""
        while self._log:
            item = self._log[0]
            if isinstance(item, LaneEnded):
                self._cursor.end(item)
                self._moved[item.lane] = item.index
            elif isinstance(item, PoolBegun):
                self._note_moved(self._cursor.begin_pool(item))
            elif item.left:
                return
            elif item.batches.lane == POOL_LANE:
                self._read_pooled(item.batches)
            else:
                self._cursor.read(item.batches)
                self._moved[item.batches.lane] = item.batches.index + item.batches.batches
            self._log.popleft()

    def _read_pooled(self, batches: SentElsewhere) -> None:
        """Move behind batches of a pool. The file has no position within one: it names what was handed over of it."""
        moved = self._cursor.read_pooled(batches.batches)
        self._note_moved(moved)
        if moved:
            self._moved[POOL_LANE] = batches.index + batches.batches

    def _note_moved(self, lanes: Iterable[int]) -> None:
        """Have the file told where these lanes stand, which a pool has moved."""
        for lane in lanes:
            self._moved[lane] = self._cursor.places.get(lane, (0, b""))[0]

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
