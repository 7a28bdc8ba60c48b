"""Whether a worker stands still, as its status page and its connection tell. Decides, and looks at nothing itself."""

from __future__ import annotations

from ..activity import Activity

OUTSIDE_USER_CODE = 10.0
"""Seconds for which a worker that was not stopped may stand still outside user code: a busy machine takes its time."""


def stands_still(last: Activity | None, *, unread: float, awake: float, stopped: bool, timeout: float) -> str:
    """What a worker that stands still has not done, or an empty text.

    Args:
        last: what its page says.
        unread: seconds for which something that it was sent lies there unread while it waits for that.
        awake: seconds for which we have looked at it without a break.
        stopped: whether a signal has stopped it.
        timeout: seconds that user code may take for a sample.
    """
    if last is None or last.importing or last.cut_off:
        return ""
    if last.in_user_code:
        return f"made no sample for {timeout:g} s" if min(last.since_seconds, awake) >= timeout else ""
    patience = timeout if stopped else max(timeout, OUTSIDE_USER_CODE)
    since = unread if last.waits else last.since_seconds
    if min(since, awake) < patience:
        return ""
    return f"did nothing with what it was given for {patience:g} s{', stopped by a signal,' if stopped else ''}"
