"""The verdict on a measured feed: says in words what limits it, without I/O.

`verdict` interprets one set of figures, whoever measured them: `penstock bench`, the daemon, or a trainer.
"""

from __future__ import annotations

from .figures import Figures, count, number, percent

WAITS = 0.1
"""A consumer that waits for less than this share of its time counts as not waiting."""

BUSY = 0.8
"""A worker or daemon with at least this share of busy time counts as always busy: there are always short pauses."""

ALL_CPUS = 0.85
"""If at least this share of a host's CPUs is needed, the CPUs are the limit."""

COMPUTES = 0.5
"""A worker that spends less than this share of its busy time on a CPU, or waiting for one, mostly waits for I/O."""

OTHERS = 0.2
"""Reports mention other work that uses at least this share of a host's CPUs."""


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
    if busy and seen.generating >= seen.collating:
        return "generator", f"The generator is the limit: {_each(seen)}. {_more_workers(seen)}"
    if busy:
        return "collating", (
            f"Collating, the copying of samples into batches, is the limit: {_each(seen)}. Yield few, large NumPy "
            f"arrays of the spec's dtypes{'' if seen.whole_batches else _SAMPLES}. {_more_workers(seen)}"
        )
    if seen.daemon_cpu >= BUSY:
        return "daemon", (
            f"The daemon's own process is the limit at {number(seen.rate)} batches/s: workers and consumer wait for "
            "it. Make batches larger."
        )
    if seen.transport == "tcp":
        return "transport", (
            f"The connection to the consumer is the limit at {number(seen.megabytes)} MB/s: workers are idle while "
            f"it waits. {'' if seen.bytes_only else 'Send smaller dtypes (uint8, not float32), or '}"
            f"{'R' if seen.bytes_only else 'r'}un the daemon on the trainer's host, which reads shared memory"
            f"{' without --transport tcp' if seen.tcp_asked else ''}."
        )
    return "transport", (
        f"The hand-over is the limit: workers are idle for {percent(seen.idle)} of the time while the consumer "
        f"waits. {'Give the daemon more --memory, so that workers get ahead, or m' if seen.memory_full else 'M'}ake "
        "batches larger."
    )


def _keeps_up(seen: Figures) -> str:
    if seen.step >= seen.receiving:
        return (
            f"The loader keeps up: the consumer waits for {percent(seen.waiting)} of the time. A faster loader would "
            "save no more than that."
        )
    return (
        f"The loader is faster than the consumer can receive: with {seen.consumer} this process takes "
        f"{number(seen.rate)} batches/s. If that is too slow, make batches larger."
    )


def _no_cpus(seen: Figures) -> str:
    text = f"The CPUs are the limit: of {_cpus(seen)}, {seen.cpus_wanted:.1f} are needed"
    if is_busy_with_others(seen):
        return f"{text}, and other work uses them too. More workers would not help."
    lacked = sum(worker.cpu_wait for worker in seen.workers)
    if lacked < seen.generating + seen.collating:  # else it is uncertain where the rest of the time went
        heaviest = "in the generator" if seen.generating >= seen.collating else "collating"
        text += f", and workers spend most of their working time {heaviest}"
    return f"{text}. More workers would not help: make the work cheaper, or serve the feed from a host with more CPUs."


def is_busy_with_others(seen: Figures) -> bool:
    """Whether other work uses much of the CPUs of the feed's host."""
    return seen.other_cpu is not None and seen.other_cpu >= OTHERS * seen.cpus


def _uneven(seen: Figures, busy: int) -> str:
    text = f"Only {busy} of {len(seen.workers)} workers {'is' if busy == 1 else 'are'} busy: "
    if seen.lanes is not None and seen.lanes < len(seen.workers):
        return text + (
            f"the feed has {count(seen.lanes, 'lane')}, so no more can work at once. Use more splits and "
            "Feed(lanes=), or fewer workers."
        )
    if seen.fast:
        return text + "their lanes take longer. Make splits smaller and similar in size."
    return text + (
        "their lanes take longer, and batches come in order. Make splits smaller and similar in size, or use "
        'Feed(order="fast"), which sends batches when they are ready.'
    )


def _each(seen: Figures) -> str:
    workers = len(seen.workers)
    each = f", {number(seen.rate / workers)} each" if workers > 1 else ""
    return f"{count(workers, 'worker')} {'makes' if workers == 1 else 'make'} {number(seen.rate)} batches/s{each}"


def _more_workers(seen: Figures) -> str:
    """Return advice on the number of workers, if all workers are busy and CPUs are left."""
    workers = len(seen.workers)
    if seen.lanes is not None and seen.lanes <= workers:
        return f"More workers need more splits and Feed(lanes=): it has {count(seen.lanes, 'lane')}."
    waits = sum(worker.cpu + worker.cpu_wait for worker in seen.workers) < COMPUTES * sum(w.busy for w in seen.workers)
    if workers >= seen.cpus and not waits:
        return (
            f"There are as many workers as CPUs already: of {_cpus(seen)}, {seen.cpus_wanted:.1f} are needed. Make the "
            "work cheaper, or serve the feed from a host with more CPUs."
        )
    text = f"Add workers: of {_cpus(seen)}, {seen.cpus_wanted:.1f} are needed"
    if waits:
        text += ", and workers mostly wait for something else (files, network), so use more workers than CPUs"
    if seen.lanes is not None:
        text += f". Best are divisors of its {seen.lanes} lanes, such as {_divisor_above(seen.lanes, workers)}"
    return text + "."


_SAMPLES = " for each sample, or whole batches with batch_size=None"

NAMES = {
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


def _cpus(seen: Figures) -> str:
    return f"the {count(seen.cpus, 'CPU')} of the daemon's host"
