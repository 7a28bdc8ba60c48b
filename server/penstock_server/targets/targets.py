"""Finds out how worker processes can import a feed that the trainer has as an object."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from penstock_proto import StartError

from ..feed.feed import Feed

_FIX = (
    "Write the feed to a file of its own (in a notebook: begin its cell with `%%writefile feeds.py`), and open "
    '"feeds.py:feed". Or give workers=0, which needs no import'
)


class Target(NamedTuple):
    """How workers import a feed: MODULE:ATTR, and the directory that must be on `sys.path`, or None."""

    name: str
    directory: str | None


def target_of(feed: Feed) -> Target:
    """Return how workers can import `feed`.

    Raises:
        StartError: they cannot; the message says what to do.
    """
    owner, attribute = _place(feed)
    name = owner.__spec__.name if owner.__spec__ is not None else owner.__name__  # with `python -m`, __main__ has one
    file = getattr(owner, "__file__", None)
    if file is None or not file.endswith(".py") or not Path(file).is_file():
        what = "a notebook or an interactive session" if name == "__main__" else f"module {name}, which has no file"
        raise StartError(f"worker processes cannot import the feed {attribute!r} from {what}. {_FIX}")
    path = Path(os.path.abspath(file))  # not resolved: `__file__` must be the same in workers
    package = path.name == "__init__.py"
    if "." not in name and not package:
        return Target(f"{path}:{attribute}", None)
    depth = name.count(".") + package
    return Target(f"{name}:{attribute}", str(path.parents[depth]))


def _place(feed: Feed) -> tuple[ModuleType, str]:
    """Return a module that has the feed as an attribute, and the attribute's name. Prefer any other module to
    `__main__`."""
    modules: dict[str, Any] = dict(sys.modules)
    main = modules.pop("__main__", None)
    own = getattr(feed.generate, "__module__", None)  # most likely the feed is there
    for module in (modules.get(own or ""), *modules.values(), main):
        names = getattr(module, "__dict__", None)
        for name, value in list(names.items()) if isinstance(names, dict) else ():
            if value is feed and name.isidentifier() and isinstance(module, ModuleType):
                return module, name
    raise StartError(
        "worker processes import a feed by its name, and this one has none: assign it to a name at the top level of "
        f"its module, feed = Feed(...). {_FIX}"
    )
