"""Watches the sources from which user code gets values that differ from run to run, and can fix these values.

To watch the system's random bytes, the clock and the process id, functions replace Python's own before user code is
imported. A library's random state is seeded before user code is imported, and again before samples are made. This is
for experiments only (culprit.py): with it, user code runs more slowly, and sees a wrong time if the clock is fixed.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import importlib
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from types import FrameType, ModuleType
from typing import Any

import numpy as np

from . import frames
from .messages import Source

SYSTEM, CLOCK, PID = "system", "clock", "pid"

THREAD, FORK = "thread", "fork"
"""Not sources, but noted like them: lines that start threads or fork processes, which run in no fixed order."""

GLOBAL = ("random", "numpy.random", "torch")
"""Random states that Penstock seeds, unless the generator takes `rng`."""

AT_IMPORT = "a library, at its import"
"""Stands for any library that uses a source while it is imported. All such libraries count as one source."""

_SEED = 20_260_101
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time")

SEEDED: dict[str, Callable[[Any], object]] = {
    "random": lambda module: module.seed(_SEED),
    "numpy.random": lambda module: module.seed(_SEED),
    "torch": lambda module: module.manual_seed(_SEED),
    "tensorflow": lambda module: module.random.set_seed(_SEED),
    "cv2": lambda module: module.setRNGSeed(_SEED),
    "cupy": lambda module: module.random.seed(_SEED),
    "polars": lambda module: module.set_random_seed(_SEED),
    "imgaug": lambda module: module.seed(_SEED),
    "paddle": lambda module: module.seed(_SEED),
    "mxnet": lambda module: module.random.seed(_SEED),
    "numba": lambda module: _seed_compiled(module),
}
"""How to seed each library that keeps a random state for the whole process."""


def _seed_compiled(numba: Any) -> None:
    """Seed the generators that compiled functions use instead of numpy.random and random."""

    @numba.njit  # type: ignore[untyped-decorator, unused-ignore]
    def seed() -> None:
        np.random.seed(_SEED)
        random.seed(_SEED)

    seed()


class Spy:
    """Watches the sources, and makes those in `fixes` give the same values in every run.

    Attributes:
        used: how many times user code used each source.
    """

    def __init__(self, fixes: Collection[Source]) -> None:
        self.used: Counter[Source] = Counter()
        self._fixes = frozenset(fixes)

    def install(self) -> None:
        """Replace Python's own functions, and seed libraries. Call this before user code is imported."""
        random_bytes = functools.partial(self._random_bytes, os.urandom)
        os.urandom = random_bytes
        random._urandom = random_bytes  # type: ignore[attr-defined]
        if hasattr(os, "getrandom"):
            get = os.getrandom
            os.getrandom = lambda size, flags=0: self._random_bytes(functools.partial(get, flags=flags), size)
        self._watch_seeding()
        for name in _CLOCKS:
            setattr(time, name, self._clock(getattr(time, name), 1e-3))
            setattr(time, f"{name}_ns", self._clock(getattr(time, f"{name}_ns"), 1_000_000))
        self._watch_threads()
        _give_users(_dates(self))
        os.getpid = self._constant(os.getpid)
        os.getppid = self._constant(os.getppid)
        for source in self._fixes:
            if source.kind in SEEDED and source.kind not in GLOBAL:
                with contextlib.suppress(ImportError):
                    importlib.import_module(source.kind)
        self.seed_libraries()

    def seed_libraries(self) -> None:
        """Seed the random state of each loaded library in `fixes`. (User code may also draw from it at import.)"""
        for source in self._fixes:
            if source.kind in SEEDED and source.kind in sys.modules:
                SEEDED[source.kind](sys.modules[source.kind])

    def asked(self, kind: str, frame: FrameType) -> tuple[Source, int] | None:
        """Note that the code in `frame` asks for a value.

        If the value should be the same in every run, return the source and how many times it was used so far.
        """
        source = _source(kind, frame)
        if source is None:
            return None
        self.used[source] += 1
        return (source, self.used[source]) if source in self._fixes else None

    def _random_bytes(self, real: Callable[[int], bytes], size: int) -> bytes:
        fixed = self.asked(SYSTEM, sys._getframe(1))
        return real(size) if fixed is None else hashlib.shake_128(repr(fixed).encode()).digest(size)

    def _watch_seeding(self) -> None:
        """Watch `random.Random()` and `random.seed()`, which read the system's random bytes in C."""
        seed = random.Random.seed

        def watched(generator: random.Random, a: Any = None, version: int = 2) -> None:
            fixed = self.asked(SYSTEM, sys._getframe(1)) if a is None else None
            seed(generator, a if fixed is None else repr(fixed), version)

        random.Random.seed = watched  # type: ignore[method-assign, assignment]
        random.seed = random._inst.seed

    def _watch_threads(self) -> None:
        start = threading.Thread.start

        def watched(thread: threading.Thread) -> None:
            if not type(thread).__module__.startswith("tqdm."):  # it only redraws the bar
                self.asked(THREAD, sys._getframe(1))
            start(thread)

        threading.Thread.start = watched  # type: ignore[method-assign, assignment]
        os.register_at_fork(before=lambda: self.asked(FORK, sys._getframe(1)))

    def _clock(self, real: Callable[[], Any], step: Any) -> Callable[[], Any]:
        def now() -> Any:
            fixed = self.asked(CLOCK, sys._getframe(1))
            return real() if fixed is None else 1_700_000_000_000 * step + fixed[1] * step

        return now

    def _constant(self, real: Callable[[], int]) -> Callable[[], int]:
        def number() -> int:
            return real() if self.asked(PID, sys._getframe(1)) is None else 4711

        return number


