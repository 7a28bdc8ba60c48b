"""Ranks that come together to read one stream: who is there, who may join, and when the stream begins."""

from __future__ import annotations

from penstock_proto import PenstockError, ProtocolError, RankTaken, StateMismatch
from penstock_proto.messages import MissingRanks

from .ask import Ask
from .consumer import Consumer
from .rank_delivery import off_border
from .stream import Stream


class Rendezvous:
    """The ranks of one group, and the stream that begins when all are there.

    What a rank asks for is compared with the others' when all are there, and where it differs all of them are told: of
    a job whose ranks disagree none is left waiting for one that was refused.
    """

    def __init__(self, stream: Stream, world_size: int) -> None:
        self.stream = stream
        self._world_size = world_size
        self._members: dict[int, tuple[Consumer, Ask]] = {}
        self._told: list[int] = []

    @property
    def over(self) -> bool:
        """Whether the stream has ended or failed, so that a new one is to begin."""
        return self.stream.error is not None or self.stream.closing

    def check(self, ask: Ask) -> None:
        """Refuse a rank that cannot join, whatever the others ask for.

        Raises:
            RankTaken: the rank is there, or has left.
            StateMismatch: it begins a job, but the others were cut off from one and come back further on.
        """
        name, group = self.stream.feed.name, _group(ask)
        taken = self._members.get(ask.rank)
        if taken is not None and taken[0].gone:
            raise RankTaken(
                f"rank {ask.rank} of {self._world_size}{group} has left this stream, which the others still read: end "
                "them too, and begin together again",
                feed=name,
            )
        if taken is not None:
            raise RankTaken(
                f"rank {ask.rank} of {self._world_size}{group} reads this feed already: give each training job a group "
                "of its own, and each of its processes its rank",
                feed=name,
            )
        for _, other in self._members.values():
            if other.again and not ask.again and _place(other) != _place(ask):
                raise _mismatch(ask, other, name)

    def give_way(self, ask: Ask) -> None:
        """Fail the ranks that wait to begin a job, if this one comes back after a cut and was further on. They cannot
        join its job."""
        for _, other in list(self._members.values()):
            further = ask.again and not other.again and _place(other) != _place(ask)
            if further and not self.stream.consumers:
                self.stream.fail(_mismatch(other, ask, self.stream.feed.name))
                return

    def compare(self, ask: Ask) -> None:
        """If this is the last rank, check whether all ask for the same. If not, the others get the error as well.

        Raises:
            StateMismatch: two ranks begin at different places, or one begins within a round.
            ProtocolError: two ranks ask for different last rounds.
        """
        asks = [ask, *(other for _, other in self._members.values())]
        if len(asks) < self._world_size:
            return
        error = self._disagreement(asks)
        if error is not None:
            self.stream.fail(error)
            raise error

    def join(self, consumer: Consumer, ask: Ask) -> None:
        """Add a rank. The stream begins with the last one."""
        if self._told and len(self._members) == self._world_size - 1:
            self._tell(())  # the last one does not wait, and has not heard yet that its session is open
        self._members[ask.rank] = consumer, ask
        self.stream.outlet.waiting.append(consumer)
        if len(self._members) == self._world_size:
            members = [self._members[rank] for rank in range(self._world_size)]
            self.stream.start([consumer for consumer, _ in members], [ask.position for _, ask in members])

    def name_missing(self) -> None:
        """Tell the ranks that are there which ones are missing, so that they can log it, or give up."""
        there = [consumer.number for consumer, _ in self._members.values()]
        if not self.stream.consumers and there != self._told:
            self._told = there
            self._tell(tuple(rank for rank in range(self._world_size) if rank not in self._members))

    def leave(self, consumer: Consumer) -> None:
        """A rank has gone again before the stream began."""
        if not self.stream.consumers and any(member is consumer for member, _ in self._members.values()):
            del self._members[consumer.rank]

    def _tell(self, missing: tuple[int, ...]) -> None:
        self.stream.outlet.tell(MissingRanks(missing), self.stream.outlet.waiting)

    def _disagreement(self, asks: list[Ask]) -> PenstockError | None:
        """Return the error if one differs from the first, or stands within a round; else None."""
        name, one = self.stream.feed.name, asks[0]
        for other in asks[1:]:
            if one.pad != other.pad:
                return ProtocolError(
                    f"rank {one.rank}{_group(one)} asks for last_round={_last_round(one)}, but rank {other.rank} for "
                    f"last_round={_last_round(other)}: all ranks must ask for the same",
                    feed=name,
                )
            if not one.again and _place(one) != _place(other):
                return _mismatch(one, other, name)
        for one in asks:
            error = off_border(one.position, self._world_size, name)
            if error is not None and not (one.pad and self._may_end_at(one)):
                return StateMismatch(f"rank {one.rank}{_group(one)}: {error.message}", feed=name)
        return None

    def _may_end_at(self, ask: Ask) -> bool:
        """Whether its position may be the end of an epoch. If that is not known yet, delivery finds out."""
        return self.stream.feed.info.batches in (None, _place(ask)[1])


def _group(ask: Ask) -> str:
    return f" of group {ask.group!r}" if ask.group else ""


def _mismatch(one: Ask, other: Ask, feed: str) -> StateMismatch:
    return StateMismatch(
        f"rank {one.rank}{_group(one)} begins {_said(one)}, but rank {other.rank} {_said(other)}: all ranks must "
        "begin at the start, or load the state of the same step",
        feed=feed,
    )


def _place(ask: Ask) -> tuple[int, int]:
    place = ask.position
    return (place.epoch, place.batches + place.skip) if place is not None else (0, 0)


def _last_round(ask: Ask) -> str:
    return '"pad"' if ask.pad else '"drop"'


def _said(ask: Ask) -> str:
    again = "again " if ask.again else ""
    if ask.position is None:
        return f"{again}at the start"
    epoch, batches = _place(ask)
    return f"{again}after batch {batches} of epoch {epoch}"
