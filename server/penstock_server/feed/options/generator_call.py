"""Calls a feed's generator, which is a function, or a class with a method: it constructs an object and runs the method.

Everything that the signature shows is checked when the feed is declared. Only `GeneratorCall.prepare`, and the function
that it returns, run user code. This file must not know workers or streams.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Signature
from typing import Any

from penstock_proto.value_text import shown

from .arguments import BY_NAME, POSITIONAL, Arguments, bound_by_name, check_arguments, check_readable_twice


@dataclass(frozen=True, slots=True)
class Wants:
    """The arguments that a generator takes. With segments, the split is the segment's number."""

    split: bool
    rng: bool
    epoch: bool
    shard: bool


class GeneratorCall:
    """A feed's generator with the arguments of each run.

    A function is called with the split (if the feed has splits), then `args` and `kwargs`. A class is constructed with
    `args` and `kwargs`, and then its method is run. The split goes to the method if that requires an argument, and
    otherwise to the constructor, before `args`.

    Args:
        generate: the function or the class.
        method: name of the class's generator method, None for a function.
        args: positional arguments.
        kwargs: keyword arguments.
        has_splits: whether the feed has splits.
        segments: whether it has segments. A segment's number is passed as the split, but only to a function or method
            that requires one more argument.

    Raises:
        TypeError: `generate` cannot be called, or its parameters do not fit the arguments.
        ValueError: it takes a split and the feed has none, or the feed has splits and it takes none.

    Attributes:
        name: name of the function, or of the class and its method.
        constructor: name of the class, or None.
        wants: the arguments that it takes.
        seeds_global_state: whether `random`, `numpy.random` and torch are seeded for each run.
    """

    def __init__(
        self,
        generate: Any,
        *,
        method: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        has_splits: bool = False,
        segments: bool = False,
    ) -> None:
        self._generate = generate
        self._method = method
        check_arguments(args, kwargs)
        check_readable_twice(generate, args, kwargs)
        _check_kind(generate, method)
        if method is None:
            self.name = str(getattr(generate, "__name__", type(generate).__name__))
            self.constructor = None
            self._call = Arguments(self.name, _signature(generate, self.name), args, kwargs)
            self._call.fit_generator(has_splits=has_splits, segments=segments)
            calls = [self._call]
        else:
            self.constructor = str(generate.__name__)
            self.name = f"{self.constructor}.{method}"
            self._call = Arguments(self.name, _method_signature(generate, method, self.name), (), None)
            self._call.fit_method(has_splits=has_splits, segments=segments)
            advice = (
                f". args= and kwargs= are for the constructor: to call {method}() with arguments, give a generator "
                f"function with `yield from {self.constructor}(...).{method}(...)`"
            )
            self._construct = Arguments(self.constructor, _signature(generate, self.constructor), args, kwargs, advice)
            self._construct.fit_constructor(
                has_splits=has_splits, segments=segments, method=self.name, split_taken=self._call.takes("split")
            )
            calls = [self._construct, self._call]
        split, rng, epoch, shard = (any(call.takes(what) for call in calls) for what in ("split", *BY_NAME))
        self.wants = Wants(split, rng, epoch, shard)
        self.seeds_global_state = method is not None or not self.wants.rng

    def prepare(self, arguments: Mapping[str, Any]) -> Callable[[], Any]:
        """Return a function that starts a run. For a class, construct the object.

        Args:
            arguments: the split, rng, epoch and shard, as `wants` names them.

        Raises:
            Exception: any exception of the constructor.
        """
        function = self._generate
        if self._method is not None:
            bound = self._construct.bound(arguments)
            function = getattr(self._generate(*bound.args, **bound.kwargs), self._method)
        bound = self._call.bound(arguments)
        return partial(function, *bound.args, **bound.kwargs)


def _check_kind(generate: Any, method: Any) -> None:
    """Check that a method is named for a class, and only for a class.

    Raises:
        TypeError: `generate` and `method` do not fit, or `generate` is not a generator function.
    """
    if method is not None:
        _check_method(generate, method)
    elif isinstance(generate, type) and not hasattr(generate, "__next__"):
        raise TypeError(f"{generate.__name__} is a class: {_instead_of_class(generate)}")
    elif not callable(generate):
        raise TypeError(
            "expected a generator function that yields samples, or an object with __len__ and __getitem__, "
            f"got {shown(generate)}{_instead_of_object(generate)}"
        )
    elif _is_method_of_a_class(generate):
        owner, _, name = generate.__qualname__.rpartition(".")
        owner = owner.rpartition(".")[2]
        raise TypeError(
            f"{owner}.{name} is a method and needs an object: give the class and the method's name, "
            f'Feed({owner}, method="{name}", args=...), with the constructor\'s arguments in args= and kwargs='
        )
    elif inspect.isasyncgenfunction(generate) or inspect.iscoroutinefunction(generate):
        raise TypeError(f"{generate.__name__} is async: a feed needs a plain generator function")


