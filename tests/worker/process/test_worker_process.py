"""A real worker process. The test takes the daemon's place at the other end of the socketpair."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import psutil
import pytest

from penstock_proto import errors
from penstock_proto import messages as m
from penstock_proto.batches import arrays, layout
from penstock_proto.spec import DictSpec, Leaf, Spec, TupleSpec, leaf_list
from penstock_proto.transport import codec, seqpacket
from penstock_server.shuffling.pool_order import source_rows
from penstock_server.worker_state.activity import NBYTES, Activity, read, where
from tests.conftest import DaemonLauncher

T = TypeVar("T", bound=m.Message)

FEEDS = """
import os, random, sys, time
import numpy as np
from penstock_server import Feed, Leaf, TupleSpec

def counted(split):
    number, length = split
    for i in range(length):
        yield np.full(3, number, np.float32), i

def slow(split):
    for i in range(2000):
        time.sleep(0.004)
        yield np.int64(i)

def slower(split):
    while True:
        time.sleep(0.1)
        yield np.int64(0)

def breaks(split):
    for i in range(6):
        yield np.int64(i)
    raise ValueError(f"no pixels in {split}")

def changes(split):
    yield np.zeros(3, np.float32)
    yield np.zeros(3, np.float32)
    yield np.zeros(3, np.float64)

def ready(split):
    for rows in (2, 5000, 3):
        yield {"x": np.full((rows, 4), rows, np.int32), "n": rows}

def empty(split):
    return iter(())

def no_yield(split):
    split + 1

def returns_a_list(split):
    return [1, 2]

def noisy(split):
    print("printed by user code")
    input_was = sys.stdin.read()
    yield len(input_was)

def leaves(split):
    sys.exit(3)
    yield 1

def cleans_up(split):
    try:
        while True:
            yield np.int64(1)
    finally:
        with open(os.environ["MARK"], "a") as mark:
            mark.write(f"closed {split};")

def sharded(shard, epoch):
    yield np.array([*shard, epoch])

def none():
    return []

def broken_list():
    raise FileNotFoundError("no such folder")

def leaves_later(split):
    yield np.int64(1)
    yield np.int64(2)
    sys.exit("no more")

def leaves_at_the_end(split):
    try:
        yield np.int64(1)
        yield np.int64(2)
    finally:
        sys.exit(4)

def exit_list():
    sys.exit()

def fails(split):
    number, length, at = split
    for i in range(length):
        if i == at:
            raise ValueError(f"sample {i} of {number}")
        yield np.array([number, i])

def dies(split):
    number, length, at = split
    for i in range(length):
        if i == at:
            os.kill(os.getpid(), 9)
        yield np.array([number, i])

def waits(split):
    yield np.int64(0)
    yield np.int64(1)
    print("waiting", flush=True)
    time.sleep(60)

def gated(split):
    print("stands", flush=True)
    while not os.path.exists("gate"):
        time.sleep(0.01)
    yield np.int64(0)

def mended(split):
    for i in range(12):
        if i == 9 and not os.path.exists("mended"):
            raise OSError("the disk is away")
        yield np.int64(i)

def deep(split):
    for i in range(100_000):
        time.sleep(0.001)
        yield np.int64(i)

def unspeakable(split):
    yield np.int64(0)
    raise ValueError("no such file: caf\\udce9.png")

class Leaves:
    def __len__(self):
        return 7
    def __getitem__(self, i):
        if i == 4:
            sys.exit(5)
        return np.int64(i)

class Source:
    def __len__(self):
        return 7
    def __getitem__(self, i):
        if i == 6:
            raise KeyError("six")
        return np.int64(10 * i)

class Empty(Source):
    def __len__(self):
        return 0

class SlowSource:
    def __len__(self):
        return 100
    def __getitem__(self, i):
        time.sleep(0.03)
        return np.int64(10 * i)

