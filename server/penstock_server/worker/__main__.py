"""Starts a worker: `python -m penstock_server.worker --fd FD --number NUMBER MODULE:ATTR ...`, run by the daemon.

FD is one end of a SOCK_SEQPACKET socketpair. In the page of `--doing-fd` the worker says what it does (see doing.py),
with `--ticks` at every sample. At SIGUSR2 it writes its stack to `--dump-fd`, as soon as it has written to that page.

A worker ends with the daemon: by Shutdown, by end of file on FD, or, when user code is in the middle of something, by
the kernel's SIGKILL. It ends with status 0, or with 1 if it could not start (StartFailed says why).
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from penstock_proto import PenstockError, StartError, codec, seqpacket
from penstock_proto.messages import ErrorReport, FeedPlan, Imported, Message, StartFailed

from ..doing import DoingPage
from ..feed import Feed
from ..importing import load, said, user_traceback
from .loop import Worker
from .served import ServedFeed
from .usercode import did

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
    _end_with_the_daemon(connection)
    _quiet_streams()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon, which then stops its workers

    if options.dump_fd is not None:
        os.set_inheritable(options.dump_fd, False)
        faulthandler.register(signal.SIGUSR2, options.dump_fd, all_threads=False)
    page = DoingPage() if options.doing_fd is None else DoingPage.inherited(options.doing_fd, ticks=options.ticks)

    began = time.monotonic()
    page.importing(f"importing {' '.join(options.feeds)}")
    try:
        feeds = _load(options.feeds)
    except PenstockError as error:
        error.worker = options.number
        _send(connection, StartFailed(error=ErrorReport.of(error)))
        return 1
    page.leave()
    _send(
        connection,
        Imported(
            feeds=tuple(served.plan for served in feeds.values()),
            imports_seconds=time.monotonic() - began,
            tensorflow="tensorflow" in sys.modules,
        ),
    )
    page.ready()
    Worker(connection, options.number, feeds, page).serve()
    return 0


def _load(targets: list[str]) -> dict[str, ServedFeed]:
    feeds: dict[str, ServedFeed] = {}
    for target in targets:
        feed = _import(target)
        plan = _plan(feed.plan, target)
        if plan.name in feeds:
            raise StartError(f"two feeds have the name {plan.name!r} ({target} is the second): give one Feed(name=...)")
        feeds[plan.name] = ServedFeed(feed, plan)
    return feeds


def _import(target: str) -> Feed:
    try:
        return load(target)
    except (SystemExit, KeyboardInterrupt) as error:
        raise StartError(f"importing {target} {did(error)}", remote_traceback=user_traceback(error)) from error


def _plan(make: Callable[[str], FeedPlan], target: str) -> FeedPlan:
    try:
        return make(target.rpartition(":")[2])
    except BaseException as error:  # the length of an indexable object is user code
        raise StartError(f"{target} cannot be served: {said(error)}", remote_traceback=user_traceback(error)) from error


def _send(connection: socket.socket, message: Message) -> None:
    try:
        seqpacket.send(connection, codec.encode(message))
    except ConnectionError:
        os._exit(0)


def _end_with_the_daemon(connection: socket.socket) -> None:
    """Have the kernel kill this process with the daemon; end now if the daemon was gone before that was asked."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    gone = select.poll()
    gone.register(connection, 0)  # reports only a hang-up
    if gone.poll(0):
        os._exit(0)


def _quiet_streams() -> None:
    """What user code prints belongs to the log, and there is nobody to answer its questions."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)


if __name__ == "__main__":
    sys.exit(main())
