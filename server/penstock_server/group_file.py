"""Writes to the state file where groups stand, as the coordinator says, before anything that follows from it is sent.

If that cannot be written, the group's stream fails. Its consumers hear nothing that follows from it, and come back to
where the file stands, as they would to another daemon.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock_proto import DaemonStopped, PenstockError, StartError

from .coordinator import Coordinator
from .coordinator import commands as do
from .coordinator import events as on
from .rate_limited_log import RateLimitedLog
from .sessions import Sessions
from .statefile import StateFile

log = logging.getLogger(__name__)


class GroupFile:
    """See the file's head.

    Args:
        state: the file.
        coordinator: what decides; to look at.
        sessions: the consumers.
        tell: tells the coordinator of an event.
        fail: called with the error if the file cannot even be read: the daemon ends.
    """

    def __init__(
        self,
        state: StateFile,
        coordinator: Coordinator,
        sessions: Sessions,
        *,
        tell: Callable[[on.Event], None],
        fail: Callable[[PenstockError], None],
    ) -> None:
        self._state = state
        self._coordinator = coordinator
        self._sessions = sessions
        self._tell = tell
        self._fail = fail
        self._log = RateLimitedLog(log)
        self._unsaved: set[tuple[str, str]] = set()
        """Groups of which a command in hand could not be written."""

    def carry_out(self, command: do.SaveGroup | do.ForgetGroup) -> None:
        """Write what the command says."""
        if isinstance(command, do.SaveGroup):
            self._save(command)
        else:
            self._forget(command.feed, command.group)

    def settled(self) -> None:
        """The commands in hand have been carried out."""
        self._unsaved.clear()

    def look_at_the_clock(self, now: float) -> None:
        """Delete the groups that have ended and could not be deleted then."""
        self._log.look_at_the_clock(now)
        for feed, group in list(self._state.to_forget):
            self._forget(feed, group)

    def _save(self, command: do.SaveGroup) -> None:
        feed, group = key = command.feed.name, command.group
        if key in self._unsaved:  # it says what has changed since one that could not be written
            return
        try:
            self._state.keep(command)
            return
        except DaemonStopped as error:
            failed = error
        self._unsaved.add(key)
        self._log.error("feed %s: group %r waits: %s", feed, group, failed.message)
        try:
            saved = self._state.kept(feed, group)
        except StartError as error:
            self._fail(error)
            return
        self._sessions.mute(self._coordinator.readers_of_group(feed, group))
        self._tell(on.NotSaved(feed, group, saved, failed))

    def _forget(self, feed: str, group: str) -> None:
        try:
            self._state.forget(feed, group)
        except DaemonStopped as error:
            text = "feed %s: group %r has ended, and is deleted from the state file when that can be written: %s"
            self._log.error(text, feed, group, error.message)
