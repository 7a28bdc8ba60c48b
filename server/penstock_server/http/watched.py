"""The parts of the daemon that the HTTP server may read, and the one thing that it may ask for: a look at a slab."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from penstock_proto.status.status_shape import Status

from ..coordinator.model.commands import SendSlab
from ..coordinator.model.feeds import ServedFeed
from ..hosts.joined_host import JoinedHost
from ..logs.bugs import Bugs
from ..shared_memory.arena import Memfd
from ..status.waits import Waits
from ..workers.worker_handle import WorkerHandle
from ..workers.worker_memory import WorkerMemory

Look: TypeAlias = Callable[[str, SendSlab, Memfd], None]
"""Called with the feed's name, a slab that is about to be sent, and the memory that it lies in."""


@dataclass(frozen=True, slots=True)
class Watched:
    """The HTTP server's view of the daemon.

    Attributes:
        status: makes the daemon's status.
        status_text: the same as JSON text, made at most a few times a second.
        waits: takes the name of a feed, and returns what its consumers have waited for.
        seconds: returns the seconds since the daemon was started.
        feeds: the feeds, by name.
        workers: returns the daemon's own workers.
        hosts: the joined hosts.
        memory: the memory of worker processes.
        feed_of: returns the name of the feed that a run reads; "" if it is unknown, or the only one.
        look_at_slabs: sets a function to call for each slab before it is sent; None: call none.
        bugs: notes unexpected errors.
    """

    status: Callable[[], Status]
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
