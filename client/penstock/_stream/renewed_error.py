"""Errors that are raised more than once."""

from __future__ import annotations

import copy

from penstock_proto import PenstockError


def renewed(error: PenstockError) -> PenstockError:
    """Return a copy of `error` without its traceback, which would hold the frames that it has passed through.

    The cause stays: it is the exception of user code that ran in this process.
    """
    other = copy.copy(error)
    other.__cause__ = error.__cause__
    return other
