"""Starts a worker in its process, fresh or forked: ties its life to the daemon's, imports the feeds, and serves.

A worker ends with the daemon: by Shutdown, by end of file on its connection, or, in the middle of user code, by the
kernel's SIGKILL. Its exit status is 0, or 1 if it could not start (StartFailed says why).
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from penstock_proto import PenstockError, StartError
from penstock_proto.messages import EnvironmentWanted, ErrorReport, FeedPlan, Imported, Message, StartFailed
from penstock_proto.messages.feeds import MAX_PARAMS
from penstock_proto.params import split_params
from penstock_proto.text import printable
from penstock_proto.transport import codec, seqpacket
from penstock_proto.transport.codec import MAX_MESSAGE

from ...feed.feed import Feed
from ...machine import orphans
from ...machine.environment import missing
from ...machine.process_limits import end_with_parent, limit_memory, outlive_parent
from ...sources.remote import file_cache
from ...targets import world
from ...targets.factory import Made
from ...targets.file_target import shown_target
from ...targets.importing import load, summary, user_traceback, users_line
from ...worker_state.activity import ActivityPage
from ...worker_state.start_arguments import StartArguments
from ..failures import describe
from ..isolation import helpers, import_seeding
from ..reading.loaded_feed import LoadedFeed
from . import signals
from .loop import WorkerLoop
from .process_guard import ProcessGuard
from .stack_sampler import StackSampler

TERMINAL_DEBUGGERS = ("", "pdb.set_trace", "ipdb.set_trace", "IPython.terminal.debugger.set_trace")
"""Values of PYTHONBREAKPOINT that name a debugger which needs a terminal."""


def end_with_the_daemon(connection: socket.socket, name: str) -> None:
    """Make the kernel kill this process when its parent ends. End now if the daemon is already gone.

    `top` and `ps -e` show the first 15 letters of `name`.
    """
    end_with_parent(name)
    gone = select.poll()
    gone.register(connection, 0)  # reports only a hang-up
    if gone.poll(0):
        os._exit(0)


def outlive_the_daemon() -> None:
    """Undo `end_with_the_daemon` for a process that notices on its own when the daemon is gone."""
    outlive_parent()


def quiet() -> None:
    """Send what user code prints to the log, give it no standard input, and leave SIGINT and SIGTERM to the daemon."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.breakpointhook = no_terminal
    signals.leave_to_daemon()


def no_terminal(*arguments: object, **options: object) -> object:
    """Replace `sys.breakpointhook`, because a worker has no terminal. Leave a debugger that needs none alone.

    Raises:
        RuntimeError: always, unless PYTHONBREAKPOINT names a debugger that needs no terminal.
    """
    if os.environ.get("PYTHONBREAKPOINT", "") not in TERMINAL_DEBUGGERS:
        return sys.__breakpointhook__(*arguments, **options)
    raise RuntimeError(
        "breakpoint() cannot work in a worker process, which has no terminal: run the feed in the trainer's process, "
        'with penstock.dataset("MODULE:ATTR", workers=0)'
    )


def serve(
    connection: socket.socket,
    number: int,
    activity_fd: int | None,
    stacks_fd: int | None,
    arguments: StartArguments,
    *,
    served: bool,
    shared_until: str = "",
) -> int:
    """Import the feeds and serve them until the daemon sends Shutdown. Return the process's exit status.

    Args:
        connection: to the daemon; blocking.
        number: the worker's number.
        activity_fd: the file of the worker's activity page (activity.py); None: the daemon does not look at it.
        stacks_fd: the file for the worker's stack (stacks.py), or None. The worker writes its stack there on SIGUSR2,
            and samples it from SIGPROF on.
        arguments: what all workers are told at their start.
        served: as in `load_feeds`.
        shared_until: the place of the statement, FILE:LINE, before which the fork server has done all imports.
    """
    feeds = arguments.feeds
    limit_memory(arguments.memory)
    file_cache.choose(arguments.file_cache, arguments.file_cache_size)
    page = ActivityPage() if activity_fd is None else ActivityPage.inherited(activity_fd, ticks=arguments.ticks)
    if stacks_fd is not None:
        os.set_inheritable(stacks_fd, False)
        faulthandler.register(signal.SIGUSR2, stacks_fd, all_threads=False)
        StackSampler(stacks_fd).install()
    guard = ProcessGuard(connection, page)
    signals.restore_in_children()
    orphans.adopt()
    began = time.monotonic()
    had_tensorflow = "tensorflow" in sys.modules  # imported by the fork server, for all workers
    try:
        loaded = load_feeds(feeds, page.importing, served=served)
        variables = missing((name, dict(one.declared.env or {})) for name, one in loaded.items())
    except PenstockError as error:
        guard.check()
        _send(connection, StartFailed(error=ErrorReport.of(error)))
        return 1
    page.leave()
    if variables is not None:
        _send(connection, EnvironmentWanted(variables=variables))
        return 0
    _send(
        connection,
        Imported(
            feeds=tuple(one.plan for one in loaded.values()),
            imports_seconds=time.monotonic() - began,
            tensorflow="tensorflow" in sys.modules and not had_tensorflow,
            shared_until=shared_until,
        ),
    )
    page.ready()
    helpers.of_this_process.others()
    WorkerLoop(connection, number, loaded, page, guard).serve()
    return 0


