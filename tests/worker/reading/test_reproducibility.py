"""The log names feeds that depend on something Penstock cannot seed, and segments that repeat each other. It names no
reproducible feed."""

from __future__ import annotations

import re
import time

import pytest

import penstock
from penstock_proto.messages import FirstSample
from penstock_server.coordinator.model import commands as do
from penstock_server.coordinator.production.first_samples import MOST_SECONDS, FirstSampleChecks
from tests.conftest import Daemon, Serve

FEEDS = """
import itertools, os, random, time
import numpy as np
from penstock_server import Feed, Leaf

np_rng = np.random.default_rng()  # nobody seeds it
lazily = []

def clock(split):
    yield {"t": np.int64(time.monotonic_ns()), "x": np.float32(split)}

def urandom(split):
    yield np.frombuffer(os.urandom(8), "u1")

def at_import(split, made=os.urandom(4)):
    yield np.frombuffer(made, "u1")

def pid(split):
    yield os.getpid()

def at_first_use(split, rng):
    lazily.append(rng.random())
    yield lazily[0]

class Counts:
    calls = 0
    def __len__(self):
        return 9
    def __getitem__(self, i):
        self.calls += 1
        return np.array([i, self.calls])

class Urandom:
    def __len__(self):
        return 1
    def __getitem__(self, i):
        return np.frombuffer(os.urandom(8), "u1")

def constant():
    rng = np.random.default_rng(0)
    while True:
        yield rng.random(3)

def drawn(split, rng):
    yield rng.random(), np.nan

def drawn_globally(split):
    yield np.random.random() + random.random()

class Honest:
    def __len__(self):
        return 9
    def __getitem__(self, i):
        return np.random.random(3)

class Lazy:
    "As Keras' DirectoryIterator: draws the order of its items at its first use."
    order = None
    def __len__(self):
        return 9
    def __getitem__(self, i):
        if self.order is None:
            self.order = np.random.permutation(9)
        return self.order[i] + np.random.random(3)

def opening(rng):
    "A game: each begins with the same board."
    yield np.zeros(3)
    while True:
        yield rng.random(3)

def coin(rng):
    yield rng.integers(2)

def numbered(segment):
    for i in range(4):
        yield segment * 4 + i

def empty_at_first(split):
    yield from ([] if split < 2 else [split])

def one_breaks(split):
    if split == 1:
        raise OSError("away")
    yield split

def none():
    yield np.zeros(3)

S = [0, 1, 2, 3]
clock = Feed(clock, splits=S, batch_size=1)
urandom = Feed(urandom, splits=lambda: S, batch_size=1)
at_import = Feed(at_import, splits=S, batch_size=1)
pid = Feed(pid, splits=S, batch_size=1)
at_first_use = Feed(at_first_use, splits=S, batch_size=1)
counts = Feed(Counts(), batch_size=1)
random_items = Feed(Urandom(), batch_size=1)
constant = Feed(constant, segment=40, batch_size=4)

drawn = Feed(drawn, splits=lambda: S, batch_size=1)
drawn_globally = Feed(drawn_globally, splits=S, batch_size=1)
honest = Feed(Honest(), batch_size=1, shuffle=1)
lazy = Feed(Lazy(), batch_size=1)
opening = Feed(opening, segment=40, batch_size=4)
coin = Feed(coin, segment=1, batch_size=1)
numbered = Feed(numbered, segment=4, samples=40, batch_size=4)
empty_at_first = Feed(empty_at_first, splits=S, batch_size=1)
one_breaks = Feed(one_breaks, splits=S, batch_size=1, on_error="skip")
none = Feed(none, batch_size=1)

def noise(batch, rng):
    return batch + rng.random() + np.random.random()

def unseeded(batch):
    return batch + np.random.default_rng().random()

def calls(batch, made=[]):
    made.append(batch)
    return batch + len(made)

def numbers(split):
    yield from range(4)

transformed = Feed(numbers, splits=S, batch_size=2, batch_transform=noise)
transformed_items = Feed(Honest(), batch_size=2, batch_transform=noise)
unseeded_batches = Feed(numbers, splits=S, batch_size=2, batch_transform=unseeded)
counted_batches = Feed(numbers, splits=S, batch_size=2, batch_transform=calls)
unseeded_batches_of_items = Feed(Honest(), batch_size=2, batch_transform=unseeded)
"""

BAD = {
    "clock": r"split 0 gave a different first sample \(sample\['t'\]\) when it was made again\.",
    "urandom": r"split 0 gave a different first sample when it was made again\.",
    "at_import": r"split 0 gave a different",
    "pid": r"split 0 gave a different",
    "at_first_use": r"split 0 gave a different",
    "counts": r"item 0 gave a different",
    "random_items": r"item 0 gave a different",
    "unseeded_batches": r"split 0 gave a different first sample \(batch after batch_transform=\) when it was made",
    "counted_batches": r"split 0 gave a different first sample \(batch after batch_transform=\) when it was made",
    "unseeded_batches_of_items": r"item 0 gave a different first sample \(batch after batch_transform=\)",
    "constant": r"segments 0 and 1 have the same samples, .*`rng`",
}
HONEST = "drawn drawn_globally honest lazy opening coin numbered empty_at_first one_breaks none".split()
HONEST += ["transformed", "transformed_items"]
PATIENT = {"coordinator.production.first_samples.MOST_SECONDS": 3600}  # otherwise a busy machine leaves some out


def warnings(daemon: Daemon, *, compared: int) -> dict[str, str]:
    """Return the warnings by feed, once `compared` comparisons were made."""
    deadline = time.monotonic() + 60
    while len(re.findall("was compared", daemon.stderr())) < compared and time.monotonic() < deadline:
        time.sleep(0.05)
    return dict(re.findall(r"WARNING penstock: feed (\w+): (.*)", daemon.stderr()))


