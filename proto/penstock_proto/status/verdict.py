"""The verdict on a measured feed: says in words what limits it. No I/O.

`verdict` interprets one set of figures, measured by `penstock bench`, the daemon, or a trainer.
"""

from __future__ import annotations

from dataclasses import dataclass

from .figures import Figures, count, number, percent, size

WAITS = 0.1
"""A consumer that waits for less than this share of its time counts as not waiting."""

BUSY = 0.8
"""A worker or daemon that is busy for at least this share of the time counts as always busy. Short pauses are
normal."""

EVEN = 0.8
"""If one worker is less than this fraction as busy as another, the work is divided unevenly."""

ALL_CPUS = 0.85
"""If work needs at least this share of a host's CPUs, the CPUs are the limit."""

OTHERS = 0.2
"""Reports mention other work if it uses at least this share of a host's CPUs."""

FEW = 10
"""With fewer batches than this, a connection's rate is unknown."""

MOSTLY = 0.5
"""A cause that makes up at least this share of a consumer's waits is the limit."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits the speed of a consumer.

    Attributes:
        limit: "consumer", "ranks", "workers", "cpus", "memory", "lanes", "generator", "collating", "daemon",
            "transport" or "pace".
        headline: the verdict in half a sentence, such as "the trainer waits 31 % of the time: ...".
        cause: its last part, which does not say how long the consumer waits.
        text: some sentences, with advice.
    """

    limit: str
    headline: str
    cause: str
    text: str


def verdict(seen: Figures) -> Verdict:
    """Return the limit of the speed according to these figures, and what that means."""
    if seen.waiting < WAITS:
        cause = _bottleneck(seen)
        return Verdict("consumer", cause, cause, _keeps_up(seen))
    limit, cause, text = _limit(seen)
    return Verdict(limit, f"the trainer waits {percent(seen.waiting)} of the time: {cause}", cause, text)


def _limit(seen: Figures) -> tuple[str, str, str]:
    """Return why a consumer waits: the limit, a few words, and some sentences."""
    if seen.slow_rank is not None and seen.ranks_share >= MOSTLY:
        return "ranks", f"rank {seen.slow_rank} is slower, and all ranks go on together", _slow_rank(seen)
    if seen.transport == "tcp" and seen.sending_share >= MOSTLY:
        return _connection(seen)
    if seen.without_makers:
        return (
            "workers",
            "no worker makes batches until a host joins",
            "No worker makes batches, as the daemon has none and no host has joined: run `penstock join` on a host, or "
            "give the daemon workers (penstock scale).",
        )
    if not seen.workers:
        return (
            "workers",
            "workers end and are started again",
            "No worker ran for the whole time: the daemon's log says why workers end and are started again.",
        )
    busy = [worker for worker in seen.workers if worker.busy >= BUSY]
    if seen.cpus_wanted >= ALL_CPUS * seen.cpus:
        return "cpus", f"{_cpus(seen)} {'is' if seen.cpus == 1 else 'are'} busy", _no_cpus(seen)
    uneven = len(busy) < seen.usable and sum(worker.busy for worker in seen.workers) < BUSY * seen.usable
    if uneven and seen.short_of_slots:
        return (
            "memory",
            f"there is memory for {_slots(seen)} in production, too little for {_workers(seen)}",
            _memory(seen),
        )
    apart = min(worker.busy for worker in seen.workers) < EVEN * max(worker.busy for worker in seen.workers)
    if busy and apart and sum(worker.busy for worker in seen.workers) < BUSY * len(seen.workers):
        text = _uneven(seen, len(busy))
        return "lanes", text[0].lower() + text[1:].partition(". ")[0].partition(", so no")[0], text
    if busy and seen.generating >= seen.collating:
        text = f"The generator is the limit: {_each(seen)}. {_more_workers(seen)}"
        return "generator", _busy(seen), text
    if busy:
        return (
            "collating",
            f"{_busy(seen)}; they mostly copy samples into batches",
            f"Collating, the copying of samples into batches, is the limit: {_each(seen)}. Yield few, large NumPy "
            f"arrays of the spec's dtypes{'' if seen.whole_batches else _SAMPLES}. {_more_workers(seen)}",
        )
    if seen.daemon_cpu >= BUSY:
        return (
            "daemon",
            f"the daemon's own process is busy {percent(seen.daemon_cpu)}",
            f"The daemon's own process is the limit at {number(seen.rate)} batches/s: workers and consumer wait for "
            "it. Make batches larger.",
        )
    if seen.idle_while_waiting < WAITS:
        return "pace", f"batches or steps take unevenly long, while workers are idle {percent(seen.idle)}", _pace(seen)
    if seen.transport == "tcp":
        return _round_trips(seen)
    return (
        "transport",
        f"the hand-over, while workers are idle {percent(seen.idle)}",
        f"The hand-over is the limit: workers are idle for {percent(seen.idle)} of the time while the consumer "
        f"waits. {'Give the daemon more --memory, so that workers get ahead, or m' if seen.memory_full else 'M'}ake "
        "batches larger.",
    )


