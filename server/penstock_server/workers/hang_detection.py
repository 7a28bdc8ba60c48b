"""Decides whether a worker hangs, from its activity page and its connection. Does no I/O."""

from __future__ import annotations

from ..worker_state.activity import Activity
from ..worker_state.process_ends import NO_SAMPLE

OUTSIDE_USER_CODE = 10.0
"""Seconds that a worker may go without progress outside user code, unless a signal stopped it: the machine may be
busy."""


def stands_still(last: Activity | None, *, unread: float, awake: float, stopped: bool, timeout: float) -> str:
    """Return what a hanging worker has failed to do, or "" if the worker does not hang.

    Args:
        last: its activity page.
        unread: seconds that a message has lain unread while the worker waits for one.
        awake: seconds that the supervisor has been checking it without a break.
        stopped: whether a signal has stopped it.
        timeout: seconds that user code may take for a sample.
    """
    if last is None or last.importing or last.cut_off:
        return ""
    if last.in_user_code:
        return f"{NO_SAMPLE} {timeout:g} s" if min(last.since_seconds, awake) >= timeout else ""
    patience = timeout if stopped else max(timeout, OUTSIDE_USER_CODE)
    since = unread if last.waits else last.since_seconds
    if min(since, awake) < patience:
        return ""
    return f"made no progress with its work for {patience:g} s{', stopped by a signal,' if stopped else ''}"
