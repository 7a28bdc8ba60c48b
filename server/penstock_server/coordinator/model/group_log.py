"""The log of a group, for the state file: its position, and the consumers that may have been handed more.

No consumer of a group knows the position of the stream. So the delivery policy reports to the log which batches it
delivers, in stream order, and which were handed over, in any order. The position is the end of the longest part of the
stream, from its beginning, that was handed over completely. Each change goes out as `SaveGroup` at once: before the
credit that it frees is used, before the End that it makes possible, and before a consumer is told that its stream is
open.

So if the daemon ends, the file lacks at most batches that were under way to a consumer. A consumer remembers that many
batches, and when it comes back it names those that it was handed. Until then the stream might deliver them again. So a
stream that begins from a file delivers nothing until all consumers in the file have come back or have been given up.

No I/O here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from penstock_proto import ProtocolError
from penstock_proto.batches.cursor import Cursor
from penstock_proto.batches.layout import POOL_LANE
from penstock_proto.batches.position import Position
from penstock_proto.messages import FeedInfo, Had, LaneEnded, LanePlace, PoolBegun, SentElsewhere

from . import commands as do
from .consumer import SentSlab
from .ranges import Ranges
from .stripe import Source
from .turn import Part, Turn

MOST_HAD = 4096
"""The most batches that a consumer may have been handed without the daemon's knowledge: the greatest possible
credit."""


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A group in a state file.

    Attributes:
        position: everything before it was handed over.
        beyond: the batches after it that were handed over: lane, number of the first batch, number of batches.
        consumers: the consumers that were connected.
    """

    position: Position
    beyond: tuple[tuple[int, int, int], ...]
    consumers: frozenset[bytes]


@dataclass(slots=True, eq=False)
class _Delivered:
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
        raise ProtocolError(f"a consumer says that it was handed {batches} batches; the limit is {MOST_HAD}", feed=feed)


