"""One worker that is profiled: tells it to sample its stack, and reads the samples.

A worker that is within one call in C gives no sample until that returns. If it gives none for a second, faulthandler
writes its stack once a second, which works within such a call. (It would not be safe while Python code runs: see
worker/process/stack_sampler.py.)
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import msgspec

from ..machine.caught_signals import catches
from ..worker_state import stacks
from .folding import Folding, Frame
from .profile import Sampled

RENEWED = 2.0
"""Seconds for which a worker goes on to sample if nobody renews that."""

SILENT = 1.0
"""Seconds without a sample after which faulthandler is asked."""

_FRAME = re.compile(rb'^  File "(.*)", line (\d+|\?\?\?) in (.*)$', re.MULTILINE)
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


class WatchedWorker:
    """The process, its stacks file, and the samples that were read from it.

    Args:
        pidfd: of the process; this object owns it.
        fd: the stacks file; likewise.
        folding: makes stacks of frames.
        record: where the samples go.
    """

    def __init__(self, pidfd: int, fd: int, folding: Folding, record: Sampled) -> None:
        self.pidfd = pidfd
        self.record = record
        self._fd = fd
        self._folding = folding
        self._begun, self._at = 0, 0
        self._paths: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self._frames: dict[int, tuple[str, int, str]] = {}
        self._stacks: dict[int, tuple[Frame, ...]] = {}
        self._credited = self._heard = time.monotonic_ns()
        """Up to when its time is accounted for, and when the last sample came."""
        self._renewed = self._told = self._asked = float("-inf")
        self._asked_while: str | None = None
        """The state of its main thread when faulthandler was asked; None if nothing is expected."""

    @classmethod
    def of(cls, number: int, pid: int, fd: int, folding: Folding) -> WatchedWorker | None:
        """Watch the process `pid` of worker `number`. Takes over `fd`. None if it has ended."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.close(fd)
            return None
        return cls(pidfd, fd, folding, Sampled(number, pid))

    def close(self) -> None:
        """Release its files."""
        os.close(self.pidfd)
        os.close(self._fd)

    def go_on(self, now: float, until: float, rate: float) -> None:
        """Have it sample its stack `rate` times a second, until `until` or until this is no longer called."""
        if now - self._renewed >= RENEWED / 4:
            self._renewed = now
            mine = int((min(until, now + RENEWED) + 0.1) * 1e9)
            stacks.put(self._fd, stacks.UNTIL, max(mine, stacks.number(self._fd, stacks.UNTIL)))
            stacks.put(self._fd, stacks.INTERVAL, int(1e9 / rate))
        silent = (time.monotonic_ns() - self._heard) / 1e9
        first = self._told == float("-inf")
        due = (first or silent > SILENT / 2) and now - self._told >= SILENT / 2
        if due and catches(self.record.pid, signal.SIGPROF):
            self._told = now
            self._send(signal.SIGPROF)
        if silent > SILENT and now - self._asked >= SILENT:
            self._asked = now
            self._ask()

    def read(self) -> None:
        """Read what has come."""
        begun = stacks.number(self._fd, stacks.BEGUN)
        written = stacks.number(self._fd, stacks.WRITTEN)
        if begun != self._begun:
            if not begun:
                return
            self._begun, self._at = begun, 0
            self._frames, self._stacks = {}, {}
        data = os.pread(self._fd, max(0, min(written, stacks.LOG) - self._at), stacks.START + self._at)
        if stacks.number(self._fd, stacks.BEGUN) != begun:
            return  # it was overwritten; the next look begins at its start
        end = data.rfind(b"\n") + 1
        self._at += end
        for line in data[:end].splitlines():
            with contextlib.suppress(msgspec.MsgspecError, KeyError, TypeError, ValueError):  # user code wrote there
                self._line(msgspec.json.decode(line))
        if self._asked_while is not None:
            self._read_dump(self._asked_while)

    def _line(self, line: list[Any]) -> None:
        match line:
            case ["paths", ours, libraries]:
                self._paths = tuple(map(str, ours)), tuple(map(str, libraries))
            case ["frame", number, file, line_number, name]:
                self._frames[number] = str(file), int(line_number), str(name)
            case ["stack", number, frames]:
                self._stacks[number] = self._folding.folded([self._frames[one] for one in frames], self._paths)
            case [int() as number, int() as end, int() as ns, on_cpu]:
                self._heard = max(self._heard, end)
                self._count(self._stacks[number], end, ns, bool(on_cpu))

    def _count(self, stack: tuple[Frame, ...], end: int, ns: int, on_cpu: bool) -> None:
        """Count the time that no other sample counts."""
        ns = min(ns, end - self._credited)
        if ns > 0:
            self.record.add(stack, ns, on_cpu)
            self._credited = end

    # --- faulthandler ---

    def _ask(self) -> None:
        state = self._state()
        if state in ("R", "S", "D") and catches(self.record.pid, signal.SIGUSR2):
            stacks.rewind(self._fd)
            self._asked_while = state
            self._send(signal.SIGUSR2)

    def _read_dump(self, state: str) -> None:
        frames = [
            (_unescaped(file), 0 if line == b"???" else int(line), _unescaped(name))
            for file, line, name in _FRAME.findall(stacks.dumped(self._fd))
        ]
        if frames:
            self._asked_while = None
            end = time.monotonic_ns()
            self._count(self._folding.folded(frames[::-1], self._paths), end, end - self._credited, state == "R")

    def _state(self) -> str:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.record.pid}/stat").read_text().rpartition(")")[2][1:2]
        return "?"

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


def _unescaped(text: bytes) -> str:
    """Return a text that faulthandler has written: it writes other letters than ASCII as numbers."""
    return _ESCAPED.sub(lambda found: chr(int(next(filter(None, found.groups())), 16)), text.decode(errors="replace"))
