"""Where the batches of ranks are made: if possible on the machine of the rank that reads them, so that they cross no
network.

Ranks get one batch each in turn. If each visit makes one batch, and the order is exact, it is known which rank will
read it. (When lanes have ended this is no longer right. Then batches cross the network as others do.)

Ranks go on in step, so the rank with the fewest workers holds up all others. Workers are divided among the machines
only if each machine with ranks has its share of them, and no other machine has any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .consumer import Consumer
from .workers import Workers

_FAIR = 0.8
"""The part of an equal share of the workers that each rank's machine must have."""


@dataclass(frozen=True, slots=True)
class _Near:
    """The workers on the machine of a rank.

    Attributes:
        workers: these workers.
        ranks: how many ranks the machine has.
        place: how many of these come before this one.
    """

    workers: list[int]
    ranks: int
    place: int


class Placing:
    """See the file's head.

    Args:
        workers: all workers.
        foreseen: whether the reader of a visit is known beforehand, if there are several.
    """

    def __init__(self, workers: Workers, *, foreseen: bool) -> None:
        self._workers = workers
        self._foreseen = foreseen
        self._consumers: Sequence[Consumer] = ()
        self._near: list[_Near] = []
        self._of: list[int] | None = None
        """The available workers when `_near` was found."""

    def begin(self, consumers: Sequence[Consumer]) -> None:
        """These consumers read the stream, by rank."""
        if self._foreseen and len(consumers) > 1:
            self._consumers = consumers

    def reader(self, visit: int) -> int | None:
        """Return the consumer that gets the batch of this visit, counted from the start of the epoch; None if that is
        not known."""
        return self._consumers[visit % len(self._consumers)].number if self._consumers else None

    def same_reader(self, lanes: int) -> bool:
        """Whether all batches of a lane, of so many, have the same reader."""
        return bool(self._consumers) and lanes % len(self._consumers) == 0

    def pick(self, visit: int) -> int:
        """Return the worker that makes this visit."""
        if not (near := self._look()):
            return self._workers.pick(visit)
        one = near[visit % len(near)]
        return one.workers[(visit // len(near) * one.ranks + one.place) % len(one.workers)]

    def workers(self, visit: int) -> list[int]:
        """Return the workers that may make this visit: those near its reader, or all. The list does not change."""
        near = self._look()
        return near[visit % len(near)].workers if near else self._workers.available

    def _look(self) -> list[_Near]:
        """Return the workers near each rank; nothing if all workers are for all ranks."""
        available = self._workers.available
        if self._consumers and self._of is not available:
            self._of, self._near = available, self._find(available)
        return self._near

    def _find(self, available: list[int]) -> list[_Near]:
        ranks: dict[str, list[Consumer]] = {}
        for consumer in self._consumers:
            ranks.setdefault(consumer.machine, []).append(consumer)
        workers: dict[str, list[int]] = {}
        for worker in available:
            workers.setdefault(self._workers.machine_of(worker), []).append(worker)
        if len(ranks) == 1 or ranks.keys() != workers.keys():
            return []
        equal = len(available) / len(self._consumers)
        if any(len(workers[machine]) < _FAIR * equal * len(there) for machine, there in ranks.items()):
            return []
        return [
            _Near(workers[one.machine], len(ranks[one.machine]), ranks[one.machine].index(one))
            for one in self._consumers
        ]
