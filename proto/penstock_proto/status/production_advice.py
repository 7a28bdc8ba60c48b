"""The words of a verdict on workers that make what the consumer waits for. verdict.py decides which of them apply."""

from __future__ import annotations

import math

from .advice import Cause, all_cpus
from .figures import Figures, HostUse, count, number, percent, size

GROWTH = 8
"""Most times as many workers that are advised at once: with many more, something else is the limit."""


def listing(seen: Figures) -> Cause:
    """The splits of the epoch are not known."""
    return Cause(
        "listing",
        f"the splits are being listed in {percent(seen.listing)} of the waits",
        f"Listing the splits is the limit: in {percent(seen.listing)} of the waits the next epoch's splits are not "
        "known yet. Make splits=() quicker, or give a list that is the same in all epochs.",
    )


def lanes(seen: Figures) -> Cause:
    """Workers have no lane to work on."""
    workers = len(seen.workers)
    if seen.lanes is not None and seen.lanes < workers:
        what = count(seen.lanes, "lane")
        if seen.splits is not None and seen.splits == seen.lanes:
            what = count(seen.splits, "split")
        few = f"the feed has {what} for {count(workers, 'worker')}"
        return Cause(
            "lanes",
            few,
            f"Only {seen.lanes} of {workers} workers {'is' if seen.lanes == 1 else 'are'} busy: the feed has {what}, "
            "so no more can work at once. Use more splits and Feed(lanes=), or fewer workers.",
            f"give it more {'splits' if seen.splits == seen.lanes else 'lanes'}",
            workers / seen.lanes,
        )
    most = -(-(seen.lanes or 1) // workers)
    if seen.lanes is not None and uneven_lanes(seen):
        few = f"{seen.lanes} lanes do not divide evenly among {workers} workers"
        return Cause(
            "lanes",
            few,
            f"{few}: some make {most} and others {most - 1}, and batches come in order. Best are divisors of "
            f"{seen.lanes}, such as {_divisor_above(seen.lanes, workers)} workers, or another Feed(lanes=), which is "
            "another order of the batches.",
            f"have {_divisor_above(seen.lanes, workers)}",
            most * _divisor_above(seen.lanes, workers) / seen.lanes,
        )
    few = f"{percent(seen.without_lane)} of the workers have no lane to work on"
    return Cause(
        "lanes",
        few,
        f"While it waits, {few}: the others keep theirs until a split ends. That is so at the end of an epoch, and "
        f"after workers were added. Make splits smaller and similar in size{_or_fast(seen)}.",
        "make splits smaller",
        1 / max(0.01, min(seen.at_work, 1 - seen.without_lane)),
    )


def uneven_lanes(seen: Figures) -> bool:
    """Whether some workers have clearly more lanes than others."""
    if seen.lanes is None or seen.lanes < len(seen.workers):
        return False
    most = -(-seen.lanes // len(seen.workers))
    return most * len(seen.workers) >= 1.2 * seen.lanes


def memory(seen: Figures) -> Cause:
    """There are too few slots for all workers."""
    slots = count(max(1, (seen.slots or 0) - 1), "slot")
    of = "" if seen.memory is None else f" of its {size(seen.memory)}"
    smaller = "make batches smaller (Feed(batch_size=)" + (", Feed(turn=1))" if seen.turn > 1 else ")")
    return Cause(
        "memory",
        f"there is memory for {slots} in production, too little for {_workers(seen)}",
        f"Memory is the limit: the daemon has {slots}{of} for batches of this stream in production, too few for "
        f"{_workers(seen)}. Give it more --memory, or {smaller}.",
        "give the daemon more --memory",
        1 / max(0.01, min(seen.at_work, 1 - seen.ahead)),
    )


def long_turns(seen: Figures) -> Cause:
    """Each lane gives many batches in a row, which one worker makes."""
    takes = f"{seen.turn_seconds:.0f} s" if seen.turn_seconds < 100 else "minutes"
    return Cause(
        "turn",
        f"each turn of {seen.turn} batches takes one worker {takes}, while others are ahead",
        f"Long turns are the limit: a lane gives {seen.turn} batches in a row, for which its worker takes about "
        f"{takes}. Meanwhile the trainer gets the speed of one worker. Use Feed(turn=1); another turn is another "
        "order of the batches.",
        "use Feed(turn=1)",
        _if_even(seen),
    )


def slow_lane(seen: Figures) -> Cause:
    """One worker makes most of the batches that the consumer waits for."""
    worker = seen.most_awaited
    name, at = worker.name or str(worker.number), f", at split {seen.awaited_at}" if seen.awaited_at else ""
    few = f"worker {name} makes the next batch in {percent(worker.awaited)} of the waits"
    return Cause(
        "split",
        few + at,
        f"One worker is the limit: {few}{at}, and others are ahead of it. Make splits smaller and similar in size, or "
        'use Feed(order="fast"), which sends batches when they are ready. If the splits are alike, look at this '
        "worker (penstock profile).",
        "make splits smaller",
        _if_even(seen),
    )


def slow_host(seen: Figures, host: HostUse) -> Cause:
    """A host makes most of the batches that the consumer waits for."""
    workers = [worker for worker in seen.workers if worker.host == host.name]
    used = sum(worker.cpu for worker in workers)
    of = "" if host.machine is None else f" of {count(host.machine.allowed, 'CPU')}; {host.machine.free:.1f} are idle"
    few = f"host {host.name} makes the next batch in {percent(host.awaited)} of the waits"
    return Cause(
        "host",
        few,
        f"One host is the limit: {few}, and others are ahead. Its {count(len(workers), 'worker')} use {used:.1f}{of}. "
        'Give it fewer workers, look at its disk and network, or use Feed(order="fast").',
        "look at that host",
        _if_even(seen),
    )


def order(seen: Figures) -> Cause:
    """Batches are ready, and the next one in order is not."""
    few = f"batches come in order, and workers are ahead of the next one {percent(seen.ahead)} of the waits"
    fixes = ["give the daemon more --memory, so that workers get further ahead"] if seen.memory_full else []
    if not seen.fast:
        fixes.append('use Feed(order="fast"), which sends batches when they are ready')
    fixes.append("make samples similar in cost")
    advice = ", or ".join(fixes)
    return Cause(
        "order",
        few,
        f"The order is the limit: {few}. Batches take unevenly long: {advice}.",
        fixes[0].partition(",")[0],
        _if_even(seen),
    )


def generator(seen: Figures) -> Cause:
    """Workers are busy with user code."""
    more = ""
    if seen.undivided:
        more = (
            " But each worker runs the whole generator, and they share only the work of transform=: `penstock check` "
            "shows how much that is."
        )
    if seen.cache_filling:
        more += " Splits are written to the cache meanwhile, and later epochs read them."
    return Cause(
        "generator",
        _busy(seen),
        f"The generator is the limit: {_each(seen)}. {_more_workers(seen)}{more}",
        _add_workers(seen),
        _with_more(seen),
    )


def collating(seen: Figures) -> Cause:
    """Workers are busy with Penstock's own code."""
    samples = "" if seen.whole_batches else " for each sample, or whole batches with batch_size=None"
    return Cause(
        "collating",
        f"{_busy(seen)}, mostly copying samples into batches",
        f"Collating, the copying of samples into batches, is the limit: {_each(seen)}. Yield few, large NumPy "
        f"arrays of the spec's dtypes{samples}. {_more_workers(seen)}",
        _add_workers(seen),
        _with_more(seen),
    )


def pace(seen: Figures) -> Cause:
    """Workers are idle at other times than the consumer."""
    more = "; more --memory lets workers get further ahead" if seen.memory_full else ""
    return Cause(
        "pace",
        f"batches or steps take unevenly long, while workers are idle {percent(seen.idle)}",
        f"Nothing is always the limit: the consumer waits for {percent(seen.waiting)} of the time, and workers are "
        f"idle for {percent(seen.idle)}, mostly at other times. Some batches or some steps take longer than "
        f"others{more}.",
    )


def unknown(seen: Figures) -> Cause:
    """No figure explains the waits."""
    return Cause(
        "unknown",
        f"unknown: workers are idle {percent(seen.idle)}, and the figures do not show why",
        f"The cause is not known: the consumer waits for {percent(seen.waiting)} of the time while workers are idle "
        f"for {percent(seen.idle)}, and neither lanes, memory, the order nor the connection explain it. Measure for "
        "longer (penstock bench), or look at the workers (penstock profile).",
    )


# --- words ---


def _if_even(seen: Figures) -> float:
    """Return how many times as fast the stream could be if no batch had to wait for others."""
    return min(seen.usable, max(seen.makes_ahead, 1 / max(0.01, seen.at_work)))


def _with_more(seen: Figures) -> float | None:
    more = _next(seen)
    return None if more is None else more / len(seen.workers)


def _or_fast(seen: Figures) -> str:
    return "" if seen.fast else ', or use Feed(order="fast")'


def _workers(seen: Figures) -> str:
    return count(len(seen.workers), "worker")


def _busy(seen: Figures) -> str:
    return f"workers are busy {percent(sum(worker.busy for worker in seen.workers) / len(seen.workers))}"


def _add_workers(seen: Figures) -> str:
    workers, more = len(seen.workers), _next(seen)
    if more is not None:
        return f"add workers ({workers} -> {more})"
    if seen.lanes is not None and seen.lanes <= workers:
        return f"and more of them need more lanes than {seen.lanes}"
    return "and as many as CPUs"


def _each(seen: Figures) -> str:
    workers = len(seen.workers)
    each = f", {number(seen.rate / workers)} each" if workers > 1 else ""
    return f"{count(workers, 'worker')} {'makes' if workers == 1 else 'make'} {number(seen.rate)} batches/s{each}"


def _next(seen: Figures) -> int | None:
    """Return how many workers to try next, or None if more would not help.

    That is as many as the consumer needs to wait no more, if they are as fast as these. But it is no more than `GROWTH`
    times as many, than idle CPUs allow, or than there are lanes.
    """
    workers = len(seen.workers)
    if seen.lanes is not None and seen.lanes <= workers:
        return None
    most = GROWTH * workers
    if seen.free_cpus is not None:
        each = sum(worker.cpu + worker.cpu_wait for worker in seen.workers) / workers
        fitting = workers + int(seen.free_cpus / max(each, 0.01) + 0.25)
        most = min(most, max(fitting, 2 * workers) if seen.waits_for_io else fitting)
    wanted = min(most, max(workers + 1, math.ceil(workers / max(0.01, 1 - seen.waiting) - 0.1)))
    if wanted <= workers:
        return None
    if seen.lanes is None:
        return wanted
    even = [count for count in range(workers + 1, most + 1) if seen.lanes % count == 0]
    return next((count for count in even if count >= wanted), even[-1] if even else min(wanted, seen.lanes))


def _more_workers(seen: Figures) -> str:
    """Return advice on the number of workers, if all workers are busy and CPUs are left."""
    more = _next(seen)
    if seen.lanes is not None and seen.lanes <= len(seen.workers):
        return f"More workers need more splits and Feed(lanes=): it has {count(seen.lanes, 'lane')}."
    cpus = f"of {all_cpus(seen)}"
    if more is None:
        return (
            f"There are as many workers as CPUs already: {cpus}, {seen.cpus_used:.1f} are used. Make the work cheaper, "
            "or serve the feed from a host with more CPUs."
        )
    text = f"Add workers ({len(seen.workers)} -> {more}): {cpus}, {seen.cpus_used:.1f} are used"
    if seen.waits_for_io:
        text += ", and workers mostly wait for something else (files, network), so use more workers than CPUs"
    if seen.lanes is not None:
        text += f". Best are divisors of its {count(seen.lanes, 'lane')}"
    return text + "."


def _divisor_above(lanes: int, count: int) -> int:
    return next(number for number in range(count + 1, lanes + 1) if lanes % number == 0)