splits = [(0, 5), (1, 0), (2, 4), (3, 2)]
feed = Feed(counted, splits=lambda: splits, batch_size=2, lanes=2)
declared = Feed(counted, splits=splits, batch_size=2, spec=TupleSpec((Leaf("float32", (3,)), Leaf("int16", ()))))
slow_feed = Feed(slow, splits=[0, 1], batch_size=2)
slower_feed = Feed(slower, splits=[0], batch_size=2)
broken = Feed(breaks, splits=["a.h5"], batch_size=2)
changing = Feed(changes, splits=["a"], batch_size=2)
whole = Feed(ready, splits=["a", "b"], batch_size=None)
yields_nothing = Feed(empty, splits=[1, 2], batch_size=2)
forgets = Feed(no_yield, splits=[1], batch_size=2)
lists = Feed(returns_a_list, splits=[1], batch_size=2)
noise = Feed(noisy, splits=[1], batch_size=1)
exits = Feed(leaves, splits=[1], batch_size=1)
exits_later = Feed(leaves_later, splits=["a"], batch_size=2)
exits_at_the_end = Feed(leaves_at_the_end, splits=["a"], batch_size=2)
exit_listing = Feed(counted, splits=exit_list, batch_size=2)
exit_items = Feed(Leaves(), batch_size=3)
failing = Feed(fails, splits=[(0, 5, 0), (1, 5, 3), (2, 6, None)], batch_size=2, lanes=1, on_error="skip")
all_fail = Feed(fails, splits=[(0, 5, 0), (1, 5, 0)], batch_size=2, lanes=1, on_error="skip")
deadly = Feed(dies, splits=[(0, 5, None), (1, 5, 3), (2, 4, None)], batch_size=2, lanes=1, on_error="skip")
mending = Feed(mended, splits=["a"], batch_size=4, lanes=1)
deeply = Feed(deep, splits=["deep.h5", "next.h5"], batch_size=2, lanes=1)
unsaid = Feed(unspeakable, splits=["a"], batch_size=2, spec=Leaf("int64", ()))
waiting = Feed(waits, splits=["w.h5"], batch_size=2)
gate = Feed(gated, splits=[0], batch_size=1, spec=Leaf("int64", ()))
cleaning = Feed(cleans_up, splits=["s"], batch_size=1)
shards = Feed(sharded, batch_size=1, lanes=3)
no_splits = Feed(counted, splits=none, batch_size=1)
no_list = Feed(counted, splits=broken_list, batch_size=1)
unpicklable = Feed(counted, splits=[lambda: 1], batch_size=1, spec=Leaf("int64", ()))
source = Feed(Source(), batch_size=3, turn=256)
slow_source = Feed(SlowSource(), batch_size=1, turn=256)
no_items = Feed(Empty(), batch_size=3)
objects = Feed(lambda split: iter([object()]), splits=[1], batch_size=1)
"""


ROOM = 1024
"""How many batches a slot of a feed with small samples has room for."""


class Worker:
    """A worker process, this end of its socketpair, and one memfd of shared memory."""

    def __init__(self, launcher: DaemonLauncher, folder: Path, feeds: list[str], *, watched: bool) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(60)
        words = ["--fd", str(theirs.fileno()), "--number", "3", *feeds]
        self.page: mmap.mmap | None = None
        self.dump = -1
        fds = []
        if watched:
            fds = [os.memfd_create("penstock-activity"), os.memfd_create("penstock-dump")]
            os.ftruncate(fds[0], NBYTES)
            self.page = mmap.mmap(fds[0], NBYTES, prot=mmap.PROT_READ)
            self.dump = fds[1]
            words += ["--activity-fd", str(fds[0]), "--stacks-fd", str(fds[1]), "--ticks"]
        self.stderr = folder / "stderr"
        with theirs, self.stderr.open("wb") as stderr:
            self.process = launcher.worker(
                *words,
                env={"MARK": str(folder / "mark")},
                folder=folder,
                stderr=stderr.fileno(),
                fds=[theirs.fileno(), *fds],
            )
        for fd in fds[:1]:
            os.close(fd)
        self.fd = -1
        self.memory: dict[int, np.ndarray[Any, Any]] = {}
        self.specs: dict[str, Spec] = {}

    def send(self, message: m.ToWorker, fd: int | None = None) -> None:
        seqpacket.send(self.socket, codec.encode(message), fd)

    def receive(self, kind: type[T]) -> T:
        data, fd = seqpacket.receive(self.socket)
        if fd is not None:
            if self.fd >= 0:
                os.close(self.fd)
            self.fd = fd
        assert data, f"the worker ended:\n{self.stderr.read_text()}"
        message = codec.from_worker(data)
        if isinstance(message, m.SpotCheck):  # tests/worker/verification/test_spot_checks.py
            return self.receive(kind)
        assert isinstance(message, kind), message
        return message

    def failure(self) -> m.ErrorReport:
        """Return the error of the run. Parts of its turn may come first."""
        while True:
            data, _ = seqpacket.receive(self.socket)
            message = codec.from_worker(data)
            if isinstance(message, m.RunFailed):
                return message.error
            if isinstance(message, m.SpotCheck):
                continue
            assert isinstance(message, m.Made), message
            assert not message.last, message

    def made(self) -> m.Made:
        """Return the end of a turn, with the batches of all of its parts. (A turn that takes long comes in parts.)"""
        made = self.receive(m.Made)
        first, batches = made.first, made.batches
        while not made.last:
            made = self.receive(m.Made)
            batches += made.batches
        return msgspec.structs.replace(made, first=first, batches=batches)

    def doing(self) -> Activity | None:
        """Return the activity on the worker's status page."""
        assert self.page is not None
        return read(self.page)

    def stderr_has(self, text: str) -> None:
        """Wait until the worker has printed this."""
        deadline = time.monotonic() + 60
        while text not in self.stderr.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert text in self.stderr.read_text()

    def nothing_comes(self) -> bool:
        return not select.select([self.socket], [], [], 0.05)[0]

    def map(self, nbytes: int, memfd: int) -> None:
        fd = os.memfd_create("penstock-test", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        self.memory[memfd] = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        self.send(m.Map(memfd, nbytes), fd)
        os.close(fd)

    def list(self, feed: str, epoch: int = 0) -> m.SplitsListed:
        """List the splits, and give the worker the list as number 1."""
        self.send(m.ListSplits(run=1000, feed=feed, epoch=epoch))
        listed = self.receive(m.SplitsListed)
        if listed.spec is not None:
            self.specs[feed] = listed.spec
        if listed.count:
            self.send(m.ShareSplits(1, listed.nbytes), self.fd)
        return listed

    def start(self, feed: str, run: int = 1, lane: int = 0, epoch: int = 0, record: bytes = b"") -> None:
        self.send(m.StartRun(run=run, feed=feed, epoch=epoch, lane=lane, splits=1, record=record))

    def fill(
        self, run: int = 1, ticket: int = 1, index: int = 0, batches: int = 1, memfd: int = 1, first: int = 0
    ) -> None:
        self.send(m.Fill(run, ticket, index, batches, memfd, len(self.memory[memfd]), first))

    def batches(
        self, feed: str, batch_size: int, count: int, memfd: int = 1, first: int = 0, room: int = ROOM
    ) -> list[tuple[list[int], list[Any]]]:
        """Return the header and leaves of consecutive batches in a slot with room for `room`."""
        slot, slot_layout = self.memory[memfd], layout.fixed_layout(self.specs[feed], batch_size, room)
        found = []
        for place in range(first, first + count):
            header = slot_layout.headers(slot)[place, :4].tolist()
            found.append((header, [leaf[place, : header[0]].tolist() for leaf in slot_layout.leaves(slot)]))
        return found

    def wait(self) -> int:
        return self.process.wait(30)

    def close(self) -> None:
        self.memory.clear()
        self.socket.close()
        try:
            self.process.wait(30)
        finally:
            self.process.close()
            for fd in (self.fd, self.dump):
                if fd >= 0:
                    os.close(fd)
            if self.page is not None:
                self.page.close()


Start = Callable[..., Worker]


@pytest.fixture
def worker(tmp_path: Path, daemon_launchers: list[DaemonLauncher]) -> Iterator[Start]:
    """`worker("feed", "source")` starts a worker that has imported these feeds of FEEDS. It is forked."""
    workers: list[Worker] = []
    (tmp_path / "feeds.py").write_text(FEEDS)

    def start(*feeds: str, imported: bool = True, watched: bool = False) -> Worker:
        targets = [feed if ":" in feed else f"feeds.py:{feed}" for feed in feeds]
        started = Worker(daemon_launchers[0], tmp_path, targets, watched=watched)
        workers.append(started)
        if imported:
            started.receive(m.Imported)
            for memfd in (1, 2):
                started.map(1 << 20, memfd)
        return started

    yield start
    for each in workers:
        each.close()


# --- start ---


def test_it_says_what_it_serves(worker: Start) -> None:
    started = worker("feed", "source", imported=False)
    imported = started.receive(m.Imported)
    assert [plan.name for plan in imported.feeds] == ["feed", "source"]
    assert imported.feeds[1].length == 7
    assert imported.imports_seconds < 10
    assert not imported.tensorflow


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["feeds.py:missing"], "no attribute 'missing'"),
        (["not_there:feed"], "no module 'not_there'"),
        (["feed", "feed"], "two feeds are named 'feed'"),
    ],
    ids=["no attribute", "no module", "twice"],
)
def test_it_says_why_it_cannot_start_and_ends(worker: Start, targets: list[str], message: str) -> None:
    started = worker(*targets, imported=False)
    error = started.receive(m.StartFailed).error
    assert error.kind == "StartError"
    assert message in error.message
    assert started.wait() == 1


