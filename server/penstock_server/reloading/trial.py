"""Tries whether the feeds can be served as their files are now, by a daemon of their own with one worker."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from penstock_proto import PenstockError, StartError
from penstock_proto.messages import ErrorReport

from ..machine.environment import OPTIONS


class Trial:
    """A daemon that serves the feeds to nobody.

    Args:
        targets: MODULE:ATTR of each feed, or the strings of data files.
        memory: bytes that slots and shuffle blocks may take.
        words: the options of workers, such as `--env=NAME=VALUE`.
    """

    def __init__(self, targets: Sequence[str], memory: int, words: Sequence[str]) -> None:
        command = [sys.executable, "-m", "penstock_server", "serve", *targets, "--workers", "1"]
        command += ["--bind", "tcp://127.0.0.1:0", "--memory", str(memory), "--until-stdin-closes", *words]
        self._ready = len(targets)
        self._said = b""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if not name.startswith(OPTIONS)},
            process_group=0,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def outcome(self) -> bool | PenstockError:
        """Return whether all feeds could be served, so far; or why one cannot be."""
        assert self._process.stdout is not None
        ended = self._process.poll() is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._process.stdout.fileno(), 1 << 16):
                self._said += data
        lines = self._said.decode(errors="replace").splitlines()
        for line in lines:
            if line.startswith("error "):
                with contextlib.suppress(msgspec.MsgspecError):
                    return msgspec.json.decode(line.removeprefix("error "), type=ErrorReport).error()
        if sum(line.startswith("ready tcp://") for line in lines) >= self._ready:
            return True
        return StartError(f"a trial of the new code ended with {self._process.returncode}") if ended else False

    def stop(self) -> None:
        """End it."""
        self._process.kill()  # its workers end with it
        with self._process:
            pass
