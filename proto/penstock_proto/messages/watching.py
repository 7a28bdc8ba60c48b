"""Messages by which the head watches a host's workers: their memory, their activity, and samples of their stacks.

They are part of the conversation in hosts.py; Samples go on to the user who asked (server.py). A host sends none of
this unless it was just asked for it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from .base import Count, Index, Line, Message, clean

MOST_SHOWN = 64
"""Workers of a host whose activity is shown: those with the smallest numbers."""

MAX_PROFILE_SECONDS = 3600

Moment = Annotated[float, Meta(ge=0, le=1e12)]
"""Seconds since the daemon was started, on the head's clock."""
Thousandths = Annotated[int, Meta(ge=0, le=1000)]

# --- from the head ---


class MeasureMemory(Message, frozen=True):
    """Measure the memory of the workers' processes. Answered by MemoryMeasured, with the last figures if they are
    recent."""


class ShowActivity(Message, frozen=True):
    """Report the workers' activity by ActivityShown, several times a second, for some seconds from now on. `at`: when
    this was sent, from which the host knows the head's clock."""

    at: Moment


class SampleStacks(Message, frozen=True):
    """Sample the workers' stacks for `seconds`, `rate` times a second, for the profile with this number. Answered by
    StacksSampled, again and again, and then SamplingEnded. 0 seconds: end the profile, without an answer."""

    profile: Count
    seconds: Annotated[float, Meta(ge=0, le=MAX_PROFILE_SECONDS)]
    rate: Annotated[float, Meta(ge=0.1, le=1000)]


# --- from the host ---


class ProcessMemory(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Bytes of a worker's process (PSS)."""

    worker: Index
    nbytes: Count


class MemoryMeasured(Message, frozen=True):
    """The memory of the workers that have a process."""

    workers: Annotated[tuple[ProcessMemory, ...], Meta(max_length=4096)]


class WorkerActivity(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A worker's activity since the previous look.

    `state`: 0, its process serves; 1, it imports the feeds; 2, there was no process for some of the time; 3, it is
    given up. `generating` and `collating`: shares of the time, in thousandths. `run` and `what`: the run that it reads
    at the moment of the look, -1 for none, and a text that shows what it reads there.
    """

    worker: Index
    state: Annotated[int, Meta(ge=0, le=3)]
    generating: Thousandths
    collating: Thousandths
    run: Annotated[int, Meta(ge=-1, le=2**62)]
    what: Annotated[str, Meta(max_length=256)]

    def __post_init__(self) -> None:
        clean(self, "what", most=256)


class ActivityShown(Message, frozen=True):
    """A look at the first `MOST_SHOWN` workers, at the moment `at` of the head's clock."""

    at: Moment
    workers: Annotated[tuple[WorkerActivity, ...], Meta(max_length=MOST_SHOWN)]


class SampledFrame(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A frame, as in penstock_server/profiling/folding.py. `beside`: `file` is relative to the folder of the first
    feed's file, which may have another path on each host."""

    file: Line
    line: Count
    name: Line
    kind: Literal["user", "library", "penstock"]
    beside: bool = False


class SampledRun(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """How many ns a stack was seen for, on a CPU or not. `stack`: its place in `Samples.stacks`."""

    stack: Index
    ns: Count
    on_cpu: bool


class Samples(Struct, frozen=True, forbid_unknown_fields=True):
    """Some of the samples of a worker's process `pid`, in the order in which they came.

    `count`: how many samples `runs` are made of. A stack is a list of places in `frames`, the outermost frame first.
    `ended`: the process has ended.
    """

    pid: Index
    count: Count
    frames: Annotated[tuple[SampledFrame, ...], Meta(max_length=4096)]
    stacks: Annotated[tuple[Annotated[tuple[Index, ...], Meta(max_length=256)], ...], Meta(max_length=4096)]
    runs: Annotated[tuple[SampledRun, ...], Meta(max_length=4096)]
    ended: bool = False

    def __post_init__(self) -> None:
        frames, stacks = len(self.frames), len(self.stacks)
        if any(frame >= frames for stack in self.stacks for frame in stack) or any(
            run.stack >= stacks for run in self.runs
        ):
            raise ValueError("samples name a frame or a stack that is not among them")


class StacksSampled(Message, frozen=True):
    """Samples of a worker for a profile."""

    profile: Count
    worker: Index
    samples: Samples


class SamplingEnded(Message, frozen=True):
    """All StacksSampled of a profile were sent."""

    profile: Count
