"""The figures of a worker. Those that a joined host reports are in WorkerReport (messages/hosts.py)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from ..declarations import figure
from ..messages import WorkerReport


class Shares(Struct, frozen=True, kw_only=True):
    """The shares of a worker's time. The first four make up all of it."""

    generating: Annotated[float, figure("Share of its time in user code, without `cpu_wait`.")]
    collating: Annotated[float, figure("Share in which it checked, copied and reported samples.")]
    cpu_wait: Annotated[float, figure("Share in which user code could have run, but no CPU was free.")]
    idle: Annotated[float, figure("Share without work.")]
    cpu: Annotated[float, figure("Share in which it ran on a CPU. It is part of the others.")]


class Worker(WorkerReport, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A worker of the daemon or of a joined host."""

    name: Annotated[str, figure("Its number, or its host's name and its number there.")]
    host: Annotated[str | None, figure("Name of the joined host that it runs on. None for the daemon's own.")]
    makes_batches: Annotated[bool, figure("Whether it makes batches, rather than only list splits and mix rows.")]
    leaving: Annotated[bool, figure("Whether it ends as soon as it has finished its work.")]
    memory: Annotated[
        int | None,
        figure("Memory of the worker's process; shared pages count in part (PSS).", "penstock_worker_memory_bytes"),
    ]
    awaited_seconds: Annotated[
        float,
        figure("Seconds that consumers have waited for its batches.", "penstock_worker_awaited_seconds_total"),
    ]
    awaited_at: Annotated[str | None, figure("The split at which it was in most of these seconds, of late.")]
    processes: Annotated[
        int, figure("Processes that user code runs in it, up to 100. 0 for joined hosts, where nobody counts them.")
    ]
    shares: Annotated[
        Shares | None,
        figure("Averages of the last `window_seconds`. None if it has not run for all of that time."),
    ] = None
