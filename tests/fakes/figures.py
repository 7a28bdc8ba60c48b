"""Figures of a measured feed, for tests of what is said about them."""

from __future__ import annotations

from penstock_proto.status.figures import CpuUse, Figures, WorkerShares


def worker(
    number: int = 0,
    generating: float = 0.0,
    idle: float = 0.0,
    cpu: float = 0.5,
    lacking: float = 0.0,
    awaited: float = 0.0,
    host: str | None = None,
) -> WorkerShares:
    return WorkerShares(number, generating, idle, cpu, lacking, "" if host is None else f"{host}/0", host, awaited)


def machine(
    *, free: float, idle: float | None = None, count: int = 2, allowed: int | None = None, stolen: float = 0.0
) -> CpuUse:
    return CpuUse(count, count if allowed is None else allowed, free if idle is None else idle, free, stolen)


FIGURES = Figures(
    url="tcp://127.0.0.1:5555/train",
    transport="local",
    consumer="NumPy",
    seconds=10.0,
    batches=1000,
    samples=32000,
    nbytes=5e9,
    first_batch_seconds=0.5,
    waiting=0.9,
    receiving=0.1,
    step=0.0,
    workers=(worker(0, generating=0.9, cpu=0.3), worker(1, generating=0.9, cpu=0.3)),
    daemon_cpu=0.1,
    consumer_cpu=0.1,
    cpus=2,
    lanes=16,
    machine=machine(free=1.2),
    slots=8,
    turn=1,
    splits=64,
    made=1000,
    sent=1000,
    workers_before=2,
    workers_after=2,
)
"""Two workers that mostly wait for files are always in the generator, and CPUs are left."""

IDLE = (worker(0, idle=0.7, cpu=0.1), worker(1, idle=0.6, cpu=0.1))
