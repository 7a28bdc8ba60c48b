"""A worker that is started afresh: `python -m penstock_server.worker --fd FD --number NUMBER MODULE:ATTR ...`.

The daemon runs it where workers cannot be forked (see forkserver.py).

FD is one end of a SOCK_SEQPACKET socketpair. In the page of `--doing-fd` the worker says what it does (see doing.py),
with `--ticks` at every sample. At SIGUSR2 it writes its stack to `--dump-fd`, as soon as it has written to that page.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence

from ..doing import DoingPage
from . import start


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the worker; returns its exit status."""
    parser = argparse.ArgumentParser(prog="penstock_server.worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--doing-fd", type=int)
    parser.add_argument("--dump-fd", type=int)
    parser.add_argument("--ticks", action="store_true")
    parser.add_argument("feeds", nargs="+", metavar="MODULE:ATTR")
    options = parser.parse_args(arguments)

    connection = socket.socket(fileno=options.fd)
    connection.setblocking(True)
    connection.set_inheritable(False)
    start.end_with_the_daemon(connection, f"penstock-w{options.number}")
    start.quiet()
    page = DoingPage() if options.doing_fd is None else DoingPage.inherited(options.doing_fd, ticks=options.ticks)
    return start.serve(connection, options.number, options.feeds, page, options.dump_fd)


if __name__ == "__main__":
    sys.exit(main())
