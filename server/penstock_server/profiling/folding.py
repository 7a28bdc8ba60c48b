"""Makes stacks of what users know: their own lines, those of libraries, and a word for what Penstock does.

A stack of a worker begins with frames of Penstock that lead to the user's generator. These are left out, so that it
begins with the generator. If user code does not follow, they become one word, such as "collating".
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from ..logs.own_code import OURS
from ..sources.registry import BUILT_IN
from ..worker_state.activity import LIBRARIES

USER, LIBRARY, PENSTOCK = "user", "library", "penstock"
"""Whose code a frame is."""

IDLE = "waiting for a slot"
"""What a worker does that has no work: no slot is free, or no turn is its."""

COLLATING = "collating"
"""Checking, shuffling, copying and reporting samples; whatever has no other word."""

WORDS = {
    "worker/tasks/listing.py": "listing splits",
    "worker/reading/split_list.py": "listing splits",
    "worker/cache/split_cache.py": "reading and writing the cache",
    "worker/cache/split_file.py": "reading and writing the cache",
    "worker/cache/cached_samples.py": "reading and writing the cache",
    "feed/objects/object_states.py": "switching random states",
    "worker/isolation/randomness.py": "switching random states",
    "worker/isolation/sample_generators.py": "switching random states",
    "worker/isolation/state_memory.py": "switching random states",
    "worker/isolation/process_settings.py": "switching settings",
    "worker/isolation/context_variables.py": "switching settings",
    "worker/reading/reproducibility.py": "comparing first samples",
    "sources/tfrecord/example.py": "parsing Examples",
    "sources/images/decoder.py": "decoding images",
    "sources/images/pixels.py": "decoding images",
    "sources/files.py": "opening files",
    "sources/remote/remote_file.py": "waiting for a file at a URL",
    "sources/remote/stores.py": "asking for a file at a URL",
}
"""By the file of a frame of Penstock, what it does. `_word` adds the readers of formats."""

_READING = ("sources/", "worker/cache/split_cache.py", "worker/cache/split_file.py", "worker/cache/cached_samples.py")
"""Files of Penstock that do a generator's work: they stay in the stack above what they call."""

ACTIVITY = "worker_state/activity.py"
"""The file whose `idle` waits for work."""

_PACKAGES = ("numpy", "msgspec", "msgpack", "msgpack_numpy")
"""Packages that Penstock itself calls outside of user code, besides Python's own library."""

_SITE = re.compile(r"(?:site|dist)-packages/([^/.]+)")


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack.

    Attributes:
        file: its path; empty if it is a word.
        line: the number of the line, 0 if it is not known.
        name: the function, or the word.
        kind: USER, LIBRARY or PENSTOCK.
    """

    file: str
    line: int
    name: str
    kind: str


Seen = tuple[str, int, str]
"""A frame as a worker writes it: file, line, function."""

Paths = tuple[tuple[str, ...], tuple[str, ...]]
"""Directories of Penstock's modules and of libraries, in a worker."""


class Folding:
    """Folds stacks, and remembers frames and stacks, so that equal ones are one object."""

    def __init__(self) -> None:
        self._frames: dict[Frame, Frame] = {}
        self._stacks: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}

    def folded(self, frames: Sequence[Seen], paths: Paths | None) -> tuple[Frame, ...]:
        """Return a stack of what users know, the outermost frame first.

        Args:
            frames: as the worker saw them, the outermost first.
            paths: whose modules are where; None: as in this process.
        """
        stack = tuple(self._frames.setdefault(frame, frame) for frame in fold(frames, paths or (OURS, LIBRARIES)))
        return self._stacks.setdefault(stack, stack)


def fold(frames: Sequence[Seen], paths: Paths) -> list[Frame]:
    """Return the stack without Penstock's frames, or with words in their places."""
    ours = [_part(file, paths[0]) for file, _, _ in frames]
    first = next((at for at, part in enumerate(ours) if part), len(frames))
    stack: list[Frame] = []
    at = first if first < len(frames) else 0  # before it: the start of Python
    while at < len(frames):
        end = at
        while end < len(frames) and ours[end]:
            end += 1
        if end > at:
            word = _word(ours[at:end], [name for _, _, name in frames[at:end]])
            called = frames[end:]
            reads = ours[end - 1].startswith(_READING)
            theirs = any(not part and _kind(one, paths) == USER for part, one in zip(ours[end:], called, strict=True))
            if not called or not (theirs or (_is_generator(called[0]) and not reads)):
                stack.append(Frame("", 0, word, PENSTOCK))
                if not called or not reads:
                    break  # what it calls in libraries belongs to it
            at = end
        stack.append(Frame(*frames[at], _kind(frames[at], paths)))
        at += 1
    return stack


def _part(file: str, ours: tuple[str, ...]) -> str:
    """Return a file's path within Penstock, or an empty text if it is not of Penstock."""
    for directory in ours:
        if file.startswith(directory):
            return file[len(directory) :].replace(os.sep, "/")
    return ""


def _kind(frame: Seen, paths: Paths) -> str:
    """Return whose code a frame is that is not Penstock's."""
    return LIBRARY if frame[0].startswith(("<frozen ", *paths[1])) else USER


def _is_generator(frame: Seen) -> bool:
    """Whether a frame of a library that Penstock has called may be a user's generator: not if it is one that Penstock
    calls for itself."""
    found = _SITE.search(frame[0])
    return found is not None and found[1] not in _PACKAGES


def _word(parts: Sequence[str], names: Sequence[str]) -> str:
    """Return what these functions in these files do, which were called in this order."""
    if parts[-1] == ACTIVITY and names[-1].endswith("idle"):
        return IDLE
    for part in reversed(parts):
        word = WORDS.get(part) or _reads(part)
        if word:
            return word
    return COLLATING


@cache
def _reads(part: str) -> str:
    """Return the word for a file in a format's folder, "" for any other."""
    for one in BUILT_IN:
        if part.startswith(f"sources/{type(one).__module__.split('.')[-2]}/"):
            return f"reading {one.things or f'{one.name} files'}"
    return ""
