"""Checks once a second on groups that nobody reads, on ranks that wait because not all have come, and on streams that
meet."""

from __future__ import annotations

from .admission.admission import Admission
from .admission.groups import Groups
from .model.timers import Timers
from .starting import Starting
from .stream.affected import AffectedStreams

EVERY = 1.0
"""Seconds between two looks."""


class PeriodicChecks:
    """Repeats the check with a timer, as long as there is something to look for.

    Args:
        groups: the groups that are read, or wait in the state file.
        admission: knows the ranks that wait for others.
        starting: says whether all feeds can be read: until then no group gives up its consumers.
        streams: the streams that an event affects.
        timers: for the next look.

    Attributes:
        due: whether the next look is scheduled.
    """

    def __init__(
        self, groups: Groups, admission: Admission, starting: Starting, streams: AffectedStreams, timers: Timers
    ) -> None:
        self._groups = groups
        self._admission = admission
        self._starting = starting
        self._streams = streams
        self._timers = timers
        self.due = False

    def begin(self) -> None:
        """Look around from now on, as long as something waits for consumers."""
        if not self.due and (self._groups.any or self._admission.waiting or self._admission.sharing.any):
            self.due = True
            self._timers.later(EVERY, self._look)

    def _look(self) -> None:
        self.due = False
        self.begin()
        now = self._timers.now
        if self._starting.done:
            for stream in self._groups.give_up(now):
                with self._streams.alone(stream):
                    stream.give_up_waiting()
        for rendezvous in self._admission.waiting:
            with self._streams.alone(rendezvous.stream):
                rendezvous.name_missing()
        for stream in self._groups.deserted(now):
            with self._streams.alone(stream):
                stream.end()
        self._groups.tidy()
        self._admission.sharing.look()
