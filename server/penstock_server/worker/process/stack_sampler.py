"""Samples the stack of the worker's main thread while somebody profiles it (`penstock profile`).

SIGPROF starts a thread. The thread looks at the main thread's stack about 100 times a second, and writes samples to the
stacks file (stacks.py) until the deadline in that file. So a worker that nobody profiles has no such thread, and pays
nothing.

Why a thread: reading the frames of a running thread needs the GIL. Handlers in C that do without it (faulthandler at
each signal) crash: with Python 3.11 about once in 5,000 times. The signal of a timer would interrupt system calls of
libraries that do not expect that. The thread gets the GIL between two instructions of the main thread, so a call in C
that holds the GIL delays the sample, which then counts for the whole time since the last one, and shows the line of
that call. While the sampler runs, threads that ask for the GIL get it after 50 us. With Python's 5 ms, shorter work
would never be seen: the sampler would get the GIL only in the next sleep or read, where it is free.

The lines of the log:

    ["paths", ours, theirs]              directories of Penstock's modules, and of libraries
    ["frame", number, file, line, name]  before the first sample with this frame
    ["stack", number, frames]            before the first sample with this stack, the outermost frame first
    [stack, end, ns, on_cpu]             a sample: it counts for the `ns` before `end`, in monotonic ns
"""

from __future__ import annotations

import _thread
import contextlib
import mmap
import opcode
import os
import random
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import msgspec

from ...logs.own_code import OURS
from ...worker_state import stacks
from ...worker_state.activity import LIBRARIES

SWITCH = 50e-6
"""Seconds after which a thread gets the GIL while the stack is sampled."""

MOST_FRAMES = 200
"""How many frames of a stack are written, from the innermost on. There may be endless recursion."""

_RESUME = opcode.opmap["RESUME"]
_WORDS = struct.Struct("=4q")
_BESIDE = struct.Struct("=2q")


class StackSampler:
    """Samples the main thread of this process on request.

    Args:
        fd: the stacks file, which stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self._running = False

    def install(self) -> None:
        """Make SIGPROF start the sampling. Call this on the main thread."""
        signal.signal(signal.SIGPROF, self._begin)
        signal.siginterrupt(signal.SIGPROF, False)

    def _begin(self, signum: int, frame: FrameType | None) -> None:
        # This runs between any two instructions of user code: no lock is taken, and nothing is imported.
        if not self._running and os.getpid() == self._pid:
            self._running = True
            try:
                _thread.start_new_thread(self._run, ())
            except RuntimeError:  # the system has no room for a thread
                self._running = False

    def _run(self) -> None:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            before = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH)
            try:
                with mmap.mmap(self._fd, stacks.NBYTES) as file:
                    self._sample(file)
            finally:
                if abs(sys.getswitchinterval() - SWITCH) < 1e-6:  # else user code has set another one
                    sys.setswitchinterval(before)
        except (OSError, ValueError):  # no memory, or user code has closed the file
            pass
        finally:
            self._running = False

    def _sample(self, file: mmap.mmap) -> None:
        assert self._main is not None
        until, interval = _BESIDE.unpack_from(file, stacks.UNTIL)
        log = StackLog(file)
        chance = random.Random(0)  # so that samples do not fall into step with the work
        last = time.monotonic_ns()
        state: int | None = None
        try:
            with contextlib.suppress(OSError):
                state = os.open(f"/proc/self/task/{self._pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            while last < until:
                pause = int(max(1_000_000, min(interval, 10**9)) * (0.5 + chance.random()))
                time.sleep(pause / 1e9)
                now = time.monotonic_ns()
                stack = log.stack(sys._current_frames().get(self._main))
                # This releases the GIL, so a main thread that was about to run does so.
                on_cpu = state is None or _runs(os.pread(state, 128, 0))
                log.write([[stack, now, now - last, on_cpu]])
                last = now
                until, interval = _BESIDE.unpack_from(file, stacks.UNTIL)
        finally:
            if state is not None:
                os.close(state)
            with contextlib.suppress(OSError, ValueError):
                file.madvise(mmap.MADV_REMOVE, stacks.START, stacks.LOG)
                log.begin()


class StackLog:
    """Writes samples to memory that other processes read at the same time."""

    def __init__(self, file: mmap.mmap) -> None:
        self._file = file
        self._encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode
        (self._begun,) = stacks.NUMBER.unpack_from(file, stacks.BEGUN)
        self.begin()

    def begin(self) -> None:
        """Begin the log again; readers notice."""
        self._frames: dict[tuple[int, int], int] = {}
        self._codes: list[CodeType] = []  # kept alive, so that the ids above stay theirs
        self._stacks: dict[tuple[int, ...], int] = {}
        self._begun += 1
        self._written = 0
        _BESIDE.pack_into(self._file, stacks.BEGUN, self._begun, 0)
        self.write([["paths", OURS, LIBRARIES]])

    def stack(self, frame: FrameType | None) -> int:
        """Return the number of the stack whose innermost frame is `frame`. If the stack is new, write it first."""
        lines: list[list[Any]] = []
        if frame is not None and _not_begun(frame):
            frame = frame.f_back  # the time before was the caller's
        seen: list[int] = []
        while frame is not None and len(seen) < MOST_FRAMES:
            code, line = frame.f_code, frame.f_lineno or 0
            number = self._frames.get((id(code), line))
            if number is None:
                number = self._frames[id(code), line] = len(self._frames)
                self._codes.append(code)
                lines.append(["frame", number, _plain(code.co_filename), line, _plain(code.co_qualname)])
            seen.append(number)
            frame = frame.f_back
        key = tuple(reversed(seen))
        number = self._stacks.get(key)
        if number is None:
            number = self._stacks[key] = len(self._stacks)
            lines.append(["stack", number, key])
        if lines:
            self.write(lines)
        return number

    def write(self, lines: list[list[Any]]) -> None:
        """Write lines. If the log is full, it begins again, and they are lost."""
        data = b"".join(self._encode(line) + b"\n" for line in lines)
        at = stacks.START + self._written
        if at + len(data) > stacks.NBYTES:
            self.begin()
            return
        self._file[at : at + len(data)] = data
        self._written += len(data)
        stacks.NUMBER.pack_into(self._file, stacks.WRITTEN, self._written)


def _not_begun(frame: FrameType) -> bool:
    """Whether a function, or a generator after its yield, was just entered: threads switch there."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return 0 <= at < len(code) and code[at] == _RESUME


def _plain(text: str) -> str:
    """Return a text that UTF-8 can encode."""
    return text.encode(errors="backslashreplace").decode()


def _runs(stat: bytes) -> bool:
    """Whether a thread with this /proc/PID/stat has a CPU or waits for one."""
    return stat[stat.rfind(b")") + 2 :][:1] == b"R"
