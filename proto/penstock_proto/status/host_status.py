"""The figures of a joined host."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from ..declarations import figure
from ..messages import Machine


class HostMemory(Struct, frozen=True, kw_only=True):
    """The memory for batches on a host."""

    used: Annotated[int, figure("Bytes that batches take on the host now.", "penstock_host_memory_used_bytes")]
    allowed: Annotated[
        int, figure("Bytes that batches may take on the host (its --memory).", "penstock_host_memory_allowed_bytes")
    ]


class HostRates(Struct, frozen=True, kw_only=True):
    """What a host sends in a second."""

    bytes: Annotated[float, figure("Bytes of batches a second, to the head and to consumers.")]


class Host(Struct, frozen=True, kw_only=True):
    """A joined host. What it has not reported yet is None."""

    name: Annotated[str, figure("Its name.")]
    address: Annotated[str, figure("Where its connection comes from.")]
    state: Annotated[str, figure("`starting`, `working` or `leaving`.")]
    workers: Annotated[int, figure("Worker processes of a host that has joined.", "penstock_host_workers")]
    ready: Annotated[
        int, figure("Worker processes of a joined host that can be given work.", "penstock_host_ready_workers")
    ]
    lanes: Annotated[int, figure("Lanes that the host's workers make now.", "penstock_host_lanes")]
    slots: Annotated[int, figure("Slots that the host's workers have to fill.")]
    awaited_seconds: Annotated[
        float,
        figure(
            "Seconds that consumers have waited for batches of the host's workers.",
            "penstock_host_awaited_seconds_total",
        ),
    ]
    received_bytes: Annotated[
        int,
        figure(
            "Bytes of batches that the host has sent to the head since it joined.", "penstock_host_received_bytes_total"
        ),
    ]
    fetched_bytes: Annotated[
        int,
        figure(
            "Bytes of batches that consumers were to fetch from the host since it joined.",
            "penstock_host_fetched_bytes_total",
        ),
    ]
    lent_bytes: Annotated[
        int,
        figure(
            "Bytes of fetched batches that were lent to consumers on the host's machine.",
            "penstock_host_lent_bytes_total",
        ),
    ]
    silent_seconds: Annotated[
        float, figure("Seconds since the last message from the host.", "penstock_host_silent_seconds")
    ]
    memory: Annotated[HostMemory | None, figure("Its memory for batches.")]
    unsent_bytes: Annotated[
        int | None,
        figure("Bytes of batches that the network has not taken from the host yet.", "penstock_host_unsent_bytes"),
    ]
    cpus: Annotated[int | None, figure("CPUs that the host's workers may use.", "penstock_host_cpus")]
    machine: Annotated[Machine | None, figure("How busy its CPUs are.")]
    rates: Annotated[HostRates, figure("Averages of the last `window_seconds`.")] = HostRates(bytes=0.0)
    awaited: Annotated[
        float | None,
        figure(
            "Share of the consumers' waits for production in the last `window_seconds` in which the next batch was "
            "this host's. None if they waited for less than half a second."
        ),
    ] = None
