"""Samples on their way from another host: into messages that are not too large, and out of them again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, cast

from penstock_proto import messages as m
from penstock_proto.text import one_line

from .folding import Frame
from .profile import Sampled, Stack

_MOST_FILE, _MOST_NAME = 200, 100
"""Bytes of a file's path and of a function's name. Of longer paths the end is kept, of names the beginning."""

_MOST_BYTES = 24_000
"""Bytes after which a piece gets no further stack. The largest stack takes 64,000, and a message 128 KiB, in which the
head's folder stands before the names of files."""

_MOST_RUNS = 2000


def pieces(record: Sampled, folder: str) -> Iterator[m.Samples]:
    """Take the samples out of a record, and yield them in pieces; at least one.

    Args:
        record: of a worker's process.
        folder: that of the first feed's file. Files below it are named relative to it.
    """
    runs, count = record.runs, record.samples
    record.runs, record.samples = [], 0
    at = 0
    while True:
        frames: dict[m.SampledFrame, int] = {}
        stacks: dict[Stack, int] = {}
        taken: list[m.SampledRun] = []
        nbytes = 0
        while at < len(runs) and nbytes < _MOST_BYTES and len(taken) < _MOST_RUNS:
            stack, ns, on_cpu = runs[at]
            if stack not in stacks:
                stacks[stack] = len(stacks)
                for frame in stack:
                    sent = _sent(frame, folder)
                    if sent not in frames:
                        frames[sent] = len(frames)
                        nbytes += len(sent.file) + len(sent.name) + 20
                nbytes += 3 * len(stack)
            taken.append(m.SampledRun(stacks[stack], ns, on_cpu))
            nbytes += 8
            at += 1
        last = at == len(runs)
        yield m.Samples(
            pid=record.pid,
            count=count if last else 0,
            frames=tuple(frames),
            stacks=tuple(tuple(frames[_sent(frame, folder)] for frame in stack) for stack in stacks),
            runs=tuple(taken),
            ended=record.ended and last,
        )
        if last:
            return


def received(record: Sampled, samples: m.Samples, known: dict[Stack, Stack]) -> None:
    """Add samples to a record. `known`: stacks that came before, so that equal ones are one object."""
    frames = [Frame(shown(one.file), one.line, shown(one.name), one.kind) for one in samples.frames]
    stacks = [tuple(frames[place] for place in stack) for stack in samples.stacks]
    stacks = [known.setdefault(stack, stack) for stack in stacks]
    for run in samples.runs:
        record.add(stacks[run.stack], run.ns, run.on_cpu)
    record.samples += samples.count - len(samples.runs)
    record.ended = record.ended or samples.ended


def _sent(frame: Frame, folder: str) -> m.SampledFrame:
    beside = folder != "" and frame.file.startswith(folder)
    file = _bytes(frame.file[len(folder) :] if beside else frame.file)[-_MOST_FILE:]
    name = _bytes(frame.name)[:_MOST_NAME]
    kind = cast(Literal["user", "library", "penstock"], frame.kind)
    line = min(max(0, frame.line), 2**62)  # user code may write to the stacks file
    return m.SampledFrame(file.decode(errors="ignore"), line, name.decode(errors="ignore"), kind, beside)


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def shown(text: str) -> str:
    """Return a text of another host without control characters, which a terminal would obey."""
    return one_line(text)
