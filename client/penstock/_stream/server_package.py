"""Access to the server's package. This process uses it only to run a feed itself, or to find a feed's name."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType

from penstock_proto import StartError, distribution


def installed() -> bool:
    """Return whether the package is installed."""
    return importlib.util.find_spec("penstock_server") is not None


def check_installed(need: str) -> None:
    """Raise StartError if the package is not installed. `need` begins the message."""
    if not installed():
        raise StartError(
            f"{need}, which is not installed here: run {distribution.pip_install('server')}, or give the URL of a "
            "daemon on another host"
        )


def load(module: str) -> ModuleType:
    """Import `module` of the package `penstock_server`."""
    return importlib.import_module(f"penstock_server.{module}")


def refuse_in_worker(feed: str) -> None:
    """Raise StartError in a worker: the module that it imports would start daemons, whose workers would do the same."""
    if "PENSTOCK_WORKER" in os.environ:
        raise StartError(
            f"a Penstock worker imports code that opens {feed}, which would start daemons without end: put the "
            'training code under `if __name__ == "__main__":`, or the Feed into a module of its own'
        )
