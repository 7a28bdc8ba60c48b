"""While a stream is read, some of its samples are made again. Feeds that are not reproducible are noticed in their
first epoch, rows that are lost are an error, and reproducible feeds of all kinds pass."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import penstock
from penstock_proto import FeedError
from penstock_proto import messages as m
from penstock_proto.status.feed_status import Checks
from penstock_server.daemon.causes import Causes
from penstock_server.in_process import engine
from penstock_server.to_daemon import control
from penstock_server.worker.tasks.making_again import Rows
from penstock_server.worker.verification import spot_checks
from penstock_server.worker.verification.spot_checks import FIRST, FIRST_SECONDS, OVERHEAD, SHARE, SpotChecks
from penstock_server.workers.process import Process
from tests.conftest import Daemon, Serve

HEAD = """
import itertools, os, random
import numpy as np
from penstock_server import Feed, Leaf, Shuffle
"""

DIFFER = """
RNG = np.random.default_rng()

def rare(split, rng):
    "A rare augmentation with a generator of its own."
    for i in range(100):
        yield np.array([split, i, RNG.random() < 0.1])

class Counts:
    "Counts its iterations, as detshuffle of webdataset does."
    epoch = -1
    def read(self, split):
        self.epoch += 1
        yield np.zeros(2)
        yield from np.random.default_rng([split, self.epoch]).random((99, 2))
counts = Counts()

def keeps_first(split):
    "A permutation that keeps item 0."
    yield split, 0
    for i in np.random.default_rng().permutation(99):
        yield split, 1 + i

class Rare:
    def __len__(self):
        return 2000
    def __getitem__(self, i):
        return np.array([i, RNG.random() < 0.1])

def transformed(sample):
    return sample if RNG.random() < 0.9 else -sample

S = range(20)
rare = Feed(rare, splits=S, batch_size=16)
stateful = Feed(counts.read, splits=S, batch_size=16, shuffle=100)
keeps_first = Feed(keeps_first, splits=S, batch_size=16)
items = Feed(Rare(), batch_size=16, shuffle=1)
by_transform = Feed(range(1, 2001), batch_size=16, transform=transformed)
"""
DIFFERING = re.findall(r"^(\w+) = Feed", DIFFER, re.MULTILINE)

LOSE = """
ORDER = np.random.default_rng().permutation(1000)

def at_import(split):
    for row in ORDER[split * 50 : split * 50 + 50]:
        yield row

class AtImport:
    def __len__(self):
        return 1000
    def __getitem__(self, i):
        return ORDER[i]

def each_time(split):
    yield from np.random.default_rng().permutation(1000)[split * 50 : split * 50 + 50]

def whole():
    yield from np.random.default_rng().permutation(1000)

at_import = Feed(at_import, splits=range(20), batch_size=16, shuffle=100)
items_at_import = Feed(AtImport(), batch_size=16, shuffle=1)
each_time = Feed(each_time, splits=range(20), batch_size=16)
whole = Feed(whole, batch_size=16, transform=abs)
"""

RANDOM = """
def process(split):
    yield from [os.getpid()] * 20

def of_a_pool(split):
    rng = np.random.default_rng()
    for _ in range(50):
        yield rng.integers(1000)

def within(split):
    yield from split * 50 + np.random.default_rng().permutation(50)

def coins(split):
    yield from np.random.default_rng().integers(2, size=50)

process = Feed(process, splits=range(20), batch_size=16)
of_a_pool = Feed(of_a_pool, splits=range(20), batch_size=16)
within = Feed(within, splits=range(20), batch_size=16)
coins = Feed(coins, splits=range(20), batch_size=16)
"""

HONEST = """
def drawn(split, rng):
    for _ in range(30):
        yield {"x": rng.random(3), "s": "text" * int(rng.integers(3))}

def globally(split):
    for _ in range(30):
        yield random.random(), np.random.random()

def lengths(split, rng):
    for _ in range(30):
        yield rng.random(int(rng.integers(1, 9)))

def batches(split, rng):
    for _ in range(5):
        yield rng.random((int(rng.integers(1, 9)), 2))

def endless(rng):
    while True:
        yield rng.random(2)

def short(split):
    yield from range(split % 3)

