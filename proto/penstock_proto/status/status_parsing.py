"""Parses the status that a daemon sends as JSON, for everybody who asks for one. The daemon is not trusted."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ..errors import ProtocolError
from ..text import printable
from .status_shape import Status

MAX_DEPTH = 32
"""How deep a status may be nested. Penstock's own is nested 6 deep."""


def parse(text: str) -> Status:
    """Return a daemon's status, with all of its texts safe to print (text.py). Leave out figures that are unknown
    here.

    Raises:
        ProtocolError: it is not JSON, is nested too deep, or lacks something that readers need.
    """
    try:
        return msgspec.convert(_cleaned(json.loads(text), MAX_DEPTH), Status)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the daemon's status cannot be read: {str(error)[:200]}") from None


def _cleaned(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return printable(value)
    if not isinstance(value, dict | list):
        return value
    if not depth:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_cleaned(item, depth - 1) for item in value]
    return {printable(key): _cleaned(item, depth - 1) for key, item in value.items()}
