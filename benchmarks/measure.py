"""The measurements of one trial, and how trials are summarized and compared."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Trial:
    """The measurements of one trial of a contestant of transport.py; None for those that were not taken."""

    per_second: float | None = None  # batches, by an eager loop that only takes them
    trainer_cpu: float | None = None  # seconds a batch in that loop, of all threads of the trainer's process
    reduce_per_second: float | None = None  # batches, by `Dataset.reduce`
    read_per_second: float | None = None  # batches, by an eager loop that reads all their bytes
    latency: float | None = None  # seconds from sending a batch to its tensor


def digits(value: float) -> str:
    """Return the value with three significant digits, without an exponent for large values."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of repeated measurements."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{digits(self.median)} ({digits(self.least)}-{digits(self.greatest)})"


@dataclass(frozen=True, slots=True)
class Run:
    """One loader's run of a pipeline, from its start to its end."""

    per_second: float  # batches, by an eager loop
    reduce_per_second: float | None  # batches, by `Dataset.reduce`; None for loaders that make no tensors
    trainer_cpu: float  # seconds a batch, of all threads of the trainer's process, in the eager loop
    workers_cpu: float  # the same, of all processes that it started
    memory: int  # bytes, anonymous and shared, of all these processes
    first_seconds: float  # from the loader's start, with TensorFlow imported, to the first batch
    sums: list[Any] | None  # shape, dtype and sum of each leaf of the first batch


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Median, lower and upper quartile of repeated measurements."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(statistics.median(values), *statistics.quantiles(values, n=4, method="inclusive")[::2])

    def __str__(self) -> str:
        if self.lower == self.upper:  # of a single measurement
            return digits(self.median)
        return f"{digits(self.median)} ({digits(self.lower)}-{digits(self.upper)})"


def ratios(runs: Sequence[Any], units: Sequence[Any], key: str = "per_second") -> list[float]:
    """Return the speeds of a loader's runs (as in the JSON) over the unit's, for the rounds that have both."""
    pairs = zip(runs, units, strict=False)
    return [run[key] / unit[key] for run, unit in pairs if run and unit and run[key] and unit[key]]
