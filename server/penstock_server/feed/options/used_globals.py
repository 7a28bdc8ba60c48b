"""Which globals of its module a function uses."""

from __future__ import annotations

import dis
import types


def used_globals(code: types.CodeType) -> set[str]:
    """Return the names of the globals that some code uses, with the functions within it."""
    names = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    return names.union(*(used_globals(one) for one in code.co_consts if isinstance(one, types.CodeType)))