def _connection(seen: Figures) -> tuple[str, str, str]:
    # A few batches do not show a connection's rate, and other consumers may have received some of them.
    rate = f"{number(seen.megabytes)} MB/s" if seen.batches >= FEW and not seen.others else ""
    return (
        "transport",
        f"the network{rate and ', which carries '}{rate}",
        f"The connection to the consumer is the limit{rate and ' at '}{rate}: it takes no more, or a batch is "
        f"coming, in {percent(seen.sending_share)} of the time for which the consumer waits. "
        f"{'' if seen.bytes_only else 'Send smaller dtypes (uint8, not float32), or '}"
        f"{'R' if seen.bytes_only else 'r'}un the daemon on the trainer's host, which reads shared memory"
        f"{_ASKED if seen.tcp_asked else ''}.",
    )


def _round_trips(seen: Figures) -> tuple[str, str, str]:
    return (
        "transport",
        f"the hand-over over TCP, while workers are idle {percent(seen.idle)}",
        f"The hand-over over TCP is the limit: workers are idle for {percent(seen.idle)} of the time while the "
        f"consumer waits, and the connection is busy in {percent(seen.sending_share)} of its waits. Make batches "
        "larger, or run the daemon on the trainer's host, which reads shared memory"
        f"{_ASKED if seen.tcp_asked else ''}.",
    )


def _pace(seen: Figures) -> str:
    more = "; more --memory lets workers get further ahead" if seen.memory_full else ""
    return (
        f"Nothing is always the limit: the consumer waits for {percent(seen.waiting)} of the time, and workers are "
        f"idle for {percent(seen.idle)}, mostly at other times. Some batches or some steps take longer than others, or "
        f"it has just begun to read{more}."
    )


def _slow_rank(seen: Figures) -> str:
    return (
        f"Rank {seen.slow_rank} is the limit: this rank waits for {percent(seen.waiting)} of the time, mostly for rank "
        f"{seen.slow_rank}, which has batches and does not take them. All ranks get a round together. Look at the step "
        "of that rank, its host and its connection."
    )


def _memory(seen: Figures) -> str:
    of = "" if seen.memory is None else f" of its {size(seen.memory)}"
    return (
        f"Memory is the limit: the daemon has {_slots(seen)}{of} for batches of this stream in production, too few for "
        f"{_workers(seen)}. Give it more --memory, or make batches smaller (Feed(batch_size=), Feed(turn=1))."
    )


def _slots(seen: Figures) -> str:
    slots = max(1, (seen.slots or 0) - 1)
    return f"{slots} {'slot' if slots == 1 else 'slots'}"


def _workers(seen: Figures) -> str:
    return count(len(seen.workers), "worker")


