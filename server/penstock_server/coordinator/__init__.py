"""The state machine that deals lanes to workers, grants slots, orders batches and deals them out. No I/O in here."""

from .coordinator import Coordinator, a_bug, size

__all__ = ["Coordinator", "a_bug", "size"]