def test_what_cannot_be_seeded_is_named_and_honest_feeds_are_not(serve: Serve) -> None:
    daemon = serve(FEEDS, *BAD, *HONEST, workers=2, log_level="debug", patched=PATIENT)
    found = warnings(daemon, compared=len(BAD) + len(HONEST))
    assert set(found) == set(BAD)
    for name, words in BAD.items():
        assert re.search(words, found[name]), found[name]
        if "made again" in words:
            assert found[name].endswith("`penstock check` finds the cause"), "two samples do not show it"
    with penstock.connect(daemon.urls["one_breaks"]) as connection:
        assert len(list(connection.batches())) == 3


def test_one_worker_alone_finds_what_differs_from_call_to_call(serve: Serve) -> None:
    names = ("clock", "urandom", "counts", "constant", "drawn", "honest")
    daemon = serve(FEEDS, *names, workers=1, log_level="debug", patched=PATIENT)
    assert set(warnings(daemon, compared=len(names))) == {"clock", "urandom", "counts", "constant"}


def test_a_worker_that_hangs_or_dies_in_a_comparison_costs_the_feed_nothing(serve: Serve) -> None:
    source = """
    import os, time
    from penstock_server import Feed

    def once(path):
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def hangs(split):
        if split == 1 and once("hung"):
            time.sleep(600)
        yield split

    def dies(split):
        if split == 1 and once("died"):
            os._exit(3)
        yield split

    feed = Feed(hangs, splits=range(4), batch_size=1)
    other = Feed(dies, splits=range(4), batch_size=1)
    """
    daemon = serve(source, "feed", "other", workers=2, hang_timeout=1, patched=PATIENT)
    for url in daemon.urls.values():
        with penstock.connect(url) as connection:
            assert sorted(int(batch[0]) for batch in connection.batches()) == [0, 1, 2, 3]
    assert "exited with status 3" in daemon.stderr()
    assert "made no sample for 1 s" in daemon.stderr()


def test_a_sample_that_looks_like_a_batch_is_warned_of_once(serve: Serve) -> None:
    source = """
    import numpy as np
    from penstock_server import Feed, Leaf

    def batches(split):
        yield np.zeros((32, 8)), np.zeros(32)

    def tokens(split):
        yield {"ids": np.zeros(32), "mask": np.zeros(32)}

    batches_of_batches = Feed(batches, splits=[1, 2], batch_size=32)
    declared = Feed(batches, splits=[1, 2], batch_size=32, spec=(Leaf(float, (32, 8)), Leaf(float, 32)))
    ready = Feed(batches, splits=[1, 2], batch_size=None)
    other = Feed(batches, splits=[1, 2], batch_size=16)
    sequences = Feed(tokens, splits=[1, 2], batch_size=32)
    """
    daemon = serve(source, "batches_of_batches", "declared", "ready", "other", "sequences")
    found = re.findall(
        r"feed (\w+): each leaf of a sample has 32 rows.*\[32, 32, ...\].*batch_size=None", daemon.stderr()
    )
    assert sorted(found) == ["batches_of_batches", "declared"]


# --- which worker compares, as the coordinator decides ---


@pytest.fixture
def asked() -> list[do.Command]:
    return []


def seen(comparisons: FirstSampleChecks, **changed: object) -> None:
    values = {"run": 0, "splits": 7, "forget": True, "first": FirstSample(2, b"d" * 8, 0.01), "worker": 0, **changed}
    comparisons.on_first_sample("train", **values)  # type: ignore[arg-type]


def test_another_worker_is_asked_as_soon_as_there_is_one_and_the_splits_are_kept_for_hosts_that_join(
    asked: list[do.Command],
) -> None:
    comparisons = FirstSampleChecks(asked.append)
    comparisons.on_worker_ready(0)
    seen(comparisons)
    comparisons.begin(range(3))
    assert asked == []
    comparisons.on_worker_ready(1)
    comparisons.on_worker_ready(2)
    comparisons.on_worker_away(2)
    comparisons.begin(range(3))
    assert asked == [do.Compare(1, 0, "train", 7, 2, b"d" * 8)]
    comparisons.begin(range(3))
    assert len(asked) == 1, "the comparison is made once"
    assert comparisons.of_hosts == {"train": do.Compare(-1, 0, "train", 7, 2, b"d" * 8)}


def test_the_only_worker_is_asked_itself(asked: list[do.Command]) -> None:
    comparisons = FirstSampleChecks(asked.append)
    comparisons.on_worker_ready(0)
    seen(comparisons, forget=False)
    comparisons.begin(range(1))
    assert asked == [do.Compare(0, 0, "train", 7, 2, b"d" * 8)]


@pytest.mark.parametrize("first", [None, FirstSample(0, b"", 0.0)])
def test_what_was_not_seen_is_not_made_again(asked: list[do.Command], first: FirstSample | None) -> None:
    comparisons = FirstSampleChecks(asked.append)
    for worker in range(2):
        comparisons.on_worker_ready(worker)
    seen(comparisons, first=first)
    comparisons.begin(range(2))
    assert asked == [do.ForgetSplits(7)]
    assert comparisons.of_hosts == {}


def test_what_takes_long_is_made_again_only_by_hosts_that_join(asked: list[do.Command]) -> None:
    comparisons = FirstSampleChecks(asked.append)
    for worker in range(2):
        comparisons.on_worker_ready(worker)
    seen(comparisons, first=FirstSample(2, b"d" * 8, MOST_SECONDS * 1.1))
    comparisons.begin(range(2))
    assert asked == []
    assert comparisons.of_hosts == {"train": do.Compare(-1, 0, "train", 7, 2, b"d" * 8)}
