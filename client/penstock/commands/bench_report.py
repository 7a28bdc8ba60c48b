"""The report of `penstock bench`: the figures of a feed, then the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_proto.status.figures import Figures, count, number, percent

from .bench_verdict import judged


def lines(seen: Figures) -> Iterator[str]:
    """Yield the report, line by line: the figures, then the verdict."""
    for name, text in rows(seen):
        yield f"{name:<12} {text}"
    yield ""
    yield judged(seen).text


def rows(seen: Figures) -> Iterator[tuple[str, str]]:
    """Yield the figures, each as a name and a text."""
    yield "feed", f"{seen.url} ({seen.transport}), read with {seen.consumer} for {seen.seconds:.1f} s"
    speed = f"{number(seen.rate)} batches/s, {number(seen.samples / seen.seconds)} samples/s"
    yield "speed", f"{speed}, {number(seen.megabytes)} MB/s"
    yield "first batch", f"after {seen.first_batch_seconds:.2f} s"
    coming = f" ({percent(seen.sending_share)} of that while a batch is coming)" if seen.transport == "tcp" else ""
    yield (
        "consumer",
        f"{percent(seen.waiting)} waiting{coming}, {percent(seen.receiving)} receiving, "
        f"{percent(seen.step)} in its step",
    )
    for worker in seen.workers:
        yield (
            f"worker {worker.name or worker.number}",
            f"{percent(worker.generating)} generating, {percent(worker.collating)} collating, {percent(worker.idle)} "
            f"idle, {percent(worker.cpu_wait)} without a CPU; it used {percent(worker.cpu)} of a CPU",
        )
    yield "daemon", f"{percent(seen.daemon_cpu)} of a CPU; its host has {seen.cpus}"
    if seen.slices:
        rates = sorted(part.rate for part in seen.slices)
        yield "spread", f"{number(rates[0])} to {number(rates[-1])} batches/s in {len(rates)} parts of the time"
    if seen.machine is not None:
        stolen = f", {percent(seen.machine.stolen)} stolen" if seen.machine.stolen >= 0.01 else ""
        other = f"{percent(seen.other_cpu)} of a CPU by other work"
        yield "its host", f"{seen.machine.idle:.1f} of {count(seen.machine.count, 'CPU')} idle, {other}{stolen}"
    if seen.others:
        yield "others", f"{count(seen.others, 'other consumer')} of this daemon: its figures include them"
    if seen.jobs > 1:
        yield "shared", f"by {seen.jobs} jobs: each batch is made once for all of them"
    if seen.cached is not None:
        yield (
            "cached",
            f"{number(seen.cached)} batches/s: with an infinitely fast loader this consumer would be "
            f"{seen.cached / seen.rate:.2f} times as fast",
        )


def parts(seen: Figures) -> Iterator[tuple[str, list[tuple[str, float, str]]]]:
    """Yield how the consumer and each worker spent their time: parts with their names, shares and kinds.

    Kinds are "user" (user code), "penstock", "lacking" (ready to run, but without a CPU) and "idle".
    """
    yield (
        "consumer",
        [
            ("step", seen.step, "user"),
            ("receiving", seen.receiving, "penstock"),
            ("waiting for batches", seen.waiting, "idle"),
        ],
    )
    for worker in seen.workers:
        yield (
            f"worker {worker.name or worker.number}",
            [
                ("generating", worker.generating, "user"),
                ("collating", worker.collating, "penstock"),
                ("without a CPU", worker.cpu_wait, "lacking"),
                ("idle", worker.idle, "idle"),
            ],
        )
