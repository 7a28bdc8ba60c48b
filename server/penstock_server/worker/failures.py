"""What user code did when it failed, in words. A worker outlives whatever user code raises, `sys.exit()` included."""

from __future__ import annotations

from penstock_proto.spec import shown

from ..importing import summary


def describe(error: BaseException) -> str:
    """What the code that raised `error` did: "raised ValueError: no pixels", or "called sys.exit(3)"."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else shown(error.code)})"
    return f"raised {summary(error)}"
