"""What one turn of a contestant measured, and how turns are summed up and compared."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


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
