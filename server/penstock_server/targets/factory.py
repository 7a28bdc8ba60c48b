"""Calls the factory of a feed with the parameters that a target gives it.

Values from the command line are text. The annotation of a parameter says what it becomes: `size: int`, `root: Path`,
`mode: Literal["train", "val"]`, `sizes: list[int]`. Without an annotation, the type of the default does.
"""

from __future__ import annotations

import enum
import inspect
import json
import os
import types
import typing
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AnySequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

from penstock_proto import StartError
from penstock_proto.text import printable
from penstock_proto.value_text import shown

if TYPE_CHECKING:
    from ..feed.feed import Feed

_TRUE, _FALSE, _NONE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}, {"none", "null"}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SEQUENCES = (list, tuple, set, frozenset, AnySequence)


class Made(NamedTuple):
    """A feed, and the parameters that its factory got and whose defaults differ, as text: `root='/data', size=128`."""

    feed: Feed
    params: str


class _Misfit(Exception):
    """A value does not fit an annotation; the argument says what was expected."""


def is_factory(value: object) -> bool:
    """Return whether `value` can be a factory: a function that does not itself yield samples."""
    return inspect.isfunction(value) and not inspect.isgeneratorfunction(value)


def make(factory: Callable[..., Any], name: str, given: Mapping[str, Any], hint: str = "") -> Made:
    """Call a factory.

    Args:
        factory: the function.
        name: its name, for messages.
        given: the values of its parameters, as text or as JSON has them.
        hint: what to do if it is not meant as a factory.

    Raises:
        StartError: the parameters do not fit, or the function did not return a feed.
    """
    from ..feed.feed import Feed

    signature = _signature(factory)
    known = {one.name: one for one in signature.parameters.values() if one.kind in _NAMED}
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    unknown = [] if takes_all else [one for one in given if one not in known]
    missing = [one.name for one in known.values() if one.default is one.empty and one.name not in given]
    if unknown or missing:
        problem = f"has no parameter {unknown[0]!r:.80}" if unknown else f"needs a value of {missing[0]}"
        has = f"its parameters are {'; '.join(map(described, known.values()))}" if known else "it has no parameters"
        how = "" if unknown else f", such as --param {missing[0]}=VALUE, or params={{{missing[0]!r}: ...}}"
        raise StartError(f"{name} {problem}{how}: {has}{hint if missing and not given else ''}")
    values = {}
    for one, value in given.items():
        parameter = known.get(one)
        try:
            values[one] = value if parameter is None else _converted(value, _kind(parameter))
        except _Misfit as misfit:
            assert parameter is not None
            raise StartError(
                f"{name}: {one} must be {misfit}, got {value!r:.80} (its parameter is {described(parameter)})"
            ) from None
    feed = factory(**values)
    if not isinstance(feed, Feed):
        raise StartError(f"{name} must return a Feed, got {shown(feed)}{hint}")
    order = [one for one in known if one in values] + sorted(values.keys() - known.keys())
    differing = [one for one in order if one not in known or not _same(values[one], known[one].default)]
    return Made(feed, ", ".join(f"{one}={_text(values[one])}" for one in differing))


def described(parameter: inspect.Parameter) -> str:
    """Return a parameter as in the function's signature, such as "size: int = 64"."""
    kind = parameter.annotation
    text = parameter.name
    if kind is not parameter.empty:
        text += f": {kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else _plain_name(kind)}"
    return text if parameter.default is parameter.empty else printable(f"{text} = {parameter.default!r:.80}")


def parameters_of(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that `--param` can set."""
    return [one for one in _signature(factory).parameters.values() if one.kind in _NAMED]


def _signature(factory: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(factory, eval_str=True)
    except Exception:  # an annotation that only a type checker can resolve
        return inspect.signature(factory)


def _kind(parameter: inspect.Parameter) -> Any:
    if parameter.annotation is not parameter.empty:
        return parameter.annotation
    default = parameter.default
    return type(default) if isinstance(default, bool | int | float | str | list | tuple | dict) else Any


def _converted(value: Any, kind: Any) -> Any:
    """Return a value as `kind` wants it.

    Raises:
        _Misfit: that is impossible.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _converted(value, arguments[0])
    if origin in (Union, types.UnionType):
        return _one_of(value, arguments)
    if origin is Literal:
        return _literal(value, arguments)
    plain = origin or kind
    if plain in (type(None), None):
        return _none(value)
    if plain is bool:
        return _bool(value)
    if plain in (int, float):
        return _number(value, plain)
    if isinstance(plain, type) and issubclass(plain, enum.Enum):
        return _enum(value, plain)
    if plain in (str, Path, os.PathLike):
        if not isinstance(value, str):
            raise _Misfit("text")
        return value if plain is str else Path(value)
    if plain in _SEQUENCES:
        return _sequence(value, plain, arguments)
    if isinstance(plain, type) and issubclass(plain, Mapping):
        return _mapping(value)
    return value


def _one_of(value: Any, kinds: tuple[Any, ...]) -> Any:
    expected = []
    for kind in sorted(kinds, key=lambda kind: kind is str):  # any text would be a str
        try:
            return _converted(value, kind)
        except _Misfit as misfit:
            expected.append(str(misfit))
    raise _Misfit(" or ".join(expected))


def _literal(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
    for choice in choices:
        if value == str(choice):
            return choice
    raise _Misfit(f"one of {', '.join(map(str, choices))}")


def _none(value: Any) -> None:
    if value is not None and not (isinstance(value, str) and value.lower() in _NONE):
        raise _Misfit("none")


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise _Misfit("true or false")


def _number(value: Any, kind: type[int] | type[float]) -> int | float:
    what = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or not isinstance(value, str | int | kind):
        raise _Misfit(what)
    try:
        return kind(value)
    except ValueError:
        raise _Misfit(what) from None


def _enum(value: Any, kind: type[enum.Enum]) -> enum.Enum:
    for member in kind:
        if value in (member.name, member.value):
            return member
    raise _Misfit(f"one of {', '.join(member.name for member in kind)}")


def _sequence(value: Any, plain: Any, arguments: tuple[Any, ...]) -> Any:
    if isinstance(value, str):
        value = _json(value) if value.lstrip().startswith("[") else [part for part in value.split(",") if part]
    if not isinstance(value, list):
        raise _Misfit("a list, such as 1,2,3")
    if plain is tuple and arguments and Ellipsis not in arguments:
        if len(value) != len(arguments):
            raise _Misfit(f"{len(arguments)} values, such as 1,2")
        items = [_converted(item, kind) for item, kind in zip(value, arguments, strict=True)]
    else:
        items = [_converted(item, arguments[0] if arguments else Any) for item in value]
    return items if plain is AnySequence else plain(items)


def _mapping(value: Any) -> dict[str, Any]:
    found = _json(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise _Misfit('a dict, such as {"a": 1}')
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise _Misfit("JSON") from None


def _same(value: Any, default: Any) -> bool:
    try:
        return type(value) is type(default) and bool(value == default)
    except Exception:  # such as arrays
        return False


def _text(value: Any) -> str:
    if isinstance(value, Path):
        return repr(str(value))
    return str(value) if isinstance(value, enum.Enum) else repr(value)


def _plain_name(kind: Any) -> str:
    return str(kind).replace("typing.", "").replace("pathlib.", "")
