"""The loader host: the daemon, its worker processes, and the `Feed` with which a user declares what to load.

User modules import this package in every worker, so it imports neither the daemon nor ZeroMQ.
"""

from penstock_proto import DictSpec, Leaf, TupleSpec

from .features import FixedLen, VarLen
from .feed import Feed

__all__ = ["DictSpec", "Feed", "FixedLen", "Leaf", "TupleSpec", "VarLen"]