def test_sys_exit_at_import_is_a_reason_not_to_start(worker: Start, tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(2)\n")
    started = worker("exits.py:feed", imported=False)
    error = started.receive(m.StartFailed).error
    assert (error.kind, error.message) == ("StartError", "importing exits.py:feed called sys.exit(2)")
    assert started.wait() == 1


# --- splits and spec ---


def test_the_first_listing_tells_the_spec(worker: Start) -> None:
    started = worker("feed")
    listed = started.list("feed")
    assert (listed.count, listed.sample_nbytes) == (4, 20)
    assert listed.spec == TupleSpec((Leaf("float32", (3,)), Leaf("int64", ())))
    again = started.list("feed", epoch=1)
    assert (again.spec, again.digest) == (None, listed.digest)


def test_a_declared_spec_needs_no_sample(worker: Start) -> None:
    listed = worker("declared").list("declared")
    assert (listed.spec, listed.sample_nbytes) == (None, 14)


def test_the_list_is_sealed_and_read_by_other_workers(worker: Start) -> None:
    first, second = worker("feed"), worker("feed")
    listed = first.list("feed")
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(first.fd, 0)
    second.send(m.ShareSplits(1, listed.nbytes), first.fd)
    second.send(m.StartRun(1, "feed", 0, 0, 1, spec=listed.spec))
    second.specs = first.specs
    second.fill()
    assert second.receive(m.Made).rows == 2
    assert second.batches("feed", 2, 1) == [([2, 0, 0, 0], [[[0.0] * 3] * 2, [0, 1]])]
    second.send(m.ForgetSplits(1))


@pytest.mark.parametrize(
    ("feed", "kind", "message"),
    [
        ("no_splits", "FeedError", "no splits to read: none returned none. Does a path or a pattern match"),
        ("no_list", "GeneratorError", "broken_list, which lists the splits, raised FileNotFoundError: no such folder"),
        ("unpicklable", "FeedError", "cannot pickle split 0 of 1"),
        ("yields_nothing", "FeedError", "all of its 2 splits were read, and none yielded a sample"),
        ("forgets", "GeneratorError", "no_yield must return an iterator, got None: did you forget to `yield`"),
        (
            "lists",
            "GeneratorError",
            "returns_a_list must return an iterator, got [1, 2]: `yield` the samples one by one",
        ),
        ("no_items", "FeedError", "the indexable object has no items"),
        ("objects", "SpecError", "dtype object, which cannot be served"),
    ],
)
def test_what_cannot_be_read_is_found_at_the_start(worker: Start, feed: str, kind: str, message: str) -> None:
    started = worker(feed)
    started.send(m.ListSplits(run=5, feed=feed, epoch=0))
    failed = started.receive(m.RunFailed)
    assert failed.run == 5
    assert failed.error.kind == kind
    assert message in failed.error.message
    assert (failed.error.feed, failed.error.worker) == (feed, 3)


def test_a_generator_that_divides_itself_has_a_split_for_each_lane(worker: Start) -> None:
    started = worker("shards")
    assert started.list("shards").count == 3
    started.start("shards", lane=2, epoch=4)
    started.fill()
    started.receive(m.Made)
    assert started.batches("shards", 1, 1)[0][1] == [[[2, 3, 4]]]


# --- turns ---


def turn(started: Any) -> list[m.Made]:
    """Receive the parts of a turn: one, or more on a busy machine, where it takes longer than 10 ms."""
    parts = [started.receive(m.Made)]
    while not (parts[-1].last or parts[-1].ended):
        parts.append(started.receive(m.Made))
    return parts


def test_a_lane_fills_its_turns_and_says_what_is_left_over(worker: Start) -> None:
    started = worker("feed")
    started.list("feed")
    started.start("feed", lane=0, epoch=1)
    started.fill(ticket=1, batches=2)
    started.fill(ticket=2, index=2, batches=3, memfd=2)
    started.fill(ticket=3, index=5, batches=3, memfd=2)
    made = turn(started)
    assert [(part.ticket, part.ended) for part in made] == [(1, False)] * len(made)
    assert (made[0].first, sum(part.batches for part in made), sum(part.rows for part in made)) == (0, 2, 4)
    assert made[-1].record
    ended = turn(started)
    assert {part.ticket for part in ended} == {2}
    assert (sum(part.batches for part in ended), sum(part.rows for part in ended)) == (2, 4)
    assert (ended[-1].ended, ended[-1].leftover) == (True, 1)
    after = started.receive(m.Made)
    assert (after.ticket, after.batches, after.last, after.ended, after.leftover) == (3, 0, True, True, 1)
    batches = [*started.batches("feed", 2, 2), *started.batches("feed", 2, 2, memfd=2)]
    assert [header for header, _ in batches] == [[2, 1, 0, 0], [2, 1, 0, 1], [2, 1, 0, 2], [2, 1, 0, 3]]
    assert [leaves[1] for _, leaves in batches] == [[0, 1], [2, 3], [4, 0], [1, 2]]
    assert batches[2][1][0] == [[0.0] * 3, [2.0] * 3]


def test_leftovers_of_several_lanes_meet_in_one_batch(worker: Start) -> None:
    started = worker("declared")
    started.specs["declared"] = TupleSpec((Leaf("float32", (3,)), Leaf("int16", ())))
    started.list("declared")
    for lane in (0, 1, 3):
        started.start("declared", run=lane, lane=lane)
        started.fill(run=lane, ticket=lane, batches=3, memfd=2)
        while not (ended := started.receive(m.Made)).last:
            pass  # a part: on a busy machine a turn takes longer than 10 ms
        assert (ended.ended, ended.leftover) == (True, (5, 0, 4, 2)[lane] % 2)
    write = m.WriteRows(run=0, ticket=9, memfd=1, nbytes=1 << 20, start=0, count=1, row=1, rows=2, index=4)
    started.send(write)
    assert started.receive(m.RowsWritten) == m.RowsWritten(0, 9)
    ((header, leaves),) = started.batches("declared", 2, 1)
    assert header == [2, 0, layout.TAIL_LANE, 4]
    assert leaves[1][1] == 4


def test_a_run_goes_on_from_its_record_in_another_worker(worker: Start) -> None:
    first, second = worker("feed"), worker("feed")
    listed = first.list("feed")
    first.start("feed")
    first.fill(batches=2)
    record = first.receive(m.Made).record
    second.specs = first.specs
    second.send(m.ShareSplits(1, listed.nbytes), first.fd)
    second.send(m.StartRun(1, "feed", 0, 0, 1, record, listed.spec))
    second.fill(index=2)
    assert second.receive(m.Made).batches == 1
    assert second.batches("feed", 2, 1)[0][1][1] == [4, 0]


def test_a_run_passes_over_the_batches_between_its_record_and_its_first_turn(worker: Start) -> None:
    first, second = worker("feed"), worker("feed")
    listed = first.list("feed")
    first.start("feed")
    first.fill(batches=1)
    record = first.receive(m.Made).record
    second.specs = first.specs
    second.send(m.ShareSplits(1, listed.nbytes), first.fd)
    second.send(m.StartRun(1, "feed", 0, 0, 1, record, listed.spec))
    second.fill(index=2)
    assert second.receive(m.Made).batches == 1
    assert second.batches("feed", 2, 1)[0] == ([2, 0, 0, 2], first_of(first, index=2))


def first_of(started: Worker, index: int) -> list[Any]:
    """Return the leaves of batch number `index` of the lane that the worker makes as run 1."""
    started.fill(ticket=9, index=index - 1, batches=2, memfd=2)
    assert started.receive(m.Made).batches == 2
    return started.batches("feed", 2, 1, memfd=2, first=1)[0][1]


def test_a_record_that_is_too_far_from_the_lanes_end_fails_the_run(worker: Start) -> None:
    started = worker("feed")
    started.list("feed")
    started.start("feed")
    started.fill(index=100)
    assert "lane 0 had 100 batches or more, and only" in started.receive(m.RunFailed).error.message


def test_batches_of_a_stripe_go_to_every_nth_place(worker: Start) -> None:
    started = worker("feed")
    started.list("feed")
    started.start("feed")
    started.send(m.Fill(1, 7, 0, 3, 2, len(started.memory[2]), 1, stripe=5, step=4))
    made = started.receive(m.Made)
    assert (made.ticket, made.first, made.batches) == (7, 0, 3)
    headers = [started.batches("feed", 2, 1, memfd=2, first=place)[0][0] for place in range(11)]
    assert [place for place, header in enumerate(headers) if header[0]] == [1, 5, 9]
    assert [headers[place] for place in (1, 5, 9)] == [[2, 0, 0, index] for index in range(3)]


def test_a_slow_turn_is_handed_over_in_parts(worker: Start) -> None:
    started = worker("slow_feed")
    started.list("slow_feed")
    started.start("slow_feed")
    started.fill(batches=10)
    parts = [started.receive(m.Made)]
    while not parts[-1].last:
        parts.append(started.receive(m.Made))
    assert 3 <= len(parts) <= 10
    assert [part.first for part in parts] == [sum(p.batches for p in parts[:i]) for i in range(len(parts))]
    assert sum(part.batches for part in parts) == 10
    assert all(part.record for part in parts if part.batches)


def test_a_dropped_run_ends_between_two_batches(worker: Start, tmp_path: Path) -> None:
    started = worker("slow_feed", "cleaning")
    started.list("slow_feed")
    started.start("slow_feed")
    started.fill(ticket=1, batches=50)
    started.fill(ticket=2, index=50, batches=50)
    assert not started.receive(m.Made).last
    started.send(m.DropRun(1))
    last = {}
    while len(last) < 2:
        made = started.receive(m.Made)
        if made.last:
            last[made.ticket] = made
    assert [(made.batches, made.ended) for made in last.values()] == [(0, False)] * 2
    assert started.nothing_comes()

    started.list("cleaning")
    started.start("cleaning", run=2)
    started.fill(run=2)
    started.receive(m.Made)
    started.send(m.DropRun(2))
    started.list("slow_feed")
    assert "closed s;closed s;" in (tmp_path / "mark").read_text()


def test_an_indexable_source_makes_any_batch(worker: Start) -> None:
    started = worker("source")
    listed = started.list("source")
    assert (listed.count, listed.spec, listed.sample_nbytes) == (0, Leaf("int64", ()), 8)
    started.send(m.StartRun(1, "source", 0, 0, 0))
    started.fill(index=1)
    assert started.receive(m.Made).rows == 3
    assert started.batches("source", 3, 1, room=256) == [([3, 0, 0, 1], [[30, 40, 50]])]
    started.fill(ticket=2, index=3)
    made = started.receive(m.Made)
    assert (made.batches, made.last, made.ended, made.leftover) == (0, True, True, 0)
    started.fill(ticket=3, index=2)
    error = started.receive(m.RunFailed).error
    assert "reading item 6 raised KeyError: 'six'" in error.message
    assert error.split == "item 6"


def test_a_worker_says_how_long_it_has_worked_on_each_range(worker: Start) -> None:
    started = worker("slow_source")
    started.list("slow_source")
    started.send(m.StartRun(1, "slow_source", 0, 0, 0))
    for ticket, batches in ((1, 10), (2, 1)):
        began = time.monotonic()
        started.fill(ticket=ticket, batches=batches)
        said = [started.receive(m.Made)]
        while not said[-1].last:
            said.append(started.receive(m.Made))
        took = 1000 * (time.monotonic() - began)
        work = [made.work_ms for made in said]
        assert work == sorted(work)
        assert 30 * batches <= work[-1] <= took


def test_a_worker_stops_within_a_range_that_takes_longer_than_it_may(worker: Start) -> None:
    started = worker("slow_source")
    started.list("slow_source")
    started.send(m.StartRun(1, "slow_source", 0, 0, 0))
    started.send(m.Fill(1, 1, 0, 90, 1, len(started.memory[1]), most_ms=100))
    said = [started.receive(m.Made)]
    while not said[-1].last:
        said.append(started.receive(m.Made))
    assert 1 <= sum(made.batches for made in said) <= 4
    assert not any(made.ended for made in said)
    started.fill(ticket=2, index=40, batches=6)
    said = [started.receive(m.Made)]
    while not said[-1].last:
        said.append(started.receive(m.Made))
    assert {made.ticket for made in said} == {2}
    assert sum(made.batches for made in said) == 6


def test_an_older_turn_that_comes_late_is_made_first(worker: Start) -> None:
    started = worker("slow_source")
    started.list("slow_source")
    started.send(m.StartRun(1, "slow_source", 0, 0, 0))
    started.map(1 << 20, memfd=2)
    started.fill(ticket=5, index=10, batches=60)
    tickets = [started.receive(m.Made).ticket]
    started.fill(ticket=4, index=3, batches=2, memfd=2)
    while (made := started.receive(m.Made)).ticket == 4 or not made.last:
        tickets.append(made.ticket)
    assert set(tickets) == {4, 5}
    assert tickets[-1] == 5
    made_of = started.batches("slow_source", 1, 60, room=256)
    assert [value for _, [[value]] in made_of] == list(range(100, 700, 10))
    assert [value for _, [[value]] in started.batches("slow_source", 1, 2, memfd=2, room=256)] == [30, 40]


def test_a_batch_that_is_too_large_waits_for_room_and_lets_others_by(worker: Start) -> None:
    started = worker("whole", "feed")
    listed = started.list("whole")
    assert listed.spec == DictSpec(("n", "x"), (Leaf("int64", ()), Leaf("int32", (None, 4))))
    assert listed.sample_nbytes == 8 + 2 * 16
    started.start("whole", run=1, lane=0)
    started.start("whole", run=2, lane=1)
    started.map(4096, 3)
    started.fill(run=1, ticket=1, index=0, memfd=3)
    assert started.receive(m.Made).shapes == ((), (2, 4))
    started.fill(run=1, ticket=2, index=1, memfd=3)
    started.fill(run=1, ticket=3, index=2, memfd=3)
    started.fill(run=2, ticket=4, index=0, memfd=3)
    need = started.receive(m.NeedRoom)
    assert (need.run, need.ticket) == (1, 2)
    assert need.nbytes == layout.lay_out(["int64", "int32"], [(), (5000, 4)]).nbytes
    made = started.receive(m.Made)
    assert (made.run, made.ticket, made.rows) == (2, 4, 2)
    started.fill(run=1, ticket=2, index=1, memfd=1)
    made = started.receive(m.Made)
    assert (made.ticket, made.rows, made.shapes, made.last) == (2, 5000, ((), (5000, 4)), True)
    slot_layout = layout.lay_out([leaf.dtype for leaf in leaf_list(listed.spec)], made.shapes)
    (count,), (x,) = slot_layout.leaves(started.memory[1])
    assert (int(count), x.shape, bool(np.all(x == 5000))) == (5000, (5000, 4), True)
    assert slot_layout.headers(started.memory[1])[0, :4].tolist() == [5000, 0, 0, 1]
    assert started.receive(m.Made).ticket == 3
    started.fill(run=1, ticket=5, index=3)
    ended = started.receive(m.Made)
    assert (ended.batches, ended.last, ended.ended, ended.leftover) == (0, True, True, 0)


def test_a_dropped_run_that_waits_for_room_answers_its_tickets(worker: Start) -> None:
    started = worker("whole")
    started.list("whole")
    started.start("whole")
    started.map(4096, 3)
    for ticket in range(3):
        started.fill(ticket=ticket, index=ticket, memfd=3)
    started.receive(m.Made)
    started.receive(m.NeedRoom)
    started.send(m.DropRun(1))
    assert [started.receive(m.Made).ticket for _ in range(2)] == [1, 2]
    assert started.nothing_comes()


# --- errors in user code ---


def test_an_exception_comes_with_the_users_own_traceback(worker: Start, tmp_path: Path) -> None:
    started = worker("broken", "feed")
    started.list("broken")
    started.start("broken")
    started.fill(ticket=1, batches=9)
    started.fill(ticket=2, index=9)
    error = started.failure().error()
    assert isinstance(error, errors.GeneratorError)
    assert error.message == "breaks raised ValueError: no pixels in a.h5"
    assert (error.feed, error.worker, error.split) == ("broken", 3, "'a.h5'")
    lines = (error.remote_traceback or "").splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    line = FEEDS.splitlines().index('    raise ValueError(f"no pixels in {split}")') + 1
    assert lines[1].strip() == f'File "{tmp_path}/feeds.py", line {line}, in breaks'
    assert lines[-1] == "ValueError: no pixels in a.h5"
    assert "penstock_server" not in "\n".join(lines)

    started.fill(ticket=3, index=9)
    started.send(m.DropRun(1))
    assert started.nothing_comes()
    assert started.list("feed").count == 4  # the worker goes on serving


def test_a_sample_that_changes_is_an_error_that_names_it(worker: Start) -> None:
    started = worker("changing")
    started.list("changing")
    started.start("changing")
    started.fill(batches=2)
    error = started.failure()
    assert error.kind == "SpecError"
    assert "float64 array of shape (3,), but the feed's spec has float32[3] there" in error.message
    assert "sample 2 of its split" in error.message
    assert (error.split, error.worker) == ("'a'", 3)


def test_a_bad_record_fails_its_run_only(worker: Start) -> None:
    started = worker("feed")
    started.list("feed")
    started.start("feed", run=7, record=b"\x80")
    failed = started.receive(m.RunFailed)
    assert failed.run == 7
    assert "restart record" in failed.error.message
    started.fill(run=7)
    started.send(m.DropRun(7))
    started.start("feed", run=8)
    started.fill(run=8)
    assert started.receive(m.Made).run == 8


def test_what_user_code_prints_goes_to_the_log(worker: Start) -> None:
    started = worker("noise")
    started.list("noise")
    started.send(m.Shutdown())
    assert started.wait() == 0
    assert "printed by user code" in started.stderr.read_text()


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ("exits", "leaves called sys.exit(3)"),
        ("exit_listing", "exit_list, which lists the splits, called sys.exit()"),
    ],
)
def test_sys_exit_in_user_code_is_an_error_and_the_worker_goes_on(worker: Start, feed: str, message: str) -> None:
    started = worker(feed, "feed")
    started.send(m.ListSplits(1, feed, 0))
    error = started.receive(m.RunFailed).error
    assert (error.kind, error.message) == ("GeneratorError", message)
    assert "SystemExit" in (error.remote_traceback or "")
    assert started.list("feed").count == 4


