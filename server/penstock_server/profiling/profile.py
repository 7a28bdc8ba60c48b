"""What a profile has seen: how long each worker had each stack, on a CPU and waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from .folding import IDLE, PENSTOCK, USER, Frame

Stack = tuple[Frame, ...]

LEAST = 0.005
"""Lines with a smaller share of the time are not listed."""


@dataclass(eq=False)
class Sampled:
    """The samples of one worker's process.

    Attributes:
        number: the worker's.
        pid: the process's.
        name: the worker's, as the status has it: its number, or "b/3" on a host that has joined.
        samples: how many there are.
        runs: stacks in the order in which they came, with the ns for which each was seen, and whether on a CPU; equal
            ones in succession are one.
        ended: whether the process ended meanwhile.
    """

    number: int
    pid: int
    name: str = ""
    samples: int = 0
    runs: list[tuple[Stack, int, bool]] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        self.name = self.name or str(self.number)

    def add(self, stack: Stack, ns: int, on_cpu: bool) -> None:
        """Add a sample."""
        self.samples += 1
        if self.runs and self.runs[-1][0] is stack and self.runs[-1][2] == on_cpu:
            ns += self.runs.pop()[1]
        self.runs.append((stack, ns, on_cpu))


@dataclass(frozen=True, slots=True)
class HotLine:
    """A line, and its time as a share of that in which workers worked: `share` in all, `on_cpu` of that on a CPU."""

    frame: Frame
    share: float
    on_cpu: float
    seconds: float


@dataclass(eq=False)
class Profile:
    """The samples of all workers of a daemon.

    Attributes:
        url: the daemon's or a feed's address.
        seconds: how long it took.
        workers: by process; one that was replaced has its successor beside it.
        hosts: those that had joined: how each was lost or why it is missing; empty if all of its samples came.
    """

    url: str
    seconds: float = 0.0
    workers: list[Sampled] = field(default_factory=list)
    hosts: dict[str, str] = field(default_factory=dict)

    def stacks(self) -> dict[tuple[Stack, bool], int]:
        """Return the ns of each stack in all workers, on a CPU (True) and waiting (False)."""
        found: Counter[tuple[Stack, bool]] = Counter()
        for worker in self.workers:
            for stack, ns, on_cpu in worker.runs:
                found[stack, on_cpu] += ns
        return found

    def times(self) -> Times:
        """Return what the workers did."""
        return Times.of(self.stacks())

    def lines(self, most: int) -> list[HotLine]:
        """Return the lines that took longest: of user code, or what Penstock did itself."""
        total: Counter[tuple[str, int, str]] = Counter()
        on_cpu: Counter[tuple[str, int, str]] = Counter()
        frames: dict[tuple[str, int, str], Frame] = {}
        for (stack, computed), ns in self.stacks().items():
            line = line_of(stack)
            if line is None or line.name == IDLE:
                continue
            key = line.file, line.line, line.name
            frames[key] = line
            total[key] += ns
            on_cpu[key] += ns * computed
        worked = max(1, sum(total.values()))
        return [
            HotLine(frames[key], ns / worked, on_cpu[key] / max(1, ns), ns / 1e9)
            for key, ns in total.most_common(most)
            if ns >= LEAST * worked
        ]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of all workers together.

    Attributes:
        idle: without work.
        generating: in user code and the libraries that it calls.
        words: what Penstock did besides, in its words.
        on_cpu: of the time that was not idle, on a CPU or waiting for one.
    """

    idle: float
    generating: float
    words: dict[str, float]
    on_cpu: float

    @property
    def working(self) -> float:
        """Seconds that were not idle."""
        return self.generating + sum(self.words.values())

    @property
    def seconds(self) -> float:
        """Seconds in all."""
        return self.working + self.idle

    @classmethod
    def of(cls, stacks: dict[tuple[Stack, bool], int]) -> Times:
        """Add up the times of stacks."""
        idle = generating = computed = 0
        words: Counter[str] = Counter()
        for (stack, on_cpu), ns in stacks.items():
            if stack and stack[0].name == IDLE:
                idle += ns
                continue
            computed += ns * on_cpu
            if any(frame.kind != PENSTOCK for frame in stack) and stack[0].kind != PENSTOCK:
                generating += ns
            else:
                words[stack[0].name if stack else "elsewhere"] += ns
        by_time = {word: ns / 1e9 for word, ns in words.most_common()}
        return cls(idle / 1e9, generating / 1e9, by_time, computed / 1e9)


def line_of(stack: Stack) -> Frame | None:
    """Return the line to which a stack's time is charged: the innermost one of user code, which called what is below.

    If there is none, the outermost frame: what Penstock did, or the generator, if that is of a library itself.
    """
    return next((frame for frame in reversed(stack) if frame.kind == USER), stack[0] if stack else None)


def frames_of(stacks: Iterator[Stack]) -> dict[Frame, int]:
    """Number the frames of stacks."""
    numbers: dict[Frame, int] = {}
    for stack in stacks:
        for frame in stack:
            numbers.setdefault(frame, len(numbers))
    return numbers
