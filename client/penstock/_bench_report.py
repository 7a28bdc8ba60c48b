"""The report of `penstock bench`: the figures of a feed, then the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from penstock_proto.figures import Figures, count, number, percent

from ._bench_verdict import judged


def lines(seen: Figures) -> Iterator[str]:
    """Yield the report, line by line: the figures, then the verdict."""
    yield f"feed         {seen.url} ({seen.transport}), read with {seen.consumer} for {seen.seconds:.1f} s"
    speed = f"{number(seen.rate)} batches/s, {number(seen.samples / seen.seconds)} samples/s"
    yield f"speed        {speed}, {number(seen.megabytes)} MB/s"
    yield f"first batch  after {seen.first_batch_seconds:.2f} s"
    coming = f" ({percent(seen.sending_share)} of that while a batch is coming)" if seen.transport == "tcp" else ""
    yield (
        f"consumer     {percent(seen.waiting)} waiting{coming}, {percent(seen.receiving)} receiving, "
        f"{percent(seen.step)} in its step"
    )
    for worker in seen.workers:
        yield (
            f"worker {worker.number:<5} {percent(worker.generating)} generating, {percent(worker.collating)} "
            f"collating, {percent(worker.idle)} idle, {percent(worker.cpu_wait)} without a CPU; it used "
            f"{percent(worker.cpu)} of a CPU"
        )
    yield f"daemon       {percent(seen.daemon_cpu)} of a CPU; its host has {seen.cpus}"
    if seen.slices:
        rates = sorted(part.rate for part in seen.slices)
        yield f"spread       {number(rates[0])} to {number(rates[-1])} batches/s in {len(rates)} parts of the time"
    if seen.other_cpu is not None and seen.stolen is not None:
        yield f"other work   {percent(seen.other_cpu)} of a CPU on this host, {percent(seen.stolen)} stolen"
    if seen.others:
        yield f"others       {count(seen.others, 'other consumer')} of this daemon: its figures include them"
    if seen.cached is not None:
        yield (
            f"cached       {number(seen.cached)} batches/s: with an infinitely fast loader this consumer would be "
            f"{seen.cached / seen.rate:.2f} times as fast"
        )
    yield ""
    yield judged(seen).text