def test_sys_exit_in_the_middle_fails_the_run_behind_what_was_made(worker: Start) -> None:
    started = worker("exits_later", "exit_items", "exits_at_the_end")
    started.list("exits_later")
    started.start("exits_later")
    started.fill(batches=2)
    assert started.receive(m.Made).batches == 1
    error = started.failure()
    assert error.message == "leaves_later called sys.exit('no more')"
    assert error.split == "'a'"
    started.list("exit_items")
    started.send(m.StartRun(2, "exit_items", 0, 0, 0))
    started.fill(run=2, index=1)
    assert started.failure().message == "reading item 4 called sys.exit(5)"
    started.list("exits_at_the_end")
    started.start("exits_at_the_end", run=3)
    started.fill(run=3)
    assert started.receive(m.Made).batches == 1
    started.send(m.DropRun(3))
    started.list("exits_at_the_end")
    started.send(m.Shutdown())
    assert started.wait() == 0
    assert "SystemExit: 4" in started.stderr.read_text()


# --- recovery ---


def test_leftover_rows_come_again_from_a_run_that_is_read_to_its_end_for_them(worker: Start) -> None:
    first, second = worker("feed"), worker("feed")
    listed = first.list("feed")
    first.start("feed", lane=0, epoch=1)
    first.fill(batches=9)
    made = first.made()
    assert (made.ended, made.leftover) == (True, 1)
    second.specs = first.specs
    second.send(m.ShareSplits(1, listed.nbytes), first.fd)
    second.send(m.StartRun(4, "feed", 1, 0, 1, made.record, listed.spec))
    write = m.WriteRows(run=4, ticket=9, memfd=2, nbytes=1 << 20, start=0, count=1, row=1, rows=2, index=3)
    second.send(write)
    assert second.receive(m.RowsWritten) == m.RowsWritten(4, 9)
    ((header, leaves),) = second.batches("feed", 2, 1, memfd=2)
    assert header == [2, 1, layout.TAIL_LANE, 3]
    assert (leaves[0][1], leaves[1][1]) == ([2.0] * 3, 3)
    second.send(write)  # the same rows again, for example for another merged batch
    assert second.receive(m.RowsWritten) == m.RowsWritten(4, 9)
    second.send(m.DropRun(4))
    second.send(write)
    assert second.receive(m.RowsWritten) == m.RowsWritten(4, 9)


