"""The state machine that gives lanes to workers, grants slots, orders batches and delivers them. No I/O in here."""

from .budget import size
from .coordinator import Coordinator, a_bug

__all__ = ["Coordinator", "a_bug", "size"]
