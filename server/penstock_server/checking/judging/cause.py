"""Looks for the cause of a difference that a daemon has found: a process without a terminal, started by the daemon.

`python -m penstock_server.checking.judging.cause FD ASKED`, where ASKED is CauseAsked as JSON. It writes CauseFound as
JSON to FD, or nothing if it could not look.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...machine.process_limits import end_with_parent
from ...worker.process import start
from ..observing.messages import CauseAsked, CauseFound
from .collecting import Options, cause_of
from .culprit_words import cause


def main(arguments: Sequence[str]) -> int:
    """Run the experiments; return the exit status."""
    fd = int(arguments[0])
    os.set_inheritable(fd, False)
    end_with_parent("penstock-cause")
    start.quiet()
    os.nice(5)
    asked = msgspec.json.decode(arguments[1], type=CauseAsked)
    options = Options(asked.target, 1.0, asked.environment, 60.0)
    culprit = cause_of(options, Path(asked.folder), asked.place, asked.number)
    if culprit is not None:
        os.write(fd, msgspec.json.encode(CauseFound(*cause(culprit))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