def load_feeds(
    targets: Sequence[str], tell: Callable[[str], None] = lambda doing: None, *, served: bool = False
) -> dict[str, LoadedFeed]:
    """Import the feeds that these MODULE:ATTR arguments name, and return them by name.

    Args:
        targets: the arguments.
        tell: called before each import, with words that say so.
        served: whether no trainer's `sys.argv` is there for the modules (targets/world.py).

    Raises:
        StartError: one cannot be imported or served, or two have the same name.
    """
    feeds: dict[str, LoadedFeed] = {}
    for target in targets:
        tell(f"importing {shown_target(target)}")
        with import_seeding.seeded_imports():
            if served:
                world.as_served(target)
            feed, params = _import(target, served=served)
            plan = plan_of(partial(_plan, feed, params), target)
        if plan.name in feeds:
            raise StartError(
                f"two feeds are named {plan.name!r} ({shown_target(target)} is the second): give one of them "
                "Feed(name=...)"
            )
        feeds[plan.name] = LoadedFeed(feed, plan)
    if served:
        world.as_served(targets[0])
    nbytes = sum(len(msgspec.msgpack.encode(loaded.plan)) for loaded in feeds.values())
    if nbytes > MAX_MESSAGE - 1024:
        for loaded in feeds.values():  # trainers can do without them
            loaded.plan = msgspec.structs.replace(loaded.plan, classes=())
        nbytes = sum(len(msgspec.msgpack.encode(loaded.plan)) for loaded in feeds.values())
    if nbytes > MAX_MESSAGE - 1024:
        raise StartError(
            f"the declared specs of these feeds take {nbytes} bytes together, and one daemon can serve up to "
            f"{MAX_MESSAGE - 1024}: use shorter keys, leave spec= out, or serve the feeds with several daemons"
        )
    return feeds


def _plan(feed: Feed, params: str, name: str) -> FeedPlan:
    """Return the plan of a feed whose factory got these parameters. It shares no cached splits with others."""
    plan = feed.plan(name)
    if not params:
        return plan
    digest = hashlib.sha256(params.encode(errors="surrogatepass")).hexdigest()[:16]
    if len(params) > MAX_PARAMS:
        params = f"{params[: MAX_PARAMS - 40]}... (SHA-256 {digest})"
    cache = None if plan.cache is None else f"{plan.cache}-{digest}"
    return msgspec.structs.replace(plan, params=printable(params), cache=cache)


def _import(target: str, *, served: bool) -> Made:
    try:
        return load(target)
    except (SystemExit, KeyboardInterrupt) as error:
        why = f"importing {shown_target(target)} {describe(error)}{_about_argv(error, served)}"
        raise StartError(why, remote_traceback=user_traceback(error)) from error
    except StartError as error:
        if error.__cause__ is not None:
            error.args = (f"{error.message}{_about_argv(error.__cause__, served)}",)
        raise


def _about_argv(error: BaseException, served: bool) -> str:
    """Return what to do if a module failed because of its command line, with the line; otherwise an empty text."""
    line = users_line(error)
    if line is None or not ((isinstance(error, SystemExit) and line.called) or "argv" in line.text):
        return ""
    whose = "that is the command line of the trainer here"
    if served:
        whose = "the modules of a daemon have no arguments (sys.argv has only the path of the module)"
    return (
        f". {line.where} reads the command line, but {whose}: read environment variables there, or under "
        '`if __name__ == "__main__":`'
    )


def plan_of(make: Callable[[str], FeedPlan], target: str) -> FeedPlan:
    """Return the plan of the feed that `target` names, MODULE:ATTR or ATTR. `make` is its method `plan`.

    Raises:
        StartError: the feed cannot be served.
    """
    try:
        return make(split_params(target)[0].rpartition(":")[2])
    except BaseException as error:  # the length of an indexable object is user code
        raise StartError(
            f"cannot serve {shown_target(target)}: {summary(error)}", remote_traceback=user_traceback(error)
        ) from error


def _send(connection: socket.socket, message: Message) -> None:
    try:
        seqpacket.send(connection, codec.encode(message))
    except ConnectionError:
        os._exit(0)
