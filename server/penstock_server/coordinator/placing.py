"""Where the batches of ranks are made: if possible on the machine of the rank that reads them, so that they cross no
network.

Ranks get one batch each in turn. If each visit makes one batch, and the order is exact, it is known which rank will
read it. (Once a lane has ended, the other lanes have other readers, and stay where they are. Then batches cross the
network.)

Ranks go on in step, so the rank with the fewest workers holds up all others, and so does a worker with more lanes than
others. Workers are divided among the machines only if each machine with ranks has its share of them, no other machine
has any, and no worker gets more lanes by it.
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
        self._near: dict[int, list[_Near]] = {}
        """What was found, by the number of lanes."""
        self._available: list[int] | None = None
        """The available workers then."""

    def begin(self, consumers: Sequence[Consumer]) -> None:
        """These consumers read the stream, by rank."""
        if self._foreseen and len(consumers) > 1:
            self._consumers = consumers

    @property
    def foresees(self) -> bool:
        """Whether readers are known beforehand."""
        return bool(self._consumers)

    def divides(self, lanes: int) -> bool:
        """Whether each rank's batches are made on its own machine. `lanes`: how many there are; 0 for ranges."""
        return bool(self._look(lanes))

    def reader(self, number: int) -> int:
        """Return the consumer that gets batch `number` of an epoch."""
        return self._consumers[number % len(self._consumers)].number

    def pick(self, place: int, lanes: int = 0) -> int:
        """Return the worker that makes lane `place` of `lanes`. If there are no lanes, `place` counts the visits."""
        if not (near := self._look(lanes)):
            return self._workers.pick(place)
        one = near[place % len(near)]
        return one.workers[(place // len(near) * one.ranks + one.place) % len(one.workers)]

    def workers(self, lane: int, lanes: int) -> list[int]:
        """Return the workers that may make `lane` of `lanes`: those near its reader, or all. The list does not
        change."""
        near = self._look(lanes)
        return near[lane % len(near)].workers if near else self._workers.available

    def _look(self, lanes: int) -> list[_Near]:
        """Return the workers near each rank; nothing if all workers are for all ranks."""
        if not self._consumers or lanes % len(self._consumers):
            return []  # a lane has several readers
        if self._available is not self._workers.available:
            self._available = self._workers.available
            self._near.clear()
        near = self._near.get(lanes)
        if near is None:
            near = self._near[lanes] = self._find(self._available, lanes)
        return near

    def _find(self, available: list[int], lanes: int) -> list[_Near]:
        ranks: dict[str, list[Consumer]] = {}
        for consumer in self._consumers:
            ranks.setdefault(consumer.machine, []).append(consumer)
        workers: dict[str, list[int]] = {}
        for worker in available:
            workers.setdefault(self._workers.machine_of(worker), []).append(worker)
        if len(ranks) == 1 or ranks.keys() != workers.keys():
            return []
        all_ranks = len(self._consumers)
        for machine, there in ranks.items():
            here = len(workers[machine])
            if here * all_ranks < _FAIR * len(available) * len(there):
                return []
            if _most(lanes * len(there) // all_ranks, here) > _most(lanes, len(available)):
                return []
        return [
            _Near(workers[one.machine], len(ranks[one.machine]), ranks[one.machine].index(one))
            for one in self._consumers
        ]


def _most(lanes: int, workers: int) -> int:
    """Return how many lanes the worker with the most has."""
    return -(-lanes // workers)
