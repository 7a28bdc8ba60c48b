"""The options of a daemon: `penstock serve` makes them once, and everything below reads them.

The types of the command line check the text of one option first (cli/parameters.py), so that an error can name the
environment variable that it came from. Ranges are checked here too, for configs that other code makes, and what several
options must agree on is checked only here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock_proto import StartError

from ..machine.cpus import usable
from ..machine.memory_limits import default_memory
from ..net.accepting import only_this_host
from ..workers.worker_config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class DaemonConfig(WorkerConfig):
    """What one daemon was told at its start. Each field has the name of its option, unless it says otherwise.

    Raises:
        ValueError: a value is out of its range, or options contradict each other. The message names the options.
        StartError: `bind` is no address, or other hosts could connect without keys.
    """

    workers: int | Literal["auto"] = field(default_factory=usable)
    """Number of worker processes that make batches; "auto": the number follows the load. Default: one for each CPU that
    this process may use. With 0 there is one idle worker: it lists splits, makes first samples and mixes rows, and
    hosts that join make the batches."""

    bind: str = "tcp://127.0.0.1:5555"
    """The `tcp://ADDRESS:PORT` to listen on; port 0 picks one."""

    keys: str | None = None
    """The folder with the daemon's keys and those of the clients and hosts that may connect; None: no keys."""

    insecure: bool = False
    """Whether other hosts may connect without keys, if they reach `bind`."""

    allow_uids: tuple[int, ...] = ()
    """Users, besides the daemon's own and root, whose trainers on this host may share memory with it. (--allow-uid)"""

    advertise: str | None = None
    """HOST or HOST:PORT for the feeds' URLs; None: the address of `bind`, or this host's name if that is 0.0.0.0."""

    memory: int = field(default_factory=default_memory)
    """Most bytes for slots and shuffle blocks. Default: a quarter of what is free, at most 8 GiB."""

    state: str | None = None
    """Path of the file that keeps the positions of groups when the daemon ends, or None."""

    http: tuple[str, int] | None = None
    """Host and port of the HTTP server, or None for no server; port 0 picks one."""

    reload: bool = False
    """Whether the next epoch is read from new code when the code of the feeds changes."""

    engine: Literal["ray"] | None = None
    """What places and starts hosts that join, or None. (--on)"""

    hosts: tuple[int, int] | None = None
    """With `engine`: the fewest and the most hosts, each on a machine of its own."""

    workers_per_host: int | None = None
    """With `engine`: number of worker processes of each of these hosts. It is --workers of their `penstock join`."""

    until_stdin_closes: bool = False
    """Whether the daemon also stops at the end of standard input: another program has started it for itself."""

    def __post_init__(self) -> None:
        """Check the values, and that the options agree."""
        super().__post_init__()
        if self.workers != "auto" and self.workers < 0:
            raise ValueError(f"--workers must be a number from 0, or auto, got {self.workers}")
        if self.memory <= 0:
            raise ValueError(f"--memory must be more than 0, got {self.memory}")
        if self.keys is not None and self.insecure:
            raise ValueError("--insecure lets clients connect without keys: give --keys or --insecure, not both")
        self._check_engine()
        exposed = not only_this_host(self.bind)
        if exposed and self.keys is None and not self.insecure:
            raise StartError(
                f"--bind {self.bind} can be reached from other hosts. Give --keys DIR, so that only clients with keys "
                "connect and all that crosses the network is encrypted (`penstock keygen DIR` makes them), or, in a "
                "network that you trust, --insecure"
            )

    def _check_engine(self) -> None:
        if self.engine is None:
            if self.hosts is not None or self.workers_per_host is not None:
                raise ValueError("--hosts and --workers-per-host need --on ray")
            return
        if self.hosts is None or self.workers_per_host is None:
            raise ValueError("--on ray needs --hosts N (or MIN:MAX) and --workers-per-host N")
        if self.hosts[0] < self.hosts[1] and self.workers == "auto":
            raise ValueError(
                "--workers auto and --hosts MIN:MAX would both follow the load: give a number for one of them"
            )
        if self.reload:
            raise ValueError("--reload is for one host: the hosts on Ray keep the code that they were started with")
