"""Starts pdb where user code failed, in the command's terminal."""

from __future__ import annotations

import pdb
import sys
import traceback
from types import FrameType, TracebackType
from typing import Any

from . import frames


def debug(error: BaseException, generator: Any = None) -> None:
    """Start pdb in the innermost frame of user code.

    Args:
        error: Penstock's exception. Its cause is the exception of user code, if that raised one.
        generator: the generator that yielded a sample that cannot be served, if user code raised nothing.
    """
    print(f"\n{type(error).__name__}: {getattr(error, 'message', error)}", file=sys.stderr)
    debugger = pdb.Pdb()
    debugger.reset()
    cause = error.__cause__
    while cause is not None:
        users = _users(cause.__traceback__)
        if users is not None:
            traceback.print_exception(type(cause), cause, users, file=sys.stderr)
            debugger.interaction(None, users)
            return
        cause = cause.__cause__
    frame: FrameType | None = getattr(generator, "gi_frame", None)
    if frame is not None:
        print(f"pdb stops at the line that yielded the sample: {frames.site(frame)}", file=sys.stderr)
        debugger.interaction(frame, None)
    else:
        print("there is no line of user code to stop at", file=sys.stderr)


def _users(found: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback from its first to its last frame of user code; None if it has no such frame."""
    parts = []
    while found is not None:
        parts.append(found)
        found = found.tb_next
    users = [at for at, part in enumerate(parts) if frames.is_users(part.tb_frame)]
    if not users:
        return None
    kept = None
    for part in reversed(parts[users[0] : users[-1] + 1]):
        kept = TracebackType(kept, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return kept
