"""Lists of lists of different lengths, as a summary counts them."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from penstock_proto import SpecError
from penstock_proto.batches.inferring import as_array, as_text, is_nested
from penstock_proto.spec import MAX_DIMS


class Lists:
    """Lists of lists of different lengths, taken apart.

    Attributes:
        innermost: the text (or None) and the array of each list that NumPy makes an array of; empty lists are left out.
        low, high: the least and the greatest size of each dimension.

    Raises:
        SpecError: they cannot be served.
    """

    def __init__(self, value: list[Any], path: str) -> None:
        self.innermost: list[tuple[npt.NDArray[Any] | None, npt.NDArray[Any]]] = []
        self.low, self.high = self._spans(value, path, 0)

    def _spans(self, value: Any, path: str, depth: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if depth >= MAX_DIMS:
            raise SpecError(
                f"its lists are nested more than {MAX_DIMS} deep, and a leaf has up to {MAX_DIMS} dimensions"
            )
        if not is_nested(value):
            text = as_text(value)
            array = as_array(value, path) if text is None else text
            if array.size:
                self.innermost.append((text, array))
            return array.shape, array.shape
        spans = [self._spans(item, f"{path}[{number}]", depth + 1) for number, item in enumerate(value)]
        most = max(len(low) for low, _ in spans)
        if any(len(low) < most and low != (0,) for low, _ in spans):
            raise SpecError(f"sample{path} holds lists that are nested to different depths")
        whole = [span for span in spans if len(span[0]) == most]
        low = tuple(map(min, zip(*(low for low, _ in whole), strict=True)))
        high = tuple(map(max, zip(*(high for _, high in whole), strict=True)))
        if len(whole) < len(spans):
            low = (0, *low[1:])
        return (len(value), *low), (len(value), *high)
