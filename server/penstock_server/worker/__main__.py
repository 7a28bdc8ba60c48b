"""A worker in a new Python process: `python -m penstock_server.worker --fd FD --number NUMBER MODULE:ATTR ...`.

The daemon runs it where it cannot fork workers (see fork_server.py).

FD is one end of a SOCK_SEQPACKET socketpair. The worker writes its activity to the page `--activity-fd` (see
activity.py). On SIGUSR2 it writes its stack to `--stacks-fd` (see stacks.py). It can do so from its first write to the
page on. The other arguments are `StartArguments`.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence

from ..targets import saved_sources, world
from ..worker_state.start_arguments import StartArguments
from .process import start


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the worker and return its exit status."""
    parser = argparse.ArgumentParser(prog="penstock_server.worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--activity-fd", type=int)
    parser.add_argument("--stacks-fd", type=int)
    StartArguments.add_to(parser)
    options = parser.parse_args(arguments)

    connection = socket.socket(fileno=options.fd)
    connection.setblocking(True)
    connection.set_inheritable(False)
    start.end_with_the_daemon(connection, f"penstock-w{options.number}")
    start.quiet()
    saved_sources.use()
    of_workers = StartArguments.of(options)
    served = not world.enter(of_workers.feeds)
    world.leave_fd()
    return start.serve(connection, options.number, options.activity_fd, options.stacks_fd, of_workers, served=served)


if __name__ == "__main__":
    sys.exit(main())