def test_rows_of_a_pool_are_copied_to_new_batches_by_a_worker_that_did_not_make_them(worker: Start) -> None:
    makes, mixes = worker("feed"), worker("feed")
    listed = makes.list("feed")
    made = []
    for lane, memfd in ((0, 1), (1, 2)):
        makes.start("feed", lane=lane, run=lane)
        makes.fill(run=lane, ticket=lane, batches=9, memfd=memfd)
        made.append(makes.made().batches)
    assert made == [4, 1]
    mixes.specs = makes.specs
    mixes.map(1 << 20, 3)
    for memfd in (1, 2):
        mixes.memory[memfd][:] = makes.memory[memfd]
    sources = (m.PooledVisit(1, made[0]), m.PooledVisit(2, made[1]))
    ask = m.PoolRows(
        run=7,
        ticket=8,
        memfd=3,
        nbytes=1 << 20,
        feed="feed",
        epoch=5,
        visit=2,
        part=1,
        sources=sources,
        first=1,
        batches=3,
        index=40,
        spec=listed.spec,
    )
    mixes.send(ask)
    assert mixes.receive(m.RowsWritten) == m.RowsWritten(7, 8)
    slots = [*makes.batches("feed", 2, made[0]), *makes.batches("feed", 2, made[1], memfd=2)]
    rows = [(tuple(image), label) for _, (images, labels) in slots for image, label in zip(images, labels, strict=True)]
    expected = [rows[number] for number in source_rows(0, 5, 2, 1, 10, 2, 6)]
    found = mixes.batches("feed", 2, 3, memfd=3)
    assert [header for header, _ in found] == [[2, 5, layout.POOL_LANE, 40 + number] for number in range(3)]
    assert [
        (tuple(image), label) for _, (images, labels) in found for image, label in zip(images, labels, strict=True)
    ] == expected
    for wrong, said in (
        ({"first": 3}, "batches from 3 on of a pool of 5"),
        ({"batches": 1100, "first": 0}, "which has no such slots"),
        ({"sources": (m.PooledVisit(9, 5),)}, "memfd 9, which is not mapped"),
    ):
        mixes.send(msgspec.structs.replace(ask, **wrong))
        failed = mixes.receive(m.RunFailed)
        assert (failed.run, failed.error.kind) == (7, "ProtocolError")
        assert said in failed.error.message


