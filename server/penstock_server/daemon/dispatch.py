"""Dispatch: passes events to the coordinator, and carries out its commands one by one, in order.

A command that fails makes its stream fail. The commands after it are still carried out: they concern other streams, or
free the slots of this one. If a failed command concerns no stream, the daemon ends, because its state is no longer
known. That can happen only while feeds are made ready, which no peer can influence.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from typing import Protocol

from penstock_proto import PenstockError
from penstock_proto import messages as m

from ..coordinator import Coordinator
from ..coordinator.model import commands as do
from ..coordinator.model import events as on
from ..logs.bugs import Bugs

_DEBUG = os.environ.get("PENSTOCK_DEBUG") == "1"
"""Whether to check the coordinator's invariants after each event, which takes time."""


class CarriesOut(Protocol):
    """Carries out commands (executor.py)."""

    def carry_out(self, command: do.Command) -> None:
        """Carry out a command."""

    def idle(self) -> None:
        """Note that all commands are carried out."""


class Dispatch:
    """The loop around the coordinator.

    Args:
        coordinator: makes the decisions.
        bugs: notes unexpected errors.
    """

    def __init__(self, coordinator: Coordinator, bugs: Bugs) -> None:
        self._coordinator = coordinator
        self._bugs = bugs
        self._commands: deque[do.Command] = deque()
        self._carrying_out = False
        self._halted = False
        self._tick: asyncio.TimerHandle | None = None
        self._tick_at = 0.0

    def start(self, executor: CarriesOut) -> None:
        """Let this object carry out commands. Before that, no event may come: each may lead to commands."""
        self._executor = executor

    def halt(self) -> None:
        """Carry out no further commands."""
        self._halted = True
        if self._tick is not None:
            self._tick.cancel()

    def tell(self, event: on.Event) -> None:
        """Tell the coordinator of an event, and carry out its commands."""
        if self._halted:
            return
        self._commands.extend(self._coordinator.handle(event, time.monotonic()))
        if _DEBUG:
            for said in self._coordinator.check():
                self._bugs.note(AssertionError(f"after {event}: {said}"))
        if self._carrying_out:  # the outer call carries out these commands too
            return
        self._carrying_out = True
        try:
            while self._commands and not self._halted:
                command = self._commands.popleft()
                try:
                    self._executor.carry_out(command)
                except Exception as error:
                    self._failed(command, error)
        finally:
            self._carrying_out = False
        self._schedule_tick()
        self._executor.idle()

    def _schedule_tick(self) -> None:
        due = self._coordinator.next_tick
        if self._tick is not None and (due is None or due != self._tick_at):
            self._tick.cancel()
            self._tick = None
        if self._tick is None and due is not None and not self._halted:
            self._tick_at = due
            seconds = max(0.0, due - time.monotonic())
            self._tick = asyncio.get_running_loop().call_later(seconds, self._ticks)

    def _ticks(self) -> None:
        self._tick = None
        self.tell(on.Tick())

    def _failed(self, command: do.Command, error: Exception) -> None:
        """Fail the stream of the command."""
        match command:
            case do.StartRun() if isinstance(error, PenstockError):  # the worker was not told
                self.tell(on.RunFailed(command.run, error))
            case do.SendSlab() | do.Tell():
                consumer = self._coordinator.consumers.get(command.consumer)
                if consumer is None:
                    self._bugs.note(error)
                else:
                    self.tell(on.StreamFailed(consumer.stream, error))
            case do.FindSlot() | do.Free() | do.Fill() | do.MeasureRows() | do.WriteRows():
                self.stream_failed(command.ticket, error)
            case do.PoolRows() | do.TransformRows():
                self.stream_failed(command.ticket, error)
            case do.StartRun() | do.DropRun() | do.ListSplits():
                self.stream_failed(command.run, error)
            case _:
                raise error

    def stream_failed(self, number: int, error: Exception) -> None:
        """Fail the stream of the run or ticket with this number.

        Raises:
            Exception: `error`, if the run belongs to the daemon's start and not to a stream.
        """
        if number < m.IDS_PER_STREAM:
            raise error
        self.tell(on.StreamFailed(number // m.IDS_PER_STREAM, error))
