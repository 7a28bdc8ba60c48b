"""Ranks that come together to read one stream: which of them are there, which may join, and when the stream begins."""

from __future__ import annotations

from collections.abc import Callable

from penstock_proto import PenstockError, ProtocolError, RankTaken, StateMismatch
from penstock_proto.messages import MissingRanks

from ..delivery.rank_job import off_border
from ..model.consumer import Consumer
from ..model.open_request import OpenRequest
from ..stream.stream import Stream


class Rendezvous:
    """The ranks of one group, and the stream that they read when all are there and ready.

    A rank is ready when it is certain where it begins: it has opened at a position, or it has begun to read. A rank
    that has only connected, at the start of the stream, may still load a state. It then opens another session, which
    replaces this one.

    When all ranks are ready, their requests are compared. If they differ, every rank gets the same error. So no rank is
    left waiting for one that was refused.

    Args:
        stream: where the ranks wait.
        world_size: how many there are.
        begin: called with all ranks and their requests: begins this stream, or lets them join another one. Returns the
            stream that they read.

    Attributes:
        stream: the stream in which the ranks wait, or which they read.
    """

    def __init__(
        self, stream: Stream, world_size: int, begin: Callable[[list[Consumer], list[OpenRequest]], Stream]
    ) -> None:
        self.stream = stream
        self._world_size = world_size
        self._begin = begin
        self._begun = False
        self._members: dict[int, tuple[Consumer, OpenRequest]] = {}
        self._told: tuple[list[int], list[int]] = [], []

    @property
    def over(self) -> bool:
        """Whether the ranks read no stream any longer, so that a new one is to begin."""
        gone = self._begun and all(consumer.gone for consumer, _ in self._members.values())
        return gone or self.stream.error is not None or self.stream.closed

    @property
    def waits(self) -> bool:
        """Whether the ranks still wait for one another."""
        return not self._begun and not self.over

    def admit(self, ask: OpenRequest) -> None:
        """Refuse a rank that cannot join, whatever the others still ask for. If instead the others cannot join the job
        that it comes back to, fail them: the stream is over then.

        Raises:
            RankTaken: the rank is there, or has left.
            StateMismatch: it begins a job, but the others were cut off from one and come back further on.
        """
        taken, _ = self._members.get(ask.rank, (None, None))
        if taken is not None:
            said = (
                "reads this feed already: give each training job a group of its own, and each of its processes its rank"
            )
            if taken.gone:
                said = "has left this stream, which the others still read: end them too, and begin together again"
            raise RankTaken(f"rank {ask.rank} of {self._world_size}{_group(ask)} {said}", feed=self._feed)
        if self._is_certain(ask):
            self._prefer_those_who_come_back(ask)

    def join(self, consumer: Consumer, ask: OpenRequest) -> None:
        """Add a rank. If all are ready now, the stream begins.

        Raises:
            StateMismatch: two ranks begin at different places, or one begins within a round. The stream has failed.
            ProtocolError: two ranks ask for different last rounds. The stream has failed.
        """
        if self._is_certain(ask) and (error := self._disagreement(ask)) is not None:
            self.stream.fail(error)
            raise error
        waiting = list(self.stream.outlet.waiting)  # without this one: it was not told yet that its session is open
        self._members[ask.rank] = consumer, ask
        self.stream.outlet.waiting.append(consumer)
        self._start_if_ready(waiting)

    def check_begin(self, consumer: Consumer) -> None:
        """Refuse a rank that begins to read, but must not, before anything has changed.

        Raises:
            StateMismatch: as for `admit`.
        """
        ask = self._waiting_ask(consumer)
        if ask is not None:
            self._check_nobody_comes_back(ask)

    def on_begun(self, consumer: Consumer) -> None:
        """Note that a rank, which `check_begin` has let pass, has begun to read, and so is ready. If all are ready now,
        the stream begins, or fails if their requests differ."""
        ask = self._waiting_ask(consumer)
        if ask is None or consumer.begun is None:
            return
        self._prefer_those_who_come_back(ask)
        if self.over:
            return
        if (error := self._disagreement(ask)) is not None:
            self.stream.fail(error)
        else:
            self._start_if_ready(self.stream.outlet.waiting)

    def name_missing(self) -> None:
        """Tell the ranks that are there which ones are missing or not ready, so that they can log it, or give up."""
        if self._begun:
            return
        there = [consumer.number for consumer, _ in self._members.values()]
        ready = {ask.rank for ask in self._ready}
        missing = [rank for rank in range(self._world_size) if rank not in ready]
        if (there, missing) != self._told:
            self._told = there, missing
            self._tell(missing, self.stream.outlet.waiting)

    def remove(self, consumer: Consumer) -> None:
        """Remove a rank that has gone before the stream began."""
        if not self._begun and any(member is consumer for member, _ in self._members.values()):
            del self._members[consumer.rank]

    def _waiting_ask(self, consumer: Consumer) -> OpenRequest | None:
        """Return the request of a rank that is there, if the stream has not begun; else None."""
        member, ask = self._members.get(consumer.rank, (None, None))
        return None if member is not consumer or self._begun or self.over else ask

    def _is_certain(self, ask: OpenRequest) -> bool:
        """Whether it is certain where the rank begins, even before it begins to read."""
        return _place(ask) != (0, 0) or self._world_size == 1

    @property
    def _ready(self) -> list[OpenRequest]:
        """The requests of the ranks that are there and ready."""
        return [ask for consumer, ask in self._members.values() if consumer.begun is not None or self._is_certain(ask)]

    def _start_if_ready(self, told: list[Consumer]) -> None:
        """Begin the stream if all ranks are there and ready. If ranks were told that some are missing, tell those in
        `told` that none is."""
        if len(self._ready) == self._world_size:
            if self._told != ([], []):
                self._tell([], told)
            members = [self._members[rank] for rank in range(self._world_size)]
            self._begun = True
            self.stream = self._begin([consumer for consumer, _ in members], [ask for _, ask in members])

    def _tell(self, missing: list[int], consumers: list[Consumer]) -> None:
        self.stream.outlet.tell(MissingRanks(tuple(missing)), consumers)

    def _prefer_those_who_come_back(self, ask: OpenRequest) -> None:
        """Compare a rank that is ready now with each that was so before. If one of the two comes back to a job from
        which it was cut off, and the other begins elsewhere, the one that comes back is right: refuse this rank, or
        fail the others.

        Raises:
            StateMismatch: another one comes back.
        """
        self._check_nobody_comes_back(ask)
        for other in self._ready:
            if ask.again and not other.again and _place(other) != _place(ask):
                self.stream.fail(self._mismatch(other, ask))
                return

    def _check_nobody_comes_back(self, ask: OpenRequest) -> None:
        """Refuse a rank that does not come back to a job, if another one does, and elsewhere.

        Raises:
            StateMismatch: one does.
        """
        for other in self._ready:
            if other.again and not ask.again and _place(other) != _place(ask):
                raise self._mismatch(ask, other)

    @property
    def _feed(self) -> str:
        return self.stream.feed.name

    def _disagreement(self, ask: OpenRequest) -> PenstockError | None:
        """If this rank is the last one to be ready, return the error if its request differs from another one, or if
        one begins within a round; else None."""
        others = [other for other in self._ready if other is not ask]
        if len(others) < self._world_size - 1:
            return None
        for other in others:
            if ask.pad != other.pad:
                return ProtocolError(
                    f"rank {ask.rank}{_group(ask)} asks for last_round={_last_round(ask)}, but rank {other.rank} for "
                    f"last_round={_last_round(other)}: all ranks must ask for the same",
                    feed=self._feed,
                )
            if not ask.again and _place(ask) != _place(other):
                return self._mismatch(ask, other)
        for one in (ask, *others):
            error = off_border(one.position, self._world_size, self._feed)
            if error is not None and not (one.pad and self._may_end_at(one)):
                return StateMismatch(f"rank {one.rank}{_group(one)}: {error.message}", feed=self._feed)
        return None

    def _mismatch(self, one: OpenRequest, other: OpenRequest) -> StateMismatch:
        return StateMismatch(
            f"rank {one.rank}{_group(one)} begins {_where(one)}, but rank {other.rank} {_where(other)}: all ranks must "
            "begin at the start, or load the state of the same step",
            feed=self._feed,
        )

    def _may_end_at(self, ask: OpenRequest) -> bool:
        """Whether its position may be the end of an epoch. If that is not known yet, delivery finds out."""
        return self.stream.feed.info.batches in (None, _place(ask)[1])


def _group(ask: OpenRequest) -> str:
    return f" of group {ask.group!r}" if ask.group else ""


def _place(ask: OpenRequest) -> tuple[int, int]:
    place = ask.position
    return (place.epoch, place.batches + place.skip) if place is not None else (0, 0)


def _last_round(ask: OpenRequest) -> str:
    return '"pad"' if ask.pad else '"drop"'


def _where(ask: OpenRequest) -> str:
    again = "again " if ask.again else ""
    if ask.position is None:
        return f"{again}at the start"
    epoch, batches = _place(ask)
    return f"{again}after batch {batches} of epoch {epoch}"
