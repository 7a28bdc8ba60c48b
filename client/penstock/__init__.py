"""Penstock for trainers: batches that a loader daemon makes, as a `tf.data.Dataset` or as NumPy arrays.

    dataset = penstock.dataset("tcp://loader:5555/train")

Importing this imports neither TensorFlow nor the server.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock_proto import (
    ConnectionLost,
    DaemonStopped,
    EndOfStream,
    FeedError,
    GeneratorError,
    IncompleteEpoch,
    MemoryBound,
    PenstockError,
    ProtocolError,
    RankTaken,
    SpecError,
    StartError,
    StateMismatch,
    StreamClosed,
    UnknownFeed,
    Unreachable,
    WorkerDied,
)

from ._connection import Connection, connect

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = [
    "Connection",
    "ConnectionLost",
    "DaemonStopped",
    "EndOfStream",
    "FeedError",
    "GeneratorError",
    "IncompleteEpoch",
    "MemoryBound",
    "PenstockError",
    "ProtocolError",
    "RankTaken",
    "SpecError",
    "StartError",
    "StateMismatch",
    "StreamClosed",
    "UnknownFeed",
    "Unreachable",
    "WorkerDied",
    "__version__",
    "connect",
    "dataset",
]

try:
    __version__ = importlib.metadata.version("penstock")
except importlib.metadata.PackageNotFoundError:  # a source tree on the path
    __version__ = "0+unknown"


def dataset(
    url: str,
    *,
    prefetch: int | None = None,
    cached: int | None = None,
    workers: int | None = None,
    memory: int | None = None,
    transport: str = "auto",
    timeout: float = 30.0,
    reconnect: float = 60.0,
    state: Mapping[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    group: str = "",
    last_round: str = "drop",
) -> tf.data.Dataset:
    """A dataset of a feed: iterating it once is one epoch, iterating again the next.

    It has a connection of its own, which closes when the dataset and all made from it are gone.

    Args:
        url: as in `connect`.
        prefetch: batches that TensorFlow takes ahead, at least 0; they count as handed over. None: 2, or, of small
            batches, as many as make about 2 MiB.
        cached: as in `Connection.dataset`.
        workers: as in `connect`.
        memory: as in `connect`.
        transport: as in `connect`.
        timeout: as in `connect`.
        reconnect: as in `connect`.
        state: as in `connect`.
        rank: as in `connect`.
        world_size: as in `connect`.
        group: as in `connect`.
        last_round: as in `connect`.

    Raises: as `connect`.
    """
    connection = connect(
        url,
        workers=workers,
        memory=memory,
        transport=transport,
        timeout=timeout,
        reconnect=reconnect,
        state=state,
        rank=rank,
        world_size=world_size,
        group=group,
        last_round=last_round,
    )
    return connection.dataset(prefetch, cached=cached)
