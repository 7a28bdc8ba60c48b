"""Decides when the daemon goes over to changed code."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from penstock_proto import PenstockError
from penstock_proto.status.status_shape import Status

from ..targets import saved_sources
from ..targets.sources import Contents, Sources, changed, digests
from .trial import Trial

log = logging.getLogger(__name__)

_RELOAD = {"event": "reload"}


class Renewable(Protocol):
    """The part of the daemon that this file uses."""

    @property
    def ready(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    @property
    def between_epochs(self) -> bool: ...

    def renew(self) -> None: ...

    def status(self) -> Status: ...


class Reloader:
    """Compares the files of feeds with those that run. The daemon calls `look` every second.

    Args:
        targets: MODULE:ATTR of each feed, or the strings of data files.
        trial: starts a trial of the code as it is now.

    Attributes:
        pending: whether the next epoch has to be read from new code.
    """

    def __init__(self, targets: Sequence[str], trial: Callable[[], Trial]) -> None:
        self._sources = Sources(targets)
        self._new_trial = trial
        self._trial: Trial | None = None
        self._specs: dict[str, str] = {}
        self._trying: dict[Path, bytes] = {}
        """What the trial tries."""
        self.pending = False
        self.begin()

    def begin(self) -> None:
        """A daemon is about to start: it serves the code that is pending, or else the code as it is now."""
        texts = self._trying if self.pending else self._sources.texts()
        saved_sources.keep(texts)
        self._served: Contents = digests(texts)
        self._seen = self._served
        self._tried: Contents | None = None
        self._compared = False
        self.pending = False

    @property
    def watches(self) -> bool:
        """Whether there are files that may change: data files alone have no code."""
        return bool(self._served)

    def stale(self) -> bool:
        """Whether the code has changed since the daemon started. Its own workers do not get the new code."""
        return self._sources.contents() != self._served

    def look(self, daemon: Renewable) -> None:
        """Look for changed code, and for the time to go over to it."""
        if daemon.ready and not self._compared:
            self._compare_specs(daemon)
        if daemon.draining:
            return
        now = self._sources.contents()
        if now == self._served:
            self.stop()
            self._seen, self._tried, self.pending = now, None, False
        elif now != self._seen:
            self.stop()  # somebody is writing: wait until nothing changes for a second
            self._seen, self.pending = now, False
        elif now != self._tried:
            log.info("trying new code: %s", changed(self._served, now), extra=_RELOAD)
            self._trying = self._sources.texts()
            self._trial, self._tried = self._new_trial(), digests(self._trying)
        elif self._trial is not None:
            self._judge(self._trial.outcome())
        if self.pending and daemon.between_epochs:
            daemon.renew()

    def wait(self) -> bool:
        """The daemon could not be started: wait until its code changes. Return False after SIGTERM or SIGINT."""
        stops: list[int] = []
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda number, _: stops.append(number))  # those of the daemon's loop do nothing now
        names = ", ".join(sorted(path.name for path in self._served))
        log.info("waiting for a change of %s", names, extra=_RELOAD)
        while not stops and not self.stale():
            time.sleep(0.3)
        return not stops

    def stop(self) -> None:
        """End a trial that is going on."""
        if self._trial is not None:
            self._trial.stop()
            self._trial = None

    def _judge(self, outcome: bool | PenstockError) -> None:
        if outcome is False:
            return
        self.stop()
        self.pending = outcome is True
        if outcome is True:
            text = "the next epoch is read from the new code; epochs that are being read finish with the old code"
            log.info(text, extra=_RELOAD)
        else:
            fields = {"event": "reload_failed", "error": outcome}
            log.error("the new code cannot be served, so the old code goes on: %s", outcome, extra=fields)

    def _compare_specs(self, daemon: Renewable) -> None:
        self._compared = True
        specs = {feed.name: feed.spec for feed in daemon.status().feeds}
        for name, spec in specs.items():
            before = self._specs.get(name, spec)
            if spec != before:
                log.warning(
                    "feed %s: samples are now %s and were %s: trainers that read it get an error, start them again",
                    *(name, spec, before),
                    extra={"event": "feed_warning", "feed": name},
                )
        self._specs = specs
