"""One consumer of a stream: what it may be sent, was sent, was handed over, and has released. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from msgspec import Struct

from penstock_proto import ProtocolError
from penstock_proto.batches.position import Position

from .leases import Lease
from .memory import MANY, Share
from .stripe import Source
from .transitions import States, Table, impossible
from .turn import Part


class SentSlab(Struct, frozen=True):
    """A slab that was sent: its number, its size in bytes, and its contents."""

    seq: int
    nbytes: int
    epoch: int
    source: Source
    part: Part


class ConsumerState(States):
    """The states of a consumer: whether it reads an epoch."""

    IDLE = "it reads no epoch"
    READING = "it has begun an epoch, and wants its batches"
    GONE = "it wants nothing more, but tensors may still live over its slots"


IDLE, READING, GONE = ConsumerState

CONSUMER_STATES: Table[ConsumerState] = {
    IDLE: {
        READING: "Begin",
        GONE: "Close, or its connection is cut",
    },
    READING: {
        IDLE: "Leave, or End was sent, or the stream failed",
        GONE: "Close, or its connection is cut",
    },
    GONE: {},
}
"""The states that a consumer can go to from each state, and the reasons."""


class Consumer:
    """Counts the slabs of one consumer, and checks its acknowledgements against them.

    Args:
        number: the consumer's id.
        stream: the number of the stream that it reads.
        feed: the name of the stream's feed.
        share: says how many slabs may be under way to it (`credit`) and under its tensors (`quota`).
        credit_bytes: the most bytes that may be under way; one slab is always allowed.
        holds_handed: whether a slab keeps its slot until the consumer releases it (shared memory). If not, the slot is
            free when the slab is handed over.
        rank: its rank, which is the number of its batch in each round.
        world_size: how many ranks its job has; 0 without ranks.
        group: the group that it is in, or its ranks are.
        identity: stays the same when the client comes back, as another consumer.
        machine: the machine on which it runs; "": that of the daemon.
        most: the most `credit` and `quota` that it takes, whatever its stream's share is.

    Attributes:
        state: whether it reads an epoch, or is gone.
        epoch: the epoch that it reads, or would read next.
        begun: the epoch that it began last, or None.
        slabs, batches, rows: how many of that epoch it was sent.
        first: the epoch, and the round in it, with which its batches begin.
        told: an epoch, and how many batches of it the consumer already knows of.
        sent, handed: how many slabs were sent, and handed over.
        ends, ended: how many Ends were sent, and how many the consumer has acknowledged.
        out: the slots that it holds, by the sequence number of the slab.
        moved: whether it was told that it cannot go on in this stream.
        start: where the daemon lets it begin, because it asked to begin where others are; None: where it asked.
    """

    def __init__(
        self,
        number: int,
        stream: int,
        feed: str,
        share: Share,
        *,
        credit_bytes: int,
        holds_handed: bool,
        rank: int = 0,
        world_size: int = 0,
        group: str = "",
        identity: bytes = b"",
        machine: str = "",
        most: tuple[int, int] = (MANY, MANY),
    ) -> None:
        self.number = number
        self.identity = identity
        self.machine = machine
        self.stream = stream
        self._most = most
        self.share = self._taken(share)
        self.rank = rank
        self.world_size = world_size
        self.group = group
        self.epoch = 0
        self.state = IDLE
        self.begun: int | None = None
        self.slabs = self.batches = self.rows = 0
        self.first = (0, 0)
        self.told = (0, 0)
        self.sent = 0
        self.handed = 0
        self.ends = 0
        self.ended = 0
        self.out: dict[int, Lease] = {}
        self.moved = False
        self.start: Position | None = None
        self._feed = feed
        self._credit_bytes = credit_bytes
        self._holds_handed = holds_handed
        self._unhanded: deque[SentSlab] = deque()
        self._unhanded_bytes = 0
        self._resized_at = 0
        self._out_before = 0
        self._returned_before = 0

    def become(self, state: ConsumerState) -> None:
        """Go to this state.

        Raises:
            ImpossibleTransition: the table has no such transition.
        """
        if state not in CONSUMER_STATES[self.state]:
            raise impossible(self.state, state)
        self.state = state

    @property
    def reading(self) -> bool:
        """Whether it has begun its epoch."""
        return self.state is READING

    @property
    def gone(self) -> bool:
        """Whether it wants nothing more."""
        return self.state is GONE

    @property
    def under_way(self) -> int:
        """How many slabs were sent and not handed over."""
        return len(self._unhanded)

    def batches_under_way(self, epoch: int) -> int | None:
        """Return how many batches were sent and not handed over; None if some are not of this epoch."""
        if any(sent.epoch != epoch for sent in self._unhanded):
            return None
        return sum(sent.part.batches for sent in self._unhanded)

    def awaits(self, epoch: int) -> bool:
        """Whether slabs of the epoch are under way to it, not counting those that `take_unhanded` has returned."""
        return any(sent.epoch == epoch and sent.seq >= self._returned_before for sent in self._unhanded)

    def newly_handed(self, handed: int) -> list[SentSlab]:
        """Return the slabs that are newly handed over once the first `handed` are, without those that `take_unhanded`
        has returned."""
        return [sent for sent in self._unhanded if self._returned_before <= sent.seq < handed]

    def take_unhanded(self, handed: int) -> Iterator[SentSlab]:
        """Return the slabs after the first `handed`, which the consumer will not hand over. Each is returned only once.
        The consumer still holds their slots."""
        first, self._returned_before = max(handed, self._returned_before), self.sent
        return (sent for sent in self._unhanded if sent.seq >= first)

    @property
    def delivered(self) -> bool:
        """Whether it has all that it was promised: it reads no epoch, and nothing is under way."""
        return self.gone or (not self.reading and (self.handed, self.ended) == (self.sent, self.ends))

    def begin(self, epoch: int) -> None:
        """Begin to read this epoch.

        Raises:
            ProtocolError: it reads an epoch already, or has read this one before.
        """
        if self.gone or self.reading or epoch < self.epoch:
            raise ProtocolError(f"epoch {epoch} cannot begin: epochs begin one after another", feed=self._feed)
        self.become(READING)
        self.epoch = self.begun = epoch
        self.slabs = self.batches = self.rows = 0

    def leave(self) -> None:
        """Leave the epoch: the consumer has read it, or wants no more of it."""
        self.become(IDLE)
        self.epoch += 1

    def stop_reading(self) -> None:
        """Stop reading: the stream has failed, or has ended."""
        if self.reading:
            self.become(IDLE)

    def on_gone(self) -> None:
        """Note that the consumer wants nothing more."""
        if not self.gone:
            self.become(GONE)

    @property
    def may_hold(self) -> int:
        """How many slots are reserved for it: if it is gone, those that it still has."""
        most = self.share.credit + self.share.quota
        return min(len(self.out), most) if self.gone else most

    def has_credit_for(self, nbytes: int) -> bool:
        """Whether a slab of this many bytes may be sent now."""
        if len(self.out) - self._out_before >= self.share.credit + self.share.quota:
            return False  # it aliases more than its quota, and its memory must stay bounded
        return not self.under_way or (
            self.under_way < self.share.credit and self._unhanded_bytes + nbytes <= self._credit_bytes
        )

    def send(self, epoch: int, source: Source, part: Part, nbytes: int) -> int:
        """Note that a slab with this part of the source is sent. The caller holds the source's slot for the consumer.

        Returns:
            The sequence number of the slab.
        """
        seq = self.sent
        self.sent += 1
        self.slabs += 1
        self.batches += part.batches
        self.rows += part.rows
        self._unhanded.append(SentSlab(seq, nbytes, epoch, source, part))
        self._unhanded_bytes += nbytes
        self.out[seq] = source.slot
        return seq

    def check(self, handed: int) -> None:
        """Refuse a count of handed slabs that is larger than the number sent.

        Raises:
            ProtocolError: names both.
        """
        if handed > self.sent:
            raise ProtocolError(f"{handed} slabs handed of {self.sent} sent", feed=self._feed)

    def believed(self, handed: int) -> int:
        """Return how many slabs count as handed over by a consumer that is gone: `handed` if that is possible, else the
        number that it last acknowledged."""
        return handed if handed <= self.sent else self.handed

    def check_acknowledged(self, handed: int, released: tuple[int, ...], ended: int) -> None:
        """Refuse an impossible acknowledgement.

        Raises:
            ProtocolError: names the counts that are impossible.
        """
        if not self.handed <= handed <= self.sent:
            raise ProtocolError(f"{handed} slabs handed of {self.sent} sent, after {self.handed}", feed=self._feed)
        if not self.ended <= ended <= self.ends:
            raise ProtocolError(f"{ended} Ends of {self.ends}, after {self.ended}", feed=self._feed)
        before: set[int] = set()
        for seq in released:
            if seq >= handed or not self._holds_handed:
                raise ProtocolError(f"slab {seq} is released before it is handed", feed=self._feed)
            if seq not in self.out or seq in before:
                raise ProtocolError(f"slab {seq} is released twice, or was never sent", feed=self._feed)
            before.add(seq)

    def acknowledge(self, handed: int, released: tuple[int, ...], ended: int) -> list[Lease]:
        """Process an acknowledgement that `check_acknowledged` has accepted.

        Args:
            handed: how many slabs are handed over, or void because their epoch was left, in all.
            released: the slabs over which no tensor lives any longer.
            ended: how many Ends came, in all.

        Returns:
            The slots that the consumer no longer holds.
        """
        self.handed, self.ended = handed, ended
        slots: list[Lease] = []
        while self._unhanded and self._unhanded[0].seq < handed:
            sent = self._unhanded.popleft()
            self._unhanded_bytes -= sent.nbytes
            if not self._holds_handed:
                slots.append(self._take_slot(sent.seq))
        slots += [self._take_slot(seq) for seq in released]
        return slots

    def take_slots(self) -> list[Lease]:
        """Return all slots that the consumer still has: it is gone with all its tensors."""
        return [self._take_slot(seq) for seq in list(self.out)]

    def resize(self, share: Share) -> None:
        """Give the consumer this share. It keeps the slots that it has until it releases them."""
        self.share = self._taken(share)
        self._resized_at, self._out_before = self.sent, len(self.out)

    def _taken(self, share: Share) -> Share:
        credit, quota = self._most
        return replace(share, credit=min(share.credit, credit), quota=min(share.quota, quota))

    def _take_slot(self, seq: int) -> Lease:
        self._out_before -= seq < self._resized_at
        return self.out.pop(seq)
