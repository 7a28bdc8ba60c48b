"""Starts processes that run user code, listens to them, and ends those that hang."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from penstock_proto.transport import seqpacket
from penstock_proto.world import inherited, interpreter

from ...machine import orphans
from ...worker_state import activity
from ...worker_state.process_ends import ended_how
from ..observing import messages

_STEP = 0.1
_DUMP_SECONDS = 0.5


@dataclass
class Outcome:
    """The reports of a process, and how it ended.

    Attributes:
        ended: how the process died before it was done, such as "was killed by SIGSEGV"; otherwise empty.
        hung: for how many seconds it hung; 0 if it did not.
        site: the line at which user code hung or died, if known.
        doing: what user code was doing when it hung or died, in words.
        output: the last lines that the process printed.
    """

    wanted: messages.Wanted | None = None
    imported: messages.Imported | None = None
    looked: messages.Looked | None = None
    failed: messages.Failed | None = None
    done: messages.Done | None = None
    skipped: list[messages.Skipped] = field(default_factory=list)
    ended: str = ""
    hung: float = 0.0
    site: str = ""
    doing: str = ""
    output: str = ""

    @property
    def broke(self) -> bool:
        """Whether the process died or hung."""
        return bool(self.ended or self.hung)


class Run:
    """One process that runs user code.

    Args:
        task: the process's task.
        variables: its environment.
        hang_timeout: seconds without a sign of life after which the process is killed.
        on_report: called with each report.
    """

    def __init__(
        self,
        task: messages.Task,
        variables: Mapping[str, str],
        hang_timeout: float,
        on_report: Callable[[messages.Report], None] = lambda report: None,
    ) -> None:
        self.outcome = Outcome()
        self._hang_timeout = hang_timeout
        self._on_report = on_report
        self._debugs = False
        self._began = time.monotonic()
        self._output = Path(task.folder) / f"{task.name}.out"
        self._dump = os.memfd_create("penstock-check-stack")
        page = os.memfd_create("penstock-check-activity")
        os.ftruncate(page, activity.NBYTES)
        self._page = mmap.mmap(page, activity.NBYTES)
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        fds = [theirs.fileno(), page, self._dump]
        command = [*interpreter(), "-m", "penstock_server.checking.observing.process", *map(str, fds)]
        self._has_group = not task.debugs  # a debugger reads from the terminal of our own group
        with theirs, self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, msgspec.json.encode(task).decode()],
                stdin=None if task.debugs else subprocess.DEVNULL,
                stdout=None if task.debugs else output,
                stderr=None if task.debugs else output,
                env=dict(variables),
                pass_fds=[*fds, *inherited()],
                process_group=0 if self._has_group else None,
            )
        os.close(page)
        self._poll = select.poll()
        self._poll.register(self._connection, select.POLLIN)

    def step(self, seconds: float) -> bool:
        """Listen for up to `seconds` seconds; return whether the process goes on."""
        if self._poll.poll(1000 * seconds):
            while self._hear():
                pass
        if self.outcome.done is not None or self.outcome.wanted is not None:
            self._finish()
            return False
        if self._process.poll() is not None:
            while self._hear():
                pass
            if self.outcome.done is None and self.outcome.wanted is None and self.outcome.failed is None:
                self.outcome.ended = ended_how(self._process.returncode)
                self._blame()
            self._finish()
            return False
        silent = self._silent()
        if silent > self._hang_timeout and not self._debugs:
            self._process.send_signal(signal.SIGUSR2)
            time.sleep(_DUMP_SECONDS)
            self.outcome.hung = silent
            self._blame()
            self._finish()
            return False
        return True

    def close(self) -> None:
        """Kill the process with all processes that user code has started there, and close the connection to it."""
        self._process.send_signal(signal.SIGSTOP)  # so that it starts no more of them
        left = [*orphans.descendants(self._process.pid)]
        with contextlib.suppress(ProcessLookupError):
            if self._has_group:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _hear(self) -> bool:
        try:
            data, _ = seqpacket.receive(self._connection)
        except (BlockingIOError, ConnectionError):
            return False
        if not data:
            return False
        report = messages.decode(data)
        self._on_report(report)
        match report:
            case messages.Wanted():
                self.outcome.wanted = report
            case messages.Imported():
                self.outcome.imported = report
            case messages.Looked():
                self.outcome.looked = report
            case messages.Failed():
                self.outcome.failed = report
            case messages.Skipped():
                self.outcome.skipped.append(report)
            case messages.Done():
                self.outcome.done = report
            case messages.Debugging():
                self._debugs = report.begins
                # Ctrl-C at the debugger's prompt is for the debugger.
                signal.signal(signal.SIGINT, signal.SIG_IGN if report.begins else signal.default_int_handler)
        return True

    def _silent(self) -> float:
        """Return for how many seconds the process has shown no sign of life."""
        seen = activity.read(self._page)
        return time.monotonic() - self._began if seen is None else seen.since_seconds

    def _blame(self) -> None:
        seen = activity.read(self._page)
        if seen is not None and (seen.in_user_code or seen.importing):
            self.outcome.doing = seen.split
        self.outcome.site = activity.where(_contents(self._dump))

    def _finish(self) -> None:
        self.close()
        os.close(self._dump)
        self._page.close()
        text = self._output.read_bytes()[-4000:].decode(errors="replace")
        self.outcome.output = "\n".join(text.strip().splitlines()[-8:])


def _contents(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def finish(*runs: Run) -> list[Outcome]:
    """Wait for all runs, and return their outcomes. If this is interrupted, kill the processes."""
    going = list(runs)
    try:
        while going:
            going = [run for run in going if run.step(_STEP / len(going))]
    finally:
        for run in going:
            run.close()
    return [run.outcome for run in runs]
