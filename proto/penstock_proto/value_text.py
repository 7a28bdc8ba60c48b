"""Values as short texts for messages: any value, even of user code."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np

from .text import printable


def shown(value: Any, limit: int = 120) -> str:
    """Show `value` as a short text for a message: arrays by dtype and shape, others by their repr.

    The text can be sent. This never raises, whatever the methods of `value` do.
    """
    try:
        text = _shown(value)
    except BaseException:  # they are user code
        text = f"<{type(value).__name__}>"
    return printable(text if len(text) <= limit else text[: limit - 3] + "...")


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype.name} array of shape {value.shape}"
    if isinstance(value, np.dtype):
        return str(value)
    if isinstance(value, tuple):
        return f"({', '.join(shown(item, 40) for item in value[:8])}{', ...' if len(value) > 8 else ''})"
    if isinstance(value, Mapping):
        first = islice(value.items(), 8)
        return f"{{{', '.join(f'{shown(key, 40)}: {shown(item, 40)}' for key, item in first)}}}"
    return repr(value)
