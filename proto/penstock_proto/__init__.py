"""Shared by both ends of Penstock: messages and their codec, the slab's layout, the element spec, and the errors.

Imports neither the client nor the server. PROTOCOL.md describes the protocol.
"""

from .errors import (
    ConnectionLost,
    DaemonStopped,
    EndOfStream,
    FeedError,
    GeneratorError,
    IncompleteEpoch,
    KeyRefused,
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
from .messages import VERSION
from .spec import DictSpec, Leaf, Spec, TupleSpec

__all__ = [
    "VERSION",
    "ConnectionLost",
    "DaemonStopped",
    "DictSpec",
    "EndOfStream",
    "FeedError",
    "GeneratorError",
    "IncompleteEpoch",
    "KeyRefused",
    "Leaf",
    "MemoryBound",
    "PenstockError",
    "ProtocolError",
    "RankTaken",
    "Spec",
    "SpecError",
    "StartError",
    "StateMismatch",
    "StreamClosed",
    "TupleSpec",
    "UnknownFeed",
    "Unreachable",
    "WorkerDied",
]
