"""What do decisions cost? The coordinator alone: the time of its state machine for each batch, without any I/O.

    python benchmarks/coordinator.py                    # all rows, about three minutes
    python benchmarks/coordinator.py --quick            # about one minute, wider spread
    python benchmarks/coordinator.py --json coordinator.json

How it is measured:

- Workers, consumers and slots are simulated once for each row, with the coordinator that a daemon has. A slot is found
  as soon as it is requested. Each worker fills its turns in order and takes 0.5 to 1.5 units of a simulated clock. A
  consumer hands over, releases and acknowledges each slab as soon as it is sent. All events are recorded.
- Then the events are replayed to a fresh coordinator, which answers with the same commands, since it depends on nothing
  else. Only this is timed: a loop that calls the coordinator and takes its commands after each call, as the daemon
  does. *The loop* is the cost of the same calls to a function that does nothing; it is shown, not subtracted.
- The first batches are not timed, until each lane was visited once and the stream's window is full.
- Times are CPU times of this process, in which nothing else runs. In each round every row is measured once, and each
  round begins with another row. The first round warms up and is dropped. Tables show the median, the least and the
  greatest. *Of the first* is taken within a round: the cost of a batch over that in the first row.
- With turns of one batch each batch is a slab of its own: the worst case, which large batches have. Small ones share
  slabs, as in the rows with turns of 16.

Opening a stream is measured from Open to the first turn that a worker is given, without the worker's answer. Beside it
are the times that a worker takes to write the list of splits, and to read a lane's first split from such a list.
"""

import argparse
import gc
import heapq
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from measure import Spread, digits
from transport import machine, progress

from penstock_proto import Leaf
from penstock_proto import messages as m
from penstock_proto.messages import FeedPlan
from penstock_server.coordinator import Coordinator
from penstock_server.coordinator import commands as do
from penstock_server.coordinator.consumer import Consumer
from penstock_server.coordinator.feeds import SplitsInfo
from penstock_server.coordinator.order import Part
from penstock_server.coordinator.rendezvous import Ask
from penstock_server.permutation import make_key, permute
from penstock_server.worker.splits import SplitList, write_list

PLENTY = 1 << 50
SPLITS = 1_000_000
BATCH_ROWS = 32
ENDLESS = 1 << 30
RECORD = bytes(48)
ROWS_LEFT = 5
"""Leftover rows of a lane that ends."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    `length`: batches in a lane (of an indexable feed: in an epoch). `readers`: of a group, or ranks, of each stream.
    `event`: what the last worker does when the clock starts: it "leaves", and its lanes never come to a border; or it
    "dies", and lanes move back to its replacement.
    """

    label: str
    lanes: int = 16
    workers: int = 2
    streams: int = 1
    splits: int = 100_000
    turn: int = 1
    order: str = "exact"
    indexable: bool = False
    length: int = ENDLESS
    readers: int = 1
    ranks: bool = False
    event: str = ""

    def plan(self) -> FeedPlan:
        return FeedPlan(
            name="train",
            spec=None,
            batch_size=BATCH_ROWS,
            turn=self.turn,
            lanes=1 if self.indexable else self.lanes,
            order=self.order,
            shuffle=0,
            interleave=1,
            seed=0,
            epochs=None,
            samples=None,
            length=self.length * BATCH_ROWS if self.indexable else None,
            drop_remainder=False,
            static_splits=True,
        )


ROWS = [
    Row("16 lanes, 2 workers"),
    Row("256 lanes, 16 workers", lanes=256, workers=16),
    Row("4096 lanes, 2 workers", lanes=4096),
    Row("4096 lanes, 256 workers", lanes=4096, workers=256),
    Row("the same, 1000 splits", lanes=4096, workers=256, splits=1000),
    Row("the same, 1000000 splits", lanes=4096, workers=256, splits=1_000_000),
    Row("the same, turns of 16", lanes=4096, workers=256, turn=16),
    Row("256 lanes, 16 workers, 64 streams", lanes=256, workers=16, streams=64),
    Row("16 lanes, 2 workers, 64 streams", streams=64),
    Row("16 lanes, 2 workers, turns of 16", turn=16),
    Row("whole epochs: 16 lanes of 4 batches, 2 workers", length=4),
    Row("whole epochs: 4096 lanes of 4 batches, 256 workers", lanes=4096, workers=256, length=4),
    Row("a worker leaves, 16 lanes, 2 workers", event="leaves"),
    Row("a worker leaves, 4096 lanes, 256 workers", lanes=4096, workers=256, event="leaves"),
    Row("a worker died, 4096 lanes, 256 workers", lanes=4096, workers=256, event="dies"),
    Row("fast order, 16 lanes, 2 workers", order="fast"),
    Row("fast order, 4096 lanes, 256 workers", lanes=4096, workers=256, order="fast"),
    Row("fast order, whole epochs, 4096 lanes, 256 workers", lanes=4096, workers=256, order="fast", length=4),
    Row("indexable, 2 workers", indexable=True),
    Row("indexable, 256 workers", workers=256, indexable=True),
    Row("indexable, fast order, 256 workers", workers=256, indexable=True, order="fast"),
    Row("a group of 4, 16 lanes, 2 workers", readers=4),
    Row("a group of 4, 4096 lanes, 256 workers", lanes=4096, workers=256, readers=4),
    Row("4 ranks, 16 lanes, 2 workers", readers=4, ranks=True),
    Row("4 ranks, 4096 lanes, 256 workers", lanes=4096, workers=256, readers=4, ranks=True),
]


