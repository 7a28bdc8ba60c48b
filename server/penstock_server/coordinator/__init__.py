"""The state machine that gives lanes to workers, grants slots, orders batches and delivers them. It does no I/O."""

from .coordinator import Coordinator
from .stream.affected import a_bug

__all__ = ["Coordinator", "a_bug"]
