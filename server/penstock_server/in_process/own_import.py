"""Imports a feed into the trainer's own process, for a stream that this process makes."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock_proto import PenstockError, StartError

from ..feed.feed import Feed
from ..targets.place import is_same_file, place_of
from ..targets.targets import name_of
from ..worker.isolation.randomness import put_states, seeds, take_states
from ..worker.process.start import load_feeds, plan_of
from ..worker.reading.loaded_feed import LoadedFeed

_sources: dict[str, bytes] = {}
"""The SHA-256 of each file that was imported here, by path."""

_importing: dict[int, str] = {}
"""The target that each thread is importing."""


def load(target: str) -> LoadedFeed:
    """Import the feed that `target` (MODULE:ATTR) names, as a worker does: with seeded global random generators.

    If the process has imported the module on its own, use it unchanged. If this function has imported the file before,
    import it again if it has changed since.

    Raises:
        StartError: it cannot be imported or served; the original exception is its cause.
    """
    thread = threading.get_ident()
    if thread in _importing:
        raise StartError(
            f"the module of {_importing[thread]!r} opens {target!r} while it is imported, which cannot work: "
            'put the training code under `if __name__ == "__main__":`, or the Feed into a module of its own'
        )
    _forget_if_changed(target)
    _importing[thread] = target
    try:
        with _own_randomness():
            (feed,) = load_feeds([target]).values()
    except StartError as error:
        raise _as_it_was_raised(error) from error.__cause__
    finally:
        del _importing[thread]
    return feed


def serve(feed: Feed) -> LoadedFeed:
    """Return the feed of this object, ready for the workers' code, under the name that it has in a daemon.

    Raises:
        StartError: it cannot be served.
    """
    try:
        return LoadedFeed(feed, plan_of(feed.plan, name_of(feed)))
    except StartError as error:
        raise _as_it_was_raised(error) from error.__cause__


def _as_it_was_raised(error: PenstockError) -> BaseException:
    """Return `error`, or the interrupt that caused it. Drop the error's traceback if its cause shows that already."""
    if isinstance(error.__cause__, KeyboardInterrupt):
        return error.__cause__
    if error.__cause__ is not None:
        error.remote_traceback = None
    return error


def _forget_if_changed(target: str) -> None:
    name, path, _ = place_of(target)
    if path is None or not Path(path).is_file():
        return
    source = hashlib.sha256(Path(path).read_bytes()).digest()
    known = sys.modules.get(name)
    ours = path in _sources or known is None
    if known is not None and ours and _sources[path] != source and is_same_file(getattr(known, "__file__", None), path):
        del sys.modules[name]
    if ours:
        _sources[path] = source


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Restore the trainer's global random states at the end of the block."""
    states = take_states()
    try:
        yield
    finally:
        put_states(states, seeds("trainer"))