class Served:
    """A coordinator with the open streams of a row."""

    def __init__(self, row: Row) -> None:
        self.coordinator = Coordinator(workers=row.workers, memory=PLENTY)
        self.coordinator.plans([row.plan()], 0)
        splits = SplitsInfo(0 if row.indexable else 1, 0 if row.indexable else row.splits, bytes(32))
        self.coordinator.splits_listed(0, splits, Leaf("float32", (16,)), 64)
        self.readers: dict[int, Consumer] = {}
        for stream in range(row.streams):
            for rank in range(row.readers):
                ask = Ask(
                    credit=8,
                    credit_bytes=PLENTY,
                    quota=8,
                    group=f"group {stream}" if row.readers > 1 else "",
                    rank=rank if row.ranks else 0,
                    world_size=row.readers if row.ranks else 0,
                )
                reader = self.coordinator.open("train", ask)
                self.readers[reader.number] = reader
        for reader in self.readers.values():
            self.coordinator.begin(reader, 0)


def acknowledge(served: Served, reader: int, handed: int, released: tuple[int, ...], ended: int) -> None:
    served.coordinator.acknowledge(served.readers[reader], handed, released, ended)


def begin(served: Served, reader: int, epoch: int) -> None:
    served.coordinator.begin(served.readers[reader], epoch)


class World:
    """Workers, consumers and slots that carry out the coordinator's commands, and record the events that this makes.

    Attributes:
        events: the coordinator's events so far.
        batches: batches sent so far.
    """

    def __init__(self, row: Row) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.batches = 0
        self._row = row
        self._served = Served(row)
        self._random = random.Random(0)
        self._fills: list[deque[do.Fill]] = [deque() for _ in range(row.workers)]
        self._busy: list[tuple[float, int]] = []
        """A heap of (time, worker): when each busy worker will have filled its first turn."""
        self._now = 0.0
        self._careful: set[int] = set()
        self._slabs: dict[int, list[int]] = {number: [0, 0] for number in self._served.readers}
        """How many slabs and Ends each consumer has received."""

    def run(self, batches: int) -> None:
        """Continue until `batches` were sent in all."""
        self._answer()
        while self.batches < batches:
            self._now, worker = heapq.heappop(self._busy)
            if self._fills[worker]:
                self._make(worker, self._fills[worker].popleft())
            if self._fills[worker]:
                self._start(worker)

    def happen(self) -> None:
        """Cause the row's event."""
        last = self._row.workers - 1
        if self._row.event == "leaves":
            self._tell(Coordinator.retire_worker, last)
        elif self._row.event == "dies":
            self._fills[last].clear()
            self._tell(Coordinator.worker_died, last, "was killed by SIGKILL")
            self._tell(Coordinator.worker_ready, last)

    def _start(self, worker: int) -> None:
        took = self._fills[worker][0].batches * self._random.uniform(0.5, 1.5)
        heapq.heappush(self._busy, (self._now + took, worker))

    def _make(self, worker: int, fill: do.Fill) -> None:
        row = self._row
        left = row.length - fill.index if not row.indexable else fill.batches
        count = min(left, fill.batches)
        ended = count < fill.batches
        each = 1 if fill.run in self._careful else max(1, count)
        for first in range(0, max(1, count), each):
            batches = min(each, count - first)
            part = Part(first, batches, batches * BATCH_ROWS, (), RECORD) if batches > 0 else None
            last = first + each >= count
            said = {"last": last, "ended": last and ended, "leftover": ROWS_LEFT if last and ended else 0}
            border = row.event == "dies"
            self._tell(Coordinator.made, fill.ticket, fill.run, part, record=RECORD, border=border, **said)

    def _tell(self, call: Callable[..., object], *values: object, **named: object) -> None:
        self._call(call, *values, **named)
        self._answer()

    def _call(self, call: Callable[..., object], *values: object, **named: object) -> None:
        event = call, values, named
        self.events.append(event)
        bound(self._served, event)()

    def _answer(self) -> None:
        coordinator = self._served.coordinator
        while commands := coordinator.take():
            for command in commands:
                match command:
                    case do.FindSlot():
                        self._call(Coordinator.slot_found, command.ticket)
                    case do.StartRun(run=run, careful=True):
                        self._careful.add(run)
                    case do.Fill():
                        self._fills[command.worker].append(command)
                        if len(self._fills[command.worker]) == 1:
                            self._start(command.worker)
                    case do.DropRun(worker=worker, run=run):
                        dropped = [fill for fill in self._fills[worker] if fill.run == run]
                        for fill in dropped:
                            self._fills[worker].remove(fill)
                            self._call(Coordinator.made, fill.ticket, run, None, last=True)
                    case do.WriteRows():
                        self._call(Coordinator.rows_written, command.ticket, command.run)
                    case do.SendSlab():
                        self.batches += command.batches
                        came = self._slabs[command.consumer]
                        came[0] += 1
                        self._call(acknowledge, command.consumer, came[0], (command.seq,), came[1])
                    case do.Tell(message=m.End() as end):
                        came = self._slabs[command.consumer]
                        came[1] += 1
                        self._call(acknowledge, command.consumer, came[0], (), came[1])
                        self._call(begin, command.consumer, end.epoch + 1)


