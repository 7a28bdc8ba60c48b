"""Describes failures of user code. A worker survives every exception of user code, including `sys.exit()`."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from penstock_proto.value_text import shown

from ..targets.importing import is_explained, is_of_reader, summary

UNKNOWN_DAMAGE = (
    ". Is the file damaged, or does it use something that Penstock's reader does not know? Copy it again, or write it "
    "in another way. With PENSTOCK_DEBUG=1 the error has a traceback"
)
"""What to do about an exception of a library that reads a data file."""

_passing: ContextVar[tuple[type[BaseException], ...]] = ContextVar("passing", default=())


@contextmanager
def letting_through(*kinds: type[BaseException]) -> Iterator[None]:
    """Let these exceptions of user code through in this context, instead of making them errors of the feed. They are
    the user's own requests, such as Ctrl-C, where user code runs in the user's process."""
    token = _passing.set(kinds)
    try:
        yield
    finally:
        _passing.reset(token)


def pass_on(error: BaseException) -> None:
    """Raise `error` if it is let through."""
    if isinstance(error, _passing.get()):
        raise error


def memory_advice() -> str:
    """Return advice after a MemoryError, to be appended to the words, or "" if this process has no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f". The worker may take {limit >> 20} MiB: if it needs more, give --worker-memory a larger size"


def describe(error: BaseException) -> str:
    """Say what the code that raised `error` did: "raised ValueError: no pixels", or "called sys.exit(3)".

    Raises:
        BaseException: `error` itself, if it is let through.
    """
    pass_on(error)
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else shown(error.code)})"
    if type(error).__name__ == "BdbQuit":  # it reached the end of the worker's standard input
        return (
            "started a debugger, which cannot work in a worker process, as that has no terminal: run the feed in the "
            'trainer\'s process, with penstock.dataset("MODULE:ATTR", workers=0)'
        )
    unknown = is_of_reader(error) and not (is_explained(error) or isinstance(error, OSError | ImportError))
    return f"raised {summary(error)}{UNKNOWN_DAMAGE if unknown else ''}{_about_threads(error)}"


def _about_threads(error: BaseException) -> str:
    """Return what to do if code may only run on the thread that made an object, or on the main thread; or ""."""
    if threading.get_ident() == threading.main_thread().ident or "thread" not in str(error):
        return ""
    return (
        ". With workers=0 the code of a feed runs on the thread that reads the stream. With workers=1 it is imported "
        "and runs on the main thread of a process of its own"
    )
