"""Rates, worker states and verdicts, from a series of a daemon's statuses. No I/O.

The daemon sees when a consumer has nothing to take: everything that it was sent is handed over, or its connection takes
no more for now. So the share of such looks stands for the share of its time that a consumer waits, and the verdict is
that of `penstock bench`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .figures import Figures, WorkerShares
from .verdict import verdict

WINDOW = 10.0
"""Seconds that the figures are averaged over."""

HISTORY = 60
"""Looks that the history of a feed's rate goes back."""

FEWEST_LOOKS = 4
"""Fewest looks at a reading consumer before there is a verdict on it."""


@dataclass(frozen=True, slots=True)
class FeedRates:
    """A feed's rates, averaged over the window.

    Attributes:
        name: of the feed.
        batches, samples, megabytes: sent per second, to all consumers.
        consumers: that have a stream open.
        history: batches per second between the latest looks.
    """

    name: str
    batches: float
    samples: float
    megabytes: float
    consumers: int
    history: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """A consumer.

    Attributes:
        feed, client, transport: as in the status.
        rank: its rank, or None.
        epoch: the one that it has begun; -1 before the first.
        reading: whether it reads an epoch now.
        queued: slabs that it was sent and has not taken yet.
        waiting: share of the looks at which nothing was there for it to take; None before there were enough.
        verdict: some sentences on what limits it, or "".
    """

    feed: str
    client: str
    transport: str
    rank: int | None
    epoch: int
    reading: bool
    queued: int
    waiting: float | None
    verdict: str


class History:
    """The statuses of the last `WINDOW` seconds.

    Raises:
        IndexError: it was asked for something before the first status was added.
    """

    def __init__(self) -> None:
        self._kept: deque[dict[str, Any]] = deque()
        self._rates: dict[str, deque[float]] = {}

    @property
    def latest(self) -> dict[str, Any]:
        """The latest status."""
        return self._kept[-1]

    @property
    def seconds(self) -> float:
        """Seconds from the first status that is kept to the latest."""
        seconds: float = self.latest["seconds"] - self._kept[0]["seconds"]
        return seconds

    def add(self, status: dict[str, Any]) -> None:
        """Add a status. Those of an earlier daemon at the same address are forgotten."""
        if self._kept and status["pid"] != self.latest["pid"]:
            self._kept.clear()
            self._rates.clear()
        before = self._kept[-1] if self._kept else None
        self._kept.append(status)
        while status["seconds"] - self._kept[0]["seconds"] > WINDOW:
            self._kept.popleft()
        if before is not None:
            for feed in status["feeds"]:
                rates = self._rates.setdefault(feed["name"], deque(maxlen=HISTORY))
                rates.append(_rate(before, status, feed["name"], "batches"))

    def feeds(self) -> list[FeedRates]:
        """Return the rates of all feeds."""
        first, last = self._kept[0], self._kept[-1]
        return [
            FeedRates(
                feed["name"],
                _rate(first, last, feed["name"], "batches"),
                _rate(first, last, feed["name"], "samples"),
                _rate(first, last, feed["name"], "bytes") / 1e6,
                feed["consumers"],
                tuple(self._rates.get(feed["name"], ())),
            )
            for feed in last["feeds"]
        ]

    def workers(self) -> dict[int, WorkerShares]:
        """Return how each worker spent its time, by its number; without those that did not run for the whole window."""
        return {shares.number: shares for shares in worker_shares(self._kept[0], self._kept[-1])}

    def consumers(self) -> list[ConsumerState]:
        """Return the consumers, with what limits each."""
        looks: dict[tuple[Any, ...], list[bool]] = {}
        for status in self._kept:
            for key, stream in _streams(status):
                if stream["reading"]:
                    looks.setdefault(key, []).append(not _queued(stream) or stream["unsent"])
        found = []
        for key, stream in _streams(self.latest):
            seen = looks.get(key, [])
            waiting = sum(seen) / len(seen) if len(seen) >= FEWEST_LOOKS else None
            found.append(
                ConsumerState(
                    stream["feed"],
                    stream["client"],
                    stream["transport"],
                    stream["rank"],
                    -1 if stream["epoch"] is None else stream["epoch"],
                    stream["reading"],
                    _queued(stream),
                    waiting,
                    "" if waiting is None or not stream["reading"] else self._verdict(stream, waiting),
                )
            )
        return found

    def _verdict(self, stream: dict[str, Any], waiting: float) -> str:
        first, last = self._kept[0], self._kept[-1]
        feed = next((one for one in last["feeds"] if one["name"] == stream["feed"]), None)
        if feed is None or self.seconds <= 0:
            return ""
        batches = feed["sent"]["batches"] - _of(first, feed["name"], "batches")
        memory = last["memory"]
        _, text = verdict(
            Figures(
                url=feed["url"],
                transport=stream["transport"],
                consumer=stream["client"],
                seconds=self.seconds,
                batches=batches,
                samples=feed["sent"]["samples"] - _of(first, feed["name"], "samples"),
                nbytes=feed["sent"]["bytes"] - _of(first, feed["name"], "bytes"),
                first_batch_seconds=0.0,
                waiting=waiting,
                receiving=0.0,
                step=1 - waiting,
                workers=tuple(self.workers().values()),
                daemon_cpu=(last["cpu_seconds"] - first["cpu_seconds"]) / self.seconds,
                consumer_cpu=0.0,
                cpus=last["cpus"],
                lanes=lanes_of(feed),
                others=len(last["streams"]) + last["more_streams"] - 1,
                fast=feed["order"] == "fast",
                whole_batches=feed["batch_size"] is None,
                bytes_only=set(re.findall(r"\b([a-z]+[0-9]*)\[", feed["spec"])) <= {"bool", "int8", "uint8"},
                memory_full=2 * memory["reserved"] >= memory["allowed"],
            )
        )
        return text


