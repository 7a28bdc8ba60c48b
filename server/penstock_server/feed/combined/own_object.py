"""Gives a generator that is an object, or a method of one, a copy of that object.

A spot check starts a generator while others run. If it shuffled a list of the object that they go through, they would
lose rows.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable
from functools import partial
from types import MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np

from ..objects.indexables import is_indexable
from ..objects.object_states import LARGE
from ..options.arguments import fresh
from ..options.feed_options import FeedOptions
from .zipped import Zipped

_MANY = 100
"""Containers with more items are copied without what lies in these."""

Options = TypeVar("Options", bound=FeedOptions)


def with_own_object(feed: Options) -> Options:
    """Return a feed like this one, whose generator has a copy of its object. Where that cannot be copied, it is shared.

    The lists, dicts, arrays and random generators that are attributes of the object are copied. Other attributes are
    shared. Since this is done for each check, of large lists and dicts only the first level is copied, and large arrays
    become read-only.
    """
    source = feed.generate
    if is_indexable(source):  # it has no generator
        return feed
    if isinstance(source, Zipped):
        parts = {label: with_own_object(part) for label, part in source.parts.items()}
        own: Any = Zipped(parts, source.wants, source.form, source.uneven)
    else:
        own = _function(source)
    if own is source:
        return feed
    made = copy.copy(feed)
    object.__setattr__(made, "generate", own)
    return made


def _function(function: Any) -> Callable[..., Any]:
    if inspect.ismethod(function):
        return MethodType(function.__func__, _object(function.__self__))
    if isinstance(function, partial):
        return partial(_function(function.func), *function.args, **function.keywords)
    return function if inspect.isroutine(function) else _object(function)


def _object(value: Any) -> Any:
    kind = type(value)
    ours = kind.__module__.partition(".")[0] == "penstock_server"
    if ours or isinstance(value, type | ModuleType) or hasattr(kind, "__del__"):  # the copy's end may close a file
        return value
    try:
        made = copy.copy(value)
        attributes = vars(made)
    except Exception:
        return value
    if made is not value:
        attributes.update({name: _own(item) for name, item in attributes.items()})
    return made


def _own(value: Any) -> Any:
    kind = type(value)
    if kind in (list, tuple, set, deque, dict) and len(value) > _MANY:
        return kind(value)
    if kind in (list, tuple, set, deque):
        return kind(map(_own, value))
    if kind is dict:
        return {key: _own(item) for key, item in value.items()}
    if kind is np.ndarray and value.nbytes > LARGE:
        view = value.view()
        view.flags.writeable = False
        return view
    return fresh(value)
