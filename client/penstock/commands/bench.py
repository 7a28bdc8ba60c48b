"""Measures a feed for `penstock bench`: reads it for a while as a trainer does, and collects figures.

`penstock_proto/status/verdict.py` interprets them. The daemon's status tells how workers spend their time; the caller
fetches it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock_proto import EndOfStream, PenstockError
from penstock_proto.status.figures import Figures, joined
from penstock_proto.status.span import Key, Span, figures_of
from penstock_proto.status.status_shape import Status

from .._adapters.connection import Connection, connect
from .._transport.ragged import Ragged
from .reading import Reading, epochs

SLICES = 10
"""The number of slices that the measured time is divided into."""
SHORTEST = 0.5
"""The shortest slice in seconds. Between two slices the benchmark asks the daemon for its status."""


def measure(
    url: str,
    *,
    status: Callable[[str], Status],
    workers: int | None = None,
    keys: str | None = None,
    params: Mapping[str, Any] | None = None,
    transport: str = "auto",
    seconds: float = 10.0,
    batches: int | None = None,
    warmup: float = 2.0,
    step: float = 0.0,
    cached: int = 0,
    tensorflow: bool = False,
    afterwards: Callable[[str, Callable[[], bool]], None] | None = None,
    tell: Callable[[str, float | None], None] = lambda doing, part: None,
) -> Figures:
    """Read a feed over a new connection, epoch after epoch, and return its figures.

    Args:
        url: as in `connect`.
        status: returns the status of the daemon at a URL.
        workers: as in `connect`.
        keys: as in `connect`.
        params: as in `connect`.
        transport: as in `connect`.
        seconds: seconds to measure; the measurement ends with a batch.
        batches: end after this many batches, if that is sooner.
        warmup: seconds to read after the first batch before measuring.
        step: seconds that a training step takes.
        cached: after the measurement read copies of this many batches, for another `seconds` seconds. 0: do not.
        tensorflow: read with a `tf.data.Dataset`, not with NumPy.
        afterwards: called after the measurement, while a thread continues to read, with the feed's URL and with a
            function that returns whether batches still come.
        tell: called with the current activity, and with the share of all work that is done, or None while it waits.

    Raises:
        EndOfStream: the feed has too few batches.
        PenstockError: as `connect`, and as reading a feed.
    """
    tell("connecting", None)
    with connect(url, workers=workers, keys=keys, transport=transport, params=params) as connection:
        try:
            stream = epochs(connection, tensorflow=tensorflow)
            seen = _measure(connection, stream, status, seconds, batches, warmup, step, cached, tensorflow, tell)
            if afterwards is not None:
                with Reading(connection, stream, step) as reading:
                    afterwards(_url(connection), reading.goes_on)
            return dataclasses.replace(seen, tcp_asked=transport == "tcp")
        except Exception:
            if connection.error is not None:  # TensorFlow passes on only its text
                raise connection.error from None
            raise


@dataclass(frozen=True, slots=True)
class _Taken:
    """The result of a loop over batches: their number, and the seconds in total, in `next`, and in the step."""

    batches: int
    seconds: float
    taking: float
    step: float


def _measure(
    connection: Connection,
    stream: Iterator[Any],
    status: Callable[[str], Status],
    seconds: float,
    batches: int | None,
    warmup: float,
    step: float,
    cached: int,
    tensorflow: bool,
    tell: Callable[[str, float | None], None],
) -> Figures:
    total = warmup + seconds * (2 if cached else 1)
    tell("waiting for the first batch", None)
    kept = [_copied(batch) for batch in itertools.islice(stream, cached)]
    _read(stream, 0, 1, step)
    if warmup:
        tell("warming up", 0.0)
        _read(stream, warmup, None, step)
    began = connection.stats()["batches"]
    slices: list[Figures] = []
    tell("measuring", warmup / total)
    for one in _slices(connection, stream, status, seconds, batches, step):
        slices.append(one)
        tell("measuring", (warmup + sum(one.seconds for one in slices)) / total)
    if not slices:
        raise EndOfStream(
            f"the feed ended after {began} batches, before the measurement began: use a shorter --warmup",
            feed=connection.info.name,
        )
    in_memory = None
    if cached:
        tell("reading from memory", (warmup + seconds) / total)
        again = _replayed(connection, kept) if tensorflow else itertools.cycle(kept)
        _read(again, math.inf, 2 * cached, 0)
        replayed = _read(again, seconds, batches, step)
        in_memory = replayed.batches / replayed.seconds
    whole = joined(slices)
    return dataclasses.replace(
        whole, consumer="TensorFlow" if tensorflow else "NumPy", cached=in_memory, slices=tuple(slices)
    )


@dataclass(frozen=True, slots=True)
class _Moment:
    """The counters of all processes at one moment."""

    stats: dict[str, Any]
    state: Status
    cpu: float
    at: float


def _slices(
    connection: Connection,
    stream: Iterator[Any],
    status: Callable[[str], Status],
    seconds: float,
    batches: int | None,
    step: float,
) -> Iterator[Figures]:
    """Measure one slice after another."""
    url = _url(connection)

    def now() -> _Moment:
        state = status(url)
        return _Moment(connection.stats(), state, time.process_time(), time.monotonic())

    count = max(1, min(SLICES, int(seconds / SHORTEST)))
    past, taken_so_far = 0.0, 0
    before = now()
    while count and (batches is None or taken_so_far < batches):
        most = None if batches is None else batches - taken_so_far
        taken = _read(stream, (seconds - past) / count, most, step)
        if not taken.batches:
            return
        taken_so_far += taken.batches
        after = now()
        if before.state.id == after.state.id and not _has_moved(connection, before, after):
            # Otherwise the figures of a new daemon, or of another stream, begin at 0: measure again.
            past += taken.seconds
            count = count - 1 if past < seconds else 0
            yield _figures(connection, taken, before, after)
        before = after


def _own(connection: Connection, span: Span) -> list[Key]:
    """Return the keys under which this consumer is in the later of two statuses."""
    here = f"{socket.gethostname()}:{os.getpid()}"
    return [key for key, one in span.after.items() if (one.feed, one.client) == (connection.info.name, here)]


def _has_moved(connection: Connection, before: _Moment, after: _Moment) -> bool:
    """Whether this consumer reads another stream now: it has met other jobs, or lost them."""
    span = Span(before.state, after.state)
    own = _own(connection, span)
    return bool(own) and not any(key in span.before for key in own)


def _figures(connection: Connection, taken: _Taken, before: _Moment, after: _Moment) -> Figures:
    """Return the figures of a slice: those of the daemon, from its two statuses, and those that were measured here.

    Raises:
        PenstockError: the status has too many consumers to show this one.
    """
    stats, name = after.stats, connection.info.name
    waited = stats["wait_seconds"] - before.stats["wait_seconds"]
    waiting = min(taken.taking, waited)
    coming = stats["waits"]["transfer"] - before.stats["waits"]["transfer"]
    span = Span(before.state, after.state)
    own = _own(connection, span)
    seen = next((found for key in own if (found := figures_of(span, key, least=0.0)) is not None), None)
    if seen is None:
        raise PenstockError(
            "the daemon's status shows 200 consumers at most, and this one is not among them", feed=name
        )
    return dataclasses.replace(
        seen,
        url=_url(connection),
        transport=stats["transport"],
        consumer="",
        seconds=taken.seconds,
        batches=taken.batches,
        samples=taken.batches * stats["rows"] / stats["batches"],
        nbytes=taken.batches * stats["bytes"] / stats["batches"],
        first_batch_seconds=stats["first_batch_seconds"],
        waiting=waiting / taken.seconds,
        receiving=(taken.taking - waiting) / taken.seconds,
        step=taken.step / taken.seconds,
        consumer_cpu=(after.cpu - before.cpu) / (after.at - before.at),
        sending_share=min(1.0, coming / waited) if waited > 0 else 0.0,
    )


def _url(connection: Connection) -> str:
    return connection._handle.handoff.url


def _replayed(connection: Connection, kept: list[Any]) -> Iterator[Any]:
    """Return an iterator that repeats these batches as tensors, without reading the stream."""
    from .._adapters import tfdata

    return iter(tfdata.replayed(kept, connection.dataset().element_spec).prefetch(2))


def _read(stream: Iterator[Any], seconds: float, most: int | None, step: float) -> _Taken:
    """Take batches for `seconds`, at least one and at most `most`, and sleep for `step` seconds after each."""
    count, taking, stepping = 0, 0.0, 0.0
    began = asked = time.perf_counter()
    while most is None or count < most:
        if next(stream, None) is None:
            break
        got = time.perf_counter()
        taking += got - asked
        count += 1
        if step:
            time.sleep(step)
        asked = time.perf_counter()
        stepping += asked - got
        if asked - began >= seconds:
            break
    return _Taken(count, asked - began, taking, stepping)


def _copied(batch: Any) -> Any:
    """Return a copy of a batch: the memory under a batch is reused once the batch is gone."""
    if isinstance(batch, tuple):
        return tuple(_copied(item) for item in batch)
    if isinstance(batch, dict):
        return {key: _copied(item) for key, item in batch.items()}
    if hasattr(batch, "row_splits"):  # a ragged leaf, in NumPy or TensorFlow
        return Ragged(_copied(batch.values), np.array(batch.row_splits))
    return np.array(batch)
