"""What limits a feed that was read for a while, in words: decisions on figures, without I/O. `bench.py` takes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

WAITS = 0.1
"""Below this share of its time a consumer does not wait to speak of."""

BUSY = 0.8
"""From this share of its time on a worker or the daemon is busy all the time: there are always moments between."""

ALL_CPUS = 0.85
"""From this share on a host's CPUs are all asked for."""


@dataclass(frozen=True, slots=True)
class Worker:
    """Where a worker's time went, as shares: `generating`, `idle`, `cpu_wait` (it could have run, and had no CPU); the
    rest is collating. `cpu` is the share in which it had a CPU.
    """

    number: int
    generating: float
    idle: float
    cpu: float
    cpu_wait: float

    @property
    def busy(self) -> float:
        """What it was not idle."""
        return 1 - self.idle

    @property
    def collating(self) -> float:
        """What it worked on its own."""
        return max(0.0, 1 - self.idle - self.generating - self.cpu_wait)


@dataclass(frozen=True, slots=True)
class Figures:
    """What was seen of a feed.

    Attributes:
        url: the feed's.
        transport: "local" or "tcp".
        consumer: "NumPy" or "TensorFlow".
        seconds, batches, samples, nbytes: what was read, and how long that took.
        first_batch_seconds: from connecting (the start of a private daemon too) to the first batch.
        waiting, receiving, step: shares of the consumer's time: no batch was there; it took one; its training step.
        workers: those that lived all the time.
        daemon_cpu, consumer_cpu: CPUs that these had, on average.
        cpus: that the daemon may use.
        lanes: so many workers can work on an epoch at once; None: any number.
        others: other consumers that the daemon had at the end.
        cached: batches/s of the same consumer out of memory, if that was measured.
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
    workers: tuple[Worker, ...]
    daemon_cpu: float
    consumer_cpu: float
    cpus: int
    lanes: int | None
    others: int = 0
    cached: float | None = None

    @property
    def rate(self) -> float:
        """Batches a second."""
        return self.batches / self.seconds

    @property
    def cpus_wanted(self) -> float:
        """CPUs of the daemon's host that this has or lacks; over TCP the consumer may be elsewhere."""
        consumer = self.consumer_cpu if self.transport == "local" else 0.0
        return sum(worker.cpu + worker.cpu_wait for worker in self.workers) + self.daemon_cpu + consumer


def verdict(seen: Figures) -> tuple[str, str]:
    """What limits the speed, and what that means.

    Returns:
        "consumer", "workers", "cpus", "lanes", "generator", "collating", "daemon" or "transport"; and some sentences.
    """
    if seen.waiting < WAITS:
        return "consumer", _keeps_up(seen)
    if not seen.workers:
        return "workers", "No worker lived all the time: the daemon's log says why they end and are started again."
    busy = [worker for worker in seen.workers if worker.busy >= BUSY]
    if seen.cpus_wanted >= ALL_CPUS * seen.cpus:
        heaviest = "in the generator" if _generating(seen) >= _collating(seen) else "collating"
        return "cpus", (
            f"The CPUs are the limit: of {_cpus(seen)}, {seen.cpus_wanted:.1f} are needed, and workers spend most of "
            f"their working time {heaviest}. More workers would not help: make that cheaper, or serve the feed from a "
            "host with more CPUs."
        )
    if busy and len(busy) < len(seen.workers) and sum(w.busy for w in seen.workers) < BUSY * len(seen.workers):
        return "lanes", _uneven(seen, len(busy))
    if busy and _generating(seen) >= _collating(seen):
        return "generator", f"The generator is the limit: {_each(seen)}. {_more_workers(seen)}"
    if busy:
        return "collating", (
            f"Collating, the copying of samples into batches, is the limit: {_each(seen)}. Yield NumPy arrays of the "
            "spec's dtypes, few and large ones for each sample, or whole batches with batch_size=None. "
            f"{_more_workers(seen)}"
        )
    if seen.daemon_cpu >= BUSY:
        return "daemon", (
            f"The daemon's own process is the limit at {_number(seen.rate)} batches/s: workers and consumer wait for "
            "it. Make batches larger."
        )
    if seen.transport == "tcp":
        return "transport", (
            f"The way to the consumer is the limit at {_number(_megabytes(seen))} MB/s: workers are idle while it "
            "waits. Send smaller dtypes (uint8, not float32), or run the daemon on the trainer's host, which reads "
            "shared memory."
        )
    return "transport", (
        f"The hand-over is the limit: workers are idle for {_percent(_idle(seen))} of the time while the consumer "
        "waits. Give the daemon more --memory, so that more is made ahead, or make batches larger."
    )


