"""The Ray actor of a host: runs `penstock join` as a child process. It imports no Ray; driver.py makes it an actor.

The child is in the actor's session and ends when its stdin closes. So it ends with the actor, however that ends, and a
restarted actor finds the CPUs of its node free.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .orders import Ended, Plan

LAST_LINES = 8
"""Lines of a host's log that its end is reported with."""


class RayHost:
    """See the file's head. Ray starts it again on the same node or another one if it dies."""

    def run(self, plan: Plan, head: str, service: str) -> Ended:
        """Run a host until it ends.

        Args:
            plan: what it is to do.
            head: the head's `tcp://host:port`.
            service: names this run of the head and the host's place in it.
        """
        folder = Path(tempfile.gettempdir(), f"penstock-{service}")
        with _key_files(plan.keys, folder) as keys:
            command = [sys.executable, "-m", "penstock_server", "join", head, *plan.feeds, *plan.options, *keys]
            command += ["--workers", str(plan.workers), "--until-stdin-closes"]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_environment()
            )
            assert process.stdin is not None
            assert process.stdout is not None
            last: deque[str] = deque(maxlen=LAST_LINES)
            # On a thread: a process that user code has left behind may hold the pipe open.
            reader = threading.Thread(target=_pass_on, args=(process.stdout, last), daemon=True)
            reader.start()
            process.wait()
            process.stdin.close()
            reader.join(1)
        return Ended(process.returncode, "".join(last))


@contextlib.contextmanager
def _key_files(files: dict[str, bytes], folder: Path) -> Iterator[list[str]]:
    """Write the files of keys into a folder, and remove it at the end. Yields the options that name it."""
    shutil.rmtree(folder, ignore_errors=True)  # of an actor that was killed
    if not files:
        yield []
        return
    folder.mkdir(0o700)
    try:
        for name, data in files.items():
            (folder / name).touch(0o600)
            (folder / name).write_bytes(data)
        yield ["--keys", str(folder)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _pass_on(lines: IO[bytes], last: deque[str]) -> None:
    """Write what the child says to the actor's log, and keep the last lines."""
    for line in lines:
        text = line.decode(errors="replace")
        last.append(text)
        sys.stderr.write(text)
        sys.stderr.flush()


def _environment() -> dict[str, str]:
    """Return this process's environment, in which the current directory, with the feeds' code, is on Python's path."""
    result = {name: value for name, value in os.environ.items() if name != "PENSTOCK_KEYS"}
    result["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), result.get("PYTHONPATH"))))
    return result
