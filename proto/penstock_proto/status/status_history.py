"""Rates, worker states and verdicts, from a series of a daemon's statuses. No I/O.

A status has counts since the daemon started, so the difference of two statuses has those of the time between them (see
span.py). The daemon keeps its own statuses of the last seconds, and adds rates and verdicts from them to each status
that it sends. A trainer keeps some of those that it asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec.structs import asdict, replace

from .feed_status import Feed, Rates
from .figures import Figures, WorkerShares
from .host_status import Host, HostRates
from .span import Key, Span, figures_of, keyed
from .status_shape import Status
from .stream_status import Stream
from .verdict import verdict
from .worker_status import Shares

WINDOW = 10.0
"""Seconds over which the figures are averaged."""

LEAST_STEADY = 2.0
"""Least seconds with the same workers that are preferred to a longer time in which they changed."""

LEAST_WAITED = 0.5
"""Least seconds of waiting before hosts get shares of it."""


class History:
    """The statuses of the last `WINDOW` seconds."""

    def __init__(self) -> None:
        self._kept: deque[Status] = deque()

    def add(self, status: Status) -> None:
        """Keep a status."""
        self._kept.append(status)
        while status.seconds - self._kept[0].seconds > WINDOW:
            self._kept.popleft()

    def figures(self, since: float, least: float) -> dict[Key, Figures]:
        """Return the figures of each stream that was read, measured from `since` on. Return none if that is less than
        `least` seconds, or if a worker that makes batches has not run for all of that time."""
        kept = [status for status in self._kept if status.seconds >= since]
        if not kept or kept[-1].seconds - kept[0].seconds < least:
            return {}
        span = Span(kept[0], kept[-1])
        if len(span.workers) != sum(worker.makes_batches for worker in span.last.workers):
            return {}
        found = {key: figures_of(span, key) for key in span.after if _reads(span, key)}
        return {key: figures for key, figures in found.items() if figures is not None}

    def described(self, status: Status) -> Status:
        """Return the status with the averages of the last seconds and the verdicts: the fields that have a default."""
        spans = [Span(kept, status) for kept in self._kept] or [Span(status, status)]
        first, shares = spans[0].first, {worker.number: worker for worker in spans[0].workers}
        return replace(
            status,
            window_seconds=round(status.seconds - first.seconds, 3),
            feeds=[replace(feed, rates=_rates(spans[0], feed)) for feed in status.feeds],
            workers=[replace(worker, shares=_shares(shares.get(worker.number))) for worker in status.workers],
            hosts=[_with_averages(spans[0], host) for host in status.hosts],
            streams=[_judged(spans, key, stream) for key, stream in keyed(status).items()],
        )


def best_span(spans: Sequence[Span], key: Key) -> Span | None:
    """Return the span that says most about a stream; None if it was not read in any. `spans` end with the same status,
    the longest first.

    Workers may have been idle before the consumer began to read, and its first batch takes longer than others. Figures
    from before and after a change of the workers do not belong together.
    """
    read = [span for span in spans if _reads(span, key)]
    steady = [span for span in read if span.before[key].handed and span.same_workers and span.seconds >= LEAST_STEADY]
    return next(iter(steady or read), None)


def _reads(span: Span, key: Key) -> bool:
    """Whether the stream is read at the beginning and at the end."""
    return key in span.before and span.before[key].reading and span.after[key].reading


def _judged(spans: Sequence[Span], key: Key, stream: Stream) -> Stream:
    """Return a stream with its averages and its verdict. `spans`: as for `best_span`."""
    span = best_span(spans, key)
    seen = None if span is None else figures_of(span, key)
    if seen is None:
        return stream
    found = verdict(seen)
    return replace(
        stream,
        waiting=round(seen.waiting, 4),
        limit=found.limit,
        headline=found.headline,
        verdict=found.text,
    )


def _rates(span: Span, feed: Feed) -> Rates:
    if span.seconds <= 0:
        return feed.rates
    return Rates(**{name: round(value / span.seconds, 3) for name, value in asdict(span.sent(feed)).items()})


def _with_averages(span: Span, host: Host) -> Host:
    """Return a joined host with its averages."""
    before = next((one for one in span.first.hosts if (one.name, one.address) == (host.name, host.address)), None)
    nbytes, awaited = host.received_bytes + host.fetched_bytes, host.awaited_seconds
    if before is not None and before.awaited_seconds <= awaited:  # otherwise it has joined since, perhaps again
        nbytes, awaited = nbytes - before.received_bytes - before.fetched_bytes, awaited - before.awaited_seconds
    waited = span.waited_for_production
    return replace(
        host,
        rates=HostRates(bytes=round(max(0, nbytes) / span.seconds, 3) if span.seconds > 0 else 0.0),
        awaited=round(min(1.0, awaited / waited), 4) if waited >= LEAST_WAITED else None,
    )


def _shares(worker: WorkerShares | None) -> Shares | None:
    if worker is None:
        return None
    return Shares(**{name: round(getattr(worker, name), 4) for name in Shares.__struct_fields__})
