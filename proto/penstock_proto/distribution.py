"""The installed distribution: its name, its version, and the command that installs one of its extras.

On PyPI, `penstock` is another project. So no name of a distribution is written here: the distribution is the one whose
console command is Penstock's, and everything else is read from its metadata.
"""

from __future__ import annotations

import json
import os
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from importlib.metadata import Distribution

_COMMAND = ("penstock", "penstock_command:main")
"""Name and value of the console command, as pyproject.toml declares it."""


def version() -> str:
    """Return the version, or "0+unknown" if Penstock is not installed (a source tree on the path)."""
    found = _distribution()
    return found.version if found is not None else "0+unknown"


def requirements() -> list[str]:
    """Return the requirements of all extras, as in PEP 508. Empty if Penstock is not installed."""
    found = _distribution()
    return (found.requires or []) if found is not None else []


def pip_install(extra: str) -> str:
    """Return the command that installs `extra`: from the folder that Penstock was installed from, if it is still there.

    The folder is that of PEP 610 (direct_url.json). Without one, the command names the distribution.
    """
    found = _distribution()
    if found is None:
        return f"pip install '.[{extra}]' in Penstock's source tree"
    return f"pip install '{_folder(found) or found.name}[{extra}]'"


def explained(error: Exception) -> str:
    """Return what to do if `error` was raised because another project's `penstock` was imported, or ""."""
    module = error.name if isinstance(error, ImportError) else ""
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        module = error.obj.__name__
    return other_project() if (module or "").split(".")[0] == _COMMAND[0] else ""


def other_project() -> str:
    """Return what to do if another project's package named `penstock` is installed here too, or ""."""
    from importlib.metadata import PackageNotFoundError, distribution  # slow to import

    try:
        found = distribution(_COMMAND[0])
    except PackageNotFoundError:
        return ""
    if any((entry.name, entry.value) == _COMMAND for entry in found.entry_points):
        return ""
    own = _distribution()
    again = (_folder(own) or own.name) if own is not None else "."
    return (
        f"the package 'penstock' {found.version} in {found.locate_file('')} is another project, and both install a "
        "folder named penstock: run pip uninstall penstock, and then pip install --force-reinstall --no-deps "
        f"'{again}'"
    )


@cache
def _distribution() -> Distribution | None:
    from importlib.metadata import entry_points  # slow to import

    name, value = _COMMAND
    for entry in entry_points(group="console_scripts", name=name):
        if entry.value == value:
            return entry.dist
    return None


def _folder(found: Distribution) -> str:
    """Return the folder that a distribution was installed from, or ""."""
    text = found.read_text("direct_url.json")
    if text is None:
        return ""
    url = json.loads(text)
    if "dir_info" not in url:
        return ""
    folder = unquote(urlsplit(url["url"]).path)
    return folder if os.path.isdir(folder) else ""
