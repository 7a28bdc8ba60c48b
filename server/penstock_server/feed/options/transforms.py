"""Checks the functions of a feed's `transform=`, which turn a sample into others, before any of them runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock_proto.value_text import shown

from .arguments import bound_by_name


@dataclass(frozen=True, slots=True)
class Transform:
    """A function that turns a sample into another, or into several.

    Attributes:
        function: takes the sample, and `rng` if `takes_rng`.
        name: its name, for errors.
        takes_rng: whether it has a parameter named `rng`.
        yields: whether it is a generator function, which yields any number of samples.
    """

    function: Callable[..., Any]
    name: str
    takes_rng: bool
    yields: bool = False


def checked_transforms(transform: Any) -> tuple[Transform, ...]:
    """Return the functions of `transform=`: None, a function, or a list of functions.

    Raises:
        TypeError: one cannot be called with a sample, or with a sample and `rng`.
    """
    if transform is None:
        return ()
    functions = transform if isinstance(transform, list | tuple) else [transform]
    return tuple(map(_checked, functions))


def checked_batch_transforms(transform: Any) -> tuple[Transform, ...]:
    """Return the functions of `batch_transform=`, in the same way.

    Raises:
        TypeError: one cannot be called with a batch, or with a batch and `rng`.
    """
    try:
        found = checked_transforms(transform)
    except TypeError as error:
        raise TypeError(f"batch_transform=: {error}") from None
    if yielding := [one.name for one in found if one.yields]:
        raise TypeError(f"batch_transform {yielding[0]} yields, and must return one batch for each: use `return`")
    return found


def _checked(function: Any) -> Transform:
    name = str(getattr(function, "__name__", type(function).__name__))
    if not callable(function):
        raise TypeError(f"transform must be a function of a sample, or a list of those, got {shown(function)}")
    if isinstance(function, type) and any("__call__" in vars(base) for base in function.__mro__):
        # The class itself is seldom meant. (tuple, or a NamedTuple, is: their objects cannot be called.)
        raise TypeError(f"transform {name} is a class: give an instance, {name}(...), or a function")
    if inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function):
        raise TypeError(f"transform {name} is async: a transform is a plain function")
    yields = inspect.isgeneratorfunction(function) or inspect.isgeneratorfunction(type(function).__call__)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # a function in C: it gets only the sample
        return Transform(function, name, takes_rng=False, yields=yields)
    parameters = [p for p in parameters if p.name not in bound_by_name(function)]
    takes_rng = any(p.name == "rng" and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
    others = [p for p in parameters if not (takes_rng and p.name == "rng")]
    if not any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in others):
        raise TypeError(f"transform {name} takes no sample: add a first parameter for it")
    if takes_rng and parameters[0].name == "rng":
        raise TypeError(f"transform {name} has rng as its first parameter: the first one gets the sample")
    required = [p.name for p in others if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) > 1:
        raise TypeError(
            f"transform {name} has parameters without an argument: {', '.join(required[1:])}. It is called with one "
            "sample, and with rng if it has a parameter of that name. If a sample is a tuple, take it apart within: "
            "`x, y = sample`; bind other parameters with functools.partial"
        )
    return Transform(function, name, takes_rng, yields)