def _source(kind: str, frame: FrameType) -> Source | None:
    """Return the source that the code in this frame uses; None if neither user code nor a library asks for it."""
    if kind in (CLOCK, PID) and frames.is_standard(frame):
        return None  # Python's own use, such as the time of a log record
    library = ""
    for caller in frames.walk(frame):
        if library and frames.is_import(caller):
            return Source(kind, "", AT_IMPORT)
        if frames.is_users(caller):
            return Source(kind, frames.site(caller), library)
        if frames.is_ours(caller):
            break
        if not library:
            library = frames.package_of(caller)
    return Source(kind, "", library) if library else None


def _give_users(dates: type[datetime.datetime]) -> None:
    """Give user code `dates` instead of `datetime.datetime`. All others get the real one: compiled libraries such as
    pandas crash if their base class is another one when they are imported."""
    real = datetime.datetime

    class Module(ModuleType):
        @property
        def datetime(self) -> type[datetime.datetime]:
            return dates if frames.is_users(sys._getframe(1)) else real

    datetime.__class__ = Module


def _dates(spy: Spy) -> type[datetime.datetime]:
    """Return a replacement for `datetime.datetime` whose `now` and `utcnow` are watched."""
    real = datetime.datetime

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, real)

    class Dates(real, metaclass=Meta):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return real(*args, **kwargs) if cls is Dates else real.__new__(cls, *args, **kwargs)

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            fixed = spy.asked(CLOCK, sys._getframe(1))
            return real.now(tz) if fixed is None else real.fromtimestamp(1_700_000_000 + fixed[1], tz)

        @classmethod
        def utcnow(cls) -> datetime.datetime:
            fixed = spy.asked(CLOCK, sys._getframe(1))
            moment = datetime.UTC
            found = real.now(moment) if fixed is None else real.fromtimestamp(1_700_000_000 + fixed[1], moment)
            return found.replace(tzinfo=None)

    Dates.__name__ = Dates.__qualname__ = "datetime"
    Dates.__module__ = "datetime"
    return Dates
