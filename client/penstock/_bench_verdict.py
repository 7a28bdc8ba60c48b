"""What limits a measured feed, in words. `_bench.py` takes the measurement; this module decides, without I/O.

`verdict` interprets one set of figures. `judged` also says whether the verdict holds for other moments of the same
measurement, by resampling its slices.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

WAITS = 0.1
"""A consumer that waits for less than this share of its time counts as not waiting."""

BUSY = 0.8
"""A worker or daemon with at least this share of busy time counts as always busy: there are always short pauses."""

ALL_CPUS = 0.85
"""If at least this share of a host's CPUs is needed, the CPUs are the limit."""

COMPUTES = 0.5
"""A worker that spends less than this share of its busy time on a CPU, or waiting for one, mostly waits for I/O."""

OTHERS = 0.2
"""The report mentions other work that uses at least this share of a host's CPUs."""

STOLEN = 0.05
"""Likewise CPU time that a hypervisor gives to other hosts."""

FEWEST = 4
"""Fewest slices for a sure verdict."""

SURE = 0.9
"""A verdict is sure if at least this share of the resamples agrees with it."""

RESAMPLES = 400

LONG = 60.0
"""Seconds after which a longer measurement would not help: the feed is on the border between two limits."""


@dataclass(frozen=True, slots=True)
class WorkerShares:
    """How a worker spent its time, as shares: `generating`, `idle`, `cpu_wait` (ready to run, without a CPU); the rest
    is collating. `cpu` is the share in which it ran on a CPU.
    """

    number: int
    generating: float
    idle: float
    cpu: float
    cpu_wait: float

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
        seconds, batches, samples, nbytes: how much was read, and in how many seconds.
        first_batch_seconds: from connecting (including the start of a private daemon) to the first batch.
        waiting, receiving, step: shares of the consumer's time: waiting for a batch, taking it, in the training step.
        workers: workers that ran for the whole time.
        daemon_cpu, consumer_cpu: CPUs that these used, on average.
        cpus: CPUs that the daemon may use.
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
        slices: the measurements of consecutive parts of the time, which together are this one.
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
        """CPUs of the daemon's host that the feed uses or lacks. Over TCP the consumer may be on another host."""
        consumer = self.consumer_cpu if self.transport == "local" else 0.0
        return sum(worker.cpu + worker.cpu_wait for worker in self.workers) + self.daemon_cpu + consumer


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a feed.

    Attributes:
        limit: the likeliest limit, as `verdict` names it.
        sure: whether the slices agree on it.
        shares: for each limit, the share of the resamples that name it.
        text: some sentences; with advice only if the verdict is sure.
    """

    limit: str
    sure: bool
    shares: dict[str, float]
    text: str


def judged(seen: Figures) -> Judgement:
    """Return what limits the speed, and whether the measurement supports that.

    On a busy machine, or if the splits of a feed differ, the verdict changes from moment to moment. So the time is
    measured in slices, and many resamples of the slices (as many slices, drawn with replacement) get a verdict each.
    The share that agrees shows how much the verdict depends on the moment. This is the bootstrap of Efron and
    Tibshirani (An Introduction to the Bootstrap, 1993, chapter 6). The unit drawn is a slice, because moments close to
    each other are alike (Künsch, 1989, does the same with blocks of a series). A verdict is sure if `SURE` of the
    resamples agree.
    """
    limit, text = verdict(seen)
    shares = _shares(seen.slices)
    others = _others(seen)
    if len(seen.slices) >= FEWEST and shares.get(limit, 0.0) >= SURE:
        return Judgement(limit, True, shares, f"{text}{others}")
    if len(seen.slices) < FEWEST:
        why = f"Not sure: {seen.seconds:.1f} s is too short to tell. It looks like {_NAMES[limit]}. "
    else:
        ordered = sorted(shares.items(), key=lambda item: -item[1])
        found = ", ".join(f"{_NAMES[name]} ({_percent(share)})" for name, share in ordered if share >= 0.01)
        why = f"Not sure: the limit changed during the measurement. Its parts suggest: {found}. "
    if seen.seconds < LONG:
        # The spread shrinks with the square root of the time, so less than twice the time is not worth it.
        why += f"Measure for longer: --seconds {max(30, 10 * round(seen.seconds * 2 / 10))}."
    else:
        why += "A longer run would hardly help: they limit the speed in turn, and removing one shows the other."
    return Judgement(limit, False, shares, f"{why}{others}")


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
    """Return the share of the resamples that names each limit. Deterministic."""
    if not slices:
        return {}
    draw = random.Random(0)
    counts = collections.Counter(verdict(joined(draw.choices(slices, k=len(slices))))[0] for _ in range(RESAMPLES))
    return {limit: count / RESAMPLES for limit, count in counts.items()}


def _others(seen: Figures) -> str:
    """Return a sentence about other work of the host, or an empty string."""
    found = []
    if _is_busy_with_others(seen):
        found.append(f"other work on this host used {seen.other_cpu:.1f} of its {_count(seen.cpus, 'CPU')}")
    if seen.stolen is not None and seen.stolen >= STOLEN * seen.cpus:
        found.append(f"its hypervisor gave {seen.stolen:.1f} to other hosts")
    return f" Meanwhile {' and '.join(found)}: measure again when it is idle." if found else ""


def verdict(seen: Figures) -> tuple[str, str]:
    """Return what limits the speed according to these figures, and what that means.

    Returns:
        "consumer", "workers", "cpus", "lanes", "generator", "collating", "daemon" or "transport"; and some sentences.
    """
    if seen.waiting < WAITS:
        return "consumer", _keeps_up(seen)
    if not seen.workers:
        return (
            "workers",
            "No worker ran for the whole time: the daemon's log says why workers end and are started again.",
        )
    busy = [worker for worker in seen.workers if worker.busy >= BUSY]
    if seen.cpus_wanted >= ALL_CPUS * seen.cpus:
        return "cpus", _no_cpus(seen)
    if busy and len(busy) < len(seen.workers) and sum(w.busy for w in seen.workers) < BUSY * len(seen.workers):
        return "lanes", _uneven(seen, len(busy))
    if busy and _generating(seen) >= _collating(seen):
        return "generator", f"The generator is the limit: {_each(seen)}. {_more_workers(seen)}"
    if busy:
        return "collating", (
            f"Collating, the copying of samples into batches, is the limit: {_each(seen)}. Yield few, large NumPy "
            f"arrays of the spec's dtypes{'' if seen.whole_batches else _SAMPLES}. {_more_workers(seen)}"
        )
    if seen.daemon_cpu >= BUSY:
        return "daemon", (
            f"The daemon's own process is the limit at {_number(seen.rate)} batches/s: workers and consumer wait for "
            "it. Make batches larger."
        )
    if seen.transport == "tcp":
        return "transport", (
            f"The connection to the consumer is the limit at {_number(_megabytes(seen))} MB/s: workers are idle while "
            f"it waits. {'' if seen.bytes_only else 'Send smaller dtypes (uint8, not float32), or '}"
            f"{'R' if seen.bytes_only else 'r'}un the daemon on the trainer's host, which reads shared memory"
            f"{' without --transport tcp' if seen.tcp_asked else ''}."
        )
    return "transport", (
        f"The hand-over is the limit: workers are idle for {_percent(_idle(seen))} of the time while the consumer "
        f"waits. {'Give the daemon more --memory, so that workers get ahead, or m' if seen.memory_full else 'M'}ake "
        "batches larger."
    )


def lines(seen: Figures) -> Iterator[str]:
    """Yield the report, line by line: the figures, then the verdict."""
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
            f"{_percent(worker.cpu)} of a CPU"
        )
    yield f"daemon       {_percent(seen.daemon_cpu)} of a CPU; its host has {seen.cpus}"
    if seen.slices:
        rates = sorted(part.rate for part in seen.slices)
        yield f"spread       {_number(rates[0])} to {_number(rates[-1])} batches/s in {len(rates)} parts of the time"
    if seen.other_cpu is not None and seen.stolen is not None:
        yield f"other work   {_percent(seen.other_cpu)} of a CPU on this host, {_percent(seen.stolen)} stolen"
    if seen.others:
        yield f"others       {_count(seen.others, 'other consumer')} of this daemon: its figures include them"
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
            f"The loader keeps up: the consumer waits for {_percent(seen.waiting)} of the time. A faster loader would "
            "save no more than that."
        )
    return (
        f"The loader is faster than the consumer can receive: with {seen.consumer} this process takes "
        f"{_number(seen.rate)} batches/s. If that is too slow, make batches larger."
    )


def _no_cpus(seen: Figures) -> str:
    text = f"The CPUs are the limit: of {_cpus(seen)}, {seen.cpus_wanted:.1f} are needed"
    if _is_busy_with_others(seen):
        return f"{text}, and other work uses them too. More workers would not help."
    lacked = sum(worker.cpu_wait for worker in seen.workers)
    if lacked < _generating(seen) + _collating(seen):  # else it is uncertain where the rest of the time went
        heaviest = "in the generator" if _generating(seen) >= _collating(seen) else "collating"
        text += f", and workers spend most of their working time {heaviest}"
    return f"{text}. More workers would not help: make the work cheaper, or serve the feed from a host with more CPUs."


def _is_busy_with_others(seen: Figures) -> bool:
    return seen.other_cpu is not None and seen.other_cpu >= OTHERS * seen.cpus


def _uneven(seen: Figures, busy: int) -> str:
    text = f"Only {busy} of {len(seen.workers)} workers {'is' if busy == 1 else 'are'} busy: "
    if seen.lanes is not None and seen.lanes < len(seen.workers):
        return text + (
            f"the feed has {_count(seen.lanes, 'lane')}, so no more can work at once. Use more splits and "
            "Feed(lanes=), or fewer workers."
        )
    if seen.fast:
        return text + "their lanes take longer. Make splits smaller and similar in size."
    return text + (
        "their lanes take longer, and batches come in order. Make splits smaller and similar in size, or use "
        'Feed(order="fast"), which sends batches when they are ready.'
    )


def _each(seen: Figures) -> str:
    count = len(seen.workers)
    each = f", {_number(seen.rate / count)} each" if count > 1 else ""
    return f"{_count(count, 'worker')} {'makes' if count == 1 else 'make'} {_number(seen.rate)} batches/s{each}"


def _more_workers(seen: Figures) -> str:
    """Return advice on the number of workers, if all workers are busy and CPUs are left."""
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
        text += ", and workers mostly wait for something else (files, network), so use more workers than CPUs"
    if seen.lanes is not None:
        text += f". Best are divisors of its {seen.lanes} lanes, such as {_divisor_above(seen.lanes, count)}"
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
    "transport": "the connection to the consumer",
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
