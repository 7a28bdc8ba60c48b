"""Decides where the batches of ranks are made: if possible on the machine of the rank that reads them, so that they do
not cross the network.

Ranks get one batch each in turn. If each visit makes one batch and the order is exact, it is known which rank will read
that batch. (Once a lane has ended, the other lanes have other readers, and stay where they are. Then batches cross the
network.)

Ranks go on in step, so the rank with the fewest workers holds up all others, and so does a worker with more lanes than
others. Hence workers are divided among the machines only if each machine with ranks has its share of the workers, no
other machine has any, and no worker gets more lanes because of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..model.consumer import Consumer
from ..model.feeds import ServedFeed
from ..model.workers import Workers

_FAIR = 0.8
"""The fraction of its equal share of the workers that each rank's machine must have."""


@dataclass(frozen=True, slots=True)
class _Near:
    """The workers on the machine of a rank.

    Attributes:
        workers: these workers.
        ranks: how many ranks the machine has.
        place: how many of these ranks come before this one.
    """

    workers: list[int]
    ranks: int
    place: int


def unforeseen(feed: ServedFeed) -> str:
    """Return why it is not known beforehand which rank reads a batch of the feed; empty if it is."""
    if feed.plan.order != "exact":
        return f'the order is "{feed.plan.order}", and not "exact"'
    if feed.info.pool != 1:
        return "lanes shuffle their samples"
    what = "turn" if feed.info.stripe == 1 else "slot"
    return "" if feed.info.room == 1 else f"a {what} has {feed.info.room} batches: set Feed(turn=1)"


class Placing:
    """Picks the worker for a lane, and knows which rank reads a turn.

    Args:
        workers: all workers.
        unforeseen: why the reader of a visit is not known beforehand, if there are several; empty if it is.
    """

    def __init__(self, workers: Workers, unforeseen: str) -> None:
        self._workers = workers
        self._unforeseen = unforeseen
        self._consumers: Sequence[Consumer] = ()
        self._found: dict[int, list[_Near] | str] = {}
        """The results of `_find`, by the number of lanes."""
        self._available: list[int] | None = None
        """The workers that were available for these results."""
        self._expected = False
        """Whether a host has joined from a machine with ranks, and another machine has ranks too."""

    def begin(self, consumers: Sequence[Consumer]) -> None:
        """Note the consumers that read the stream, by rank."""
        if len(consumers) > 1:
            self._consumers = consumers

    def divides(self, lanes: int) -> bool:
        """Whether each rank's batches are made on its own machine. `lanes`: how many there are; 0 for ranges."""
        return bool(self._near(lanes))

    def why_anywhere(self, lanes: int) -> str:
        """Return why batches are not made on the machines of their ranks, although a host has joined from one of these;
        empty if they are, or if none has joined."""
        found = self._near_or_why(lanes)
        return found if isinstance(found, str) and self._expected else ""

    def reader(self, number: int) -> int | None:
        """Return the consumer that gets batch `number` of an epoch; None if that is not known beforehand."""
        if self._unforeseen or not self._consumers:
            return None
        return self._consumers[number % len(self._consumers)].number

    def pick(self, place: int, lanes: int = 0) -> int:
        """Return the worker that makes lane `place` of `lanes`. If there are no lanes, `place` counts the visits."""
        if not (near := self._near(lanes)):
            return self._workers.pick(place)
        one = near[place % len(near)]
        return one.workers[(place // len(near) * one.ranks + one.place) % len(one.workers)]

    def workers(self, lane: int, lanes: int) -> list[int]:
        """Return the workers that may make `lane` of `lanes`: those near its reader, or all. The list never changes."""
        near = self._near(lanes)
        return near[lane % len(near)].workers if near else self._workers.available

    def _near(self, lanes: int) -> list[_Near]:
        """Return the workers near each rank; empty if all workers are for all ranks."""
        found = self._near_or_why(lanes)
        return [] if isinstance(found, str) else found

    def _near_or_why(self, lanes: int) -> list[_Near] | str:
        """Return the workers near each rank, or why all workers are for all ranks."""
        if not self._consumers:
            return self._unforeseen
        if self._available is not self._workers.available:
            self._available = self._workers.available
            self._found.clear()
            ranks = {consumer.machine for consumer in self._consumers}
            joined = {self._workers.machine_of(worker) for worker in self._available} - {""}
            self._expected = len(ranks) > 1 and bool(ranks & joined)
        if self._unforeseen:
            return self._unforeseen
        if lanes % len(self._consumers):  # a lane has several readers
            return f"{lanes} lanes are not a multiple of {len(self._consumers)} ranks"
        found = self._found.get(lanes)
        if found is None:
            found = self._found[lanes] = self._find(self._available, lanes)
        return found

    def _find(self, available: list[int], lanes: int) -> list[_Near] | str:
        ranks: dict[str, list[Consumer]] = {}
        for consumer in self._consumers:
            ranks.setdefault(consumer.machine, []).append(consumer)
        workers: dict[str, list[int]] = {}
        for worker in available:
            workers.setdefault(self._workers.machine_of(worker), []).append(worker)
        if len(ranks) == 1:
            return "all ranks are on one machine"
        for machine in sorted(ranks.keys() ^ workers.keys()):
            where = _named(machine)
            return f"{where} has a rank, and no worker" if machine in ranks else f"{where} has workers, and no rank"
        all_ranks = len(self._consumers)
        for machine, there in ranks.items():
            here = len(workers[machine])
            share = len(available) * len(there) / all_ranks
            if here < _FAIR * share:
                has = f"{here} of {len(available)} workers and {len(there)} of {all_ranks} ranks"
                return f"{_named(machine)} has {has}, and needs {math.ceil(_FAIR * share)} workers"
            most, otherwise = _most(lanes * len(there) // all_ranks, here), _most(lanes, len(available))
            if most > otherwise:
                only = f"only {otherwise} if all workers share them"
                return f"a worker of {_named(machine)} would have {most} lanes, and {only}"
        return [
            _Near(workers[one.machine], len(ranks[one.machine]), ranks[one.machine].index(one))
            for one in self._consumers
        ]


def _named(machine: str) -> str:
    return machine or "the head's machine"


def _most(lanes: int, workers: int) -> int:
    """Return how many lanes the worker with the most has."""
    return -(-lanes // workers)