@pytest.mark.parametrize("dropped", [True, False])
def test_after_a_long_step_nothing_is_written_for_runs_that_were_dropped_meanwhile(
    worker: Start, tmp_path: Path, dropped: bool
) -> None:
    started = worker("feed", "gate")
    started.list("feed")
    started.start("feed")
    started.fill(batches=9)
    made = started.made().batches
    started.list("gate")
    started.start("gate", run=2)
    for memfd in (3, 4, 5, 6):
        started.map(1 << 20, memfd)
    started.fill(run=2, ticket=2, memfd=3)
    started.stderr_has("stands\n")
    started.fill(ticket=3, index=made, memfd=6)
    started.send(m.WriteRows(run=1, ticket=8, memfd=4, nbytes=1 << 20, start=0, count=1, row=0, rows=2, index=3))
    pool = {
        "epoch": 0,
        "visit": 0,
        "part": 0,
        "sources": (m.PooledVisit(1, made),),
        "first": 0,
        "batches": 2,
        "index": 0,
    }
    started.send(m.PoolRows(run=7, ticket=9, memfd=5, nbytes=1 << 20, feed="feed", **pool))
    if dropped:
        started.send(m.DropRun(1))
        started.send(m.DropRun(7))
    (tmp_path / "gate").touch()
    assert started.receive(m.Made).ticket == 2
    assert [started.receive(m.RowsWritten).ticket for _ in range(2)] == [8, 9]
    assert started.receive(m.Made).ticket == 3
    assert [started.memory[memfd].any() for memfd in (4, 5)] == [not dropped] * 2


def test_leftover_rows_of_a_lane_that_has_a_full_batch_are_refused(worker: Start) -> None:
    started = worker("feed")
    started.list("feed")
    started.start("feed")
    write = m.WriteRows(run=1, ticket=9, memfd=1, nbytes=1 << 20, start=0, count=1, row=1, rows=2, index=3)
    started.send(write)
    error = started.receive(m.RunFailed).error
    assert (error.kind, "a full batch, number 0" in error.message) == ("ProtocolError", True)
    started.send(write)  # the daemon sent it before it heard of the failure
    assert started.receive(m.RowsWritten) == m.RowsWritten(1, 9)


def test_leftover_rows_that_do_not_come_again_are_an_error_of_the_feed(worker: Start) -> None:
    started = worker("feed")
    started.list("feed")
    started.start("feed", run=2)
    started.fill(run=2, batches=9)
    record = started.made().record
    started.start("feed", run=3, record=record)
    started.send(m.WriteRows(3, 9, 1, 1 << 20, start=0, count=2, row=0, rows=2, index=3))
    error = started.receive(m.RunFailed).error
    assert error.kind == "FeedError"
    assert "lane 0 had 2 samples or more after its last full batch, and only 1 when" in error.message


def test_user_code_that_raises_while_leftovers_are_read_again_fails_its_run(worker: Start) -> None:
    started = worker("broken")
    started.list("broken")
    started.start("broken")
    started.fill(batches=3)
    record = started.made().record
    started.start("broken", run=2, record=record)
    started.send(m.WriteRows(2, 9, 1, 1 << 20, start=0, count=1, row=0, rows=2, index=0))
    failed = started.receive(m.RunFailed)
    assert (failed.run, failed.error.message) == (2, "breaks raised ValueError: no pixels in a.h5")


def test_the_rest_of_a_turn_is_made_where_it_belongs(worker: Start) -> None:
    first, second = worker("feed"), worker("feed")
    listed = first.list("feed")
    first.start("feed", lane=0)
    first.fill(batches=1)
    record = first.receive(m.Made).record
    second.specs = first.specs
    second.send(m.ShareSplits(1, listed.nbytes), first.fd)
    second.send(m.StartRun(1, "feed", 0, 0, 1, record, listed.spec))
    second.fill(index=1, batches=2, first=1)
    made = second.made()
    assert (made.first + made.batches, made.last) == (2, True)
    batches = second.batches("feed", 2, 2, first=1)
    assert [(header[3], leaves[1]) for header, leaves in batches] == [(1, [2, 3]), (2, [4, 0])]
    slot_layout = layout.fixed_layout(first.specs["feed"], 2, ROOM)
    for start, stop in slot_layout.regions(1, 2):
        second.memory[1][start:stop] = 0
    assert not second.memory[1].any()
    second.fill(index=3, batches=2, first=slot_layout.batches - 1)
    assert "2 batches from place 1023 on do not fit into a slot" in second.failure().message


def test_a_careful_run_reports_every_batch_with_its_record(worker: Start) -> None:
    started, other = worker("feed"), worker("feed")
    listed = started.list("feed")
    started.send(m.StartRun(1, "feed", 1, 0, 1, careful=2**62))
    started.fill(batches=4)
    parts = [started.receive(m.Made) for _ in range(4)]
    assert [(part.first, part.batches, part.last) for part in parts] == [(i, 1, i == 3) for i in range(4)]
    other.specs = started.specs
    other.send(m.ShareSplits(1, listed.nbytes), started.fd)
    for index, part in enumerate(parts[:3], 1):
        other.send(m.StartRun(index, "feed", 1, 0, 1, part.record, listed.spec))
        other.fill(run=index, index=index)
        other.receive(m.Made)
        assert other.batches("feed", 2, 1) == started.batches("feed", 2, 4)[index : index + 1]


def test_a_batch_for_which_a_split_is_skipped_is_the_last_of_its_report(worker: Start) -> None:
    started = worker("failing")
    started.list("failing")
    started.start("failing")
    started.fill(batches=9)
    for _ in range(2):
        started.receive(m.SplitSkipped)
        made = started.receive(m.Made)
        assert (made.batches, made.skipped, made.last) == (1, True, False)
        assert made.record
    assert started.made().batches == 2


