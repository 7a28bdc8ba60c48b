"""Shared by both ends of Penstock: messages and their codec, the slab's layout, the element spec, and the errors.

Imports neither the client nor the server. PROTOCOL.md describes the protocol. Names that need NumPy are loaded on first
use, so that the command line starts quickly.
"""

import importlib
from typing import TYPE_CHECKING

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
    StreamMoved,
    UnknownFeed,
    Unreachable,
    WorkerDied,
)

if TYPE_CHECKING:
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
    "StreamMoved",
    "TupleSpec",
    "UnknownFeed",
    "Unreachable",
    "WorkerDied",
]

_PLACES = {"VERSION": ".messages", "DictSpec": ".spec", "Leaf": ".spec", "Spec": ".spec", "TupleSpec": ".spec"}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_PLACES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
