"""The options of a daemon and of a joining host that concern their worker processes.

How an option reaches them:

- `environment` is set when a process starts (`machine.environment.of_workers`);
- what a process must know from its start is a field of `StartArguments`, which `start_arguments` makes. The fork server
  gets it for the workers that it forks;
- hosts on Ray get the same options as words of `penstock join` (`join_words`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..worker_state.start_arguments import StartArguments

if TYPE_CHECKING:
    from penstock_proto.messages import Environment

LEAST_WORKER_MEMORY = 64 << 20
"""The least `worker_memory`, in bytes: Python and NumPy alone take about half of it."""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The options that both have. `DaemonConfig` and `JoinConfig` add the other options.

    Raises:
        ValueError: a value is out of its range.
    """

    feeds: tuple[str, ...]
    """MODULE:ATTR of each feed, or what `make_target` returned for data files."""

    hang_timeout: float | None = None
    """Seconds without a sample after which a worker in user code is killed and replaced. None: no worker is killed, and
    one that does not read its messages is only logged. The supervisor watches; workers only count their samples."""

    worker_memory: int | None = None
    """Bytes of memory of its own that each worker may have; None: no limit. A worker sets the limit for itself."""

    file_cache: str | None = None
    """The folder in which the workers of a host keep files of URLs; None: the default."""

    file_cache_size: int | None = None
    """Bytes of that folder, at most; 0: nothing is kept; None: the default."""

    environment: Environment = field(default_factory=dict)
    """Environment variables of the workers, by name; None as a value removes one. They override those that the feeds
    want, and Penstock's defaults."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.hang_timeout is not None and self.hang_timeout <= 0:
            raise ValueError(f"--hang-timeout must be more than 0, got {self.hang_timeout}")
        if self.file_cache_size is not None and self.file_cache_size < 0:
            raise ValueError(f"--file-cache-size must be at least 0, got {self.file_cache_size}")
        if self.worker_memory is not None and self.worker_memory < LEAST_WORKER_MEMORY:
            raise ValueError(
                f"--worker-memory must be at least {LEAST_WORKER_MEMORY >> 20}M, got {self.worker_memory} bytes"
            )

    def start_arguments(self) -> StartArguments:
        """Return what each worker process is told at its start."""
        return StartArguments(
            feeds=self.feeds,
            ticks=self.hang_timeout is not None,
            memory=self.worker_memory,
            file_cache=None if self.file_cache is None else os.path.abspath(self.file_cache),
            file_cache_size=self.file_cache_size,
        )

    def join_words(self) -> list[str]:
        """Return these options, without the feeds, as words of `penstock join`."""
        words = [] if self.hang_timeout is None else [f"--hang-timeout={self.hang_timeout}"]
        words += [] if self.worker_memory is None else [f"--worker-memory={self.worker_memory}"]
        words += [] if self.file_cache is None else [f"--file-cache={self.file_cache}"]
        words += [] if self.file_cache_size is None else [f"--file-cache-size={self.file_cache_size}"]
        for name, value in self.environment.items():
            words.append(f"--env={name}" if value is None else f"--env={name}={value}")
        return words
