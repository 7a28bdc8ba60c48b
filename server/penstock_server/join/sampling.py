"""At the host: samples its workers' stacks for `penstock profile`, and sends the samples to the head.

It does for this host's workers what the command does for the head's own workers (profiling/watching.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping

from penstock_proto import messages as m
from penstock_proto.transport import codec

from ..logs.bugs import Bugs
from ..profiling.pieces import pieces
from ..profiling.sampled_workers import SampledWorkers
from ..workers.supervisor import Supervisor

MOST_PROFILES = 8
"""Maximum number of profiles at a time. Further ones end at once, without samples."""

EVERY = 0.1
"""Seconds between two looks at the samples."""

LOOK_AGAIN = 1.0
"""Seconds between two looks for new processes, unless one has ended."""

SENT_EVERY = 0.5
"""Seconds between two messages about a worker."""


class Sampling:
    """The profiles that are going on, by their numbers at the head.

    Args:
        send: sends the head a message.
        numbers: the head's number of each worker. It may grow.
        supervisor: the worker processes.
        folder: the folder of the first feed's file, or empty.
        bugs: notes unexpected errors.
    """

    def __init__(
        self,
        send: Callable[[bytes], object],
        numbers: Mapping[int, int],
        supervisor: Supervisor,
        folder: str,
        bugs: Bugs,
    ) -> None:
        self._send = send
        self._numbers = numbers
        self._supervisor = supervisor
        self._folder = folder
        self._bugs = bugs
        self._profiles: dict[int, asyncio.Task[None]] = {}

    def take(self, message: m.SampleStacks) -> None:
        """Start or stop a profile, as the head asks."""
        before = self._profiles.pop(message.profile, None)
        if before is not None:
            before.cancel()
        if not message.seconds:
            return
        if len(self._profiles) >= MOST_PROFILES:
            self._send(codec.encode(m.SamplingEnded(message.profile)))
            return
        task = self._profiles[message.profile] = asyncio.get_running_loop().create_task(self._sample(message))
        task.add_done_callback(lambda task: self._ended(message.profile, task))

    def end(self) -> None:
        """Stop all profiles, as the connection has ended."""
        for task in list(self._profiles.values()):
            task.cancel()

    def _ended(self, profile: int, task: asyncio.Task[None]) -> None:
        if self._profiles.get(profile) is task:
            del self._profiles[profile]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._bugs.note(error)

    async def _sample(self, message: m.SampleStacks) -> None:
        now = looked = sent = time.monotonic()
        until = now + message.seconds
        with contextlib.closing(SampledWorkers()) as workers:
            workers.found(self._stacks())
            while now < until:
                workers.go_on(now, until, message.rate)
                await asyncio.sleep(max(0.0, min(EVERY, until - now)))
                now = time.monotonic()
                if workers.read() or now - looked >= LOOK_AGAIN:
                    looked = now
                    workers.found(self._stacks())
                if now - sent >= SENT_EVERY or now >= until:
                    sent = now
                    self._send_samples(message.profile, workers, last=now >= until)
        self._send(codec.encode(m.SamplingEnded(message.profile)))

    def _stacks(self) -> list[tuple[int, int, int]]:
        return [(number, pid, os.dup(fd)) for number, pid, fd in self._supervisor.stacks()]

    def _send_samples(self, profile: int, workers: SampledWorkers, *, last: bool) -> None:
        """Send the new samples. At the end, also report workers without samples."""
        for record in list(workers.records):
            if record.runs or record.ended or last:
                for samples in pieces(record, self._folder):
                    self._send(codec.encode(m.StacksSampled(profile, self._numbers[record.number], samples)))
            if record.ended:
                workers.records.remove(record)
