"""Imports user code: loads the feed that MODULE:ATTR names, and cuts tracebacks down to the user's frames."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import linecache
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

from penstock_proto import StartError, distribution
from penstock_proto.params import shown_call, split_params, with_params
from penstock_proto.text import both_ends, printable
from penstock_proto.value_text import shown

from ..logs.own_code import OURS
from . import pickled, saved_sources
from .factory import Made, is_factory, make
from .file_target import is_file_target, load_target
from .installed import is_installed
from .place import Place, is_same_file, place_of

_CONTEXTS = contextlib.__file__  # its frames come between ours if a source opens a file
_IMPORT = (os.path.dirname(importlib.__file__) + os.sep, "<frozen importlib")
_READERS = os.path.join(OURS[0], "sources") + os.sep
_DEBUG = os.environ.get("PENSTOCK_DEBUG") == "1"
_BETWEEN = (os.path.join(OURS[0], "worker", "isolation", "import_seeding.py"), "<frozen importlib")
"""Files whose frames come between a user's `import` and the module that it runs."""

_MOST_OF_A_PART = 2000
"""Characters of one part of a traceback: of a frame, or of an exception's text."""


def load(target: str) -> Made:
    """Load the feed that `target` names: "MODULE:ATTR", where MODULE is a module's name or the path of a .py file, and
    ATTR is a feed, or a function that returns one. A target from `with_params` has the function's parameters.

    A target of data files, from `file_target`, needs no module. For a module's name, add the current directory to the
    end of `sys.path`; for a file, put its directory, or that of its package, at the front.

    Raises:
        StartError: it cannot be loaded; the message says why.
    """
    if is_file_target(target):
        return Made(load_target(target, load_function), "")
    if pickled.is_pickled_target(target):
        return Made(pickled.load(), "")
    name, params = split_params(target)
    module_name, colon, attribute = name.rpartition(":")
    if not colon and name.endswith(".py"):
        example, feeds = _feeds_of(_load(place_of(f"{name}:feed")))
        raise StartError(f"{name}: which feed in it? Write {name}:{example}; {feeds}")
    if not colon or not module_name or not attribute:
        raise StartError(f"expected MODULE:ATTR, such as scenes:feed or scenes.py:feed, got {name!r}")
    module = _load(place_of(target))
    return _feed(module, module_name, attribute, params)


def load_function(target: str) -> Callable[..., Any]:
    """Load the function that `target` names, "MODULE:NAME" as for `load`.

    Raises:
        StartError: it cannot be loaded; the message says why.
    """
    module_name, colon, attribute = target.rpartition(":")
    if not colon or not module_name or not attribute:
        raise StartError(f"expected MODULE:FUNCTION, such as images.py:augment, got {target!r}")
    module = _load(place_of(target))
    found = getattr(module, attribute, None)
    if not callable(found):
        if found is None:
            raise StartError(f"{module_name} has no attribute {attribute!r}")
        raise StartError(f"{module_name}:{attribute} must be a function, got {shown(found)}")
    return found  # type: ignore[no-any-return]


def join_path(directory: str, *, last: bool = False) -> None:
    """Put `directory` at the front of `sys.path`, or at its end, unless it is there already."""
    if directory not in sys.path:
        sys.path.insert(len(sys.path) if last else 0, directory)


def user_traceback(error: BaseException) -> str:
    """Return the traceback of `error`, from the first frame that belongs neither to Penstock nor to the import
    system. A long text of an exception keeps both ends, so that it leaves room for the frames. Where Penstock refuses
    what user code asks for, it ends with the user's frame.

    An error of a data file has none, unless PENSTOCK_DEBUG=1: its message says everything, and the frames would be
    those of a library."""
    if is_of_reader(error) and not _DEBUG:
        return ""
    frame = error.__traceback__
    while frame is not None and _is_ours(frame):
        frame = frame.tb_next
    try:
        told = traceback.TracebackException(type(error), error, frame)
        told.stack[:] = [one for one in told.stack if not one.filename.startswith(_BETWEEN)]
        if told.stack and (told.stack[-1].line or "").startswith("raise "):
            while len(told.stack) > 1 and told.stack[-1].filename.startswith((*OURS, "<string>")):  # of a dataclass
                told.stack.pop()
        return printable("".join(both_ends(part, _MOST_OF_A_PART) for part in told.format()))
    except BaseException:  # the attributes of `error` are user code too
        return ""


class Line(NamedTuple):
    """A line of user code.

    Attributes:
        where: such as "scenes.py:12".
        text: the source.
        called: whether it called other code, a library or Python's own.
    """

    where: str
    text: str
    called: bool = False


def users_line(error: BaseException) -> Line | None:
    """Return the user's line from which `error` came, directly or through a library."""
    found = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith((*OURS, *_IMPORT)) and not is_installed(file):
            found = Line(f"{os.path.basename(file)}:{number}", linecache.getline(file, number))
        elif found is not None:
            found = found._replace(called=True)
    return found


def is_of_reader(error: BaseException) -> bool:
    """Return whether one of Penstock's readers of data files raised `error`, or a library that it called."""
    if not isinstance(error, Exception) or isinstance(error, MemoryError) or users_line(error) is not None:
        return False
    return any(one.f_code.co_filename.startswith(_READERS) for one, _ in traceback.walk_tb(error.__traceback__))


