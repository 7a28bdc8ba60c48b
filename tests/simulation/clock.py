"""A clock that stands still until a test advances it."""

from __future__ import annotations


class Clock:
    """Replaces the module `time` in one of our modules: `monkeypatch.setattr(_tcp_transport, "time", clock)`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
