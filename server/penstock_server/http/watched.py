"""What the HTTP server may look at in the daemon, and the one thing that it may ask for: a look at a slab."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..bugs import Bugs
from ..coordinator.commands import SendSlab
from ..coordinator.feeds import ServedFeed
from ..host.arena import Memfd
from ..host.worker_handle import WorkerHandle
from ..joining.joined_host import JoinedHost
from ..waits import Waits
from ..worker_memory import WorkerMemory

Look: TypeAlias = Callable[[str, SendSlab, Memfd], None]
"""Called with the feed's name, a slab that is about to be sent, and the memory that it lies in."""


@dataclass(frozen=True, slots=True)
class Watched:
    """See the file's head.

    Attributes:
        status: makes the daemon's status.
        status_text: the same as JSON text, made at most some times a second.
        waits: what the consumers of a feed have waited for, given its name.
        seconds: since the daemon was started.
        feeds: by their names.
        workers: the daemon's own.
        hosts: those that have joined.
        memory: of their processes.
        feed_of: the name of the feed that a run reads; "" if it is unknown, or the only one.
        look_at_slabs: has a function called for each slab before it is sent, or no longer (None).
        bugs: where unexpected errors are noted.
    """

    status: Callable[[], dict[str, Any]]
    status_text: Callable[[], str]
    waits: Callable[[str], Waits]
    seconds: Callable[[], float]
    feeds: Mapping[str, ServedFeed]
    workers: Callable[[], Iterable[WorkerHandle]]
    hosts: Iterable[JoinedHost]
    memory: WorkerMemory
    feed_of: Callable[[int], str]
    look_at_slabs: Callable[[Look | None], None]
    bugs: Bugs