def is_explained(error: BaseException) -> bool:
    """Return whether Penstock itself made the message of `error`, and not a library."""
    frames = [one for one, _ in traceback.walk_tb(error.__traceback__)]
    return not frames or frames[-1].f_code.co_filename.startswith(OURS)


def summary(error: BaseException) -> str:
    """Return the class, the text and the notes of `error` on one line, such as "ValueError: no pixels"."""
    try:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        return printable(f"{type(error).__name__}: {error}{notes}")
    except BaseException:  # its __str__ is user code too
        return type(error).__name__


def _is_ours(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith((*OURS, _CONTEXTS, *_IMPORT))


def _load(place: Place) -> ModuleType:
    if place.path is None:
        return _load_module(place.name, place.root)
    return _load_file(place, place.path)


def _load_file(place: Place, path: str) -> ModuleType:
    name = place.name
    if not saved_sources.exists(path):
        raise StartError(f"{path}: no such file")
    if not path.endswith(".py"):
        raise _not_python(path)
    known = sys.modules.get(name)
    if known is not None:
        return _its_file(known, name, path)
    join_path(place.root)
    if place.in_package:
        return _its_file(_load_module(name, place.root), name, path)
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


def _its_file(module: ModuleType, name: str, path: str) -> ModuleType:
    """Return `module`, if it has this name and is of this file."""
    file = getattr(module, "__file__", None)
    if not is_same_file(file, path):
        raise StartError(
            f"{path}: a module of this name, {name}, is already loaded from {file or 'the interpreter'}: rename the "
            "file"
        )
    return module


def _load_module(name: str, root: str) -> ModuleType:
    join_path(root, last=True)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if os.path.isfile(name):
            raise _not_python(name) from None
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise StartError(
                f"no module {error.name!r} in {root} or among the installed packages: "
                "start the daemon in the module's directory, or give the path of its .py file"
            ) from None
        raise _import_failed(name, error) from error
    except Exception as error:
        raise _import_failed(name, error) from error


def _not_python(path: str) -> StartError:
    return StartError(f"{path}: expected a Python file (.py) or a module name")


def _import_failed(module: str, error: Exception) -> StartError:
    why = f"importing {module} raised {summary(error)}"
    folder = os.path.dirname(module)
    if explained := distribution.explained(error):
        why = f"{why}\n{explained}"
    elif "__main__" in str(error):
        why += (
            ": workers do not run the trainer's script, which is __main__ there. Put what both need into another module"
        )
    elif "with no known parent package" in str(error) and not os.path.exists(os.path.join(folder, "__init__.py")):
        why += (
            f": {folder} has no __init__.py, so it is no package. Add one, or name the module instead of the file, as "
            f"{os.path.basename(folder)}.{Path(module).stem}:feed, from the folder above"
        )
    return StartError(why, remote_traceback=user_traceback(error))


def _feed(module: ModuleType, module_name: str, attribute: str, params: dict[str, Any] | None) -> Made:
    from ..feed.feed import Feed  # the daemon needs only `place_of` from this file

    _, feeds = _feeds_of(module)
    if not hasattr(module, attribute):
        raise StartError(f"{module_name} has no attribute {attribute!r}; {feeds}")
    value = getattr(module, attribute)
    if isinstance(value, Feed):
        if params:
            raise StartError(
                f"{module_name}:{attribute} is a Feed, which has no parameters: write a function that takes "
                f"{', '.join(params)} and returns a Feed, and name that"
            )
        return Made(value, "")
    if callable(value):
        hint = f"write feed = Feed({attribute}, splits=..., batch_size=...), and serve {module_name}:feed"
    else:
        hint = feeds
    if is_factory(value):
        return _made(value, f"{module_name}:{attribute}", params or {}, f". If it yields samples itself, {hint}")
    raise StartError(f"{module_name}:{attribute} must be a Feed, got {shown(value)}; {hint}")


def _feeds_of(module: ModuleType) -> tuple[str, str]:
    """Return the name of the module's first feed, or "feed" if it has none, and words that list its feeds."""
    from ..feed.feed import Feed

    found = [name for name, value in vars(module).items() if isinstance(value, Feed)]
    if not found:
        makers = [name for name, value in vars(module).items() if is_factory(value) and _returns_feed(value)]
        if makers:
            return makers[0], f"it has no feeds, and functions that return one: {', '.join(makers)}"
        return "feed", "it has no feeds: write feed = Feed(...) at its top level"
    return found[0], f"its feeds are {', '.join(found)}" if len(found) > 1 else f"its only feed is {found[0]}"


def _returns_feed(function: Callable[..., Any]) -> bool:
    """Return whether an annotation says so."""
    told = getattr(function, "__annotations__", {}).get("return")
    return getattr(told, "__name__", told) == "Feed"


def _made(factory: Callable[..., Any], name: str, params: dict[str, Any], hint: str) -> Made:
    try:
        return make(factory, name, params, hint)
    except StartError:
        raise
    except Exception as error:
        called = shown_call(with_params(name, params))
        raise StartError(f"{called} raised {summary(error)}", remote_traceback=user_traceback(error)) from error
