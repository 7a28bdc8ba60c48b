"""What keeps a daemon from serving its feeds, in words: "importing scenes.py:feed (12 s)"."""

from __future__ import annotations

from penstock_proto.status.figures import count
from penstock_proto.status.status_shape import Status
from penstock_proto.text import one_line

_MOST_TEXT = 300
"""Most characters of an error."""


def phase(state: Status) -> str:
    """Return what keeps a daemon with this status from serving its feeds. Return "" if nothing does."""
    if state.draining:
        return "the daemon is stopping"
    if state.ready:
        return ""
    for failing in state.failing:
        why = one_line(failing.error)[:_MOST_TEXT]
        return f"feed {failing.feed} failed {count(failing.times, 'time')} and is tried again: {why}"
    own = [worker for worker in state.workers if worker.host is None]
    for worker in sorted(own, key=lambda one: not one.ready):  # the first that is ready lists splits for all
        doing = worker.doing
        if doing is not None and doing.what:
            what = one_line(doing.what)
            if worker.ready and not what.endswith("the splits"):  # then it is the name of a split, or of an item
                what = f"reading a first sample: {what}"
            stopped = ", stopped by a signal" if worker.stopped else ""
            return f"{what} ({doing.seconds:.0f} s{stopped})"
    return "starting workers"