def test_splits_that_break_are_skipped_and_told_once_before_what_comes_behind(worker: Start) -> None:
    started, other = worker("failing"), worker("failing")
    listed = started.list("failing")
    assert listed.spec == Leaf("int64", (2,))  # of the first split that yields anything
    started.send(m.StartRun(1, "failing", 0, 0, 1, careful=2**62))
    started.fill(batches=9)
    skipped = started.receive(m.SplitSkipped)
    assert (skipped.run, skipped.number, skipped.split, skipped.samples) == (1, 0, "(0, 5, 0)", 0)
    assert skipped.error is not None
    assert (skipped.error.kind, skipped.error.feed, skipped.error.worker) == ("GeneratorError", "failing", 3)
    assert skipped.error.message == "fails raised ValueError: sample 0 of 0"
    first = started.receive(m.Made)
    skipped = started.receive(m.SplitSkipped)
    assert (skipped.number, skipped.samples) == (1, 3)
    second = started.receive(m.Made)
    assert (first.batches, second.batches) == (1, 1)
    rest = started.made()
    assert (rest.ended, rest.leftover) == (True, 1)
    made = started.batches("failing", 2, 4)
    assert [leaves[0] for _, leaves in made] == [
        [[1, 0], [1, 1]],
        [[1, 2], [2, 0]],
        [[2, 1], [2, 2]],
        [[2, 3], [2, 4]],
    ]
    other.specs = started.specs
    other.send(m.ShareSplits(1, listed.nbytes), started.fd)
    other.send(m.StartRun(1, "failing", 0, 0, 1, second.record, listed.spec, skip=(0, 2)))
    other.fill(index=2)
    skipped = other.receive(m.SplitSkipped)
    assert (skipped.number, skipped.split, skipped.samples, skipped.error) == (2, "(2, 6, None)", 1, None)
    ended = other.receive(m.Made)
    assert (ended.batches, ended.ended, ended.leftover) == (0, True, 0)
    other.send(m.StartRun(2, "failing", 0, 0, 1, ended.record))  # its record tells that it ended, though no batch came
    other.fill(run=2, index=2)
    assert other.receive(m.Made).ended


def test_a_feed_of_which_every_split_breaks_says_why(worker: Start) -> None:
    started = worker("all_fail")
    started.send(m.ListSplits(1, "all_fail", 0))
    assert started.receive(m.RunFailed).error.message == "fails raised ValueError: sample 0 of 0"


def test_after_a_death_the_page_names_the_split_and_the_stream_goes_on_without_it(worker: Start) -> None:
    started, other = worker("deadly", watched=True), worker("deadly")
    listed = started.list("deadly")
    started.send(m.StartRun(6, "deadly", 0, 0, 1, careful=2**62))
    started.fill(run=6, batches=9)
    assert started.wait() == -signal.SIGKILL
    made = [started.receive(m.Made) for _ in range(4)]
    doing = started.doing()
    assert doing is not None
    assert (doing.run, doing.number, doing.split, doing.in_user_code) == (6, 1, "(1, 5, 3)", True)
    assert doing.samples == 3
    other.specs = started.specs
    other.send(m.ShareSplits(1, listed.nbytes), started.fd)
    other.send(m.StartRun(1, "deadly", 0, 0, 1, made[-1].record, skip=(1,), spec=listed.spec))
    other.fill(index=4, batches=2)
    assert other.receive(m.SplitSkipped).samples == 3
    other.made()
    assert [leaves[0] for _, leaves in other.batches("deadly", 2, 2)] == [[[2, 0], [2, 1]], [[2, 2], [2, 3]]]


def test_a_worker_that_stands_still_says_where(worker: Start, tmp_path: Path) -> None:
    started = worker("waiting", watched=True)
    imported = started.doing()
    assert imported is not None
    assert not imported.in_user_code
    started.list("waiting")
    started.start("waiting", run=2)
    started.fill(run=2, batches=2)
    started.stderr_has("waiting\n")
    doing = started.doing()
    assert doing is not None
    assert (doing.run, doing.number, doing.split, doing.samples) == (2, 0, "'w.h5'", 2)
    assert doing.in_user_code
    for _ in range(2):
        os.ftruncate(started.dump, 0)
        os.lseek(started.dump, 0, os.SEEK_SET)
        started.process.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + 60
        while not (place := where(os.pread(started.dump, 1 << 16, 0))) and time.monotonic() < deadline:
            time.sleep(0.01)
        line = FEEDS.splitlines().index("    time.sleep(60)") + 1
        assert place == f"{tmp_path}/feeds.py:{line} in waits"
    started.process.kill()