def _streams(status: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield the streams of a status, with a key that is the same in the next status."""
    counts: dict[tuple[Any, ...], int] = {}
    for stream in status["streams"]:
        same = stream["feed"], stream["client"], stream["transport"], stream["rank"]
        counts[same] = counts.get(same, 0) + 1
        yield (*same, counts[same]), stream


def _queued(stream: dict[str, Any]) -> int:
    count: int = stream["sent"] - stream["handed"]
    return count


def _of(status: dict[str, Any], name: str, thing: str) -> int:
    """How much of the feed of this name was sent by then; 0 if it was not ready."""
    return next((feed["sent"][thing] for feed in status["feeds"] if feed["name"] == name), 0)


def _rate(before: dict[str, Any], after: dict[str, Any], name: str, thing: str) -> float:
    seconds = after["seconds"] - before["seconds"]
    return (_of(after, name, thing) - _of(before, name, thing)) / seconds if seconds > 0 else 0.0


def worker_shares(before: dict[str, Any], after: dict[str, Any]) -> Iterator[WorkerShares]:
    """Yield how workers spent the time between two statuses, for those that ran for all of it."""
    spent = {worker["pid"]: worker["spent"] for worker in before["workers"] if worker["spent"]}
    for worker in after["workers"]:
        now, then = worker["spent"], spent.get(worker["pid"])
        if now and then and now["seconds"] > then["seconds"]:
            share = {name: (now[name] - then[name]) / (now["seconds"] - then["seconds"]) for name in now}
            idle = min(1.0, max(0.0, share["idle_seconds"]))
            user = min(1 - idle, max(0.0, share["user_seconds"]))
            lacking = min(user, share["cpu_wait_seconds"])  # the time in user code includes it
            yield WorkerShares(worker["number"], user - lacking, idle, share["cpu_seconds"], lacking)


def lanes_of(feed: dict[str, Any]) -> int | None:
    """Return how many workers can work on an epoch of a feed at once, or None if any number can."""
    if feed["indexable"]:
        return None
    lanes: int = feed["lanes"]
    return min(lanes, feed["splits"] or lanes)
