"""Has each feed's first sample made again, by another worker if there is one, to see whether it differs.

This happens once all feeds are ready, so it does not delay the start. Feeds whose samples take long are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from msgspec import structs

from penstock_proto.messages import FirstSample

from ..model import commands as do

MOST_SECONDS = 0.25
"""A first sample that took more seconds than this is not made again."""


class FirstSampleChecks:
    """The comparisons that are still to be made. Commands go to `out`.

    Attributes:
        of_hosts: the comparisons that each joining host makes, by feed. Their lists of splits are kept.
    """

    def __init__(self, out: Callable[[do.Command], None]) -> None:
        self._do = out
        self.of_hosts: dict[str, do.Compare] = {}
        self._ready: set[int] = set()
        self._waiting: list[tuple[int, do.Compare]] = []

    def on_first_sample(
        self, feed: str, run: int, splits: int, forget: bool, first: FirstSample | None, worker: int
    ) -> None:
        """Note that `worker` has made the feed's first sample. With `forget`, only comparisons still need the list of
        splits."""
        if first is not None and first.digests:
            self.of_hosts[feed] = compare = do.Compare(-1, run, feed, splits, first.index, first.digests)
            if first.seconds <= MOST_SECONDS:
                self._waiting.append((worker, compare))
        elif forget:
            self._do(do.ForgetSplits(splits))

    def on_worker_ready(self, worker: int) -> None:
        """Note that the worker has imported the user's modules."""
        self._ready.add(worker)

    def on_worker_away(self, worker: int) -> None:
        """Note that the worker has died or left."""
        self._ready.discard(worker)

    def begin(self, own: Collection[int]) -> None:
        """Have samples compared as far as possible, now that all feeds are ready. `own`: the daemon's own workers.

        The first one of them makes the first batches, and a sample of another split may take long. So it compares only
        if there is no other one, and none to wait for.
        """
        waiting, self._waiting = self._waiting, []
        for seen_by, command in waiting:
            others = self._ready - {seen_by} if len(own) > 1 else self._ready
            others_come = set(own) - self._ready - {seen_by}
            if not others or (others_come and max(others) == min(own)):
                self._waiting.append((seen_by, command))
                continue
            self._do(structs.replace(command, worker=max(others)))  # its lanes are visited last