def test_what_was_made_before_an_error_goes_on_behind_the_last_full_batch(worker: Start, tmp_path: Path) -> None:
    started = worker("mending")
    started.list("mending")
    started.start("mending")
    started.fill(batches=9)
    made = started.receive(m.Made)
    assert (made.batches, made.last) == (2, False)
    assert "the disk is away" in started.receive(m.RunFailed).error.message
    (tmp_path / "mended").touch()
    started.start("mending", run=2, record=made.record)
    started.fill(run=2, ticket=2, index=2, first=2, batches=9)
    ended = started.made()
    assert (ended.batches, ended.ended, ended.leftover) == (1, True, 0)
    batches = started.batches("mending", 4, 3)
    assert [leaves[0] for _, leaves in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


# --- what is read again ---


def far(record: bytes, taken: int) -> bytes:
    """Return the record of `deeply` after this many samples of its first split."""
    place = arrays.unpack(record)
    return arrays.pack({**place, "seats": [[0, taken]], "next": 1, "index": taken // 2})


FAR = 60_000
"""A number of samples that take 60 s or more to read again."""
OTHER = m.IDS_PER_STREAM
"""A run of another stream."""


def deep_record(started: Worker) -> bytes:
    """Return a record of `deeply`, from a run that is then dropped."""
    started.list("deeply")
    started.start("deeply", run=99)
    started.fill(run=99, ticket=99)
    record = started.receive(m.Made).record
    started.send(m.DropRun(99))
    return record


def test_others_are_served_while_a_split_is_read_again_and_that_can_be_dropped(worker: Start) -> None:
    started = worker("deeply", "feed", watched=True)
    record = deep_record(started)
    started.start("deeply", run=1, record=far(record, FAR))
    started.fill(run=1, ticket=1, index=FAR // 2)
    listed = started.list("feed")
    assert listed.count == 4
    for number in range(3):
        started.start("feed", run=OTHER + number)
        started.fill(run=OTHER + number, ticket=OTHER + number, batches=2, memfd=2)
        made = started.made()
        assert (made.ticket, made.first + made.batches) == (OTHER + number, 2)
    doing = started.doing()
    assert doing is not None
    before = doing.samples
    deadline = time.monotonic() + 60
    while (doing := started.doing()) is None or doing.samples <= before or doing.split != "'deep.h5'":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert doing.samples < FAR
    started.send(m.DropRun(1))
    assert started.receive(m.Made) == m.Made(run=1, ticket=1, first=0, batches=0, rows=0, last=True)
    assert started.nothing_comes()


@pytest.mark.parametrize("work", ["Fill", "WriteRows"])
def test_shutdown_does_not_wait_for_what_is_read_again(worker: Start, work: str) -> None:
    started = worker("deeply")
    record = deep_record(started)
    started.start("deeply", run=1, record=far(record, FAR))
    if work == "Fill":
        started.fill(run=1, index=FAR // 2)
    else:
        started.send(m.WriteRows(1, 1, 1, 1 << 20, start=0, count=1, row=0, rows=2, index=0))
    started.send(m.Shutdown())
    assert started.wait() == 0


def test_leftover_rows_that_need_a_split_read_again_are_let_alone_when_their_run_is_dropped(worker: Start) -> None:
    started = worker("deeply")
    record = deep_record(started)
    started.start("deeply", run=1, record=far(record, FAR))
    for ticket in (5, 6):
        started.send(m.WriteRows(1, ticket, 1, 1 << 20, start=0, count=1, row=0, rows=2, index=0))
    started.send(m.DropRun(1))
    assert {started.receive(m.RowsWritten).ticket for _ in range(2)} == {5, 6}
    assert started.nothing_comes()


def test_a_run_that_must_come_by_a_later_place_hands_nothing_over_before_it_has(worker: Start) -> None:
    started = worker("slow_feed")
    started.list("slow_feed")
    started.start("slow_feed", run=1)
    started.fill(run=1, batches=10)
    parts = [started.receive(m.Made)]
    while not parts[-1].last:
        parts.append(started.receive(m.Made))
    started.send(m.StartRun(2, "slow_feed", 0, 0, 1, ahead=parts[-1].record))
    started.fill(run=2, ticket=2, batches=10)
    assert started.receive(m.Made).batches == 10
    place = arrays.unpack(parts[-1].record)
    other = arrays.pack({**place, "seats": [[0, 18]], "done": 2})  # as if another split had come before
    started.send(m.StartRun(3, "slow_feed", 0, 0, 1, ahead=other))
    started.fill(run=3, ticket=3, batches=10)
    failed = started.receive(m.RunFailed)
    assert failed.run == 3
    assert "after 10 batches lane 0 was 18 samples into split 0, and when it was read again" in failed.error.message


# --- impossible requests ---


def serves(started: Worker, feed: str = "feed") -> bool:
    """Return whether the worker still serves."""
    started.start(feed, run=500)
    started.fill(run=500, ticket=500)
    return started.receive(m.Made).batches == 1


def test_a_message_that_cannot_be_decoded_fails_the_run_that_it_is_about(worker: Start) -> None:
    started = worker("feed")
    started.list("feed")
    started.start("feed", run=7)
    started.send(m.Fill(7, 1, 2**62 + 1, 1, 1, 1 << 20))
    failed = started.receive(m.RunFailed)
    assert (failed.run, failed.error.kind, failed.error.feed) == (7, "ProtocolError", "feed")
    assert "malformed message" in failed.error.message
    started.send(m.StartRun(8, "feed", 0, 2**31, 1))
    assert started.receive(m.RunFailed).run == 8
    for data in (b"\xc1", b"\x80", codec.encode(m.ForgetSplits(-1)), codec.encode(m.Fill(-1, 1, 0, 1, 1, 1))):
        seqpacket.send(started.socket, data)
    assert serves(started)
    assert "ignored a message from the daemon" in started.stderr.read_text()


def test_records_that_cannot_be_fail_their_run(worker: Start) -> None:
    started = worker("feed")
    started.list("feed")
    started.start("feed", run=1)
    started.fill(run=1)
    good = started.receive(m.Made).record
    place = arrays.unpack(good)
    huge = 2**62
    for number, change in enumerate(
        (
            {"index": huge},
            {"seats": [[0, huge]], "index": huge // 2},
            {"seats": [None], "done": huge, "index": huge // 2},
            {"next": huge},
            {"block": huge, "made": huge},
            {"skipped": [[huge, huge]]},
            {"seats": np.zeros((1, 2), np.int64)},
            {"seats": [[np.int64(0), 2]]},
            {"index": -1},
            {"index": 1.0},
        ),
        10,
    ):
        for kind in ("record", "ahead"):
            started.send(
                m.StartRun(number, "feed", 0, 0, 1, **{"record": good} | {kind: arrays.pack({**place, **change})})
            )
            failed = started.receive(m.RunFailed)
            assert (failed.run, failed.error.kind) == (number, "ProtocolError"), change
    assert serves(started)


def test_whatever_fails_in_a_run_fails_that_run(worker: Start) -> None:
    started = worker("feed", "unsaid")
    listed = started.list("feed")
    started.list("unsaid")
    assert listed.count == 4
    started.start("unsaid", run=1)
    started.fill(run=1)
    assert "no such file: caf\\udce9.png" in started.failure().message
    started.list("feed")
    started.start("feed", run=2)
    started.fill(run=2, memfd=1)
    started.receive(m.Made)
    started.send(m.WriteRows(2, 9, 1, 1 << 20, start=2**62, count=2**62, row=2**62, rows=2**62, index=2**62))
    assert started.receive(m.RunFailed).run == 2
    started.send(m.StartRun(3, "unknown", 0, 0, 1))
    failed = started.receive(m.RunFailed)
    assert failed.run == 3
    assert "the worker failed while it served this stream: it raised KeyError" in failed.error.message
    started.send(m.ListSplits(4, "unknown", 0))
    assert started.receive(m.RunFailed).run == 4
    assert serves(started)


# --- its end ---


def test_shutdown_closes_generators_and_ends(worker: Start, tmp_path: Path) -> None:
    started = worker("cleaning")
    started.list("cleaning")
    started.start("cleaning")
    started.fill()
    started.receive(m.Made)
    started.send(m.Shutdown())
    assert started.wait() == 0
    assert (tmp_path / "mark").read_text() == "closed s;closed s;"


def test_shutdown_does_not_wait_for_a_turn(worker: Start) -> None:
    started = worker("slower_feed")
    started.list("slower_feed")
    started.start("slower_feed")
    started.fill(batches=250)  # they take 50 s or more
    started.receive(m.Made)
    started.send(m.Shutdown())
    assert started.wait() == 0


@pytest.mark.parametrize("busy", [False, True])
def test_end_of_file_ends_it_at_once(worker: Start, busy: bool) -> None:
    started = worker("slower_feed")
    if busy:
        started.list("slower_feed")
        started.start("slower_feed")
        started.fill(batches=250)
    started.socket.close()
    assert started.wait() == 0


def test_ctrl_c_and_sigterm_are_left_to_the_daemon(worker: Start) -> None:
    started = worker("feed")
    started.process.send_signal(signal.SIGINT)
    started.process.send_signal(signal.SIGTERM)
    assert started.list("feed").count == 4


def test_it_dies_with_the_daemon_even_in_the_middle_of_user_code(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(
        textwrap.dedent("""
        import time
        from penstock_server import Feed
        def splits():
            print("stuck", flush=True)
            time.sleep(1000)
        feed = Feed(lambda split: iter(()), splits=splits, batch_size=1)
        """)
    )
    daemon = """
import socket, subprocess, sys
from penstock_proto.transport import codec, seqpacket
from penstock_proto import messages
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
command = [sys.executable, "-m", "penstock_server.worker", "--fd", str(theirs.fileno()), "--number", "0", "stuck:feed"]
worker = subprocess.Popen(command, pass_fds=[theirs.fileno()])
seqpacket.receive(ours)
seqpacket.send(ours, codec.encode(messages.ListSplits(1, "feed", 0)))
print(worker.pid, flush=True)
worker.wait()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", daemon], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        assert parent.stderr.readline() == "stuck\n"
        parent.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        worker.wait(30)
    assert not worker.is_running()


def test_memfds_come_and_go(worker: Start) -> None:
    started = worker("feed")
    started.list("feed")
    started.start("feed")
    started.fill()
    started.receive(m.Made)
    mapped = Path(f"/proc/{started.process.pid}/maps")
    assert "penstock-test" in mapped.read_text()
    for memfd in (1, 2):
        started.send(m.Unmap(memfd))
    started.list("feed")
    assert "penstock-test" not in mapped.read_text()
    for fd in Path(f"/proc/{started.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            assert "penstock-test" not in os.readlink(fd)
