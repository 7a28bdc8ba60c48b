"""What limits a feed that was read for a while, in words: decisions on figures, without I/O. `_bench.py` takes them.

`verdict` is what a set of figures says. `judged` is what it says of the feed: whether other moments of the same
measurement say the same, which it finds out by resampling its slices.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

WAITS = 0.1
"""Below this share of its time a consumer does not wait to speak of."""

BUSY = 0.8
"""From this share of its time on a worker or the daemon is busy all the time: there are always moments between."""

ALL_CPUS = 0.85
"""From this share on a host's CPUs are all asked for."""

COMPUTES = 0.5
"""From this share of its busy time on a CPU, or in want of one, a worker does not mostly wait for something else."""

OTHERS = 0.2
"""From this share of a host's CPUs on the work of others is worth a word."""

STOLEN = 0.05
"""Likewise what a hypervisor gives to others."""

FEWEST = 4
"""The fewest slices that a sure verdict needs."""

SURE = 0.9
"""From this share of the resamples on, those that say the same are to be relied on."""

RESAMPLES = 400

LONG = 60.0
"""Seconds after which measuring for longer would not tell more: it is on the border between two limits."""


@dataclass(frozen=True, slots=True)
class WorkerShares:
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
        other_cpu: CPUs of this host that had other work, on average; None where the daemon may be elsewhere.
        stolen: CPUs of it that a hypervisor gave to others; likewise.
        fast: whether the feed has `order="fast"`.
        whole_batches: whether it has `batch_size=None`.
        bytes_only: whether no dtype of it is longer than a byte.
        memory_full: whether half of the daemon's `--memory` or more is reserved.
        tcp_asked: whether TCP was asked for.
        slices: the figures of parts of the time, one after another, of which these are the whole.
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
    slices: tuple[Figures, ...] = ()

    @property
    def rate(self) -> float:
        """Batches a second."""
        return self.batches / self.seconds

    @property
    def cpus_wanted(self) -> float:
        """CPUs of the daemon's host that this has or lacks; over TCP the consumer may be elsewhere."""
        consumer = self.consumer_cpu if self.transport == "local" else 0.0
        return sum(worker.cpu + worker.cpu_wait for worker in self.workers) + self.daemon_cpu + consumer


@dataclass(frozen=True, slots=True)
class Judgement:
    """What can be said of a feed.

    Attributes:
        limit: as `verdict` names it: the likeliest.
        sure: whether the slices agree on it.
        shares: of the resamples, those that name each limit.
        text: some sentences. Advice only where it is sure.
    """

    limit: str
    sure: bool
    shares: dict[str, float]
    text: str


def judged(seen: Figures) -> Judgement:
    """What limits the speed, if the measurement carries that.

    A busy machine, or a feed whose splits differ, gives another verdict from moment to moment. So the time is measured
    in slices, and the verdict is taken of many resamples of these: as many slices, drawn with replacement. The share
    that agrees says how far the verdict depends on the moment. That is the bootstrap of Efron and Tibshirani (An
    Introduction to the Bootstrap, 1993, chapter 6), with a slice as the unit that is drawn, as moments near each other
    are alike (Künsch, 1989, does so with blocks of a series). A verdict is sure where `SURE` of the resamples agree.
    """
    limit, text = verdict(seen)
    shares = _shares(seen.slices)
    others = _others(seen)
    if len(seen.slices) >= FEWEST and shares.get(limit, 0.0) >= SURE:
        return Judgement(limit, True, shares, f"{text}{others}")
    if len(seen.slices) < FEWEST:
        why = f"Not sure: {seen.seconds:.1f} s are too short to tell. It looks like {_NAMES[limit]}. "
    else:
        ordered = sorted(shares.items(), key=lambda item: -item[1])
        found = ", ".join(f"{_NAMES[name]} ({_percent(share)})" for name, share in ordered if share >= 0.01)
        why = f"Not sure: the limit changed while it was measured. Of resamples of its parts, so many say: {found}. "
    if seen.seconds < LONG:
        # Spread shrinks with the square root of the time, so anything less than twice as long is not worth it.
        why += f"Measure for longer: --seconds {max(30, 10 * round(seen.seconds * 2 / 10))}."
    else:
        why += "A longer run would hardly tell: they limit it by turns, and what helps against one shows the other."
    return Judgement(limit, False, shares, f"{why}{others}")


def joined(slices: Sequence[Figures]) -> Figures:
    """The figures of all these slices together, each by its length. All else is that of the last."""
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
        daemon_cpu=mean(lambda part: part.daemon_cpu),
        consumer_cpu=mean(lambda part: part.consumer_cpu),
        other_cpu=mean(lambda part: part.other_cpu or 0.0) if here else None,
        stolen=mean(lambda part: part.stolen or 0.0) if here else None,
        workers=tuple(map(worker, sorted(lived))),
        slices=(),
    )


def _shares(slices: Sequence[Figures]) -> dict[str, float]:
    """How often each limit is the verdict of a resample. The same for the same slices."""
    if not slices:
        return {}
    draw = random.Random(0)
    counts = collections.Counter(verdict(joined(draw.choices(slices, k=len(slices))))[0] for _ in range(RESAMPLES))
    return {limit: count / RESAMPLES for limit, count in counts.items()}


def _others(seen: Figures) -> str:
    """A sentence about what else the host does, if that is worth one."""
    found = []
    if _is_busy_with_others(seen):
        found.append(f"other work of this host took {seen.other_cpu:.1f} of its {_count(seen.cpus, 'CPU')}")
    if seen.stolen is not None and seen.stolen >= STOLEN * seen.cpus:
        found.append(f"its hypervisor kept {seen.stolen:.1f} for others")
    return f" Meanwhile {' and '.join(found)}: measure again when it rests." if found else ""