def whole():
    yield from np.random.random((300, 2))

def breaks(split):
    yield from range(20)
    if split % 2:
        raise OSError("away")

class Items:
    def __len__(self):
        return 200
    def __getitem__(self, i):
        return np.array([i, np.random.random()])

class Together(Items):
    def __getitems__(self, indices):
        return [self[i] for i in indices]

def noisy(sample, rng):
    return sample + rng.random()

def noisy_globally(sample):
    return sample + np.random.random()

S = range(12)
drawn = Feed(drawn, splits=S, batch_size=8)
shuffled = Feed(drawn.generate, splits=S, batch_size=8, shuffle=64)
listed = Feed(globally, splits=lambda: list(S), batch_size=8)
padded = Feed(lengths, splits=S, batch_size=8, batching="pad", shuffle=40)
ragged = Feed(lengths, splits=S, batch_size=8, batching="ragged")
ready = Feed(batches, splits=S, batch_size=None)
rebatched = Feed(batches, splits=S, batch_size=None, rebatch=8)
segments = Feed(endless, segment=20, samples=300, batch_size=8)
tiny_segments = Feed(endless, segment=3, samples=300, batch_size=8, shuffle=30)
short = Feed(short, splits=range(200), batch_size=8)
whole = Feed(whole, batch_size=8, transform=noisy)
mixed_whole = Feed(whole.generate, batch_size=8, transform=noisy_globally, shuffle=60)
breaks = Feed(breaks, splits=S, batch_size=8, on_error="skip")
items = Feed(Items(), batch_size=8, shuffle=1, transform=noisy)
together = Feed(Together(), batch_size=8, shuffle=Shuffle(64, block=8))
fast = Feed(globally, splits=S, batch_size=8, order="fast")
mix = Feed.mix({"a": listed, "b": Feed(globally, splits=range(5), batch_size=8)}, batch_size=8)
zipped = Feed.zip({"a": listed, "b": listed}, batch_size=8)
"""
HONEST_FEEDS = re.findall(r"^(\w+) = Feed", HONEST, re.MULTILINE)


def read(url: str, epochs: int = 1) -> None:
    with penstock.connect(url) as connection:
        for _ in range(epochs):
            for _ in connection.batches():
                pass


def figures(daemon: Daemon) -> dict[str, Checks]:
    return {feed.name: feed.checks for feed in control.status(next(iter(daemon.urls.values())), 60).feeds}


def differing(daemon: Daemon) -> set[str]:
    return {name for name, checks in figures(daemon).items() if checks.different}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_stream_that_differs_when_it_is_made_again_is_noticed_in_its_first_epoch(serve: Serve, workers: int) -> None:
    daemon = serve(HEAD + DIFFER, *DIFFERING, workers=workers)
    for name in DIFFERING:
        read(daemon.urls[name])
    assert differing(daemon) == set(DIFFERING)
    for name in DIFFERING:
        assert re.search(rf"feed {name}: .* gave another sample \d+.* when it was made again", daemon.stderr())


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(engine, "_warned", set())
    caplog.set_level(logging.WARNING, "penstock")
    return caplog


@pytest.mark.parametrize("name", DIFFERING)
def test_without_workers_it_is_noticed_too(tmp_path: Path, warned: pytest.LogCaptureFixture, name: str) -> None:
    path = tmp_path / f"differs_{name}_alone.py"
    path.write_text(HEAD + DIFFER)
    with penstock.connect(f"{path}:{name}", workers=0) as connection:
        for _ in connection.batches():
            pass
    assert "when it was made again" in warned.text


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("name", ["at_import", "items_at_import", "each_time", "whole"])
def test_rows_that_are_lost_are_an_error_in_the_first_epoch(
    tmp_path: Path, warned: pytest.LogCaptureFixture, name: str, workers: int
) -> None:
    path = tmp_path / f"loses_{name}_{workers}.py"
    path.write_text(HEAD + LOSE)
    with penstock.connect(f"{path}:{name}", workers=workers) as connection:
        rows: list[int] = []
        if workers < 2 and "at_import" in name:  # one process has one order, in which no row is lost
            for batch in connection.batches():
                rows += batch.tolist()
            assert sorted(rows) == list(range(1000))
            return
        with pytest.raises(FeedError, match=rf"feed {name}: rows are lost, and others come twice"):
            for batch in connection.batches():
                rows += batch.tolist()


ONE_LIST = """
import numpy as np
from penstock_server import Feed