def _check_method(generate: Any, method: Any) -> None:
    if not isinstance(method, str):
        raise TypeError(f'method must be the name of a method, such as method="generate", got {shown(method)}')
    if not isinstance(generate, type):
        if inspect.isroutine(generate):
            raise TypeError(f"method= is for a class, and {generate.__name__} is a function: leave method= out")
        name = type(generate).__name__
        raise TypeError(
            f"method= needs the class itself, and got an instance of {name}: give Feed({name}, method={method!r}, "
            "args=..., kwargs=...), with the constructor's arguments. Each worker then makes objects of its own"
        )
    name = f"{generate.__name__}.{method}"
    found = getattr(generate, method, None)
    if found is None:
        named = ", ".join(_generators_of(generate)) or "none"
        raise TypeError(f"{generate.__name__} has no method {method!r}; generator methods: {named}")
    if not callable(found):
        raise TypeError(f"{name} is not a method but {shown(found)}: name the method that yields the samples")
    if inspect.isasyncgenfunction(found) or inspect.iscoroutinefunction(found):
        raise TypeError(f"{name} is async: a feed needs a plain generator method")


def _generators_of(cls: type) -> list[str]:
    """Return the names of the class's generator methods: the public ones first, as they are defined."""
    defined = dict.fromkeys(name for base in cls.__mro__ for name in vars(base))
    names = [name for name in defined if inspect.isgeneratorfunction(getattr(cls, name, None))]
    return sorted(names, key=lambda name: name.startswith("_"))


def _likely_method(cls: type) -> str:
    return next(iter(_generators_of(cls)), "generate")


def _instead_of_class(cls: type) -> str:
    """Say what to give instead of a class without method=."""
    name = cls.__name__
    if hasattr(cls, "__getitem__") and hasattr(cls, "__len__"):
        return f"give an instance, {name}(...), whose items are then served"
    if hasattr(cls, "reset_state"):
        return f"give a function that makes the object and iterates over it{_function(f'{name}(...)', cls)}"
    return (
        f"give an instance, {name}(...), if its items are samples, or, if one of its methods yields them, the name of "
        f'that: Feed({name}, method="{_likely_method(cls)}", ...)'
    )


def _instead_of_object(source: Any) -> str:
    """Say what to give instead of an object that can be iterated over, such as what a generator function returned."""
    if not hasattr(source, "__iter__"):
        if type(source).__module__ == "builtins":
            return ""
        return f". Give a function that reads samples from it and yields them{_function('...', type(source))}"
    code = getattr(source, "gi_code", None)
    if code is not None and code.co_name.isidentifier():  # not that of an expression
        return f". An iterator can be read only once: give the function, Feed({code.co_name}, args=...)"
    once = "An iterator can be read only once: give" if hasattr(source, "__next__") else "Give"
    kind = type(source)
    public = kind.__module__ not in ("builtins", "_io") and not kind.__name__.startswith("_")
    made = f"{kind.__name__}(...)" if public else "...  # make it here"
    return f". {once} a function that makes it{_function(made, kind)}"


def _function(made: str, cls: type) -> str:
    """Return the lines of a generator function that makes an object of `cls` with the expression `made`, and iterates
    over it. A DataFlow of tensorpack must be reset before it is read, and then seeds its random numbers."""
    if not hasattr(cls, "reset_state"):
        return f":\n    def samples():\n        yield from {made}\n    feed = Feed(samples, ...)"
    imports, parameter, seeds = "", "", ""
    if any(base.__module__.startswith("tensorpack.") for base in cls.__mro__):
        imports, parameter = "    from tensorpack.utils.utils import fix_rng_seed\n\n", "rng"
        seeds = "        fix_rng_seed(int(rng.integers(2**31)))\n"
    return (
        f":\n{imports}    def samples({parameter}):\n{seeds}        flow = {made}\n        flow.reset_state()\n"
        "        yield from map(tuple, flow)\n    feed = Feed(samples, ...)"
    )


def _is_method_of_a_class(function: Any) -> bool:
    """Return whether this is a plain function whose first parameter is `self`."""
    parts = getattr(function, "__qualname__", "").split(".")
    if not inspect.isfunction(function) or len(parts) < 2 or parts[-2] == "<locals>":
        return False
    return next(iter(inspect.signature(function).parameters), None) == "self"


def _signature(function: Any, name: str) -> Signature:
    """Return the signature of a function, without what a `functools.partial` gives it and Penstock would fill."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise TypeError(f"cannot read the parameters of {name}: wrap it in a `def` of your own") from None
    bound = bound_by_name(function)
    return signature.replace(parameters=[p for p in signature.parameters.values() if p.name not in bound])


def _method_signature(cls: type, method: str, name: str) -> Signature:
    """Return the signature of a method as seen from an instance: without `self`."""
    signature = _signature(getattr(cls, method), name)
    parameters = list(signature.parameters.values())
    plain = inspect.isfunction(inspect.getattr_static(cls, method))
    if plain and parameters and parameters[0].kind in POSITIONAL:
        signature = signature.replace(parameters=parameters[1:])
    return signature
