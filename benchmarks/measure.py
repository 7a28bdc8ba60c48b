"""What one turn of a contestant measured, and how turns are summed up and compared."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of a contestant of transport.py gave; None where it was not measured in that way."""

    per_second: float | None = None  # batches, by an eager loop that only takes them
    trainer_cpu: float | None = None  # seconds a batch in that loop, of all threads of the trainer's process
    reduce_per_second: float | None = None  # batches, by `Dataset.reduce`
    read_per_second: float | None = None  # batches, by an eager loop that reads all of their bytes
    latency: float | None = None  # seconds from a batch's sending to its tensor


def digits(value: float) -> str:
    """The value with three significant digits, and no exponent where it is large."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of repeated measurements, and the least and the greatest of them."""

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
    reduce_per_second: float | None  # batches, by `Dataset.reduce`; None where no tensors are made
    trainer_cpu: float  # seconds a batch, of all threads of the trainer's process, in the eager loop
    workers_cpu: float  # the same of all processes that it started
    memory: int  # bytes, anonymous and shared, of all of them
    first_seconds: float  # from its start, with TensorFlow imported, to the first batch
    sums: list[Any] | None  # shape, dtype and sum of each leaf of the first batch


@dataclass(frozen=True, slots=True)
class Quartiles:
    """The median of repeated measurements, and the values between which the middle half of them lies."""

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
    """The speeds of a loader's runs, as JSON has them, over those of the unit's, in the rounds that have both."""
    pairs = zip(runs, units, strict=False)
    return [run[key] / unit[key] for run, unit in pairs if run and unit and run[key] and unit[key]]
