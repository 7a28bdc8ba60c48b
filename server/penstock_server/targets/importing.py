"""Imports user code: loads the feed that MODULE:ATTR names, and cuts tracebacks down to the user's frames."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from penstock_proto import StartError, distribution
from penstock_proto.text import printable
from penstock_proto.value_text import shown

from ..logs.own_code import OURS
from . import saved_sources
from .file_target import is_file_target, load_target

if TYPE_CHECKING:
    from ..feed.feed import Feed

_CONTEXTS = contextlib.__file__  # its frames come between ours if a source opens a file
_IMPORT = (os.path.dirname(importlib.__file__) + os.sep, "<frozen importlib")
_BETWEEN = (os.path.join(OURS[0], "worker", "isolation", "import_seeding.py"), "<frozen importlib")
"""Files whose frames come between a user's `import` and the module that it runs."""

_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_INSTALLED_IN = ("site-packages", "dist-packages")


def load(target: str) -> Feed:
    """Load the feed that `target` names: "MODULE:ATTR", where MODULE is a module's name or the path of a .py file.

    A target of data files, from `file_target`, needs no module. For other targets, add the current directory, or the
    directory of the file, to `sys.path`.

    Raises:
        StartError: it cannot be loaded; the message says why.
    """
    if is_file_target(target):
        return load_target(target, load_function)
    module_name, colon, attribute = target.rpartition(":")
    if not colon or not module_name or not attribute:
        raise StartError(f"expected MODULE:ATTR, such as scenes:feed or scenes.py:feed, got {target!r}")
    name, path = place_of(target)
    module = _load_module(name) if path is None else _load_file(name, path)
    return _feed(module, module_name, attribute)


def load_function(target: str) -> Callable[..., Any]:
    """Load the function that `target` names, "MODULE:NAME" as for `load`.

    Raises:
        StartError: it cannot be loaded; the message says why.
    """
    module_name, colon, attribute = target.rpartition(":")
    if not colon or not module_name or not attribute:
        raise StartError(f"expected MODULE:FUNCTION, such as images.py:augment, got {target!r}")
    name, path = place_of(target)
    module = _load_module(name) if path is None else _load_file(name, path)
    found = getattr(module, attribute, None)
    if not callable(found):
        what = "has no attribute" if found is None else "has no function"
        raise StartError(f"{module_name} {what} {attribute!r}")
    return found  # type: ignore[no-any-return]


def place_of(target: str) -> tuple[str, str | None]:
    """Return the name of the module in `target`, and the absolute path of its file if `target` names the file."""
    module = target.rpartition(":")[0]
    if not module.endswith(".py") and os.sep not in module:
        return module, None
    path = os.path.abspath(module)
    return os.path.splitext(os.path.basename(path))[0], path


def join_path(directory: str) -> None:
    """Put `directory` at the front of `sys.path`, unless it is there already."""
    if directory not in sys.path:
        sys.path.insert(0, directory)


def is_installed(path: str) -> bool:
    """Return whether the file at `path` belongs to an installed package or to Python, and not to the user's own
    code."""
    return path.startswith(_INSTALLED) or any(part in _INSTALLED_IN for part in Path(path).parts)


def user_traceback(error: BaseException) -> str:
    """Return the traceback of `error`, from the first frame that belongs neither to Penstock nor to the import
    system."""
    frame = error.__traceback__
    while frame is not None and _is_ours(frame):
        frame = frame.tb_next
    try:
        told = traceback.TracebackException(type(error), error, frame)
        told.stack[:] = [one for one in told.stack if not one.filename.startswith(_BETWEEN)]
        return printable("".join(told.format()))
    except BaseException:  # the attributes of `error` are user code too
        return ""


def summary(error: BaseException) -> str:
    """Return the class, the text and the notes of `error` on one line, such as "ValueError: no pixels"."""
    try:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        return printable(f"{type(error).__name__}: {error}{notes}")
    except BaseException:  # its __str__ is user code too
        return type(error).__name__


def _is_ours(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith((*OURS, _CONTEXTS, *_IMPORT))


def _load_file(name: str, path: str) -> ModuleType:
    if not saved_sources.exists(path):
        raise StartError(f"{path}: no such file")
    if not path.endswith(".py"):
        raise _not_python(path)
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) == path:
            return known
        where = getattr(known, "__file__", None) or "the interpreter"
        raise StartError(f"{path}: a module of this name is already loaded from {where}: rename the file")
    join_path(os.path.dirname(path))
    spec = saved_sources.spec_of(name, path)
    assert spec is not None  # any path that ends in .py has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _import_failed(path, error) from error
    return module


def _load_module(name: str) -> ModuleType:
    join_path(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if os.path.isfile(name):
            raise _not_python(name) from None
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise StartError(
                f"no module {error.name!r} in {os.getcwd()} or among the installed packages: "
                "start the daemon in the module's directory, or give the path of its .py file"
            ) from None
        raise _import_failed(name, error) from error
    except Exception as error:
        raise _import_failed(name, error) from error


def _not_python(path: str) -> StartError:
    return StartError(f"{path}: expected a Python file (.py) or a module name")


def _import_failed(module: str, error: Exception) -> StartError:
    why = f"importing {module} raised {summary(error)}"
    if explained := distribution.explained(error):
        why = f"{why}\n{explained}"
    return StartError(why, remote_traceback=user_traceback(error))


def _feed(module: ModuleType, module_name: str, attribute: str) -> Feed:
    from ..feed.feed import Feed  # the daemon needs only `place_of` from this file

    found = [name for name, value in vars(module).items() if isinstance(value, Feed)]
    if found:
        feeds = f"its feeds are {', '.join(found)}" if len(found) > 1 else f"its only feed is {found[0]}"
    else:
        feeds = "it has no feeds: write feed = Feed(...) at its top level"
    if not hasattr(module, attribute):
        raise StartError(f"{module_name} has no attribute {attribute!r}; {feeds}")
    value = getattr(module, attribute)
    if isinstance(value, Feed):
        return value
    if callable(value):
        hint = f"write feed = Feed({attribute}, splits=..., batch_size=...), and serve {module_name}:feed"
    else:
        hint = feeds
    raise StartError(f"{module_name}:{attribute} must be a Feed, got {shown(value)}; {hint}")