def verdict(seen: Figures) -> tuple[str, str]:
    """What limits the speed by these figures, and what that means.

    Returns:
        "consumer", "workers", "cpus", "lanes", "generator", "collating", "daemon" or "transport"; and some sentences.
    """
    if seen.waiting < WAITS:
        return "consumer", _keeps_up(seen)
    if not seen.workers:
        return "workers", "No worker lived all the time: the daemon's log says why they end and are started again."
    busy = [worker for worker in seen.workers if worker.busy >= BUSY]
    if seen.cpus_wanted >= ALL_CPUS * seen.cpus:
        return "cpus", _no_cpus(seen)
    if busy and len(busy) < len(seen.workers) and sum(w.busy for w in seen.workers) < BUSY * len(seen.workers):
        return "lanes", _uneven(seen, len(busy))
    if busy and _generating(seen) >= _collating(seen):
        return "generator", f"The generator is the limit: {_each(seen)}. {_more_workers(seen)}"
    if busy:
        return "collating", (
            f"Collating, the copying of samples into batches, is the limit: {_each(seen)}. Yield NumPy arrays of the "
            f"spec's dtypes, few and large ones{'' if seen.whole_batches else _SAMPLES}. {_more_workers(seen)}"
        )
    if seen.daemon_cpu >= BUSY:
        return "daemon", (
            f"The daemon's own process is the limit at {_number(seen.rate)} batches/s: workers and consumer wait for "
            "it. Make batches larger."
        )
    if seen.transport == "tcp":
        return "transport", (
            f"The way to the consumer is the limit at {_number(_megabytes(seen))} MB/s: workers are idle while it "
            f"waits. {'' if seen.bytes_only else 'Send smaller dtypes (uint8, not float32), or '}"
            f"{'R' if seen.bytes_only else 'r'}un the daemon on the trainer's host, which reads shared memory"
            f"{' without --transport tcp' if seen.tcp_asked else ''}."
        )
    return "transport", (
        f"The hand-over is the limit: workers are idle for {_percent(_idle(seen))} of the time while the consumer "
        f"waits. {'Give the daemon more --memory, so that more is made ahead, or m' if seen.memory_full else 'M'}ake "
        "batches larger."
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
    if seen.slices:
        rates = sorted(part.rate for part in seen.slices)
        yield f"spread       {_number(rates[0])} to {_number(rates[-1])} batches/s in {len(rates)} parts of the time"
    if seen.other_cpu is not None and seen.stolen is not None:
        yield f"other work   {_percent(seen.other_cpu)} of a CPU on this host, {_percent(seen.stolen)} stolen"
    if seen.others:
        yield f"others       {seen.others} more read from this daemon: its figures are theirs too"
    if seen.cached is not None:
        yield (
            f"cached       {_number(seen.cached)} batches/s: with an infinitely fast loader this consumer would be "
            f"{seen.cached / seen.rate:.2f} times as fast"
        )
    yield ""
    yield judged(seen).text


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


def _no_cpus(seen: Figures) -> str:
    text = f"The CPUs are the limit: of {_cpus(seen)}, {seen.cpus_wanted:.1f} are needed"
    if _is_busy_with_others(seen):
        return f"{text}, and other work is on them too. More workers would not help."
    lacked = sum(worker.cpu_wait for worker in seen.workers)
    if lacked < _generating(seen) + _collating(seen):  # else where the rest of the time went is not known well
        heaviest = "in the generator" if _generating(seen) >= _collating(seen) else "collating"
        text += f", and workers spend most of their working time {heaviest}"
    return f"{text}. More workers would not help: make that cheaper, or serve the feed from a host with more CPUs."


def _is_busy_with_others(seen: Figures) -> bool:
    return seen.other_cpu is not None and seen.other_cpu >= OTHERS * seen.cpus


def _uneven(seen: Figures, busy: int) -> str:
    text = f"Only {busy} of {len(seen.workers)} workers {'is' if busy == 1 else 'are'} busy: "
    if seen.lanes is not None and seen.lanes < len(seen.workers):
        return text + (
            f"the feed has {_count(seen.lanes, 'lane')}, so no more can work at once. Give it more splits and "
            "Feed(lanes=), or fewer workers."
        )
    if seen.fast:
        return text + "their lanes take longer. Make splits smaller and alike."
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
    waits = sum(worker.cpu + worker.cpu_wait for worker in seen.workers) < COMPUTES * sum(w.busy for w in seen.workers)
    if count >= seen.cpus and not waits:
        return (
            f"There are as many workers as CPUs already: of {_cpus(seen)}, {seen.cpus_wanted:.1f} are needed. Make the "
            "work cheaper, or serve the feed from a host with more CPUs."
        )
    text = f"Add workers: of {_cpus(seen)}, {seen.cpus_wanted:.1f} are needed"
    if waits:
        text += ", and workers mostly wait for something else (files, network), so there may be more of them than CPUs"
    if seen.lanes is not None:
        text += f". Best are numbers that divide its {seen.lanes} lanes, such as {_divisor_above(seen.lanes, count)}"
    return text + "."


_SAMPLES = " for each sample, or whole batches with batch_size=None"

_NAMES = {
    "consumer": "the consumer",
    "workers": "workers that end",
    "cpus": "the CPUs",
    "lanes": "too few busy lanes",
    "generator": "the generator",
    "collating": "collating",
    "daemon": "the daemon's own process",
    "transport": "the way to the consumer",
}


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
