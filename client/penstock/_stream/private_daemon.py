"""A private daemon: `penstock_server` as a child process that serves one feed to this process and ends with it.

The child ends when its stdin closes, which happens when this process dies in any way. On stdout it prints `ready
tcp://HOST:PORT/NAME`, or `error {...}` with an ErrorReport. Before that it prints `starting "..."` each second, which
says what it waits for. All other lines there come from user code, and this process prints them on its own stderr.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Literal

import msgspec

from penstock_proto import PenstockError, StartError
from penstock_proto.messages import ErrorReport
from penstock_proto.params import SENT, shown_call, split_params
from penstock_proto.text import one_line
from penstock_proto.world import VARIABLE, World, interpreter

from .._transport.waiting import Announcer
from . import process_hooks, server_package

_PATIENCE = 2.0
_STEP = 0.1
MAX_LINE = 1 << 20
"""Most bytes of a line of the daemon. Longer ones come from user code, and are passed on in pieces."""


class PrivateDaemon:
    """A running private daemon.

    Attributes:
        url: the URL of its feed.
        stopping: whether `stop` was called.
    """

    stopping = False

    def __init__(
        self,
        spec: str,
        workers: int | Literal["auto"] | None,
        memory: int | None,
        world: World,
        watch: Callable[[], None] | None = None,
    ) -> None:
        """Start a daemon for the feed `spec` (MODULE:ATTR) and wait until it is ready, however long its imports take.
        The log says what it is doing.

        Args:
            spec: as for `penstock serve`.
            workers: number of worker processes, "auto", or None for the daemon's default.
            memory: limit of its shared memory in bytes, or None for the daemon's default.
            world: what user modules see in the workers.
            watch: called regularly while waiting; it may raise to stop.

        Raises:
            StartError: the server package is not installed, or the daemon ended before it was ready.
            PenstockError: the daemon reported this error.
        """
        named = shown_call(spec)
        server_package.refuse_in_worker(repr(named))
        if workers not in (None, "auto") and not (isinstance(workers, int) and workers > 0):
            raise ValueError(f'workers={workers!r}: must be 0 (no worker processes) or more, or "auto"')
        server_package.check_installed(f"{named!r} needs the daemon")
        command = [*interpreter(), "-m", "penstock_server", "serve", spec, "--bind", "tcp://127.0.0.1:0"]
        if hasattr(sys, "ps1"):  # a notebook or an interactive session: no lines between its outputs unless needed
            command += ["--log-level", "warning"]
        if workers is not None:
            command += ["--workers", str(workers)]
        if memory is not None:
            command += ["--memory", str(memory)]
        command += ["--until-stdin-closes"]
        shared = world.write()
        try:
            # In its own process group: Ctrl-C goes to the trainer alone, which may need data while it saves a model.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(world, shared),
                cwd=world.directory,
                pass_fds=[shared],
                bufsize=0,  # the lock of a buffer may be held by the reader thread when a forked child closes the pipe
                process_group=0,
            )
        finally:
            os.close(shared)
        process_hooks.register(self)
        self._phase = ""
        self._said: queue.SimpleQueue[str | PenstockError | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="penstock-private", daemon=True)
        self._reader.start()
        try:
            self.url = self._ready(spec, watch)
        except BaseException:
            self.stop()
            raise

    def alive(self) -> bool:
        """Return whether the daemon still runs."""
        return self._process.poll() is None

    def _ready(self, spec: str, watch: Callable[[], None] | None) -> str:
        said = self._first_said(Announcer(f"the private daemon of {shown_call(spec)}"), watch)
        if isinstance(said, str):
            return said
        if said is not None:
            raise said
        status = self._process.wait()
        seen = "" if spec.startswith(SENT) else f", or run `penstock serve {split_params(spec)[0]}`"
        raise StartError(
            f"the private daemon for {shown_call(spec)!r} ended with status {status} before it was ready; see its "
            f"messages on stderr{seen}"
        )

    def _first_said(self, announcer: Announcer, watch: Callable[[], None] | None) -> str | PenstockError | None:
        try:
            while True:
                announcer.say(self._phase)
                try:
                    return self._said.get(timeout=_STEP)  # in steps, so that Ctrl-C works
                except queue.Empty:
                    if watch is not None:
                        watch()
        finally:
            announcer.close()

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        begun = b""
        while data := stdout.read(1 << 16):
            *lines, begun = (begun + data).split(b"\n")
            for line in lines:
                self._hear(line.decode(errors="replace"))
            if len(begun) > MAX_LINE:
                sys.stderr.write(begun.decode(errors="replace"))
                begun = b""
        self._said.put(None)

    def _hear(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "ready" and rest.startswith("tcp://"):
            self._said.put(rest)
            return
        if word == "starting":
            with contextlib.suppress(msgspec.MsgspecError):
                self._phase = one_line(msgspec.json.decode(rest, type=str))
                return
        if word == "error":
            with contextlib.suppress(msgspec.MsgspecError):
                self._said.put(msgspec.json.decode(rest, type=ErrorReport).error())
                return
        sys.stderr.write(line + "\n")

    def stop(self) -> None:
        """Stop the daemon: close its stdin, after 2 s send SIGTERM, 0.5 s later SIGKILL. May be called again."""
        process = self._process
        self.stopping = True
        process_hooks.unregister(self)
        _close(process.stdin)
        for end in (process.terminate, process.kill, None):
            try:
                process.wait(_PATIENCE if end is not process.kill else 0.5)
                break
            except subprocess.TimeoutExpired:
                if end is not None:
                    end()
        self._reader.join(0.5)
        if not self._reader.is_alive():  # else a process that the daemon left behind holds the pipe
            _close(process.stdout)

    at_exit = stop

    def forget(self) -> None:
        """In a forked child: leave the daemon to the parent, and close its stdin, which must close with the parent."""
        _close(self._process.stdin)
        _close(self._process.stdout)
        self._process.returncode = 0


def _environment(world: World, shared: int) -> dict[bytes, bytes]:
    """Return the environment of the daemon, without the variables that set options of another `penstock serve`."""
    result = {name: value for name, value in world.environment.items() if not name.startswith(b"PENSTOCK_SERVE_")}
    result[VARIABLE.encode()] = str(shared).encode()
    return result


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(OSError):
            pipe.close()
