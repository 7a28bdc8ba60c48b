"""Numbers in the dtypes that users ask for, for formats whose files have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


def checked_dtypes(dtypes: Mapping[str, Any] | None) -> dict[str, np.dtype[Any]]:
    """Return the dtypes of columns.

    Raises:
        TypeError: one is not a dtype of numbers.
    """
    found: dict[str, np.dtype[Any]] = {}
    for name, dtype in (dtypes or {}).items():
        try:
            found[name] = np.dtype(dtype)
        except TypeError:
            found[name] = np.dtype(object)
        if found[name].kind not in "biuf":
            raise TypeError(f'dtypes= takes a dtype of numbers for {name!r}, such as "float32", got {dtype!r}')
    return found


def converted(numbers: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Return numbers in a dtype; None if it cannot hold them: as integers or bools they would be others, or as floats
    infinite."""
    with np.errstate(all="ignore"):
        found = numbers.astype(dtype)
    if dtype.kind == "f":
        return None if np.any(np.isinf(found) & np.isfinite(numbers)) else found
    return found if np.array_equal(found, numbers) else None
