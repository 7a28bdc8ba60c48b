"""The options of a joining host: `penstock join` makes them once, and everything below reads them.

The types of the command line check the text of each option first (cli/parameters.py). Ranges are checked here too, for
configs that other code makes.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..machine.cpus import usable
from ..machine.memory_limits import default_memory
from ..workers.worker_config import WorkerConfig

if TYPE_CHECKING:
    from penstock_proto.security.keys import ClientKeys


@dataclass(frozen=True, kw_only=True)
class JoinConfig(WorkerConfig):
    """What one joining host was told at its start. Each field has the name of its option, unless it says otherwise.

    Raises:
        ValueError: a value is out of its range.
    """

    head: tuple[str, int]
    """Host and port of the head. (The argument URL.)"""

    workers: int = field(default_factory=usable)
    """Number of workers until the head asks for another number (`penstock scale --host`). Default: one for each CPU
    that this process may use."""

    memory: int = field(default_factory=default_memory)
    """Most bytes in which the workers build batches for the head. Default: a quarter of what is free, at most 8 GiB."""

    host_name: str = field(default_factory=socket.gethostname)
    """Name of this host in the head's log and status."""

    keys: ClientKeys | None = None
    """This host's keys, or None. (--keys names their folder.)"""

    grace: float = 25.0
    """Seconds that the workers have to hand over their work when this host leaves."""

    patience: float = 60.0
    """Seconds to wait for a head that does not answer, at the start or after it was lost."""

    fetch_port: int = 0
    """Port at which trainers fetch batches; 0: any free port."""

    allow_uids: tuple[int, ...] = ()
    """Users, besides our own and root, whose trainers on this host may map its memory. (--allow-uid)"""

    until_stdin_closes: bool = False
    """Whether this host also ends at the end of standard input, when the process that started it is gone."""

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {self.workers}")
        if self.memory <= 0:
            raise ValueError(f"--memory must be more than 0, got {self.memory}")
        if self.grace < 0 or self.patience < 0:
            raise ValueError(f"--grace and --patience must not be negative, got {self.grace} and {self.patience}")
