"""Finds out how worker processes can get a feed that the trainer has as an object."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from penstock_proto.world import Carried

from ..feed.feed import Feed
from . import pickled
from .sources import loaded_files


class Target(NamedTuple):
    """How workers get a feed: they import MODULE:ATTR, and `directory` must be on `sys.path`, unless it is None. Or
    they unpickle what is `carried` to them."""

    name: str
    directory: str | None = None
    carried: Carried | None = None


def target_of(feed: Feed) -> Target:
    """Return how workers can get `feed`: they import it if it has a name at the top level of a file.

    Raises:
        StartError: they cannot; the message says what to do.
    """
    owner, attribute = _place(feed)
    module = None if owner is None else owner.__spec__.name if owner.__spec__ is not None else owner.__name__
    file = getattr(owner, "__file__", None)  # with `python -m`, __main__ has a spec
    in_script = owner is sys.modules.get("__main__") and file is not None and _only_in_the_script(file, attribute)
    if module is None or file is None or not file.endswith(".py") or not Path(file).is_file() or in_script:
        name = pickled.target_for(attribute or feed.name or "feed")  # as `name_of`: a feed's own name comes first
        return Target(name, carried=pickled.pack(feed, loaded_files()))
    path = Path(os.path.abspath(file))  # not resolved: `__file__` must be the same in workers
    package = path.name == "__init__.py"
    if "." not in module and not package:
        return Target(f"{path}:{attribute}")
    depth = module.count(".") + package
    return Target(f"{module}:{attribute}", str(path.parents[depth]))


def name_of(feed: Feed) -> str:
    """Return the name under which `feed` is served: its own, or that of the variable that has it, or "feed"."""
    return feed.name or _place(feed)[1] or "feed"


def _only_in_the_script(file: str, name: str) -> bool:
    """Return whether a script assigns a name only under `if __name__ == "__main__":`, so not where workers import
    it."""
    try:
        body = ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    assigning = [one for one in body if not isinstance(one, ast.FunctionDef | ast.ClassDef) and _assigns(one, name)]
    return bool(assigning) and all(
        isinstance(one, ast.If) and "__name__" in map(ast.unparse, ast.walk(one.test)) for one in assigning
    )


def _assigns(node: ast.AST, name: str) -> bool:
    names = (one for one in ast.walk(node) if isinstance(one, ast.Name) and one.id == name)
    return any(isinstance(one.ctx, ast.Store) for one in names)


def _place(feed: Feed) -> tuple[ModuleType | None, str]:
    """Return a module that has the feed as an attribute, and the attribute's name; None and "" if there is none. Prefer
    any other module to `__main__`."""
    modules: dict[str, Any] = dict(sys.modules)
    main = modules.pop("__main__", None)
    own = getattr(feed.generate, "__module__", None)  # most likely the feed is there
    for module in (modules.get(own or ""), *modules.values(), main):
        names = getattr(module, "__dict__", None)
        for name, value in list(names.items()) if isinstance(names, dict) else ():
            if value is feed and name.isidentifier() and isinstance(module, ModuleType):
                return module, name
    return None, ""
