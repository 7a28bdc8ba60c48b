"""What do the coordinator's decisions cost? The time per batch of its state machine alone, without any I/O.

    python benchmarks/coordinator.py                    # all rows, about three minutes
    python benchmarks/coordinator.py --quick            # about one minute, wider spread
    python benchmarks/coordinator.py --json coordinator.json

How it is measured:

- First, the events of each row are recorded once, with a real coordinator and simulated workers, consumers and slots. A
  slot is there as soon as the coordinator asks for it. Each worker fills its turns in order, and takes half to one and
  a half units of a simulated clock for each. A consumer hands over, releases and acknowledges each slab as soon as it
  is sent.
- Then a fresh coordinator gets the same events. It answers with the same commands, since it depends on nothing else.
  Only this is timed: a loop that calls the coordinator and takes its commands after each call, as a daemon does. *The
  loop* is the time of the same loop with a function that does nothing. It is shown, but not subtracted.
- Timing begins when each lane was visited once and the stream's window is full.
- Times are CPU times of this process, which does nothing else. Each round has one trial of every row, and begins with
  another row. The first round warms up and is dropped. The tables have medians, with the least and the greatest value.
  *Of the first* is the cost of a batch over that of the first row, taken within a round.
- With turns of one batch each batch is a slab of its own. That is the worst case, which large batches have. Small
  batches share slabs, as in the rows with turns of 16.

*Opening* a stream is measured from Open to the request for the first turn, without the worker's answer. Beside it are
the times that a worker takes to write the list of splits, and to read a lane's first split from a shared list.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from measure import Spread, digits
from transport import machine, progress

from penstock_proto import Leaf
from penstock_proto import messages as m
from penstock_proto.messages import FeedPlan
from penstock_server.coordinator import Coordinator
from penstock_server.coordinator.model import commands as do
from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.model.feeds import SplitsInfo
from penstock_server.coordinator.model.open_request import OpenRequest
from penstock_server.shuffling.permutation import make_key, permute
from penstock_server.worker.reading.split_list import SharedSplits, write_list

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

    `length`: batches in a lane (for an indexable feed: in an epoch). `consumers`: how many consumers (of a group, or
    ranks) each stream has. `event`: the last worker's fate when the timing starts: it "leaves", and its lanes never
    come to a border; or it "dies", and lanes move back to the new process.
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
    consumers: int = 1
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
    Row("a group of 4, 16 lanes, 2 workers", consumers=4),
    Row("a group of 4, 4096 lanes, 256 workers", lanes=4096, workers=256, consumers=4),
    Row("4 ranks, 16 lanes, 2 workers", consumers=4, ranks=True),
    Row("4 ranks, 4096 lanes, 256 workers", lanes=4096, workers=256, consumers=4, ranks=True),
]


class Served:
    """A coordinator with the streams of a row open."""

    def __init__(self, row: Row) -> None:
        self.coordinator = Coordinator(workers=row.workers, memory=PLENTY)
        splits = SplitsInfo(0 if row.indexable else 1, 0 if row.indexable else row.splits, bytes(32))
        self.handle(on.Imported(0, (row.plan(),)))
        self.handle(on.SplitsListed(0, splits, Leaf("float32", (16,)), 64))
        self.first: list[do.Command] = []
        for stream in range(row.streams):
            for rank in range(row.consumers):
                ask = OpenRequest(
                    credit=8,
                    credit_bytes=PLENTY,
                    quota=8,
                    group=f"group {stream}" if row.consumers > 1 else "",
                    rank=rank if row.ranks else 0,
                    world_size=row.consumers if row.ranks else 0,
                    shares=row.consumers == 1,
                )
                self.first += self.handle(on.Open(len(self.coordinator.consumers) + 1, "train", ask))
        for consumer in self.coordinator.consumers:
            self.first += self.handle(on.Begin(consumer, 0))

    def handle(self, event: on.Event) -> list[do.Command]:
        return self.coordinator.handle(event, 0.0)


class World:
    """Simulated workers, consumers and slots, which answer the coordinator's commands and record their answers.

    Attributes:
        events: the coordinator's events so far.
        batches: how many were sent so far.
    """

    def __init__(self, row: Row) -> None:
        self.events: list[on.Event] = []
        self.batches = 0
        self._row = row
        self._served = Served(row)
        self._random = random.Random(0)
        self._fills: list[deque[do.Fill]] = [deque() for _ in range(row.workers)]
        self._busy: list[tuple[float, int]] = []
        """When each busy worker will have finished its first turn, soonest first."""
        self._now = 0.0
        self._careful: set[int] = set()
        self._slabs: dict[int, list[int]] = {number: [0, 0] for number in self._served.coordinator.consumers}
        """How many slabs and Ends came to each consumer."""

    def run(self, batches: int) -> None:
        """Continue until `batches` batches were sent in all."""
        self._carry_out(self._served.first)
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
            self._tell(on.RetireWorkers((last,)))
        elif self._row.event == "dies":
            self._fills[last].clear()
            self._tell(on.WorkerDied(last, "was killed by SIGKILL"))
            self._tell(on.Imported(last, (self._row.plan(),)))

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
            last = first + each >= count
            made = m.Made(
                fill.run,
                fill.ticket,
                first=first,
                batches=max(0, batches),
                rows=max(0, batches) * BATCH_ROWS,
                last=last,
                ended=last and ended,
                leftover=ROWS_LEFT if last and ended else 0,
                record=RECORD,
                border=row.event == "dies",
            )
            self._tell(made)

    def _tell(self, event: on.Event) -> None:
        self._carry_out(self._handle(event))

    def _handle(self, event: on.Event) -> list[do.Command]:
        self.events.append(event)
        return self._served.handle(event)

    def _carry_out(self, first: list[do.Command]) -> None:
        commands = deque(first)
        while commands:
            match commands.popleft():
                case do.FindSlot() as command:
                    commands += self._handle(on.SlotFound(command.ticket))
                case do.StartRun(run=run, careful=True):
                    self._careful.add(run)
                case do.Fill() as command:
                    self._fills[command.worker].append(command)
                    if len(self._fills[command.worker]) == 1:
                        self._start(command.worker)
                case do.DropRun(worker=worker, run=run):
                    dropped = [fill for fill in self._fills[worker] if fill.run == run]
                    for fill in dropped:
                        self._fills[worker].remove(fill)
                        commands += self._handle(m.Made(run, fill.ticket, first=0, batches=0, rows=0, last=True))
                case do.WriteRows() as command:
                    commands += self._handle(m.RowsWritten(command.run, command.ticket))
                case do.SendSlab() as command:
                    self.batches += command.batches
                    came = self._slabs[command.consumer]
                    came[0] += 1
                    commands += self._handle(on.Acknowledge(command.consumer, came[0], (command.seq,), came[1]))
                case do.Tell(consumer=consumer, message=m.End() as end):
                    came = self._slabs[consumer]
                    came[1] += 1
                    commands += self._handle(on.Acknowledge(consumer, came[0], (), came[1]))
                    commands += self._handle(on.Begin(consumer, end.epoch + 1))


def nothing(*_: object, **__: object) -> None:
    """Do nothing: called when only the loop is measured."""


@dataclass(frozen=True)
class History:
    """The recorded events of a row. The first `warm` of them are not timed."""

    row: Row
    events: list[on.Event]
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
    """Return the seconds per batch of the coordinator with the loop, and of the loop alone."""
    served = Served(told.row)
    handle = served.coordinator.handle
    for event in told.events[: told.warm]:
        handle(event, 0.0)
    timed = told.events[told.warm :]
    before = sum(consumer.batches for consumer in served.coordinator.consumers.values())
    gc.collect()
    gc.freeze()  # the recorded events are not the coordinator's garbage
    began = time.process_time()
    for event in timed:
        handle(event, 0.0)
    took = time.process_time() - began
    began = time.process_time()
    for event in timed:
        nothing(event, 0.0)
    loop = time.process_time() - began
    gc.unfreeze()
    sent = sum(consumer.batches for consumer in served.coordinator.consumers.values()) - before
    if told.row.length == ENDLESS and sent != told.batches:  # otherwise readers count from the start of their epoch
        raise AssertionError(f"{told.row.label}: {sent} batches were sent, and {told.batches} when it was recorded")
    return took / told.batches, loop / told.batches


def opening(lanes: int, shuffle: int) -> dict[str, float]:
    """Return the seconds that a stream, and an epoch with a million splits, take to begin."""
    row = Row("", lanes=lanes, splits=SPLITS)
    plan = msgspec.structs.replace(row.plan(), shuffle=shuffle)
    splits = [f"/data/train/part-{number:07}.tfrecord" for number in range(SPLITS)]
    began = time.process_time()
    fd, nbytes, digest = write_list(splits)
    wrote = time.process_time() - began
    coordinator = Coordinator(workers=row.workers, memory=PLENTY)
    coordinator.handle(on.Imported(0, (plan,)), 0.0)
    coordinator.handle(on.SplitsListed(0, SplitsInfo(1, SPLITS, digest), Leaf("float32", (16,)), 64), 0.0)
    began = time.process_time()
    commands = coordinator.handle(on.Open(1, "train", OpenRequest(credit=8, credit_bytes=PLENTY, quota=8)), 0.0)
    wish = next(command for command in commands if isinstance(command, do.FindSlot))
    coordinator.handle(on.SlotFound(wish.ticket), 0.0)
    opened = time.process_time() - began
    began = time.process_time()
    read = SharedSplits(fd, nbytes)
    read[permute(make_key(0, 0, "splits"), SPLITS, 0) if shuffle else 0]
    found = time.process_time() - began
    os.close(fd)
    return {"write the list": wrote, "open a stream": opened, "read a first split": found}


def table(rows: list[tuple[str, ...]]) -> str:
    """Return the rows as a table in Markdown. The first one is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[cell.ljust(widths[0]) if not n else cell.rjust(widths[n]) for n, cell in enumerate(row)] for row in rows]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(report: dict[str, Any]) -> str:
    """Return the measurements in Markdown."""
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
    parser.add_argument("--only", default="", help="rows with one of these words, comma between them; and the first")
    parser.add_argument("--slabs", type=int, help="to be sent in a row (10000, or 3000 with --quick)")
    parser.add_argument("--repeats", type=int, help="rounds that count (5, or 3 with --quick)")
    parser.add_argument("--quick", action="store_true", help="fewer slabs, fewer repeats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
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
