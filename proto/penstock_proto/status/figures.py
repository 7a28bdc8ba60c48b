"""The figures of a measured feed: their type, joining those of several slices, and formatting them as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

COMPUTES = 0.5
"""A worker that spends less than this share of its busy time on a CPU, or waiting for one, mostly waits for I/O."""


@dataclass(frozen=True, slots=True)
class WorkerShares:
    """How a worker spent its time, as shares: `generating`, `idle`, `cpu_wait` (ready to run, but without a CPU); the
    rest is collating. `cpu` is the share in which it ran on a CPU.

    Attributes:
        name: its name in the status, if that is not its number.
        host: the joined host that it runs on; None: that of the daemon.
        awaited: the share of the consumers' waits for production in which the next batch was this worker's.
    """

    number: int
    generating: float
    idle: float
    cpu: float
    cpu_wait: float
    name: str = ""
    host: str | None = None
    awaited: float = 0.0

    @property
    def busy(self) -> float:
        """The share in which it was not idle."""
        return 1 - self.idle

    @property
    def collating(self) -> float:
        """The share in which it checked, copied and reported samples."""
        return max(0.0, 1 - self.idle - self.generating - self.cpu_wait)


@dataclass(frozen=True, slots=True)
class CpuUse:
    """How many CPUs of the daemon's host did what, on average.

    Attributes:
        count: CPUs that the daemon may run on.
        allowed: how many of them its cgroups' quotas allow, rounded up.
        idle: how many of them were idle.
        free: how many more the daemon and its workers could have used: idle ones that their cgroups' quotas allow.
        stolen: how many a hypervisor gave to other hosts.
    """

    count: int
    allowed: int
    idle: float
    free: float
    stolen: float


@dataclass(frozen=True, slots=True)
class HostUse:
    """A joined host: how its CPUs were used (None if unknown), and the share of the waits for production in which the
    next batch was one of its workers'."""

    name: str
    machine: CpuUse | None
    awaited: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The measurement of a feed.

    Attributes:
        url: the URL of the feed.
        transport: "local" or "tcp".
        consumer: "NumPy" or "TensorFlow".
        seconds, batches, samples, nbytes: how long the measurement took, and how much was read in it.
        first_batch_seconds: from connecting (including the start of a private daemon) to the first batch.
        waiting, receiving, step: the shares of the consumer's time in which it waited for a batch, took it, and was in
            the training step.
        workers: the workers that ran for the whole time.
        daemon_cpu, consumer_cpu: CPUs that the daemon and the consumer used, on average.
        cpus: CPUs that the daemon, and hosts that have joined it, may use.
        lanes: how many workers can work on an epoch at once; None: any number.
        others: other consumers that the daemon had at the end.
        jobs: how many jobs shared the stream at the end.
        cached: batches/s of the same consumer from memory, if that was measured.
        machine: the CPUs of the daemon's host; None if unknown.
        undivided: whether each worker runs the whole generator, and transforms the samples of its lanes.
        fast: whether the feed has `order="fast"`.
        whole_batches: whether the feed has `batch_size=None`.
        bytes_only: whether all dtypes of the feed have one byte.
        memory_full: whether half of the daemon's `--memory` or more is reserved.
        tcp_asked: whether the user asked for TCP.
        slots: slots in which batches of the stream can be made at once; None if unknown.
        memory: bytes that the daemon may use for batches; None if unknown.
        turn, stripe: most batches that a lane gives in a row; and batches of several lanes, or of ranges that are as
            long as a worker makes in a moment, that share a slot, or 1.
        splits: splits of an epoch; None if each epoch lists its own, or for an indexable feed.
        made, sent: how many batches of the feed workers made, and how many its consumers were sent.
        reading: the share of the time in which the consumer read an epoch.
        unmade: the share of its reading time in which it had nothing to take, as the daemon sees it.
        ranks_share, sending_share, handing_share: the shares of the consumer's waits in which it waits for other ranks;
            in which a batch is on its way to it, or its connection takes no more; and in which a batch is in its
            process already.
        listing, interrupted, without_lane, ahead: parts of its waits for production, as shares of them; see
            stream_status.Waits.
        slow_rank: the rank that others wait for most, or None.
        holding_up: the share of its time in which other ranks wait for this consumer.
        without_makers: whether the daemon has no worker that makes batches, and waits for hosts to join.
        began: whether the consumer had a batch before the measurement.
        workers_before, workers_after: how many workers there were that make batches, at the beginning and at the end.
            They differ from `workers` if some came, went or were replaced.
        starting: what the workers do that are not ready, such as "importing scenes.py:feed (12 s)".
        ended: how many times a worker ended by itself and was replaced.
        stopped: names of the workers that a signal has stopped.
        awaited_at: the split at which the worker was whose batches were awaited most; empty if unknown.
        cache_filling: whether splits were written to a cache, which later epochs read.
        hosts: the hosts that have joined.
        slices: the measurements of consecutive parts of the time that make up this one.
    """

    url: str
    transport: str
    consumer: str
    seconds: float
    batches: int
    samples: float
    nbytes: float
    first_batch_seconds: float
    waiting: float
    receiving: float
    step: float
    workers: tuple[WorkerShares, ...]
    daemon_cpu: float
    consumer_cpu: float
    cpus: int
    lanes: int | None
    others: int = 0
    jobs: int = 1
    undivided: bool = False
    cached: float | None = None
    machine: CpuUse | None = None
    fast: bool = False
    whole_batches: bool = False
    bytes_only: bool = False
    memory_full: bool = True
    tcp_asked: bool = False
    slots: int | None = None
    memory: int | None = None
    turn: int = 1
    stripe: int = 1
    splits: int | None = None
    made: int = 0
    sent: int = 0
    reading: float = 1.0
    unmade: float = 1.0
    ranks_share: float = 0.0
    sending_share: float = 0.0
    handing_share: float = 0.0
    listing: float = 0.0
    interrupted: float = 0.0
    without_lane: float = 0.0
    ahead: float = 0.0
    slow_rank: int | None = None
    holding_up: float = 0.0
    without_makers: bool = False
    began: bool = True
    workers_before: int = 0
    workers_after: int = 0
    starting: tuple[str, ...] = ()
    ended: int = 0
    stopped: tuple[str, ...] = ()
    awaited_at: str = ""
    cache_filling: bool = False
    hosts: tuple[HostUse, ...] = ()
    slices: tuple[Figures, ...] = ()

    @property
    def rate(self) -> float:
        """Batches a second."""
        return self.batches / self.seconds

    @property
    def megabytes(self) -> float:
        """Megabytes a second."""
        return self.nbytes / self.seconds / 1e6

    @property
    def generating(self) -> float:
        """How many workers, on average, were in the generator."""
        return sum(worker.generating for worker in self.workers)

    @property
    def collating(self) -> float:
        """How many workers, on average, were collating."""
        return sum(worker.collating for worker in self.workers)

    @property
    def idle(self) -> float:
        """The share of the workers' time in which they were idle."""
        return sum(worker.idle for worker in self.workers) / len(self.workers)

    @property
    def idle_while_waiting(self) -> float:
        """The smallest share of the time in which the consumer must have waited while workers were idle."""
        return max(0.0, self.waiting + self.idle - 1)

    @property
    def usable(self) -> int:
        """How many workers can work on the feed at once, if there is memory for it."""
        return len(self.workers) if self.lanes is None else min(len(self.workers), self.lanes)

    @property
    def short_of_slots(self) -> bool:
        """Whether slots allow fewer batches at once than workers could make. One slot is kept for the next in order.
        All workers fill one stripe together, so two stripes are enough: the consumer reads the other one."""
        at_once = 2 if self.stripe > 1 else self.usable
        return self.slots is not None and max(1, self.slots - 1) < at_once

    @property
    def at_work(self) -> float:
        """The share of the time, while the consumer reads, in which the workers that can work on the feed do so."""
        return sum(worker.busy for worker in self.workers) / max(1, self.usable) / max(self.reading, 0.01)

    @property
    def most_awaited(self) -> WorkerShares:
        """The worker whose batches are awaited most."""
        return max(self.workers, key=lambda worker: worker.awaited)

    @property
    def makes_ahead(self) -> float:
        """How many batches workers make for each that is sent. 1 if the difference is less than a batch of each."""
        return self.made / max(1, self.sent) if self.made - self.sent >= len(self.workers) else 1.0

    @property
    def turn_seconds(self) -> float:
        """About how long a worker takes for a turn; 0 if unknown."""
        return self.turn * sum(worker.busy for worker in self.workers) * self.seconds / self.made if self.made else 0.0

    @property
    def waits_for_io(self) -> bool:
        """Whether workers mostly wait for something other than a CPU."""
        return sum(one.cpu + one.cpu_wait for one in self.workers) < COMPUTES * sum(one.busy for one in self.workers)

    @property
    def cpus_used(self) -> float:
        """CPUs that workers and daemon use, and the consumer, unless it may be on another host (over TCP)."""
        consumer = self.consumer_cpu if self.transport == "local" else 0.0
        return sum(worker.cpu for worker in self.workers) + self.daemon_cpu + consumer

    @property
    def places(self) -> list[CpuUse | None]:
        """How the CPUs of each host with workers were used. None stands for a host that has not reported it."""
        names = {worker.host for worker in self.workers}
        own = [self.machine] if None in names else []
        return own + [host.machine for host in self.hosts if host.name in names]

    @property
    def free_cpus(self) -> float | None:
        """How many CPUs the hosts that have workers could give in addition; None if unknown."""
        known = [place.free for place in self.places if place is not None]
        return sum(known) if known and len(known) == len(self.places) else None

    @property
    def cpus_lacked(self) -> float:
        """How many of the daemon's own workers, on average, could run and had no CPU."""
        return sum(worker.cpu_wait for worker in self.workers if worker.host is None)

    @property
    def other_cpu(self) -> float:
        """CPUs of the daemon's host that other work uses; 0 if unknown."""
        if self.machine is None:
            return 0.0
        elsewhere = sum(worker.cpu for worker in self.workers if worker.host is not None)
        return max(0.0, self.machine.count - self.machine.idle - self.machine.stolen - self.cpus_used + elsewhere)


