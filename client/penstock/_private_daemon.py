"""A private daemon: `penstock_server` as a child process that serves one feed to this process and ends with it.

The child ends when its stdin closes, which this process's death does too, however it comes. On stdout it says
`ready tcp://HOST:PORT/NAME`, or `error {...}` with an ErrorReport; whatever else user code prints there goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO

import msgspec

from penstock_proto import PenstockError, StartError
from penstock_proto.messages import ErrorReport

from . import _process_hooks

_PATIENCE = 2.0
_STEP = 0.1


class PrivateDaemon:
    """A daemon that runs.

    Attributes:
        url: where its feed is served.
        stopping: whether it was told to end.
    """

    stopping = False

    def __init__(
        self, spec: str, workers: int | None, memory: int | None, watch: Callable[[], None] | None = None
    ) -> None:
        """Start a daemon for the feed `spec` (MODULE:ATTR) and wait until it is ready, however long its imports take.

        Args:
            spec: as `penstock serve` takes it.
            workers: number of worker processes, or None for the daemon's default.
            memory: bound of its shared memory in bytes, or None for the daemon's default.
            watch: called now and then while waiting; it may raise to break off.

        Raises:
            StartError: the server package is not installed, or the daemon ended before it was ready.
            PenstockError: what the daemon reported.
        """
        if "PENSTOCK_WORKER" in os.environ:
            raise StartError(
                f"{spec!r} is opened while a Penstock worker imports this code, which would start daemons without end: "
                'put the training code under `if __name__ == "__main__":`, or the Feed into a module of its own'
            )
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers}: give 1 or more")
        if importlib.util.find_spec("penstock_server") is None:
            raise StartError(
                f"{spec!r} needs the daemon, which is not installed here: pip install 'penstock[server]', "
                "or give the URL of a daemon that runs elsewhere"
            )
        command = [sys.executable, "-m", "penstock_server", "serve", spec, "--bind", "tcp://127.0.0.1:0"]
        if workers is not None:
            command += ["--workers", str(workers)]
        if memory is not None:
            command += ["--memory", str(memory)]
        command += ["--until-stdin-closes"]
        # A process group of its own: Ctrl-C is the trainer's, which may want its data while it saves a model.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # a buffer has a lock, which the reader holds while a forked child closes the pipe
            process_group=0,
        )
        _process_hooks.register(self)
        self._said: queue.SimpleQueue[str | PenstockError | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="penstock-private", daemon=True)
        self._reader.start()
        try:
            self.url = self._ready(spec, watch)
        except BaseException:
            self.stop()
            raise

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def _ready(self, spec: str, watch: Callable[[], None] | None) -> str:
        while True:
            try:
                said = self._said.get(timeout=_STEP)  # in steps, so that Ctrl-C is heard
            except queue.Empty:
                if watch is not None:
                    watch()
                continue
            if isinstance(said, str):
                return said
            if said is not None:
                raise said
            status = self._process.wait()
            raise StartError(
                f"the private daemon for {spec!r} ended with status {status} before it was ready; what it said stands "
                f"on stderr, and `penstock serve {spec}` shows it again"
            )

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        begun = b""
        while data := stdout.read(1 << 16):
            *lines, begun = (begun + data).split(b"\n")
            for line in lines:
                self._hear(line.decode(errors="replace"))
        self._said.put(None)

    def _hear(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "ready" and rest.startswith("tcp://"):
            self._said.put(rest)
            return
        if word == "error":
            with contextlib.suppress(msgspec.MsgspecError):
                self._said.put(msgspec.json.decode(rest, type=ErrorReport).error())
                return
        sys.stderr.write(line + "\n")

    def stop(self) -> None:
        """End the daemon: by the end of its stdin, after 2 s by SIGTERM, then by SIGKILL. May be called again."""
        process = self._process
        self.stopping = True
        _process_hooks.unregister(self)
        _close(process.stdin)
        for end in (process.terminate, process.kill, None):
            try:
                process.wait(_PATIENCE if end is not process.kill else 0.5)
                break
            except subprocess.TimeoutExpired:
                if end is not None:
                    end()
        self._reader.join(0.5)
        if not self._reader.is_alive():  # else a grandchild holds the pipe
            _close(process.stdout)

    at_exit = stop

    def forget(self) -> None:
        """In a forked child: the daemon is the parent's, and its stdin must close when the parent ends."""
        _close(self._process.stdin)
        _close(self._process.stdout)
        self._process.returncode = 0


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(OSError):
            pipe.close()