def _bottleneck(seen: Figures) -> str:
    if seen.holding_up >= WAITS:
        return f"the trainer is the bottleneck: other ranks wait for it {percent(seen.holding_up)} of the time"
    if not seen.workers:
        return "the trainer is the bottleneck"
    need = max(
        sum(worker.busy for worker in seen.workers) / max(1, seen.usable), seen.cpus_wanted / seen.cpus, seen.daemon_cpu
    )
    could = 1 / max(need, 0.01)
    if could < 1 + WAITS:
        return "the trainer is the bottleneck, and the loader has little to spare"
    return (
        f"the trainer is the bottleneck: the loader could give {could:.0f}x"
        if could >= 10
        else (f"the trainer is the bottleneck: the loader could give {could:.1f}x")
    )


def _busy(seen: Figures) -> str:
    """Return in a few words how busy workers are and what to do."""
    busy = f"workers are busy {percent(sum(worker.busy for worker in seen.workers) / len(seen.workers))}"
    workers, more = len(seen.workers), _next(seen)
    if more is not None:
        return f"{busy}, add workers ({workers} -> {more})"
    if seen.lanes is not None and seen.lanes <= workers:
        return f"{busy}, and more of them need more lanes than {seen.lanes}"
    return f"{busy}, and as many as CPUs"


def _keeps_up(seen: Figures) -> str:
    if seen.holding_up >= WAITS:
        return (
            f"This rank is the limit: the other ranks wait for it {percent(seen.holding_up)} of the time, as all ranks "
            "get a round together. Look at its step, its host and its connection."
        )
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
    if lacked < seen.generating + seen.collating:  # otherwise it is unclear where the rest of the time went
        heaviest = "in the generator" if seen.generating >= seen.collating else "collating"
        text += f", and workers spend most of their working time {heaviest}"
    return f"{text}. More workers would not help: make the work cheaper, or serve the feed from a host with more CPUs."


def is_busy_with_others(seen: Figures) -> bool:
    """Return whether other work uses much of the CPUs of the feed's host."""
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


def _next(seen: Figures) -> int | None:
    """Return how many workers to try next, or None if more would not help."""
    workers = len(seen.workers)
    if seen.lanes is not None and seen.lanes <= workers:
        return None
    if workers >= seen.cpus and not seen.wait_for_io:
        return None
    return 2 * workers if seen.lanes is None else _divisor_above(seen.lanes, workers)


def _more_workers(seen: Figures) -> str:
    """Return advice on the number of workers, if all workers are busy and CPUs are left."""
    more = _next(seen)
    if seen.lanes is not None and seen.lanes <= len(seen.workers):
        return f"More workers need more splits and Feed(lanes=): it has {count(seen.lanes, 'lane')}."
    if more is None:
        return (
            f"There are as many workers as CPUs already: of {_cpus(seen)}, {seen.cpus_wanted:.1f} are needed. Make the "
            "work cheaper, or serve the feed from a host with more CPUs."
        )
    text = f"Add workers: of {_cpus(seen)}, {seen.cpus_wanted:.1f} are needed"
    if seen.wait_for_io:
        text += ", and workers mostly wait for something else (files, network), so use more workers than CPUs"
    if seen.lanes is not None:
        text += f". Best are divisors of its {seen.lanes} lanes, such as {more}"
    return text + "."


_SAMPLES = " for each sample, or whole batches with batch_size=None"

_ASKED = " without --transport tcp"

NAMES = {
    "consumer": "the consumer",
    "ranks": "a slow rank",
    "workers": "workers that end",
    "cpus": "the CPUs",
    "memory": "the memory for batches",
    "lanes": "too few busy lanes",
    "generator": "the generator",
    "collating": "collating",
    "daemon": "the daemon's own process",
    "transport": "the connection to the consumer",
    "pace": "an uneven pace",
}


def _divisor_above(lanes: int, count: int) -> int:
    return next(number for number in range(count + 1, lanes + 1) if lanes % number == 0)


def _cpus(seen: Figures) -> str:
    return f"the {count(seen.cpus, 'CPU')} of the daemon's host"
