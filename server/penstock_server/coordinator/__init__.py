"""The state machine that deals lanes to workers, grants slots, orders batches and deals them out. No I/O in here."""

from .coordinator import Coordinator, size

__all__ = ["Coordinator", "size"]
