"""Shows the daemon's progress, while feeds start and while epochs finish, to a person and to the service manager."""

from __future__ import annotations

from typing import Protocol

from penstock_proto.status.figures import count
from penstock_proto.status.status_shape import Status

from .service_manager import Phase, ServiceManager
from .terminal import Line


class Progressing(Protocol):
    """The daemon, as this file sees it."""

    @property
    def ready(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    renewing: bool

    def status(self) -> Status: ...


class Progress:
    """What is said about one daemon, each news once.

    Args:
        line: the line that shows it to a person.
        manager: the service manager.
    """

    def __init__(self, line: Line, manager: ServiceManager) -> None:
        self._line = line
        self._manager = manager

    def look(self, daemon: Progressing) -> None:
        """Show the daemon's progress. Call it every second."""
        waits = daemon.draining or not daemon.ready
        text = words(daemon.status()) if waits or self._manager.listens else ""
        stopping = daemon.draining and not daemon.renewing
        self._manager.tell(Phase(daemon.ready, stopping, text))
        then = "; Ctrl-C again stops at once" if stopping else ", then the new code is read" if daemon.renewing else ""
        self._line.show(text + then if waits else "")


def words(state: Status) -> str:
    """Return in words what a daemon with this status waits for, or what it does if it waits for nothing."""
    if state.draining:
        return _finishing(state)
    if not state.ready:
        return _starting(state)
    return f"serving {count(len(state.feeds), 'feed')} to {count(_consumers(state), 'consumer')}"


def _finishing(state: Status) -> str:
    reading = [stream for stream in state.streams if stream.reading]
    if not reading:
        return f"stopping, {count(_consumers(state), 'consumer')} left"
    if hosts := needs_hosts(state):
        return hosts
    batches = {feed.name: feed.batches for feed in state.feeds}
    known = [wanted for stream in reading if (wanted := batches.get(stream.feed)) is not None]
    sent = sum(stream.batches for stream in reading)
    of = f" of {sum(known)}" if len(known) == len(reading) else ""
    whose = "the epoch of 1 consumer" if len(reading) == 1 else f"the epochs of {len(reading)} consumers"
    return f"finishing {whose}: {sent}{of} batches sent"


def needs_hosts(state: Status) -> str:
    """Return that no worker makes batches, and what to do. Return "" if some do."""
    makers = any(worker.makes_batches for worker in state.workers)
    return "" if makers else "no worker makes batches: run `penstock join`"


def _starting(state: Status) -> str:
    workers = state.workers
    ready = sum(worker.ready for worker in workers)
    text = f"starting: {ready} of {count(len(workers), 'worker')} ready"
    return f"{text}, {state.phase}" if state.phase else text


def _consumers(state: Status) -> int:
    return len(state.streams) + state.more_streams