class Rows:
    def __init__(self):
        self.rows = list(range(200))
    def __call__(self):
        np.random.shuffle(self.rows)
        for row in self.rows:
            yield np.float32(row)

feed = Feed(Rows(), batch_size=8)
method = Feed(Rows().__call__, batch_size=8)
zipped = Feed.zip({"row": feed, "other": method}, batch_size=8)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_list_of_an_object_that_each_run_shuffles_is_not_shuffled_by_checks(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "feeds.py"
    path.write_text(ONE_LIST)
    for name in ("feed", "method", "zipped"):
        with penstock.connect(f"{path}:{name}", workers=workers) as connection:
            for _ in range(4):
                batches = list(connection.batches())
                rows = np.concatenate([batch["row"] if name == "zipped" else batch for batch in batches])
                assert sorted(rows.tolist()) == list(range(200)), name


def test_what_is_merely_random_is_only_warned_of(serve: Serve) -> None:
    names = ["process", "of_a_pool", "within", "coins"]
    daemon = serve(HEAD + RANDOM, *names, workers=3)
    for name in names:
        read(daemon.urls[name], epochs=2)
    assert differing(daemon) == set(names)


@pytest.mark.parametrize("workers", [1, 3])
def test_reproducible_feeds_of_all_kinds_are_compared_and_pass(serve: Serve, workers: int) -> None:
    daemon = serve(HEAD + HONEST, *HONEST_FEEDS, workers=workers, log_level="debug")
    for name in HONEST_FEEDS:
        if name == "breaks":
            with penstock.connect(daemon.urls[name]) as connection:
                list(connection.batches())
        else:
            read(daemon.urls[name], epochs=2)
    found = figures(daemon)
    assert {name for name, checks in found.items() if checks.different} == set(), daemon.stderr()
    assert {name for name, checks in found.items() if not checks.samples} == set()


def test_the_log_names_the_cause_that_penstock_check_finds(serve: Serve, tmp_path: Path) -> None:
    daemon = serve(HEAD + DIFFER, "rare", workers=2, env={"TMPDIR": str(tmp_path)})
    read(daemon.url)
    until(lambda: "why its samples differ" in daemon.stderr())
    assert re.search(
        r"feed rare: why its samples differ: the cause is the system's random numbers .*:6, at import\). "
        r"What to do: give it a seed",
        daemon.stderr(),
    )
    assert not list(tmp_path.glob("penstock-c*"))


def test_a_daemon_that_stops_while_it_looks_for_a_cause_leaves_no_files(serve: Serve, tmp_path: Path) -> None:
    daemon = serve(HEAD + DIFFER, "rare", workers=2, env={"TMPDIR": str(tmp_path)})
    read(daemon.url)
    until(lambda: bool(list(tmp_path.glob("penstock-c*/*.out"))))  # an experiment has begun
    daemon.process.terminate()
    assert daemon.process.wait(30) == 0
    assert not list(tmp_path.glob("penstock-c*"))


def test_a_daemon_that_stops_begins_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that end may still tell of differences. A search would outlive the daemon, and miss its files."""
    started = []

    def start(command: list[str], *_: object) -> None:
        started.append(command)
        raise OSError

    monkeypatch.setattr(Process, "started", start)
    causes = Causes(["scenes.py:feed"], {}, SimpleNamespace(names=["feed"]), lambda: (), print)  # type: ignore[arg-type]
    causes.find("feed", 0, 0)
    assert len(started) == 1
    causes.stop()
    causes.find("feed", 0, 0)
    assert len(started) == 1


def until(there: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- which samples, and at what cost ---

RUN = m.StartRun(run=3 * m.IDS_PER_STREAM + 5, feed="train", epoch=2, lane=1, splits=7)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(spot_checks, "time", clock)
    return clock


class Maker:
    """Makes splits of 100 samples that take `seconds` each."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.sent: list[m.SpotCheck] = []
        self.made = 0.0
        self._clock = clock
        self._seconds = seconds
        self._checks = SpotChecks(self.sent.append)
        self._spot_of = self._checks.of_run(RUN)

    def split(self, index: int, samples: int = 100) -> None:
        spot = self._spot_of(index, 0.0)
        source = self._source(samples)
        for _ in source if spot is None else spot.of(source):
            pass
        if spot is not None:
            spot.close()
        self.made += samples * self._seconds
        self._checks.on_work_done(samples * self._seconds)

    def _source(self, samples: int):  # type: ignore[no-untyped-def]
        for i in range(samples):
            self._clock.now += self._seconds
            yield i

    def checked(self) -> float:
        """Return how long it takes to make the checked samples again, and to ask for that."""
        return sum(check.samples * self._seconds + OVERHEAD for check in self.sent)


@pytest.mark.parametrize("seconds", [1e-5, 1e-3, 0.03, 2.0])
def test_checks_take_a_hundredth_of_the_time_and_some_are_made_at_once(clock: Clock, seconds: float) -> None:
    maker = Maker(clock, seconds)
    for index in range(FIRST):
        maker.split(index)
    if 2 * seconds <= FIRST_SECONDS:
        assert len(maker.sent) == FIRST
        assert maker.checked() <= FIRST * FIRST_SECONDS
    for index in range(FIRST, 3000):
        maker.split(index)
    assert maker.checked() <= SHARE * maker.made + FIRST * FIRST_SECONDS
    assert maker.checked() >= 0.5 * SHARE * maker.made, "spread over the whole time"
    assert maker.sent[-1].index > 2000


def test_a_sample_that_takes_long_is_checked_once_its_time_is_saved(clock: Clock) -> None:
    maker = Maker(clock, 0.5)
    maker.split(0)
    assert maker.sent == []
    maker.split(1)
    assert maker.sent == []
    maker.split(2)
    assert [(check.index, check.samples) for check in maker.sent] == [(2, 1)]
    assert maker.checked() == pytest.approx(SHARE * 50 + OVERHEAD)


def test_a_check_says_what_was_made_and_the_first_ones_hold_up_the_end_of_the_epoch(clock: Clock) -> None:
    maker = Maker(clock, 1e-3)
    maker.split(4, samples=3)
    (check,) = maker.sent
    assert (check.run, check.feed, check.epoch, check.splits, check.index) == (RUN.run, "train", 2, 7, 4)
    assert (check.samples, len(check.digests), check.ended, check.first) == (3, 24, True, True)
    for index in range(200):
        maker.split(index)
    assert [check.first for check in maker.sent[: FIRST + 1]] == [True] * FIRST + [False]
    assert not maker.sent[-1].ended


def test_samples_that_are_skipped_or_fail_are_not_checked(clock: Clock) -> None:
    sent: list[m.SpotCheck] = []
    spot_of = SpotChecks(sent.append).of_run(RUN)

    def fails():  # type: ignore[no-untyped-def]
        yield 1
        raise OSError("away")

    spot = spot_of(0, 0.0)
    assert spot is not None
    with pytest.raises(OSError, match="away"):
        list(spot.of(fails()))
    spot.close()
    spot = spot_of(1, 0.0)
    assert spot is not None
    spot.give_up()
    assert list(spot.of(iter(range(50)))) == list(range(50))
    spot.close()
    assert sent == []


@pytest.mark.parametrize(
    ("split_of", "are_rows"),
    [
        (lambda split: range(split * 50, split * 50 + 50), True),
        (lambda split: np.random.default_rng(split).integers(1000, size=50), False),
        (lambda split: [i % 2 for i in range(50)], False),
        (lambda split: [(i * 7 + split * 13) % 500 for i in range(50)], True),
        (lambda split: [split % 3], False),
    ],
    ids=["distinct", "drawn at random", "two values", "shuffled each time", "single samples"],
)
def test_rows_of_a_data_set_are_told_from_random_draws(split_of, are_rows: bool) -> None:  # type: ignore[no-untyped-def]
    rows = Rows()
    for split in range(20):
        for number, value in enumerate(split_of(split)):
            rows.add(split, number, str(value).encode())
    assert rows.are_rows is are_rows
