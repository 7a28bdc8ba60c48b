"""The status page: what a worker does now, in a page of shared memory that outlives it.

The worker writes it before it lets user code run on and after; the daemon's host reads it at any time, above all when
the worker has died or stands still. So it costs about a microsecond, takes no lock and sends nothing. Beside that it
adds up where the worker's time goes:

    0    int64 sequence (0: never written, odd: being written), run, number, samples, monotonic ns, state, text bytes
    64   up to 256 bytes of UTF-8 text that shows the split
    512  int64 monotonic ns when it was ready (0: not yet), ns idle, monotonic ns since when it is idle (0: it is not),
         ns in user code, monotonic ns since when it is in user code (0: it is not)
    552  int64 the run that it works on now, in user code or not, and 1 (0: none)

This file knows neither runs nor messages, nor who made the page.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

NBYTES = 4096
"""Bytes of a page."""

LOOK_NS = 1_000_000
"""So seldom is looked at what user code may have done to the worker, which costs some microseconds."""

MAX_TEXT = 256
"""Bytes of text in it; longer texts are cut."""

Page: TypeAlias = mmap.mmap | bytearray | memoryview

_SAMPLES, _CHANGED, _STATE = 3, 4, 5  # positions among the words
_TEXT = 64
_READY, _WAITING, _USER, _WORK = 512, 520, 536, 552
_WORDS = struct.Struct("=7q")
_BEHIND_SEQUENCE = struct.Struct("=6q")
_SEQUENCE = struct.Struct("=q")
_SPENT = struct.Struct("=5q")
_SUM_SINCE = struct.Struct("=2q")
_IDLE, _IMPORTING, _IN_USER_CODE, _CUT_OFF = range(4)
_TRIES = 16


@dataclass(frozen=True, slots=True)
class Activity:
    """What a worker does, or did last.

    `run` is the daemon's number of the run; `number` the split's within its lane (for an indexable feed the batch's),
    -1 where no lane is read: splits are listed, a first sample is looked at. `split` shows it. `samples`: read of it
    so far, exact only where samples are counted (see ActivityPage). `since_seconds`: since anything here changed.
    `in_user_code`: user code runs for this run now; otherwise it ran last, or is being imported (then `run` is -1, and
    `importing`). `waits`: it has nothing to do. `cut_off`: user code, of this run if there is one, has closed its
    connection. `works_on`: the run that it works on, in user code or not; -1 for none.
    """

    run: int
    number: int
    split: str
    samples: int
    since_seconds: float
    in_user_code: bool
    importing: bool = False
    waits: bool = False
    cut_off: bool = False
    works_on: int = -1


@dataclass(frozen=True, slots=True)
class Spent:
    """Where a worker's time has gone since it was ready, in seconds; what goes on now is counted in.

    `idle_seconds` it waited to be told what to do. `user_seconds` it was in user code, less what it is reckoned to have
    spent there on checking and copying samples (of the call that runs now: with it). The rest it worked on its own.
    """

    seconds: float
    idle_seconds: float
    user_seconds: float


class ActivityPage:
    """The writer's side. One thread writes.

    Args:
        page: NBYTES of writable memory; by default private, for a worker that nobody watches.
        ticks: count every sample, so that "no sample for so long" can be told from "busy".

    Attributes:
        on_leave: called when user code has returned, before the page says so; not more often than every `LOOK_NS`.
    """

    def __init__(self, page: mmap.mmap | bytearray | None = None, *, ticks: bool = False) -> None:
        self._page = memoryview(bytearray(NBYTES) if page is None else page)
        self._words = self._page[:_TEXT].cast("q")
        self._ticks = ticks
        self._sequence = 0
        self._text = ""
        self._nbytes = 0
        self._entered = self._user_ns = self._idle_ns = 0
        self.on_leave: Callable[[], None] = _nothing
        self._looked = 0
        self._run = -1

    @classmethod
    def inherited(cls, fd: int, *, ticks: bool = False) -> ActivityPage:
        """Over the memfd `fd`, which is closed."""
        try:
            return cls(mmap.mmap(fd, NBYTES), ticks=ticks)
        finally:
            os.close(fd)

    def importing(self, text: str) -> None:
        """The user's modules are about to be imported."""
        self._write(-1, -1, text, 0, _IMPORTING)

    def enter(self, run: int, number: int, text: str, samples: int = 0) -> None:
        """User code is about to run for this split, of which so many samples were read."""
        self._write(run, number, text, samples, _IN_USER_CODE)

    def leave(self, copying: int = 0) -> None:
        """User code has returned; so many ns of the time were not its own. What it was stays to be seen."""
        now = time.monotonic_ns()
        if now - self._looked > LOOK_NS:
            self._looked = now
            self.on_leave()
        self._words[_STATE] = _IDLE
        self._words[_CHANGED] = now
        self._user_ns += max(0, now - self._entered - copying)
        _SUM_SINCE.pack_into(self._page, _USER, self._user_ns, 0)

    def cut_off(self) -> None:
        """User code has closed the worker's connection; which it was stays to be seen."""
        self._words[_STATE] = _CUT_OFF

    def detach(self) -> None:
        """In a forked child: what it does is written nowhere."""
        self._looked = -LOOK_NS
        self._page = memoryview(bytearray(NBYTES))
        self._words = self._page[:_TEXT].cast("q")

    def ready(self) -> None:
        """From now on its time is counted, from nothing."""
        self._user_ns = self._idle_ns = 0
        _SPENT.pack_into(self._page, _READY, time.monotonic_ns(), 0, 0, 0, 0)

    def works_on(self, run: int) -> int:
        """From now on it works on this run (-1: on none), in user code or not. Returns which that was before."""
        before, self._run = self._run, run
        _SEQUENCE.pack_into(self._page, _WORK, run + 1)
        return before

    def idle(self, wait: Callable[[], object]) -> None:
        """There is nothing to do until `wait` returns."""
        began = time.monotonic_ns()
        _SUM_SINCE.pack_into(self._page, _WAITING, self._idle_ns, began)
        wait()
        now = time.monotonic_ns()
        self._idle_ns += now - began
        self._words[_CHANGED] = now
        _SUM_SINCE.pack_into(self._page, _WAITING, self._idle_ns, 0)

    def tick(self) -> None:
        """User code has made a sample."""
        self._words[_SAMPLES] += 1
        self._words[_CHANGED] = time.monotonic_ns()

    def counting(self, samples: Iterator[T]) -> Iterator[T]:
        """`samples`, with a tick for each if ticks are asked for."""
        return map(self._ticked, samples) if self._ticks else samples

    def _ticked(self, sample: Any) -> Any:
        self.tick()
        return sample

    def _write(self, run: int, number: int, text: str, samples: int, state: int) -> None:
        self._words[0] = self._sequence + 1
        if text is not self._text:
            self._text = text
            data = text.encode(errors="backslashreplace")[:MAX_TEXT]
            self._page[_TEXT : _TEXT + len(data)] = data
            self._nbytes = len(data)
        now = time.monotonic_ns()
        _BEHIND_SEQUENCE.pack_into(self._page, 8, run, number, samples, now, state, self._nbytes)
        if state == _IN_USER_CODE:
            self._entered = now
            _SUM_SINCE.pack_into(self._page, _USER, self._user_ns, now)
        self._sequence += 2
        self._words[0] = self._sequence


def _nothing() -> None:
    pass


def read(page: Page) -> Activity | None:
    """What a page says; None if nothing was written yet, or the writer died while it wrote."""
    for _ in range(_TRIES):
        sequence, run, number, samples, changed, state, nbytes = _WORDS.unpack_from(page)
        text = bytes(page[_TEXT : _TEXT + max(0, min(nbytes, MAX_TEXT))])
        (after,) = _SEQUENCE.unpack_from(page)
        if sequence == after and sequence % 2 == 0:
            break
    else:
        return None
    if sequence == 0:
        return None
    _, waiting = _SUM_SINCE.unpack_from(page, _WAITING)
    (works_on,) = _SEQUENCE.unpack_from(page, _WORK)
    cut_off = state == _CUT_OFF
    return Activity(
        run,
        number,
        text.decode(errors="ignore"),
        samples,
        since_seconds=max(0.0, (time.monotonic_ns() - max(changed, waiting)) / 1e9),
        in_user_code=state == _IN_USER_CODE or (cut_off and run >= 0),
        importing=state == _IMPORTING,
        waits=waiting > 0 and state == _IDLE,
        cut_off=cut_off,
        works_on=works_on - 1,
    )


def spent(page: Page) -> Spent | None:
    """Where the writer's time has gone; None before it was ready."""
    ready, idle, waiting, user, entered = _SPENT.unpack_from(page, _READY)
    if not ready:
        return None
    now = time.monotonic_ns()
    idle += now - waiting if waiting else 0
    user += now - entered if entered else 0
    return Spent(*(max(0, ns) / 1e9 for ns in (now - ready, idle, user)))


_FRAME = re.compile(rb'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def where(dump: bytes) -> str:
    """Where a thread stands: "FILE:LINE in FUNCTION" of the innermost frame of user code.

    Args:
        dump: what faulthandler wrote of one thread; of several dumps the last counts.

    Returns:
        The innermost frame if none is the user's; empty if there is no frame.
    """
    last = dump[max(0, dump.rfind(b"(most recent call first)")) :]
    frames = [tuple(part.decode(errors="replace") for part in frame) for frame in _FRAME.findall(last)]
    theirs = [frame for frame in frames if not frame[0].startswith((_OURS, "<frozen ", *_LIBRARIES))]
    for file, line, function in (theirs or frames)[:1]:
        return f"{file}:{line} in {function}"
    return ""
