"""The Ray actor of a host: runs `penstock join` as a child process. It imports no Ray; driver.py makes it an actor.

The child is in the actor's session and ends when its stdin closes. So it ends with the actor, however that ends, and a
restarted actor finds the CPUs of its node free.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from typing import IO

from ..join import sent_keys
from .orders import Ended, Plan

LAST_LINES = 8
"""Lines of a host's log in the report of its end."""


class RayHost:
    """The actor of one host. If it dies, Ray starts it again on the same node or another one. Two methods may run at
    the same time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._leaves = False

    def leave(self) -> None:
        """Tell the host to hand over its work and end."""
        self._leaves = True
        if self._process is not None:
            self._process.terminate()

    def run(self, plan: Plan, head: str, name: str) -> Ended:
        """Run a host until it ends.

        Args:
            plan: what to run.
            head: the head's `tcp://host:port`.
            name: the host's name at the head.
        """
        command = [sys.executable, "-m", "penstock_server", "join", head, *plan.feeds, *plan.options]
        command += ["--workers", str(plan.workers), "--host-name", name, "--until-stdin-closes"]
        command += [sent_keys.OPTION] if plan.keys else []
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_environment()
        )
        self._process = process
        if self._leaves:
            process.terminate()
        assert process.stdin is not None
        assert process.stdout is not None
        last: deque[str] = deque(maxlen=LAST_LINES)
        # On a thread: a process that user code has left behind may hold the pipe open.
        reader = threading.Thread(target=_pass_on, args=(process.stdout, last), daemon=True)
        reader.start()
        if plan.keys:
            sent_keys.write(plan.keys, process.stdin)
        process.wait()
        process.stdin.close()
        reader.join(1)
        return Ended(process.returncode, "".join(last))


def _pass_on(lines: IO[bytes], last: deque[str]) -> None:
    """Write the child's output to the actor's log, and keep the last lines."""
    for line in lines:
        text = line.decode(errors="replace")
        last.append(text)
        sys.stderr.write(text)
        sys.stderr.flush()


def _environment() -> dict[str, str]:
    """Return this process's environment, with the current directory, which holds the feeds' code, on Python's path."""
    result = {name: value for name, value in os.environ.items() if name != "PENSTOCK_KEYS"}
    result["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), result.get("PYTHONPATH"))))
    return result
