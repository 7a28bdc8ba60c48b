"""The state machine that gives lanes to workers, grants slots, orders batches and delivers them. It does no I/O."""

from .coordinator import Coordinator
from .stream.affected import a_bug
from .view import CoordinatorView

__all__ = ["Coordinator", "CoordinatorView", "a_bug"]
