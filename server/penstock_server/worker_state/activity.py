"""The activity page: a page of shared memory that shows what a worker is doing, and outlives the worker.

The worker writes the page before and after each call of user code. The supervisor can read it at any time. It does so
above all when the worker has died or hangs. A write takes about a microsecond and needs no lock and no message. The
page also adds up the worker's time:

    0    int64 sequence (0: never written, odd: being written), run, number, samples, monotonic ns, state, text bytes
    64   up to 256 bytes of UTF-8 text for the split
    512  int64 monotonic ns when it became ready (0: not yet), ns idle, monotonic ns since when it is idle (0: it is
         not), ns in user code, monotonic ns since when it is in user code (0: it is not)
    552  int64 number of the run that it works on, in user code or not, plus 1 (0: none)

This file must not know messages, or who made the page.
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

from ..logs.own_code import OURS

T = TypeVar("T")

NBYTES = 4096
"""Bytes of a page."""

LOOK_NS = 1_000_000
"""Least ns between two calls of `on_leave`, because a call takes some microseconds."""

MAX_TEXT = 256
"""Most bytes of the text in a page; longer texts are cut."""

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
    """The present or last activity of a worker.

    Attributes:
        run: the daemon's number of the run for which user code runs, or ran last; -1 while modules are imported.
        number: number of the split within its lane (for an indexable feed, of the batch); -1 if the worker reads no
            lane, but lists splits or makes a first sample.
        split: a short text for the split.
        samples: samples read from it so far; exact only if samples are counted (see ActivityPage).
        since_seconds: seconds since anything here changed.
        in_user_code: whether user code runs for this run now.
        importing: whether the user's modules are being imported.
        waits: whether the worker has no work.
        cut_off: whether user code (of this run, if there is one) has closed the worker's connection.
        works_on: the run that the worker works on, in user code or not; -1 for none.
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
    """How a worker has spent its time since it was ready, including the present call of user code.

    Attributes:
        seconds: seconds in total.
        idle_seconds: seconds without work.
        user_seconds: seconds in user code, without the estimated time for checking and copying samples there (which the
            present call still includes). The rest is Penstock's own.
    """

    seconds: float
    idle_seconds: float
    user_seconds: float


