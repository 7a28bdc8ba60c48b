"""Says in a line what the loader cost a training, and why. No I/O."""

from __future__ import annotations

import dataclasses
import os
import socket

from penstock_proto.status.figures import Figures, WorkerShares, number, percent
from penstock_proto.status.status_history import Span, figures_of
from penstock_proto.status.status_shape import Status
from penstock_proto.status.verdict import WAITS, verdict

from .step_waits import Waits

HELD_BACK = 0.8
READY = 0.9
"""If TensorFlow's thread waits for `HELD_BACK` of the time although `READY` of the steps find a batch ready, something
between the two may hold batches back."""


def summary(sums: Waits, figures: Figures | None, *, fits: bool, asked_in_vain: float) -> str:
    """Return the summary of a training.

    Args:
        sums: the sums over its steps.
        figures: the daemon's figures, or None if it did not answer.
        fits: whether each step consumed one batch, as far as can be seen.
        asked_in_vain: the share of the time in which TensorFlow's thread waited for data.
    """
    if not fits:
        return (
            "waits are unknown, because a step did not consume one batch of the feed: Feeding needs "
            "connection.keras(), or a dataset that is made from connection.dataset() with map and prefetch alone"
        )
    if not sums.steps:
        return "no steps were measured: fit read no feed, or took too few steps"
    waited, seconds = sums.waited, sums.seconds
    ready = sums.ready / sums.steps
    if ready >= READY and asked_in_vain >= HELD_BACK:
        return (
            f"the trainer waited {_seconds(waited)} of {_seconds(seconds)} that can be seen, but TensorFlow waited for "
            f"batches {percent(asked_in_vain)} of the time: the loader has little to spare, or shuffle() or batch() "
            "after connection.dataset() holds batches back and hides the waits"
        )
    cost = f"the trainer waited {_seconds(waited)} of {_seconds(seconds)} for data ({percent(sums.waiting)})"
    if sums.waiting < 0.995 and sums.waiting >= WAITS:
        cost += f", and would be up to {1 / (1 - sums.waiting):.1f} times as fast without waiting"
    why = _cause(sums, figures)
    return f"{cost}; {percent(ready)} of the steps found a batch ready{f'. {why}' if why else ''}"


def figures_of_training(
    first: Status | None, last: Status | None, feed: str, rank: int | None, waiting: float
) -> Figures | None:
    """Return a consumer's figures between two statuses, or None if these lack them or come from different daemons.

    Args:
        first: the earlier status, or None.
        last: the later one, or None.
        feed: the name of the feed.
        rank: the rank of the consumer, which is in this process, or None.
        waiting: the share of its time that the trainer really waits.
    """
    if first is None or last is None or first.id != last.id:
        return None
    span, here = Span(first, last), f"{socket.gethostname()}:{os.getpid()}"
    for key, stream in span.after.items():
        mine = stream.client.partition(" ")[0] == here and (stream.feed, stream.rank) == (feed, rank)
        if mine and (seen := figures_of(span, key)) is not None:
            return dataclasses.replace(seen, waiting=waiting, step=1 - waiting)
    return None


def _cause(sums: Waits, figures: Figures | None) -> str:
    """Return a sentence on what limits the training."""
    if sums.waiting >= WAITS and sums.handoff > 0.5 * sums.waited:
        return "Batches were there: TensorFlow's threads or this process had no CPU to take them"
    if figures is None:
        if sums.waiting < WAITS:
            return "The trainer is the bottleneck"
        if sums.transfer > 0.5 * sums.waited:
            return "The network is the limit"
        return ""
    if sums.transfer > 0.5 * sums.waited:  # the daemon does not see small slabs wait in the kernel's buffers
        figures = dataclasses.replace(figures, sending_share=1.0)
    found = verdict(figures)
    if found.limit in ("transport", "pace") and sums.production > 0.5 * sums.waited and figures.sending_share < 0.5:
        found = verdict(_without_pauses(figures))
    return found.cause[0].upper() + found.cause[1:]


def _without_pauses(figures: Figures) -> Figures:
    """Return the figures without the time in which even the busiest worker was idle, as during a validation."""
    most = max((worker.busy for worker in figures.workers), default=0.0) or 1.0
    workers = (
        WorkerShares(one.number, one.generating / most, 1 - one.busy / most, one.cpu / most, one.cpu_wait / most)
        for one in figures.workers
    )
    return dataclasses.replace(figures, workers=tuple(workers))


def _seconds(value: float) -> str:
    return f"{number(value)} s"
