"""Context variables of user code: each open generator has its own, and so has each object that is called repeatedly.

`np.errstate`, `decimal.localcontext` and many libraries keep their settings in context variables (`contextvars`). The
variables of each generator begin as they were when the feeds had been imported.

A module may be imported while a generator runs, and may change such settings for good. It runs only once in a process.
So these changes reach all contexts, as if the module had been imported before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader, SourcelessFileLoader
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

from ...targets.saved_sources import SavedSourceLoader

_MISSING = object()
_LOADERS = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader, SavedSourceLoader)
"""Loader classes with one instance for each module."""


class Variables:
    """The contexts of user code in one process.

    Args:
        on_import: called when a module is imported while user code runs; returns a function to call after that.
    """

    def __init__(self, on_import: Callable[[], Callable[[], None]]) -> None:
        self._base = copy_context()
        self._live: WeakValueDictionary[int, Context] = WeakValueDictionary()
        self._on_import = on_import
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)

    def new(self) -> Context:
        """Return the context of a new generator."""
        context = self._base.copy()
        context.run(self._prepare)
        self._live[id(context)] = context
        return context

    def _prepare(self) -> None:
        _OWNER.set(self)
        if (decimal := sys.modules.get("decimal")) is not None:
            decimal.setcontext(decimal.getcontext().copy())  # copies of a context share the object otherwise

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Let changes of the present context that are made in this block reach all contexts, except where the variable
        has another value already."""
        before, after = dict(copy_context()), self._on_import()
        decimal_before = _decimal()
        token = _OWNER.set(None)  # modules that are imported in turn belong to this one
        try:
            yield
        finally:
            _OWNER.reset(token)
            after()
            changed = {name: value for name, value in copy_context().items() if before.get(name) is not value}
            changed.pop(_OWNER, None)
            decimal_after = _decimal()
            for context in (self._base, *self._live.values()):
                for name, value in changed.items():
                    if context.get(name, _MISSING) is before.get(name, _MISSING) and name.name != "decimal_context":
                        _run(context, name.set, value)
                if decimal_before != decimal_after:
                    _run(context, _set_decimal, decimal_before, decimal_after)


class _LateImports(MetaPathFinder):
    """Finds modules as the next finders do, and notes what they change if user code imports them while it runs."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module for `importlib`, or return None to leave it to the other finders."""
        owner = _OWNER.get(None)
        if owner is None:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if type(spec.loader) in _LOADERS:
                    _watch(spec.loader, owner)
                return spec
        return None


def _watch(loader: Any, owner: Variables) -> None:
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        with owner.importing():
            run(module)

    loader.exec_module = exec_module


def _decimal() -> tuple[Any, ...] | None:
    """Return the settings of the present decimal context, which is changed in place; None if there is none."""
    module = sys.modules.get("decimal")
    if module is None:
        return None
    now = module.getcontext()
    return now.prec, now.rounding, now.Emin, now.Emax, now.capitals, now.clamp, dict(now.traps)


def _set_decimal(before: tuple[Any, ...] | None, after: tuple[Any, ...]) -> None:
    if before is None or _decimal() == before:
        module: Any = sys.modules["decimal"]
        prec, rounding, least, most, capitals, clamp, traps = after
        module.setcontext(module.Context(prec, rounding, least, most, capitals, clamp, [], _trapped(traps)))


def _trapped(traps: dict[Any, bool]) -> list[Any]:
    return [signal for signal, traps_it in traps.items() if traps_it]


def _run(context: Context, function: Callable[..., object], *args: Any) -> None:
    with suppress(RuntimeError):  # it is active, so the module has changed it
        context.run(function, *args)


_OWNER: ContextVar[Variables | None] = ContextVar("penstock_variables", default=None)
"""Set in the contexts of user code, and not in the trainer's or in those of other threads."""

_FINDER = _LateImports()
