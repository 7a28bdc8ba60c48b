"""The coordinator, as those see it that only read its state: status, scaling, metrics, sessions, hosts.

Only `Dispatch` passes it events. Everybody else takes a `CoordinatorView`, which has no method that changes anything.
But the streams and consumers that it returns are the coordinator's own. Nothing keeps you from changing them: only read
them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from penstock_proto import PenstockError

from .model.commands import Compare
from .model.consumer import Consumer
from .model.feeds import ServedFeed
from .starting import Failing
from .stream.stream import Stream


class WorkersView(Protocol):
    """Which workers there are; see model/workers.py."""

    @property
    def numbers(self) -> Sequence[int]: ...

    @property
    def makers(self) -> Sequence[int]: ...

    @property
    def own(self) -> Sequence[int]: ...

    @property
    def scaled(self) -> Sequence[int]: ...

    @property
    def idle(self) -> AbstractSet[int]: ...

    @property
    def away(self) -> AbstractSet[int]: ...

    @property
    def leaving(self) -> AbstractSet[int]: ...

    @property
    def standing(self) -> AbstractSet[int]: ...


class BudgetView(Protocol):
    """The memory and the slots of all streams; see stream/budget.py."""

    @property
    def memory(self) -> int: ...

    @property
    def nbytes_reserved(self) -> int: ...

    @property
    def slots_reserved(self) -> int: ...


class StartingView(Protocol):
    """How far the start of the feeds is; see starting.py."""

    @property
    def names(self) -> Collection[str]: ...

    @property
    def begun(self) -> bool: ...

    @property
    def done(self) -> bool: ...

    @property
    def retries(self) -> bool: ...

    @property
    def failing(self) -> Mapping[str, Failing]: ...

    @property
    def first_samples(self) -> Mapping[str, Compare]: ...


class CoordinatorView(Protocol):
    """The state that others read; see coordinator.py."""

    @property
    def feeds(self) -> Mapping[str, ServedFeed]: ...

    @property
    def streams(self) -> Mapping[int, Stream]: ...

    @property
    def consumers(self) -> Mapping[int, Consumer]: ...

    @property
    def workers(self) -> WorkersView: ...

    @property
    def budget(self) -> BudgetView: ...

    @property
    def starting(self) -> StartingView: ...

    def stream_of(self, number: int) -> Stream | None: ...

    def stream_read_by(self, consumer: Consumer) -> Stream: ...

    def apart_because(self, consumer: Consumer) -> str: ...

    def readers_of_group(self, feed: str, group: str) -> list[int]: ...

    def unknown_feed(self, name: str) -> PenstockError: ...