_MEANS = (
    "waiting receiving step daemon_cpu consumer_cpu reading unmade ranks_share sending_share handing_share listing "
    "interrupted without_lane ahead holding_up"
).split()


def joined(slices: Sequence[Figures]) -> Figures:
    """Return the slices as one measurement: means weighted by length, and everything else from the last slice."""
    seconds = sum(part.seconds for part in slices)

    def mean(value: Callable[[Figures], float]) -> float:
        return sum(value(part) * part.seconds for part in slices) / seconds

    def worker(number: int) -> WorkerShares:
        def share(value: Callable[[WorkerShares], float]) -> float:
            return mean(lambda part: next(value(worker) for worker in part.workers if worker.number == number))

        return WorkerShares(
            number,
            share(lambda w: w.generating),
            share(lambda w: w.idle),
            share(lambda w: w.cpu),
            share(lambda w: w.cpu_wait),
            next(worker.name for worker in slices[-1].workers if worker.number == number),
            next(worker.host for worker in slices[-1].workers if worker.number == number),
            share(lambda w: w.awaited),
        )

    def machine() -> CpuUse | None:
        seen = [(part.machine, part.seconds) for part in slices if part.machine is not None]
        if not seen:
            return None
        use = {
            name: sum(getattr(one, name) * weight for one, weight in seen) / sum(weight for _, weight in seen)
            for name in ("idle", "free", "stolen")
        }
        return CpuUse(seen[-1][0].count, seen[-1][0].allowed, **use)

    lived = set.intersection(*({worker.number for worker in part.workers} for part in slices))
    means: dict[str, Any] = {name: mean(attrgetter(name)) for name in _MEANS}
    return dataclasses.replace(
        slices[-1],
        seconds=seconds,
        batches=sum(part.batches for part in slices),
        samples=sum(part.samples for part in slices),
        nbytes=sum(part.nbytes for part in slices),
        made=sum(part.made for part in slices),
        sent=sum(part.sent for part in slices),
        ended=sum(part.ended for part in slices),
        began=slices[0].began,
        workers_before=slices[0].workers_before,
        cache_filling=any(part.cache_filling for part in slices),
        machine=machine(),
        **means,
        workers=tuple(map(worker, sorted(lived))),
        slices=(),
    )


def count(number: int, word: str, words: str = "") -> str:
    """Return `1 worker`, or `2 workers`. `words` is the plural if it takes more than an s."""
    return f"{number} {word if number == 1 else words or word + 's'}"


def number(value: float) -> str:
    """Return the value with three digits, or without decimals if it has more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    """Return `12 %`."""
    return f"{100 * share:.0f} %"


def size(nbytes: float) -> str:
    """Return `12 bytes`, or `3.4 MiB`."""
    amount, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
