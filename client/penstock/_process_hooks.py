"""What must not outlive the process, nor live on in a forked child, as it should in neither case be left to chance."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Owner(Protocol):
    """Something that owns fds, a thread or a process."""

    def at_exit(self) -> None:
        """The interpreter ends: let go in good order, within 2 s."""

    def forget(self) -> None:
        """This is a forked child: close what was inherited, tell nobody, and trust no lock and no thread."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def register(owner: Owner) -> None:
    """Call `owner.at_exit` at the end of the interpreter and `owner.forget` in forked children, while it lives."""
    _owners.add(owner)


def unregister(owner: Owner) -> None:
    """`owner` owns nothing any more."""
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
