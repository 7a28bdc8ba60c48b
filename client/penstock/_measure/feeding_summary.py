"""Says in a line what the loader cost a training, and why. No I/O."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Sequence

from penstock_proto.status.figures import Figures, number, percent
from penstock_proto.status.span import Span, figures_of, keyed
from penstock_proto.status.status_history import best_span
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


def figures_of_training(answers: Sequence[Status], feed: str, rank: int | None, cpu: float) -> Figures | None:
    """Return the figures of this process as a consumer, or None if the daemon's statuses lack them.

    Args:
        answers: statuses of one daemon.
        feed: the name of the feed.
        rank: the rank of the consumer, which is in this process, or None.
        cpu: how many CPUs this process used, on average.
    """
    if not answers:
        return None
    last, here = answers[-1], f"{socket.gethostname()}:{os.getpid()}"
    spans = [Span(first, last) for first in answers[:-1]]
    for key, stream in keyed(last).items():
        if stream.client.partition(" ")[0] != here or (stream.feed, stream.rank) != (feed, rank):
            continue
        span = best_span(spans, key)
        seen = None if span is None else figures_of(span, key)
        if seen is not None:
            return dataclasses.replace(seen, consumer_cpu=cpu)
    return None


def _as_the_trainer_saw(seen: Figures, sums: Waits) -> Figures:
    """Return the figures with what only the trainer knows: how long it really waited, and where its batch was then."""
    waited = max(sums.waited, 1e-9)
    made_late = sums.production > 0.5 * waited
    return dataclasses.replace(
        seen,
        waiting=sums.waiting,
        step=1 - sums.waiting,
        # The daemon does not see small slabs wait in the kernel's buffers.
        sending_share=1.0 if sums.transfer > 0.5 * waited else seen.sending_share,
        handing_share=sums.handoff / waited,
        unmade=sums.waiting if made_late else seen.unmade,
        # Workers are idle while the training pauses, as during a validation. That does not matter to its waits.
        reading=max((worker.busy for worker in seen.workers), default=1.0) if made_late else seen.reading,
    )


def _cause(sums: Waits, figures: Figures | None) -> str:
    """Return a sentence on what limits the training."""
    if figures is not None:
        found = verdict(_as_the_trainer_saw(figures, sums)).cause
        return found[0].upper() + found[1:]
    if sums.waiting < WAITS:
        return "The trainer is the bottleneck"
    if sums.handoff > 0.5 * sums.waited:
        return "Batches were there, and the trainer's process did not take them"
    return "The network is the limit" if sums.transfer > 0.5 * sums.waited else ""


def _seconds(value: float) -> str:
    return f"{number(value)} s"
