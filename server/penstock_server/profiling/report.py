"""The report of `penstock profile`: what the workers did, and the lines that took longest; as lines, or as JSON."""

from __future__ import annotations

import dataclasses
import linecache
import os
import textwrap
from collections.abc import Iterator
from typing import Any

from penstock_proto.text import one_line

from .folding import IDLE, Frame
from .profile import Profile, Times

MOST_LINES = 10

FEW = 100
"""Fewer samples than this say little."""

MOSTLY_IDLE = 0.5

_WIDTH = 110


def lines(profile: Profile, target: str, *, reads: bool) -> Iterator[str]:
    """Yield the report, line by line.

    Args:
        profile: what was sampled.
        target: what the user asked for.
        reads: whether this command read the feed itself.
    """
    times = profile.times()
    yield f"profile   {target}: {extent(profile)}"
    if times.seconds:
        yield from textwrap.wrap(f"workers   {parts_in_words(times)}", _WIDTH, subsequent_indent=" " * 10)
    if times.working:
        on_cpu = _percent(times.on_cpu / times.working)
        yield f"          while they worked they were on a CPU for {on_cpu} of the time, and waited for the rest"
        yield ""
        yield "  time  on CPU  line"
        for line in profile.lines(MOST_LINES):
            place = place_of(line.frame)
            source = source_of(line.frame)
            beside = len(place) + 2 + len(source) <= _WIDTH - 16
            shown = f"{place}  {source}".rstrip() if beside else place
            yield f"{_percent(line.share):>6}  {_percent(line.on_cpu):>6}  {shown}"
            if not beside:
                yield f"{'':18}{source[: _WIDTH - 18]}"
    notes = list(remarks(profile, reads=reads))
    if notes:
        yield ""
        for note in notes:
            yield from textwrap.wrap(note, _WIDTH)


def remarks(profile: Profile, *, reads: bool) -> Iterator[str]:
    """Yield what one should know about the profile."""
    times = profile.times()
    samples = sum(worker.samples for worker in profile.workers)
    if times.seconds and times.idle > MOSTLY_IDLE * times.seconds:
        why = (
            "the consumer is slower than they are, or there are more workers than lanes"
            if reads
            else "nobody reads, or the trainer is slower; `penstock profile MODULE:ATTR` reads the feed itself"
        )
        yield f"The workers had nothing to do for {_percent(times.idle / times.seconds)} of the time: {why}."
    for worker in profile.workers:
        if worker.ended:
            yield f"Worker {worker.name} (pid {worker.pid}) ended meanwhile: the daemon's log says why."
        elif not worker.samples:
            yield (
                f"Worker {worker.name} (pid {worker.pid}) gave no samples: a signal has stopped it, it gets no CPU, "
                "or its code handles SIGPROF itself."
            )
    for host, how in profile.hosts.items():
        if how:
            yield f"Host {host} {how}: samples of its workers are missing."
    if not profile.workers:
        yield "No worker was ready: see `penstock status`."
    elif samples < FEW:
        yield f"{_count(samples, 'sample')} are few: profile for longer, with --seconds."


def as_json(profile: Profile, target: str) -> dict[str, Any]:
    """Return the same as a value for JSON."""
    times = profile.times()
    return {
        "target": target,
        "url": profile.url,
        "seconds": profile.seconds,
        "worker_seconds": times.seconds,
        "idle_seconds": times.idle,
        "generating_seconds": times.generating,
        "other_seconds": times.words,
        "on_cpu_seconds": times.on_cpu,
        "workers": [
            {"number": one.number, "name": one.name, "pid": one.pid, "samples": one.samples, "ended": one.ended}
            for one in profile.workers
        ],
        "hosts": [{"name": host, "lost": how or None} for host, how in profile.hosts.items()],
        "lines": [
            {
                "file": line.frame.file or None,
                "line": line.frame.line or None,
                "function": line.frame.name,
                "source": source_of(line.frame) or None,
                **{key: value for key, value in dataclasses.asdict(line).items() if key != "frame"},
            }
            for line in profile.lines(MOST_LINES)
        ],
    }


def place_of(frame: Frame) -> str:
    """Return where a frame is: "scenes.py:12 in images", or the word for what Penstock does."""
    if not frame.file:
        return frame.name
    path = os.path.relpath(frame.file)
    file = frame.file if path.startswith("..") else path
    return f"{file}:{frame.line or '?'} in {frame.name}"


def source_of(frame: Frame) -> str:
    """Return the text of a frame's line, if the file can be read here. Another host names any file; it is read only if
    its name is that of a module."""
    text = linecache.getline(frame.file, frame.line).strip() if frame.file.endswith(".py") and frame.line else ""
    return one_line(text)


def extent(profile: Profile) -> str:
    """Return how much was sampled: "2 workers for 10.0 s, 1,981 samples of their stacks"."""
    samples = sum(worker.samples for worker in profile.workers)
    alive = sum(not worker.ended for worker in profile.workers)
    on = f" on {_count(1 + len(profile.hosts), 'host')}" if profile.hosts else ""
    return f"{_count(alive, 'worker')}{on} for {profile.seconds:.1f} s, {_count(samples, 'sample')} of their stacks"


def parts_in_words(times: Times) -> str:
    """Return what workers did: "95 % in your code, 5 % collating"."""
    parts = {"in your code": times.generating, **times.words, IDLE: times.idle}
    shown = [(name, seconds / times.seconds) for name, seconds in parts.items()]
    return ", ".join(f"{_percent(share)} {name}" for name, share in shown if share >= 0.005)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word if number == 1 else word + 's'}"
