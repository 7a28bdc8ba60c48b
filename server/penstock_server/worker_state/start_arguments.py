"""The command line that starts workers: written by the daemon, and read by the fork server and by a fresh worker."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StartArguments:
    """What each worker is told at its start. All workers get the same.

    Args:
        feeds: MODULE:ATTR of each feed.
        ticks: whether the worker counts every sample on its activity page.
        memory: bytes of memory of its own that the worker may have (`limit_memory`), or None for no limit.
        file_cache: the folder of the file cache, or None for the default.
        file_cache_size: its bound in bytes, or None for the default.
    """

    feeds: tuple[str, ...]
    ticks: bool = False
    memory: int | None = None
    file_cache: str | None = None
    file_cache_size: int | None = None

    def words(self) -> list[str]:
        """Return them as words of a command line."""
        ticks = ["--ticks"] if self.ticks else []
        memory = [] if self.memory is None else ["--memory", str(self.memory)]
        cache = [] if self.file_cache is None else ["--file-cache", self.file_cache]
        cache += [] if self.file_cache_size is None else ["--file-cache-size", str(self.file_cache_size)]
        return [*ticks, *memory, *cache, *self.feeds]

    @staticmethod
    def add_to(parser: argparse.ArgumentParser) -> None:
        """Let a parser accept these words."""
        parser.add_argument("--ticks", action="store_true")
        parser.add_argument("--memory", type=int)
        parser.add_argument("--file-cache")
        parser.add_argument("--file-cache-size", type=int)
        parser.add_argument("feeds", nargs="+", metavar="MODULE:ATTR")

    @classmethod
    def of(cls, parsed: argparse.Namespace) -> StartArguments:
        """Return what such a parser has read."""
        return cls(
            feeds=tuple(parsed.feeds),
            ticks=parsed.ticks,
            memory=parsed.memory,
            file_cache=parsed.file_cache,
            file_cache_size=parsed.file_cache_size,
        )
