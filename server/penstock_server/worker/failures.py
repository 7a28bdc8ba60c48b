"""Describes failures of user code. A worker survives every exception of user code, including `sys.exit()`."""

from __future__ import annotations

from penstock_proto.spec import shown

from ..importing import summary


def describe(error: BaseException) -> str:
    """Say what the code that raised `error` did: "raised ValueError: no pixels", or "called sys.exit(3)"."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else shown(error.code)})"
    return f"raised {summary(error)}"
