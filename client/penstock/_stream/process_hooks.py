"""Hooks for interpreter exit and forks, for objects that must not outlive the process or live on in a child."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Owner(Protocol):
    """An object that owns fds, a thread or a process."""

    def at_exit(self) -> None:
        """Shut down in order, within 2 s: the interpreter ends."""

    def forget(self) -> None:
        """In a forked child: close inherited fds, send nothing, and rely on no lock and no thread."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def register(owner: Owner) -> None:
    """Call `owner.at_exit` when the interpreter ends and `owner.forget` in forked children, while `owner` lives."""
    _owners.add(owner)


def unregister(owner: Owner) -> None:
    """Stop calling `owner`, which no longer owns anything."""
    _owners.discard(owner)


@atexit.register
def _at_exit() -> None:
    for owner in list(_owners):
        owner.at_exit()


def _forget() -> None:
    for owner in list(_owners):
        owner.forget()
    _owners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
