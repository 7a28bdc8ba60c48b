"""Assigns an argument to each parameter of a user's function: the split, a value of `args` or `kwargs`, or an argument
by name.

This file calls no user code.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Collection, Mapping
from functools import partial
from inspect import BoundArguments, Parameter, Signature
from typing import Any

import numpy as np

from penstock_proto.value_text import shown

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
"""Kinds of parameters that take one positional argument."""

BY_NAME = ("rng", "epoch", "shard")
"""Names of parameters that Penstock fills, unless `args` or `kwargs` gives them."""

_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)

_LARGE = 16 << 20
"""Bytes of the largest array in `args` or `kwargs` that each run gets a copy of. Of a larger one it gets a read-only
view."""

_PLAIN = frozenset((str, bytes, int, float, bool, type(None)))
"""Types whose values are immutable."""


class Arguments:
    """The arguments of one function: maps each parameter to its value.

    Args:
        name: name of the function, for errors.
        signature: its signature, without `self`.
        args: positional arguments, after the split.
        kwargs: keyword arguments.

    One of the `fit_` methods must be called first. `advice` is what to do if `kwargs` names a parameter that does not
    exist.

    Raises:
        TypeError: `kwargs` names a parameter that does not exist.
    """

    def __init__(
        self,
        name: str,
        signature: Signature,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        advice: str = "",
    ) -> None:
        self._name = name
        self._advice = advice
        self._signature = signature
        self._parameters = list(signature.parameters.values())
        self._args = args
        self._values: dict[str, Any] = {}
        self._given = self._check_names(dict(kwargs or {}))
        self._of_run: dict[str, str] = {}  # parameter -> the argument that it gets in each run
        self._split_in_rest = False

    def takes(self, what: str) -> bool:
        """Return whether a parameter gets `what`: "split", "rng", "epoch" or "shard"."""
        return what in self._of_run.values() or (what == "split" and self._split_in_rest)

    def bound(self, arguments: Mapping[str, Any]) -> BoundArguments:
        """Return the arguments of one run, with copies of `args` and `kwargs` that it may change."""
        values = {name: fresh(value) for name, value in self._values.items()}
        values |= {name: arguments[what] for name, what in self._of_run.items()}
        if self._split_in_rest:
            rest = self._rest
            assert rest is not None
            values[rest] = (arguments["split"], *values.get(rest, ()))
        return BoundArguments(self._signature, values)

    def fit_generator(self, *, has_splits: bool, segments: bool) -> None:
        """Fit a generator function."""
        name, others = self._name, self._others()
        if has_splits and not others:
            raise ValueError(f"{name} takes no split: add a first parameter for it, or leave splits= out")
        missing = [] if has_splits else self._missing(self._placed(split=False))
        wants_split = has_splits or bool(missing)
        if others and (has_splits or others[0].name in missing):
            self._check_first(others[0], "split" if has_splits or not segments else "segment's number")
        surplus = self._missing(self._placed(split=wants_split and bool(others)))
        if surplus:
            raise TypeError(
                f"{name} has parameters without an argument: {', '.join(surplus)}. A generator can take the split (its "
                "first parameter), rng, epoch and shard; give the others with args= or kwargs=, or bind them with "
                "functools.partial"
            )
        if missing and not has_splits and not segments:
            if self._args or self._given:
                raise TypeError(
                    f"{name} has a parameter without an argument: {missing[0]}. Give it with args= or kwargs=, or give "
                    "splits= if it is the split, which goes before args="
                )
            raise ValueError(f"{name} takes a split ({missing[0]}), but there are none: give splits=")
        self._place(split=wants_split)
        self._refuse_shard(has_splits=has_splits, segments=segments)

    def fit_method(self, *, has_splits: bool, segments: bool) -> None:
        """Fit the method of a class, which gets the split if it requires an argument."""
        missing, others = self._missing({}), self._others()
        if missing and others and missing[0] == others[0].name:
            self._check_first(others[0], "split" if has_splits or not segments else "segment's number")
            if not has_splits and not segments:
                raise ValueError(
                    f"{self._name} takes a split ({missing[0]}), but there are none: give splits=. (args= and kwargs= "
                    "are for the constructor)"
                )
            missing = missing[1:]
            self._place(split=True)
        else:
            self._place(split=False)
        if missing:
            raise TypeError(
                f"{self._name} has parameters without an argument: {', '.join(missing)}. A method can take the split "
                "(its first parameter), rng, epoch and shard, and args= and kwargs= are for the constructor: write a "
                "generator function that makes the object and runs the method"
            )
        self._refuse_shard(has_splits=has_splits, segments=segments)

    def fit_constructor(self, *, has_splits: bool, segments: bool, method: str, split_taken: bool) -> None:
        """Fit the constructor of a class, which gets the split if the method does not."""
        name = self._name
        split = has_splits and not split_taken
        free = [p for p in self._parameters if p.kind in POSITIONAL and p.name not in self._given]
        others = self._others()
        if split and (not others or (self._rest is None and len(free) <= len(self._args))):
            raise TypeError(
                f"neither {method} nor the constructor of {name} has a parameter left for the split, which comes "
                "before args=: leave out the argument in args= that the splits replace, or leave splits= out"
            )
        if split:
            self._check_first(others[0], "split")
        missing = self._missing(self._placed(split=split))
        if missing:
            after = " after the split" if split else ""
            raise TypeError(
                f"the constructor of {name} has parameters without an argument{after}: {', '.join(missing)}. Give them "
                "with args= or kwargs="
            )
        self._place(split=split)
        if has_splits or segments:
            if self.takes("shard") and self._signature.parameters["shard"].default is Parameter.empty:
                self._refuse_shard(has_splits=has_splits, segments=segments)
            self._of_run = {parameter: what for parameter, what in self._of_run.items() if what != "shard"}

    @property
    def _rest(self) -> str | None:
        """The name of its `*args` parameter, or None."""
        return next((p.name for p in self._parameters if p.kind is p.VAR_POSITIONAL), None)

    def _check_names(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Note the values of `kwargs`, and check that the function has a parameter for each. Return those with a
        parameter of their own, that is, not in its `**kwargs`."""
        names = {p.name for p in self._parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        unknown = {name: value for name, value in kwargs.items() if name not in names}
        rest = next((p.name for p in self._parameters if p.kind is p.VAR_KEYWORD), None)
        if unknown and rest is None:
            has = f"it has {', '.join(sorted(names))}" if names else "it has no parameters"
            text = f"kwargs= names {', '.join(unknown)}, but {self._name} has no such parameter: {has}"
            raise TypeError(f"{text}{self._advice}")
        self._values |= {name: value for name, value in kwargs.items() if name in names}
        if unknown and rest is not None:
            self._values[rest] = unknown
        return {name: value for name, value in kwargs.items() if name in names}

    def _others(self) -> list[Parameter]:
        """Return the parameters that can get the split: positional ones that get no argument by name, and `*args`."""
        kinds = (*POSITIONAL, Parameter.VAR_POSITIONAL)
        return [p for p in self._parameters if p.kind in kinds and p.name not in self._given and p.name not in BY_NAME]

    def _check_first(self, parameter: Parameter, what: str) -> None:
        """Check that `parameter`, which is to get the split, is the first free one."""
        free = [p for p in self._parameters if p.name not in self._given]
        if parameter is not free[0]:
            if free[0].name == "shard":
                raise TypeError(
                    f"{self._name} has parameter {parameter.name} after shard, which has the number of shards too: "
                    f"index, count = shard. Leave {parameter.name} out, or give it a default"
                )
            raise TypeError(
                f"{self._name} has parameter {parameter.name} after {free[0].name}: only the first one can be the "
                f"{what}. Put it first, or, if it is something else, give it a default or bind it with "
                "functools.partial"
            )

    def _placed(self, *, split: bool) -> dict[str, Any]:
        """Return the positional parameters that get the split or a value of `args`, with those values.

        Raises:
            TypeError: `args` has too many values, or `kwargs` gives one of the parameters too.
        """
        parameters = [p for p in self._parameters if p.kind in POSITIONAL]
        if split:
            while parameters and parameters[0].name in self._given:
                del parameters[0]
        values = ["split", *self._args] if split else list(self._args)
        if len(values) > len(parameters) and self._rest is None:
            after = " after the split" if split else ""
            takes = len(parameters) - split
            raise TypeError(
                f"args= has {len(self._args)} values, and {self._name} takes {max(takes, 0)}{after}: it is called as "
                f"{self._name}{self._signature}"
            )
        placed = {p.name: value for p, value in zip(parameters, values, strict=False)}
        if twice := [name for name in placed if name in self._given]:
            raise TypeError(f"args= and kwargs= both give {twice[0]} of {self._name}: leave it out of one of them")
        return placed

    def _missing(self, placed: Mapping[str, Any]) -> list[str]:
        """Return the parameters that need an argument and have none, apart from those in `placed`."""
        return [
            p.name
            for p in self._parameters
            if p.default is p.empty
            and p.kind not in _VARIABLE
            and p.name not in self._given
            and p.name not in placed
            and p.name not in BY_NAME
        ]

    def _place(self, *, split: bool) -> None:
        """Decide which argument each parameter gets."""
        placed = self._placed(split=split)
        rest = (["split", *self._args] if split else list(self._args))[len(placed) :]
        for parameter in self._parameters:
            if parameter.name in placed:
                continue
            if parameter.name in BY_NAME and parameter.name not in self._given and parameter.kind not in _VARIABLE:
                if parameter.kind is Parameter.POSITIONAL_ONLY:
                    raise TypeError(
                        f"{self._name} takes {parameter.name} by position only: remove the `/` from its parameters"
                    )
                self._of_run[parameter.name] = parameter.name
        first = next(iter(placed), None)
        if split and first is not None:
            self._of_run[first] = "split"
            del placed[first]
        elif split:
            self._split_in_rest = True
            del rest[0]
        self._values |= placed
        if rest and self._rest is not None:
            self._values[self._rest] = tuple(rest)

    def _refuse_shard(self, *, has_splits: bool, segments: bool) -> None:
        if (has_splits or segments) and self.takes("shard"):
            option = "splits=" if has_splits else "segment="
            raise ValueError(
                f"{self._name} takes shard, which is for generators without {option}: leave one of them out"
            )


def check_arguments(args: Any, kwargs: Any) -> None:
    """Check the types of `args=` and `kwargs=`.

    Raises:
        TypeError: they are not a tuple and a dict.
    """
    if not isinstance(args, tuple):
        raise TypeError(f"args must be a tuple, such as args=(files,), got {shown(args)}")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise TypeError(
            f'kwargs must be a dict of arguments by name, such as kwargs={{"size": 64}}, got {shown(kwargs)}'
        )


def check_readable_twice(generate: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
    """Check that no argument is an iterator of Python's own, such as a generator or a `csv.reader`.

    Raises:
        TypeError: one is. All runs would read it together, so each would miss what another one has read.
    """
    values = [(f"args[{number}]", value) for number, value in enumerate(args)]
    values += [(f"kwargs[{name!r}]", value) for name, value in (kwargs or {}).items()]
    if isinstance(generate, partial):
        values += [(f"argument {number} of the functools.partial", value) for number, value in enumerate(generate.args)]
        values += [(f"{name} of the functools.partial", value) for name, value in generate.keywords.items()]
    for place, value in values:
        if is_read_once(value):
            raise TypeError(
                f"{place} is {shown(value)}, an iterator: what one run reads of it, no other run gets. Make it in the "
                "generator, or give a list"
            )


def is_read_once(value: Any) -> bool:
    """Whether this is an iterator of Python's own, which can be read only once."""
    return hasattr(type(value), "__next__") and type(value).__module__ in ("builtins", "itertools", "_csv")


def bound_by_name(function: Any) -> Collection[str]:
    """Return the parameters that Penstock would fill, and that a `functools.partial` has bound by name."""
    keywords = function.keywords if isinstance(function, partial) else {}
    return [name for name in BY_NAME if name in keywords]


def fresh(value: Any) -> Any:
    """Return a copy that a run may change without affecting the next run, such as a list of files that it shuffles in
    place.

    Containers, arrays and random generators are copied. An array that is too large to copy becomes read-only. All runs
    of a process share any other object.
    """
    kind = type(value)
    if kind in (list, tuple, set, deque):
        items = value if _PLAIN.issuperset(map(type, value)) else map(fresh, value)
        return deque(items, value.maxlen) if kind is deque else kind(items)
    if kind is dict:
        return {key: fresh(item) for key, item in value.items()}
    if kind is bytearray or isinstance(value, random.Random | np.random.Generator | np.random.RandomState):
        return copy.deepcopy(value)
    if kind is np.ndarray:
        if value.nbytes <= _LARGE:
            return value.copy()
        view = value.view()
        view.flags.writeable = False
        return view
    return value
