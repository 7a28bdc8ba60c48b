"""The state machine that gives lanes to workers, grants slots, orders batches and delivers them. It does no I/O."""

from .affected import a_bug
from .budget import size
from .coordinator import Coordinator

__all__ = ["Coordinator", "a_bug", "size"]
