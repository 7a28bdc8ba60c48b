"""The figures of the CPUs of the daemon's host."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from ..declarations import figure


class Machine(Struct, frozen=True, kw_only=True):
    """The CPUs of the daemon's host. Times are counted since the daemon was started, and added up over CPUs."""

    count: Annotated[int, figure("CPUs that the daemon may run on, without regard to quotas of its cgroups.")]
    idle_seconds: Annotated[
        float, figure("Seconds in which they were idle.", "penstock_daemon_host_idle_cpu_seconds_total")
    ]
    free_seconds: Annotated[
        float,
        figure(
            "CPU seconds that the daemon and its workers could have used in addition: idle ones that quotas allow.",
            "penstock_daemon_free_cpu_seconds_total",
        ),
    ]
    stolen_seconds: Annotated[
        float,
        figure("Seconds that the hypervisor gave to other hosts.", "penstock_daemon_host_stolen_cpu_seconds_total"),
    ]
