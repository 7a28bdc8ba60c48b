"""A clock that stands still until a test moves it on."""

from __future__ import annotations


class Clock:
    """In place of the module `time` in a module of ours: `monkeypatch.setattr(_tcp_transport, "time", clock)`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
