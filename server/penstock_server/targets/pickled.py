"""Feeds that workers cannot import: those of notebooks, interactive sessions and functions.

The trainer pickles such a feed with cloudpickle, which takes the functions and classes of `__main__`, and those inside
functions, with their code and with the globals that they use. All others are pickled by name, and imported. The pickle
goes to the workers in the trainer's world (penstock_proto/world.py). Only processes of the trainer's own user get it.
"""

from __future__ import annotations

import inspect
import io
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any

from penstock_proto import StartError, distribution
from penstock_proto.params import SENT
from penstock_proto.text import printable
from penstock_proto.value_text import shown
from penstock_proto.world import Carried

if TYPE_CHECKING:
    from ..feed.feed import Feed

_carried: Carried | None = None
"""What the trainer of this worker has pickled."""


def is_pickled_target(target: str) -> bool:
    """Return whether `target` names a feed that was pickled."""
    return target.startswith(SENT)


def target_for(name: str) -> str:
    """Return the target of a pickled feed with this name."""
    return f"{SENT}{name}"


def name_of(target: str) -> str:
    """Return the name of the feed that was pickled."""
    return target.removeprefix(SENT)


def pack(feed: Feed, files_loaded: tuple[bytes, ...]) -> Carried:
    """Pickle a feed, with the lines of its source that are in no file.

    Args:
        feed: the feed.
        files_loaded: the files of the user's modules that this process has imported.

    Raises:
        StartError: it cannot be pickled; the message says why.
    """
    try:
        dumps = _pickler()
    except ImportError:
        raise StartError(
            f"a feed of a notebook, or of a function, needs cloudpickle: run {distribution.pip_install('server')}"
        ) from None
    files: set[str] = set()
    try:
        data = dumps(feed, files)
    except Exception as error:
        culprit = next(_culprits(feed, dumps), "")
        raise StartError(
            f"the feed cannot be sent to worker processes: {culprit}{printable(f'{type(error).__name__}: {error}')}. "
            "Make or open this in the generator, or give workers=0, which sends nothing"
        ) from error
    return Carried(data, {_shown_file(name): lines for name, lines in _lines() if name in files}, files_loaded)


def keep(carried: Carried) -> None:
    """Keep what the trainer has pickled, for `load`. Tracebacks show its lines."""
    global _carried
    _carried = carried
    for name, lines in carried.lines.items():
        linecache.cache[name] = sum(map(len, lines)), None, lines, name


def load() -> Feed:
    """Return the pickled feed.

    Raises:
        StartError: it cannot be unpickled.
    """
    assert _carried is not None
    try:
        feed: Feed = pickle.loads(_carried.feed)
    except Exception as error:
        raise StartError(
            "a worker cannot build the trainer's feed again, which was pickled there: "
            f"{printable(f'{type(error).__name__}: {error}')}"
        ) from error
    return feed


def dumps(value: Any) -> bytes:
    """Pickle a value of user code for other workers. It may be an instance of a class that came with the feed."""
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError):
        if _carried is None:
            raise
        import cloudpickle

        found: bytes = cloudpickle.dumps(value)
        return found


def _pickler() -> Callable[[Any, set[str]], bytes]:
    """Return a function that pickles a value as cloudpickle does, and adds the files of its code to a set. Code of
    notebook cells is renamed: its file has the number of the cell, as in the notebook's own tracebacks.

    Raises:
        ImportError: cloudpickle is not installed.
    """
    from cloudpickle import CloudPickler

    from ..feed.options.cache_key import DIRECTORY, feed_directory
    from ..feed.options.feed_options import FeedOptions

    reduce_code = CloudPickler.dispatch_table[CodeType]

    def dumps(value: Any, files: set[str]) -> bytes:
        def reduce(code: CodeType) -> Any:
            files.add(code.co_filename)
            return reduce_code(code.replace(co_filename=_shown_file(code.co_filename)))

        class Pickler(CloudPickler):  # type: ignore[misc]
            dispatch_table = CloudPickler.dispatch_table.new_child({CodeType: reduce})  # read when it is made

            def reducer_override(self, value: Any) -> Any:
                if isinstance(value, FeedOptions) and value.cache is not None:
                    reduced: Any = value.__reduce_ex__(4)
                    make, arguments, state = reduced[:3]
                    return make, arguments, {**state, DIRECTORY: feed_directory(value)}
                return super().reducer_override(value)

        buffer = io.BytesIO()
        Pickler(buffer).dump(value)
        return buffer.getvalue()

    return dumps


def _shown_file(name: str) -> str:
    """Return the file of some code as tracebacks show it: for a notebook's cell `Cell In[5]`, where IPython has a
    temporary file that does not exist."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    label = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(name)
    return name if label is None else " ".join(label)


def _lines() -> Iterator[tuple[str, list[str]]]:
    """Yield the names and the lines of sources that are in no file, such as cells."""
    for name, entry in list(linecache.cache.items()):
        if len(entry) == 4 and not os.path.isfile(name):
            yield name, entry[2]


def _culprits(feed: Feed, dumps: Callable[[Any, set[str]], bytes]) -> Iterator[str]:
    """Yield the variables of the feed's functions that cannot be pickled, as the beginning of a message."""
    options = {"transform": feed.transform, "splits": feed.splits, "args": feed.args, "kwargs": feed.kwargs}
    functions = [feed.generate, *(feed.transform if isinstance(feed.transform, list | tuple) else [feed.transform])]
    for function in functions:
        if inspect.isfunction(function):
            variables = inspect.getclosurevars(function)
            for name, value in {**variables.globals, **variables.nonlocals}.items():
                if not _can_be_pickled(value, dumps):
                    code = function.__code__
                    place = f"{os.path.basename(_shown_file(code.co_filename))}:{code.co_firstlineno}"
                    yield f"{function.__name__} ({place}) uses {name} = {shown(value)}. "
    for name, value in options.items():
        if not _can_be_pickled(value, dumps):
            yield f"{name}={shown(value)}. "


def _can_be_pickled(value: Any, dumps: Callable[[Any, set[str]], bytes]) -> bool:
    try:
        dumps(value, set())
    except Exception:
        return False
    return True
