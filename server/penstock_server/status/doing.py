"""What a worker reads now, whether it is the daemon's own or that of a joined host."""

from __future__ import annotations

from collections.abc import Mapping

from ..hosts.host_table import HostTable
from ..workers.worker_handle import WorkerHandle


def split_of(own: Mapping[int, WorkerHandle], hosts: HostTable, worker: int) -> str | None:
    """Return the split that a worker reads, if it reads one, as far as is known: a host reports it once a second."""
    if worker in own:
        doing = own[worker].doing
    else:
        host = hosts.by_worker.get(worker)
        said = None if host is None else host.said.get(worker)
        doing = None if said is None else said[0].doing
    return None if doing is None else doing.split
