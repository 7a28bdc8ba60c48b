"""At the head: checks a host, which gets work only after one of its workers has made the first sample of each feed
again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from penstock_proto import StartError
from penstock_proto import messages as m

from ..coordinator.model import commands as do


class Head(Protocol):
    """What a check needs from the head."""

    @property
    def first_samples(self) -> Mapping[str, do.Compare]:
        """The commands to make the feeds' first samples again, by feed."""

    def said(self, worker: int, message: m.Compared) -> None:
        """Handle a message from a worker."""


class HostCheck:
    """The check of one host.

    Args:
        head: the head, which it joins.
        compare: tells a worker to make a first sample again.
        admit: called with each worker that gets work from now on, and its Imported message.

    Attributes:
        passed: whether the host gets work.
    """

    def __init__(
        self,
        head: Head,
        *,
        compare: Callable[[int, do.Compare], None],
        admit: Callable[[int, m.Imported], None],
    ) -> None:
        self.passed = False
        self._head = head
        self._compare = compare
        self._admit = admit
        self._imported: dict[int, m.Imported] = {}
        self._asked = -1
        """The worker that was asked to make first samples again; -1 if none was."""
        self._compared = 0

    def imported(self, worker: int, message: m.Imported) -> None:
        """Admit a worker that has imported the feeds, if the check is passed; otherwise start the check with it."""
        self._imported[worker] = message
        if self.passed:
            self._admit(worker, message)
        elif self._asked < 0:
            self._ask()

    def compared(self, worker: int, message: m.Compared) -> None:
        """Handle a first sample that a worker has made again.

        Raises:
            StartError: the worker cannot make this sample.
        """
        if worker != self._asked or self.passed:
            return  # its process was asked before it died
        if message.unfit:
            raise StartError(f"it cannot make the samples of the head: {message.unfit}")
        self._head.said(worker, message)
        self._compared += 1
        self._pass_if_compared()

    def gone(self, worker: int) -> None:
        """Forget a worker whose process has ended, or is to end."""
        self._imported.pop(worker, None)
        if worker == self._asked and not self.passed:
            self._ask()

    def _ask(self) -> None:
        """Ask a worker to make the first samples again, if there is one."""
        self._asked, self._compared = next(iter(self._imported), -1), 0
        if self._asked < 0:
            return
        for compare in self._head.first_samples.values():
            self._compare(self._asked, compare)
        self._pass_if_compared()

    def _pass_if_compared(self) -> None:
        if self._compared == len(self._head.first_samples):
            self.passed = True
            for worker, message in list(self._imported.items()):
                self._admit(worker, message)
