"""Penstock for trainers: batches from a loader daemon, as a `tf.data.Dataset` or as NumPy arrays.

    dataset = penstock.dataset("tcp://loader:5555/train")

Importing this package imports neither TensorFlow nor the server.
"""

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

from ._connection import Connection, connect, dataset
from ._ragged import Ragged
from ._version import __version__

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
    "Ragged",
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
