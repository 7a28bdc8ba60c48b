"""What one consumer of a stream may be sent, was sent, was handed, and has released. Counts only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from penstock_proto import ProtocolError

from .memory import Share
from .order import Part, Turn

if TYPE_CHECKING:
    from .stream import Stream


class Sent(Struct, frozen=True):
    """A slab that was sent: its number, its bytes, and what it holds of which epoch."""

    seq: int
    nbytes: int
    epoch: int
    turn: Turn
    part: Part


class Consumer:
    """See the file's head.

    Args:
        number: the consumer's id.
        stream: what it reads, whose share says how many slabs may be under way (`credit`) and under tensors (`quota`).
        credit_bytes: most bytes under way; one slab is always allowed.
        holds_handed: whether a handed slab stays in its slot until released (shared memory) or is free when handed.
        rank: which batch of each round is its own.
        identity: the same for a client that comes back, and so has several consumers one after another.

    Attributes:
        epoch: the one that it reads, or would read next.
        reading: whether it has begun that.
        begun: the one that it began last, or None.
        slabs, batches, rows: sent of that epoch.
        first: the epoch and the round in it from which on it is sent batches.
        told: the epoch and the number of batches of it that it knows of.
        gone: whether it wants nothing more.
        sent, handed: slabs.
        ends, ended: Ends that were sent, and that the consumer says came.
        out: the turns whose slabs have not come back, by sequence number.
    """

    def __init__(
        self,
        number: int,
        stream: Stream,
        *,
        credit_bytes: int,
        holds_handed: bool,
        rank: int = 0,
        identity: bytes = b"",
    ) -> None:
        self.number = number
        self.identity = identity
        self.stream = stream
        self.share = stream.share
        self.rank = rank
        self.epoch = 0
        self.reading = False
        self.begun: int | None = None
        self.slabs = self.batches = self.rows = 0
        self.first = (0, 0)
        self.told = (0, 0)
        self.gone = False
        self.sent = 0
        self.handed = 0
        self.ends = 0
        self.ended = 0
        self.out: dict[int, Turn] = {}
        self._feed = stream.feed.name
        self._credit_bytes = credit_bytes
        self._holds_handed = holds_handed
        self._unhanded: deque[Sent] = deque()
        self._unhanded_bytes = 0
        self._resized_at = 0
        self._out_before = 0
        self._given_back = 0

    @property
    def under_way(self) -> int:
        """Slabs that were sent and not handed."""
        return len(self._unhanded)

    def awaits(self, epoch: int) -> bool:
        """Whether slabs of the epoch are under way to it that it has not given back."""
        return any(sent.epoch == epoch and sent.seq >= self._given_back for sent in self._unhanded)

    def handing(self, handed: int) -> list[Sent]:
        """What is handed over if the first `handed` slabs are: of those under way the ones not given back."""
        return [sent for sent in self._unhanded if self._given_back <= sent.seq < handed]

    def give_back(self, handed: int) -> Iterator[Sent]:
        """What was sent behind the first `handed` slabs will not be handed over: each of these, once."""
        first, self._given_back = max(handed, self._given_back), self.sent
        return (sent for sent in self._unhanded if sent.seq >= first)

    @property
    def delivered(self) -> bool:
        """Whether it has all that was promised: it reads no epoch, and nothing is under way."""
        return self.gone or (not self.reading and (self.handed, self.ended) == (self.sent, self.ends))

    def begin(self, epoch: int) -> None:
        """It wants this epoch.

        Raises:
            ProtocolError: it reads one, or has read this one.
        """
        if self.gone or self.reading or epoch < self.epoch:
            raise ProtocolError(f"epoch {epoch} cannot begin: epochs begin one after another", feed=self._feed)
        self.epoch = self.begun = epoch
        self.reading = True
        self.slabs = self.batches = self.rows = 0

    def leave(self) -> None:
        """It has read its epoch, or wants no more of it."""
        self.epoch, self.reading = self.epoch + 1, False

    def has_credit_for(self, nbytes: int) -> bool:
        """Whether a slab of so many bytes may be sent now."""
        if len(self.out) - self._out_before >= self.share.credit + self.share.quota:
            return False  # only of a consumer that aliases more than it may: its memory stays bounded too
        return not self.under_way or (
            self.under_way < self.share.credit and self._unhanded_bytes + nbytes <= self._credit_bytes
        )

    def send(self, epoch: int, turn: Turn, part: Part, nbytes: int) -> int:
        """A slab with this part of the turn is sent; returns its sequence number."""
        seq = self.sent
        self.sent += 1
        self.slabs += 1
        self.batches += part.batches
        self.rows += part.rows
        self._unhanded.append(Sent(seq, nbytes, epoch, turn, part))
        self._unhanded_bytes += nbytes
        self.out[seq] = turn
        turn.out += 1
        return seq

    def check(self, handed: int) -> None:
        """Refuse a count of handed slabs that is more than were sent.

        Raises:
            ProtocolError: names both.
        """
        if handed > self.sent:
            raise ProtocolError(f"{handed} slabs handed of {self.sent} sent", feed=self._feed)

    def believed(self, handed: int) -> int:
        """How many slabs count as handed over of a consumer that is gone and is said to have been handed so many: what
        it said last, where that cannot be."""
        return handed if handed <= self.sent else self.handed

    def check_acknowledged(self, handed: int, released: tuple[int, ...], ended: int) -> None:
        """Refuse what cannot be acknowledged.

        Raises:
            ProtocolError: counts that cannot be.
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

    def acknowledge(self, handed: int, released: tuple[int, ...], ended: int) -> list[Turn]:
        """`handed` slabs in all are handed (or void), over those in `released` no tensor lives, `ended` Ends came: as
        `check_acknowledged` has found possible. Returns the turns of which no slab is out any more."""
        self.handed, self.ended = handed, ended
        back: list[Turn] = []
        while self._unhanded and self._unhanded[0].seq < handed:
            sent = self._unhanded.popleft()
            self._unhanded_bytes -= sent.nbytes
            if not self._holds_handed:
                self._take_back(sent.seq, back)
        for seq in released:
            self._take_back(seq, back)
        return back

    def lost(self) -> list[Turn]:
        """The consumer is gone, and every tensor with it. Returns the turns of which slabs were out."""
        back: list[Turn] = []
        for seq in list(self.out):
            self._take_back(seq, back)
        return back

    def resize(self, share: Share) -> None:
        """From now on it has this share. What is out stays out till it is released."""
        self.share = share
        self._resized_at, self._out_before = self.sent, len(self.out)

    def _take_back(self, seq: int, back: list[Turn]) -> None:
        turn = self.out.pop(seq)
        turn.out -= 1
        self._out_before -= seq < self._resized_at
        if not turn.out:
            back.append(turn)
