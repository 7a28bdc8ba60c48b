"""The status of a daemon: a tree of structs. Each figure is declared once, here or in the file of its part.

A declaration has the figure's type, what it means, and the metric that shows it. penstock_server/status/status.py fills
the figures in. Then they are in `penstock status --json`, in `/api/status`, in the metrics, and in the tables of
docs/monitoring.md.

A field with averages has a default, because a status is made without them (status_history.py). So does a figure that
daemons of an earlier release with the same version of the protocol do not send.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Struct

from ..declarations import figure
from ..messages import Machine
from .feed_status import Feed
from .host_status import Host
from .stream_status import Stream
from .worker_status import Worker


class Failing(Struct, frozen=True, kw_only=True):
    """A feed that cannot start."""

    feed: Annotated[str, figure("Its name.")]
    times: Annotated[int, figure("How often it was tried.")]
    error: Annotated[str, figure("The latest error.")]


class Memory(Struct, frozen=True, kw_only=True):
    """Memory of all streams."""

    allowed: Annotated[
        int, figure("Bytes that slots and shuffle blocks may take (--memory).", "penstock_memory_allowed_bytes")
    ]
    reserved: Annotated[
        int, figure("Bytes of slots and shuffle blocks that streams have reserved.", "penstock_memory_reserved_bytes")
    ]
    arena: Annotated[int, figure("Bytes of the slots that exist now.", "penstock_memory_slots_bytes")]
    positions: Annotated[int, figure("Bytes of positions that consumers are sending.")]


class HostEngine(Struct, frozen=True, kw_only=True):
    """What runs hosts (`serve --on`)."""

    name: Annotated[str, figure("Its name.")]
    hosts: Annotated[
        int,
        figure("Hosts that the engine (serve --on) is to run; some may not have joined yet.", "penstock_engine_hosts"),
    ]
    adjusts: Annotated[
        tuple[int, int] | None, figure("The least and the most hosts, if their number is adjusted to the load.")
    ]


class Status(Struct, frozen=True, kw_only=True):
    """A daemon at one moment."""

    id: Annotated[
        str, figure("Differs from daemon to daemon, even if process ids are the same. Each counts from its own start.")
    ]
    pid: Annotated[int, figure("Its process.")]
    version: Annotated[int, figure("Its version of the protocol.")]
    endpoint: Annotated[str, figure("Its address over TCP.")]
    unix: Annotated[str, figure("Its address for consumers on its host.")]
    seconds: Annotated[float, figure("Seconds since the daemon was started.", "penstock_daemon_uptime_seconds")]
    cpus: Annotated[int, figure("CPUs that the daemon and its workers may use.", "penstock_daemon_cpus")]
    cpu_seconds: Annotated[
        float,
        figure("CPU time of the daemon's own process, without its workers.", "penstock_daemon_cpu_seconds_total"),
    ]
    machine: Annotated[Machine, figure("The CPUs of its host.")]
    ready: Annotated[bool, figure("Whether all feeds can be read.", "penstock_daemon_ready")]
    malformed: Annotated[
        int,
        figure("Messages from peers that could not be decoded.", "penstock_daemon_malformed_messages_total"),
    ]
    greeted: Annotated[int, figure("Peers that have connected and do not read yet.")]
    internal_errors: Annotated[
        int,
        figure(
            "Bugs in Penstock that the daemon survived; the log has tracebacks.",
            "penstock_daemon_internal_errors_total",
        ),
    ]
    draining: Annotated[
        bool,
        figure("Whether the daemon stops when the epochs that are being read have ended.", "penstock_daemon_draining"),
    ]
    failing: Annotated[list[Failing], figure("Feeds that cannot start yet.")]
    adjusts_workers: Annotated[bool, figure("Whether the number of workers follows the load.")]
    engine: Annotated[HostEngine | None, figure("What runs hosts, with `serve --on`.")]
    memory: Annotated[Memory, figure("Memory of all streams.")]
    feeds: Annotated[list[Feed], figure("The feeds.")]
    workers: Annotated[list[Worker], figure("The workers: first the daemon's own, then those of hosts.")]
    hosts: Annotated[list[Host], figure("The hosts that have joined.")]
    streams: Annotated[list[Stream], figure("The consumers, up to 200.")]
    more_streams: Annotated[int, figure("Consumers that are left out.")]
    more_workers: Annotated[int, figure("Workers that are left out, beyond 400.")] = 0
    more_hosts: Annotated[int, figure("Hosts that are left out, beyond 100.")] = 0
    phase: Annotated[
        str, figure("What keeps the feeds from being read, in words, while they start. Empty if nothing does.")
    ] = ""
    window_seconds: Annotated[float, figure("Length of the time that averages are over: ten seconds at most.")] = 0.0


# msgspec reads a struct's types when it first decodes one. Two threads that are first at the same time crash, and two
# feeds of a trainer may be. So it happens here, during the import.
msgspec.json.Decoder(Status)