class ActivityPage:
    """The worker's side of the page, which writes it. Only one thread may write.

    Args:
        page: NBYTES of writable memory; by default private memory, for a worker that nobody watches.
        ticks: count every sample, to distinguish a hang from slow work.

    Attributes:
        on_leave: called when user code has returned, before the page shows it; at most once in `LOOK_NS`, but always
            before the page shows another split.
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
        self._not_looked = False
        self._run = -1

    @classmethod
    def inherited(cls, fd: int, *, ticks: bool = False) -> ActivityPage:
        """Make a page over the memfd `fd`, and close `fd`."""
        try:
            return cls(mmap.mmap(fd, NBYTES), ticks=ticks)
        finally:
            os.close(fd)

    def importing(self, text: str) -> None:
        """Note that the user's modules are about to be imported."""
        self._write(-1, -1, text, 0, _IMPORTING)

    def enter(self, run: int, number: int, text: str, samples: int = 0) -> None:
        """Note that user code is about to run for this split, after `samples` samples of it."""
        if self._not_looked and text != self._text:
            self._not_looked = False
            self.on_leave()
        self._write(run, number, text, samples, _IN_USER_CODE)

    def leave(self, copying: int = 0) -> None:
        """Note that user code has returned; `copying` ns of its time do not count as user code. The page goes on
        showing the split."""
        now = time.monotonic_ns()
        self._not_looked = now - self._looked <= LOOK_NS
        if not self._not_looked:
            self._looked = now
            self.on_leave()
        self._words[_STATE] = _IDLE
        self._words[_CHANGED] = now
        self._user_ns += max(0, now - self._entered - copying)
        _SUM_SINCE.pack_into(self._page, _USER, self._user_ns, 0)

    def cut_off(self) -> None:
        """Note that user code has closed the worker's connection. The page goes on showing the split."""
        self._words[_STATE] = _CUT_OFF

    def detach(self) -> None:
        """In a forked process: write to private memory from now on."""
        self._looked = -LOOK_NS
        self._page = memoryview(bytearray(NBYTES))
        self._words = self._page[:_TEXT].cast("q")

    def ready(self) -> None:
        """Note that the worker is ready, and count its time from now on."""
        self._user_ns = self._idle_ns = 0
        _SPENT.pack_into(self._page, _READY, time.monotonic_ns(), 0, 0, 0, 0)

    def works_on(self, run: int) -> int:
        """Note that the worker works on this run from now on (-1: on none). Return the run before."""
        before, self._run = self._run, run
        _SEQUENCE.pack_into(self._page, _WORK, run + 1)
        return before

    def idle(self, wait: Callable[[], object]) -> None:
        """Call `wait`, and count its time as idle."""
        began = time.monotonic_ns()
        _SUM_SINCE.pack_into(self._page, _WAITING, self._idle_ns, began)
        wait()
        now = time.monotonic_ns()
        self._idle_ns += now - began
        self._words[_CHANGED] = now
        _SUM_SINCE.pack_into(self._page, _WAITING, self._idle_ns, 0)

    def tick(self) -> None:
        """Count a sample of user code."""
        self._words[_SAMPLES] += 1
        self._words[_CHANGED] = time.monotonic_ns()

    def count(self, samples: int) -> None:
        """Count samples that were made together, if samples are counted."""
        if self._ticks:
            self._words[_SAMPLES] += samples
            self._words[_CHANGED] = time.monotonic_ns()

    def counting(self, samples: Iterator[T]) -> Iterator[T]:
        """Return `samples`. If samples are counted, each one makes a tick."""
        return map(self._ticked, samples) if self._ticks else samples

    def beating(self, samples: Iterator[T]) -> Iterator[T]:
        """Return `samples`. If samples are counted, each one makes a sign of life, but is not counted."""
        return map(self._beaten, samples) if self._ticks else samples

    def _beaten(self, sample: Any) -> Any:
        self._words[_CHANGED] = time.monotonic_ns()
        return sample

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
    """Read a page. Return None if nothing was written yet, or if the writer died in the middle of a write."""
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


def call(page: Page) -> tuple[int, float]:
    """Read the run that the worker works on (-1: none), and the seconds for which the present call of user code has
    lasted (0: user code does not run)."""
    _, entered = _SUM_SINCE.unpack_from(page, _USER)
    (works_on,) = _SEQUENCE.unpack_from(page, _WORK)
    return works_on - 1, max(0.0, (time.monotonic_ns() - entered) / 1e9) if entered else 0.0


def spent(page: Page) -> Spent | None:
    """Read how the worker has spent its time. Return None before it was ready."""
    ready, idle, waiting, user, entered = _SPENT.unpack_from(page, _READY)
    if not ready:
        return None
    now = time.monotonic_ns()
    idle += now - waiting if waiting else 0
    user += now - entered if entered else 0
    return Spent(*(max(0, ns) / 1e9 for ns in (now - ready, idle, user)))


_FRAME = re.compile(rb'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)

LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Directories of other modules that are not the user's."""


def where(dump: bytes) -> str:
    """Return the position of a thread: "FILE:LINE in FUNCTION" of the innermost frame of user code.

    Args:
        dump: faulthandler's output for one thread. If it has several dumps, the last one counts.

    Returns:
        The innermost frame if none is user code; empty if there is no frame.
    """
    last = dump[max(0, dump.rfind(b"(most recent call first)")) :]
    frames = [tuple(part.decode(errors="replace") for part in frame) for frame in _FRAME.findall(last)]
    theirs = [frame for frame in frames if not frame[0].startswith((*OURS, "<frozen ", *LIBRARIES))]
    for file, line, function in (theirs or frames)[:1]:
        return f"{file}:{line} in {function}"
    return ""
