"""The figures of a measured feed: their type, joining those of several slices, and formatting them as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

COMPUTES = 0.5
"""A worker that spends less than this share of its busy time on a CPU, or waiting for one, mostly waits for I/O."""


@dataclass(frozen=True, slots=True)
class WorkerShares:
    """How a worker spent its time, as shares: `generating`, `idle`, `cpu_wait` (ready to run, but without a CPU); the
    rest is collating. `cpu` is the share in which it ran on a CPU. `name`: its name in the status, if that is not its
    number.
    """

    number: int
    generating: float
    idle: float
    cpu: float
    cpu_wait: float
    name: str = ""

    @property
    def busy(self) -> float:
        """The share in which it was not idle."""
        return 1 - self.idle

    @property
    def collating(self) -> float:
        """The share in which it checked, copied and reported samples."""
        return max(0.0, 1 - self.idle - self.generating - self.cpu_wait)


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
        cached: batches/s of the same consumer from memory, if that was measured.
        other_cpu: CPUs of this host that other work used, on average; None if the daemon may be on another host.
        stolen: CPUs of this host that a hypervisor gave to other hosts; likewise.
        fast: whether the feed has `order="fast"`.
        whole_batches: whether the feed has `batch_size=None`.
        bytes_only: whether all dtypes of the feed have one byte.
        memory_full: whether half of the daemon's `--memory` or more is reserved.
        tcp_asked: whether the user asked for TCP.
        slots: slots in which batches of the stream can be made at once; None if unknown.
        memory: bytes that the daemon may use for batches; None if unknown.
        ranks_share, sending_share: the shares of the consumer's waits in which it waits for other ranks, and in which a
            batch is on its way to it, or its connection takes no more.
        slow_rank: the rank that others wait for most, or None.
        without_makers: whether the daemon has no worker that makes batches, and waits for hosts to join.
        holding_up: the share of its time in which other ranks wait for this consumer.
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
    cached: float | None = None
    other_cpu: float | None = None
    stolen: float | None = None
    fast: bool = False
    whole_batches: bool = False
    bytes_only: bool = False
    memory_full: bool = True
    tcp_asked: bool = False
    slots: int | None = None
    memory: int | None = None
    ranks_share: float = 0.0
    sending_share: float = 0.0
    slow_rank: int | None = None
    without_makers: bool = False
    holding_up: float = 0.0
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
        """Whether slots allow fewer batches at once than workers could make. One slot is kept for the next in order."""
        return self.slots is not None and max(1, self.slots - 1) < self.usable

    @property
    def wait_for_io(self) -> bool:
        """Whether workers mostly wait for something other than a CPU."""
        return sum(one.cpu + one.cpu_wait for one in self.workers) < COMPUTES * sum(one.busy for one in self.workers)

    @property
    def cpus_wanted(self) -> float:
        """CPUs of the daemon's host that the feed uses or lacks. Over TCP the consumer may be on another host."""
        consumer = self.consumer_cpu if self.transport == "local" else 0.0
        return sum(worker.cpu + worker.cpu_wait for worker in self.workers) + self.daemon_cpu + consumer


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
        )

    lived = set.intersection(*({worker.number for worker in part.workers} for part in slices))
    here = all(part.other_cpu is not None for part in slices)
    return dataclasses.replace(
        slices[-1],
        seconds=seconds,
        batches=sum(part.batches for part in slices),
        samples=sum(part.samples for part in slices),
        nbytes=sum(part.nbytes for part in slices),
        waiting=mean(lambda part: part.waiting),
        receiving=mean(lambda part: part.receiving),
        step=mean(lambda part: part.step),
        sending_share=mean(lambda part: part.sending_share),
        daemon_cpu=mean(lambda part: part.daemon_cpu),
        consumer_cpu=mean(lambda part: part.consumer_cpu),
        other_cpu=mean(lambda part: part.other_cpu or 0.0) if here else None,
        stolen=mean(lambda part: part.stolen or 0.0) if here else None,
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
