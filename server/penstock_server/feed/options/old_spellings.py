"""Refuses options that have become part of another one, and says how to write them now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .short_repr import arguments, call, keyword
from .values import Cache, OnError, Pad, Shuffle


class _Missing:
    """Shown in the place of an argument that the user has to give too."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


_MOVED: Mapping[str, tuple[type, Mapping[str, str], tuple[Any, ...]]] = {
    "shuffle": (Shuffle, {"interleave": "interleave", "block": "block"}, (_Missing("SAMPLES"),)),
    "batching": (Pad, {"pad_value": "value", "buckets": "buckets", "too_long": "too_long"}, ()),
    "cache": (Cache, {"cache_version": "version"}, (_Missing("DIRECTORY"),)),
    "on_error": (OnError, {"attempts": "crashes"}, ("raise",)),
}
"""By option: the class of its value, the new names of the options that are now part of it, and the value's positional
arguments if the user does not give the option."""


def refuse_old_spellings(options: Mapping[str, Any]) -> None:
    """Check that `options`, keyword arguments of `Feed`, are none of those that have become part of another one.

    Raises:
        TypeError: one is; the message has the new spelling, with the user's values.
    """
    texts = []
    for option, (kind, names, default) in _MOVED.items():
        old = {name: options[name] for name in names if name in options}
        if not old:
            continue
        positional, keywords = default, {names[name]: value for name, value in old.items()}
        if (known := options.get(option)) is not None:
            positional, others = _arguments(kind, known)
            keywords = {**others, **keywords}
        given = ", ".join(keyword(name, value) for name, value in old.items())
        texts.append(
            f"{given} {'is' if len(old) == 1 else 'are'} now part of {option}: write "
            f"{option}={call(kind.__name__, positional, keywords)}"
        )
    if texts:
        raise TypeError(". ".join(texts))


def _arguments(kind: type, given: Any) -> tuple[Any, dict[str, Any]]:
    """Return the arguments for the value of an option that the user gave too."""
    if isinstance(given, kind):
        return arguments(given)
    return ((), {}) if kind is Pad else ((given,), {})
