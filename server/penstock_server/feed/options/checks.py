"""Checks that several options share. Each error says what to give instead."""

from __future__ import annotations

from typing import Any


def whole(option: str, value: Any, low: int, high: int, *, optional: bool = False) -> None:
    """Check that an option is a whole number from `low` to `high`.

    Raises:
        TypeError, ValueError: it is not.
    """
    if value is None and optional:
        return
    if type(value) is not int:
        raise TypeError(f"{option} must be a whole number{' or None' if optional else ''}, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{option} must be {low} to {high}{' or None' if optional else ''}, got {value}")