def lines(seen: Figures) -> Iterator[str]:
    """The figures and the verdict, a line for each thing."""
    yield f"feed         {seen.url} ({seen.transport}), read with {seen.consumer} for {seen.seconds:.1f} s"
    speed = f"{_number(seen.rate)} batches/s, {_number(seen.samples / seen.seconds)} samples/s"
    yield f"speed        {speed}, {_number(_megabytes(seen))} MB/s"
    yield f"first batch  after {seen.first_batch_seconds:.2f} s"
    yield (
        f"consumer     {_percent(seen.waiting)} waiting, {_percent(seen.receiving)} receiving, "
        f"{_percent(seen.step)} in its step"
    )
    for worker in seen.workers:
        yield (
            f"worker {worker.number:<5} {_percent(worker.generating)} generating, {_percent(worker.collating)} "
            f"collating, {_percent(worker.idle)} idle, {_percent(worker.cpu_wait)} without a CPU; it used "
            f"{_percent(worker.cpu)} of one"
        )
    yield f"daemon       {_percent(seen.daemon_cpu)} of a CPU; its host has {seen.cpus}"
    if seen.others:
        yield f"others       {seen.others} more read from this daemon: its figures are theirs too"
    if seen.cached is not None:
        yield (
            f"cached       {_number(seen.cached)} batches/s: with an infinitely fast loader this consumer would be "
            f"{seen.cached / seen.rate:.2f} times as fast"
        )
    yield ""
    yield verdict(seen)[1]


def _keeps_up(seen: Figures) -> str:
    if seen.step >= seen.receiving:
        return (
            f"The loader keeps up: the consumer waits for {_percent(seen.waiting)} of the time, and the rest is its "
            "own. A faster loader would gain no more than that."
        )
    return (
        f"The loader is faster than the consumer can receive: with {seen.consumer} this process takes "
        f"{_number(seen.rate)} batches/s. Make batches larger if that is too few."
    )


def _uneven(seen: Figures, busy: int) -> str:
    text = f"Only {busy} of {len(seen.workers)} workers {'is' if busy == 1 else 'are'} busy: "
    if seen.lanes is not None and seen.lanes < len(seen.workers):
        return text + (
            f"the feed has {_count(seen.lanes, 'lane')}, so no more can work at once. Give it more splits and "
            "Feed(lanes=), or fewer workers."
        )
    return text + (
        "their lanes take longer, and batches come in order. Make splits smaller and alike, or let "
        'Feed(order="fast") send what is there.'
    )


def _each(seen: Figures) -> str:
    count = len(seen.workers)
    each = f", {_number(seen.rate / count)} each" if count > 1 else ""
    return f"{_count(count, 'worker')} {'makes' if count == 1 else 'make'} {_number(seen.rate)} batches/s{each}"


def _more_workers(seen: Figures) -> str:
    """What can be said of more workers, where all that there are are busy and CPUs are left."""
    count = len(seen.workers)
    if seen.lanes is not None and seen.lanes <= count:
        return f"More workers need more splits and Feed(lanes=): it has {_count(seen.lanes, 'lane')}."
    text = f"Add workers: of {_cpus(seen)}, {seen.cpus_wanted:.1f} are needed"
    if sum(worker.cpu for worker in seen.workers) < 0.5 * sum(worker.busy for worker in seen.workers):
        text += ", and workers mostly wait for something else (files, network), so there may be more of them than CPUs"
    if seen.lanes is not None:
        text += f". Best are numbers that divide its {seen.lanes} lanes, such as {_divisor_above(seen.lanes, count)}"
    return text + "."


def _divisor_above(lanes: int, count: int) -> int:
    return next(number for number in range(count + 1, lanes + 1) if lanes % number == 0)


def _generating(seen: Figures) -> float:
    return sum(worker.generating for worker in seen.workers)


def _collating(seen: Figures) -> float:
    return sum(worker.collating for worker in seen.workers)


def _idle(seen: Figures) -> float:
    return sum(worker.idle for worker in seen.workers) / len(seen.workers)


def _megabytes(seen: Figures) -> float:
    return seen.nbytes / seen.seconds / 1e6


def _cpus(seen: Figures) -> str:
    return f"the {_count(seen.cpus, 'CPU')} of the daemon's host"


def _count(number: int, word: str) -> str:
    return f"{number} {word if number == 1 else word + 's'}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