class GroupLog:
    """The position of one group, and the command that saves each change of it.

    Args:
        feed: the feed that the group reads.
        group: its name.
        saved: the group in the state file, from which it goes on; None: it begins at epoch 0.
        out: where commands go.

    Attributes:
        awaited: consumers that may have been handed batches that the file does not name.
    """

    def __init__(self, feed: FeedInfo, group: str, saved: SavedGroup | None, out: Callable[[do.Command], None]) -> None:
        self.awaited = set(saved.consumers) if saved else set()
        self._feed = feed
        self._group = group
        self._do = out
        self._cursor = Cursor(saved.position if saved else Position(feed, 0))
        self._beyond: defaultdict[int, Ranges] = defaultdict(Ranges)
        """Batches that were handed over beyond the position, by lane."""
        self._log: deque[_Delivered | LaneEnded | PoolBegun] = deque()
        self._delivered: dict[tuple[int, int], _Delivered] = {}
        self._moved: dict[int, int] = {}
        self._over = False
        for batches in saved.beyond if saved else ():
            self._add_beyond(*batches)

    # --- consumers ---

    def on_arrived(self, consumer: bytes, had: Iterable[Had]) -> None:
        """Note that a consumer has come. If it was awaited, `had` are the last slabs that it was handed."""
        beyond = []
        if consumer in self.awaited:
            self.awaited.remove(consumer)
            beyond = [(one.lane, one.index, one.batches) for one in had if one.epoch == self._cursor.epoch]
        for batches in beyond:
            self._add_beyond(*batches)
        self._save(beyond, arrived=consumer)

    def on_parted(self, consumer: bytes) -> None:
        """Note that a consumer has gone: batches that it was not handed go to others."""
        self._save(parted=consumer)

    def give_up(self) -> None:
        """Give up the consumers that are still awaited: they will not come back."""
        awaited, self.awaited = self.awaited, set()
        for consumer in sorted(awaited):
            self.on_parted(consumer)

    def end(self, forget: bool) -> None:
        """Stop logging, as the stream has ended. With `forget`, have the group deleted from the file."""
        if not self._over and forget:
            self._do(do.ForgetGroup(self._feed.name, self._group))
        self._over = True

    # --- the stream, in its order ---

    def begin(self, epoch: int, digest: bytes = b"") -> None:
        """Note that the stream is in this epoch, whose list of splits has this digest."""
        fresh = epoch > self._cursor.epoch
        if fresh:
            self._cursor.begin(epoch)
            self._log.clear()
            self._delivered.clear()
            self._moved.clear()
            self._beyond.clear()
        elif digest == self._cursor.digest:
            return
        self._cursor.digest = digest
        self._save(fresh=fresh)

    def was_handed(self, turn: Turn, part: Part) -> bool:
        """Whether the part's first batch was handed over by an earlier daemon."""
        return turn.index_at(part.first) in self._beyond[turn.lane]

    def on_delivery(self, epoch: int, turn: Turn, part: Part) -> None:
        """Note that the part's first batch is delivered now. Its other batches follow one by one.

        All of them are logged together, because the lane's record belongs after the last one.
        """
        first = turn.index_at(part.first)
        if (turn.lane, first) not in self._delivered:
            sent = SentElsewhere(epoch, turn.lane, first, part.batches, part.rows, part.record)
            if turn.striped:  # a worker reports several batches with one record
                place = LanePlace(turn.lane, first + part.batches, part.record)
                sent = replace(sent, record=b"", lanes=(turn.lane,), places=(place,) if part.record else ())
            delivered = _Delivered(sent, part.batches)
            self._log.append(delivered)
            self._delivered.update(((turn.lane, index), delivered) for index in range(first, first + part.batches))

    def pass_over(self, turn: Turn, batch: Part) -> None:
        """Pass over a batch that was handed over by an earlier daemon: the file has it."""
        self._count_handed(turn, batch)
        self._advance()
        if self._moved:
            self._save()

    def on_lane_ended(self, ended: LaneEnded) -> None:
        """Note that a lane ends here."""
        self._log.append(ended)
        self._advance()

    def on_pool_begun(self, pool: PoolBegun) -> None:
        """Note that a pool begins here. The position stays at its start until all of the pool was handed over."""
        self._log.append(pool)
        self._advance()

    def on_handed(self, sent: Iterable[SentSlab]) -> None:
        """Note that these slabs were handed over."""
        beyond = [self._count_handed(one.source, one.part) for one in sent if one.epoch == self._cursor.epoch]
        if beyond:
            self._advance()
            self._save(beyond)

    # --- helpers ---

    def _add_beyond(self, lane: int, index: int, batches: int) -> None:
        self._beyond[lane].add(index, index + batches)

    def _count_handed(self, turn: Source, batch: Part) -> tuple[int, int, int]:
        lane, index = turn.lane_at(batch.first), turn.index_at(batch.first)
        self._delivered.pop((lane, index)).left -= 1
        return lane, index, 1

    def _advance(self) -> None:
        """Move the position up to the first batch that was not handed over."""
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
        """Move past batches of a pool. The file has no position within a pool: it names the batches of it that were
        handed over."""
        moved = self._cursor.read_pooled(batches.batches)
        self._note_moved(moved)
        if moved:
            self._moved[POOL_LANE] = batches.index + batches.batches

    def _note_moved(self, lanes: Iterable[int]) -> None:
        """Note that the file has to learn the positions of these lanes, which a pool has moved."""
        for lane in lanes:
            self._moved[lane] = self._cursor.places.get(lane, (0, b""))[0]

    def _save(
        self,
        beyond: Iterable[tuple[int, int, int]] = (),
        *,
        fresh: bool = False,
        arrived: bytes = b"",
        parted: bytes = b"",
    ) -> None:
        if self._over:
            return
        cursor, moved = self._cursor, self._moved
        self._moved = {}
        self._do(
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
                passed=tuple(moved.items()),
                beyond=tuple(one for one in beyond if one[1] + one[2] > moved.get(one[0], 0)),
                arrived=arrived,
                parted=parted,
            )
        )
