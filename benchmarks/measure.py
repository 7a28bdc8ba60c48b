"""What one turn of a contestant measured, and how turns are summed up and compared."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """One contestant's uninterrupted run: what arrived, how long it took, what it cost."""

    batches: int
    bytes: int
    seconds: float  # wall clock
    cpu_seconds: float  # of all threads of the trainer's process, user and system

    @property
    def gb_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9

    @property
    def cpu_ms_per_batch(self) -> float:
        return self.cpu_seconds / self.batches * 1e3


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


def ratios(runs: Sequence[Any], units: Sequence[Any]) -> list[float]:
    """The speeds of a loader's runs, as JSON has them, over those of the unit's, in the rounds that have both."""
    pairs = zip(runs, units, strict=True)
    return [run["per_second"] / unit["per_second"] for run, unit in pairs if run and unit]


@dataclass(frozen=True, slots=True)
class Summary:
    """A contestant's turns at one size of batch, beside the yardsticks' of the same rounds."""

    gb_per_second: Spread
    of_memcpy: Spread | None
    of_loopback: Spread | None
    cpu_ms_per_batch: Spread
    turns: Sequence[Turn]

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def ratio(turns: Sequence[Turn], yardstick: Sequence[Turn] | None) -> Spread | None:
    """Speed over the yardstick's speed, each taken within one round, where both saw one machine."""
    if yardstick is None:
        return None
    pairs = zip(turns, yardstick, strict=True)
    return Spread.of([one.gb_per_second / other.gb_per_second for one, other in pairs])


def summary(turns: Sequence[Turn], others: dict[str, list[Turn]]) -> Summary:
    """Sums up the `turns` of one contestant; `others` has the turns of all, by name."""
    return Summary(
        gb_per_second=Spread.of([turn.gb_per_second for turn in turns]),
        of_memcpy=ratio(turns, others.get("memcpy")),
        of_loopback=ratio(turns, others.get("loopback")),
        cpu_ms_per_batch=Spread.of([turn.cpu_ms_per_batch for turn in turns]),
        turns=turns,
    )
