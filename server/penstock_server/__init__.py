"""The loader host: the daemon, its worker processes, and the `Feed` with which a user declares what to load.

User modules import this package in every worker, so it imports neither the daemon nor ZeroMQ. The command line imports
it too, so its names are loaded when they are first used: completing a command in a shell must not wait for NumPy.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock_proto import DictSpec, Leaf, TupleSpec
    from penstock_proto.drop import DROP

    from .feed.feed import Feed
    from .feed.options.values import Cache, OnError, Pad, Shuffle, Weights
    from .sources.features import FixedLen, FixedLenSequence, VarLen
    from .sources.images.decoder import ImageDecoder

__all__ = [
    "DROP",
    "Cache",
    "DictSpec",
    "Feed",
    "FixedLen",
    "FixedLenSequence",
    "ImageDecoder",
    "Leaf",
    "OnError",
    "Pad",
    "Shuffle",
    "TupleSpec",
    "VarLen",
    "Weights",
]

_PLACES = {
    "DROP": "penstock_proto.drop",
    "Cache": "penstock_server.feed.options.values",
    "DictSpec": "penstock_proto.spec",
    "Feed": "penstock_server.feed.feed",
    "FixedLen": "penstock_server.sources.features",
    "FixedLenSequence": "penstock_server.sources.features",
    "ImageDecoder": "penstock_server.sources.images.decoder",
    "Leaf": "penstock_proto.spec",
    "OnError": "penstock_server.feed.options.values",
    "Pad": "penstock_server.feed.options.values",
    "Shuffle": "penstock_server.feed.options.values",
    "TupleSpec": "penstock_proto.spec",
    "VarLen": "penstock_server.sources.features",
    "Weights": "penstock_server.feed.options.values",
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
