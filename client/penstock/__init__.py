"""Penstock for trainers: batches from a loader daemon, as a `tf.data.Dataset` or as NumPy arrays.

    dataset = penstock.dataset("tcp://loader:5555/train")

Importing this package imports neither TensorFlow nor the server. `penstock.Feed` and the values of its
options import the server's package.
"""

from typing import TYPE_CHECKING

from penstock_proto import (
    ConnectionLost,
    DaemonStopped,
    EndOfStream,
    FeedError,
    GeneratorError,
    IncompleteEpoch,
    KeyRefused,
    Leaf,
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
from penstock_proto.drop import DROP

from ._adapters.connection import Connection, connect, dataset
from ._transport.ragged import Ragged

if TYPE_CHECKING:
    from penstock_server import Cache, Feed, OnError, Pad, Shuffle

    __version__: str
"""The version of the installed distribution."""

__all__ = [
    "DROP",
    "Cache",
    "Connection",
    "ConnectionLost",
    "DaemonStopped",
    "EndOfStream",
    "Feed",
    "FeedError",
    "GeneratorError",
    "IncompleteEpoch",
    "KeyRefused",
    "Leaf",
    "MemoryBound",
    "OnError",
    "Pad",
    "PenstockError",
    "ProtocolError",
    "Ragged",
    "RankTaken",
    "Shuffle",
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


_OF_THE_SERVER = {
    "Cache": "feed.options.values",
    "Feed": "feed.feed",
    "OnError": "feed.options.values",
    "Pad": "feed.options.values",
    "Shuffle": "feed.options.values",
}
"""Names of the server's package, with the modules that define them."""


def __getattr__(name: str) -> object:
    from penstock_proto import distribution

    if name == "__version__":  # looked up only now: importlib.metadata is slow to import
        return distribution.version()
    if name not in _OF_THE_SERVER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._stream import server_package

    if not server_package.installed():
        raise ImportError(
            f"penstock.{name} is part of the server package, which is not installed here: run "
            f"{distribution.pip_install('server')}. A trainer that reads from a daemon does not need it"
        )
    return getattr(server_package.load(_OF_THE_SERVER[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
