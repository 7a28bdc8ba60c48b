"""Writes the positions of groups to the state file on the coordinator's command.

A position is written before anything that depends on it is sent. If writing fails, the group's stream fails, and its
consumers get nothing that depends on the position. They connect again and go on from the file, as they would with
another daemon.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock_proto import DaemonStopped, PenstockError, StartError

from ..consumers.sessions import Sessions
from ..coordinator import CoordinatorView
from ..coordinator.model import commands as do
from ..coordinator.model import events as on
from ..logs.rate_limited_log import RateLimitedLog

if TYPE_CHECKING:
    from ..state_file.statefile import StateFile

log = logging.getLogger(__name__)


class GroupFile:
    """Carries out `SaveGroup` and `ForgetGroup`.

    Args:
        state: the file.
        coordinator: makes the decisions.
        sessions: the consumers.
        tell: tells the coordinator of an event.
        fail: called with the error if the file cannot even be read: the daemon ends.
    """

    def __init__(
        self,
        state: StateFile,
        coordinator: CoordinatorView,
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
        """Groups with a command that could not be written, among the commands that are being carried out."""

    def carry_out(self, command: do.SaveGroup | do.ForgetGroup) -> None:
        """Write the command's change to the file."""
        if isinstance(command, do.SaveGroup):
            self._save(command)
        else:
            self._forget(command.feed, command.group)

    def idle(self) -> None:
        """Note that all commands are carried out: later commands of all groups are tried again."""
        self._unsaved.clear()

    def look_at_the_clock(self, now: float) -> None:
        """Delete the groups that have ended and could not be deleted then."""
        self._log.look_at_the_clock(now)
        for feed, group in list(self._state.to_forget):
            self._forget(feed, group)

    def _save(self, command: do.SaveGroup) -> None:
        feed, group = key = command.feed.name, command.group
        if key in self._unsaved:  # the command has changes relative to one that could not be written
            return
        try:
            self._state.keep(command)
            return
        except DaemonStopped as error:
            failed = error
        self._unsaved.add(key)
        self._log.error("feed %s: group %r waits: %s", feed, group, failed.message, event="state_unsaved", feed=feed)
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
            text = "feed %s: group %r has ended. It will be deleted from the state file when that can be written: %s"
            self._log.error(text, feed, group, error.message, event="state_unsaved", feed=feed)
