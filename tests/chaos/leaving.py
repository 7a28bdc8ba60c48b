"""Processes that the generators of a feed start and leave behind. None of them may outlive the scenario.

Workers import this module along with feeds.py, so it imports nothing from the package.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess

MARK = "CHAOS_MARK"
"""The variable that names what such processes show as their command."""

_SLEEP = "/usr/bin/sleep"
WAYS = ("", "", "", "", "", "", "popen", "session", "fork", "multiprocessing")


def start(way: str) -> object:
    """Start a process in this way. Return what refers to it, if anything does."""
    command = [os.environ[MARK], "600"]
    if way in ("popen", "session"):
        return subprocess.Popen(command, executable=_SLEEP, start_new_session=way == "session")
    if way == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=os.execv, args=(_SLEEP, command), daemon=True)
        process.start()
        return process
    if way == "fork" and os.fork() == 0:
        os.execv(_SLEEP, command)
    return None


def drawn(tag: int) -> str:
    """Draw the way of a feed from its tag: mostly none."""
    return random.Random(f"leaving {tag}").choice(WAYS)
