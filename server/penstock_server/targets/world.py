"""Gives user modules the world of the trainer in a process that imports them: `sys.argv` and `sys.path`.

A private daemon has inherited them from its trainer (penstock_proto/world.py), and all workers get them. Under
`penstock serve` there is no such trainer. Then `sys.argv` has one element, the path of the module that is imported, and
modules are looked for in the current directory first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from penstock_proto.world import VARIABLE, World, inherited

from . import pickled
from .importing import join_path
from .place import argv_of


def enter(targets: Sequence[str]) -> bool:
    """Give this process what the modules of these targets must see. Return whether that is the world of a trainer."""
    fds = inherited()
    if not fds:
        as_served(targets[0])
        return False
    world = World.read(fds[0])
    world.enter()
    if world.carried is not None:
        pickled.keep(world.carried)
    return True


def loaded_files() -> tuple[bytes, ...]:
    """Return the files of the user's modules that the trainer had imported when it pickled its feed; none if it has
    pickled none."""
    worlds = map(World.read, inherited())
    return next((world.carried.files for world in worlds if world.carried is not None), ())


def leave_fd() -> None:
    """Close the memfd of the trainer's world, and forget it: what user code starts must not inherit it."""
    for fd in inherited():
        del os.environ[VARIABLE]
        os.close(fd)


def enter_path() -> None:
    """Find modules where the workers of this daemon do."""
    for fd in inherited():
        World.read(fd).enter_path()


def as_served(target: str) -> None:
    """Give this process what the module of a target sees under `penstock serve`."""
    join_path(os.getcwd())
    sys.argv = argv_of(target)
    sys.modules["__main__"].__file__ = sys.argv[0]