def bound(served: Served, event: tuple[Any, ...]) -> partial[object]:
    call, values, named = event
    target = served if call in (acknowledge, begin) else served.coordinator
    return partial(call, target, *values, **named)


def nothing(*_: object, **__: object) -> None:
    """Called instead of the coordinator when only the loop is measured."""


@dataclass(frozen=True)
class History:
    """The coordinator's events in a row. The first `warm` of them are not timed."""

    row: Row
    events: list[tuple[Any, ...]]
    warm: int
    batches: int


def history(row: Row, batches: int) -> History:
    """Record the events while about `batches` slabs are sent, or a whole epoch if lanes end."""
    world = World(row)
    if row.length == ENDLESS:
        lanes = row.workers if row.indexable else min(row.lanes, row.splits)
        world.run(row.turn * row.streams * (lanes + 4 * row.workers))
    else:
        batches = max(batches, row.lanes * row.length + row.lanes * ROWS_LEFT // BATCH_ROWS)
    first, sent = len(world.events), world.batches
    world.happen()
    world.run(sent + batches * row.turn)
    return History(row, world.events, first, world.batches - sent)


def replay(told: History) -> tuple[float, float]:
    """Seconds per batch of the coordinator including the loop, and of the loop alone."""
    served = Served(told.row)
    take = served.coordinator.take
    take()
    for event in told.events[: told.warm]:
        bound(served, event)()
        take()
    calls = [bound(served, event) for event in told.events[told.warm :]]
    idle = [partial(nothing, *call.args, **call.keywords) for call in calls]
    before = sum(reader.batches for reader in served.readers.values())
    gc.collect()
    gc.freeze()  # objects of the measurement are not the coordinator's work
    began = time.process_time()
    for call in calls:
        call()
        take()
    took = time.process_time() - began
    began = time.process_time()
    for call in idle:
        call()
        nothing()
    loop = time.process_time() - began
    gc.unfreeze()
    sent = sum(reader.batches for reader in served.readers.values()) - before
    if told.row.length == ENDLESS and sent != told.batches:  # else readers count from the start of their epoch
        raise AssertionError(f"{told.row.label}: {sent} batches were sent, but {told.batches} in the recording")
    return took / told.batches, loop / told.batches


def opening(lanes: int, shuffle: int) -> dict[str, float]:
    """Seconds to open a stream and an epoch with a million splits."""
    row = Row("", lanes=lanes, splits=SPLITS)
    plan = msgspec.structs.replace(row.plan(), shuffle=shuffle)
    splits = [f"/data/train/part-{number:07}.tfrecord" for number in range(SPLITS)]
    began = time.process_time()
    fd, nbytes, digest = write_list(splits)
    wrote = time.process_time() - began
    coordinator = Coordinator(workers=row.workers, memory=PLENTY)
    coordinator.plans([plan], 0)
    coordinator.splits_listed(0, SplitsInfo(1, SPLITS, digest), Leaf("float32", (16,)), 64)
    began = time.process_time()
    coordinator.open("train", Ask(credit=8, credit_bytes=PLENTY, quota=8))
    wish = next(command for command in coordinator.take() if isinstance(command, do.FindSlot))
    coordinator.slot_found(wish.ticket)
    coordinator.take()
    opened = time.process_time() - began
    began = time.process_time()
    read = SplitList(fd, nbytes)
    read[permute(make_key(0, 0, "splits"), SPLITS, 0) if shuffle else 0]
    found = time.process_time() - began
    os.close(fd)
    return {"write the list": wrote, "open a stream": opened, "read a first split": found}


def table(rows: list[tuple[str, ...]]) -> str:
    """The rows, the first of them the head, as a table in Markdown."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[cell.ljust(widths[0]) if not n else cell.rjust(widths[n]) for n, cell in enumerate(row)] for row in rows]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(report: dict[str, Any]) -> str:
    """The results, in Markdown."""
    cells: list[tuple[str, ...]] = [("", "us a batch", "of the first", "the loop, us", "batches/s")]
    for one in report["rows"]:
        cost, ratio, loop = (Spread(**one[key]) for key in ("us_per_batch", "of_the_first", "loop_us"))
        cells.append((one["row"]["label"], str(cost), str(ratio), digits(loop.median), digits(1e6 / cost.median)))
    found = [table(cells)]
    if report["opening"]:
        cells = [(f"{SPLITS} splits; ms", *report["opening"][0]["ms"])]
        for one in report["opening"]:
            label = f"{one['lanes']} lanes{', shuffled' if one['shuffle'] else ''}"
            cells.append((label, *(str(Spread(**spread)) for spread in one["ms"].values())))
        found.append(table(cells))
    return "\n\n".join(found)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows with one of these words (comma-separated), and the first row")
    parser.add_argument("--slabs", type=int, help="slabs to send in a row (10000, or 3000 with --quick)")
    parser.add_argument("--repeats", type=int, help="rounds that count (5, or 3 with --quick)")
    parser.add_argument("--quick", action="store_true", help="fewer slabs, fewer repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    chosen = parser.parse_args()
    chosen.slabs = chosen.slabs or (3000 if chosen.quick else 10_000)
    chosen.repeats = chosen.repeats or (3 if chosen.quick else 5)
    if min(chosen.slabs, chosen.repeats) < 1:
        parser.error("--slabs and --repeats must be at least 1")
    return chosen


def main() -> int:
    chosen = options()
    report: dict[str, Any] = {"machine": machine(), "slabs": chosen.slabs, "rows": [], "opening": []}
    print(json.dumps(report["machine"]), end="\n\n")
    words = chosen.only.split(",")
    histories = []
    for row in ROWS:
        if row is ROWS[0] or any(word in row.label for word in words):
            progress(f"recording: {row.label}")
            histories.append(history(row, chosen.slabs))
    took: dict[str, list[tuple[float, float]]] = {told.row.label: [] for told in histories}
    for round_ in range(chosen.repeats + 1):
        for position in range(len(histories)):
            told = histories[(round_ + position) % len(histories)]
            progress(f"round {round_} of {chosen.repeats}: {told.row.label}")
            measured = replay(told)
            if round_:
                took[told.row.label].append(measured)
    progress("")
    first = [whole for whole, _ in took[ROWS[0].label]]
    for told in histories:
        both = took[told.row.label]
        report["rows"].append(
            {
                "row": asdict(told.row),
                "batches": told.batches,
                "us_per_batch": asdict(Spread.of([whole * 1e6 for whole, _ in both])),
                "of_the_first": asdict(Spread.of([whole / one for (whole, _), one in zip(both, first, strict=True)])),
                "loop_us": asdict(Spread.of([loop * 1e6 for _, loop in both])),
                "seconds_per_batch": both,
            }
        )
    for lanes, shuffle in ((16, 0), (16, 4096), (4096, 0), (4096, 4096)):
        progress(f"opening: {lanes} lanes, shuffle={shuffle}")
        rounds = [opening(lanes, shuffle) for _ in range(chosen.repeats)]
        spreads = {name: asdict(Spread.of([one[name] * 1e3 for one in rounds])) for name in rounds[0]}
        report["opening"].append({"lanes": lanes, "shuffle": shuffle, "ms": spreads})
    progress("")
    print(tables(report))
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
