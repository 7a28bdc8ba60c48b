"""`penstock check`, as a user calls it, finds each mistake, with its place and its fix, and none in a healthy feed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pytest

from penstock_server.checking.judging import culprit, culprit_words, runs
from penstock_server.checking.judging.culprit import Culprit, Result, Trial
from penstock_server.checking.judging.sizes import Pace, speed
from penstock_server.checking.observing import messages
from penstock_server.checking.observing.cpu_time import CpuWatch
from penstock_server.checking.observing.messages import Carried, Done, Gpu, Source
from penstock_server.checking.observing.repeats import lost_by_segments, one_pass
from penstock_server.checking.observing.sources import AT_IMPORT, SEEDED
from tests.conftest import DaemonLauncher, wait_until

FEEDS = """
import ctypes, itertools, multiprocessing, os, random, sys, time
import numpy as np
from penstock_server import DROP, Feed, Leaf

unseeded = np.random.default_rng()
kept = np.random.default_rng(0)
text = {"a", "bb", "ccc", "dddd", "eeeee"}
pieces = dict(splits=range(64), batch_size=8)

def rows(split, rng):
    for i in range(40):
        yield {"image": rng.random((4, 4)), "label": 40 * split + i}

healthy = Feed(rows, **pieces, shuffle=512, samples=2560)
wrong_samples = Feed(rows, **pieces, samples=2561)
with_variables = Feed(rows, **pieces, env={"OMP_NUM_THREADS": "3"})

def twice(x):
    return 2 * x

def pooled(split):
    with multiprocessing.Pool(2) as pool:
        yield from pool.imap(twice, range(20))

with_processes = Feed(pooled, **pieces)

def expensive():
    for number in range(1000):
        time.sleep(0.002)
        yield np.float32(number)

def cheap(sample):
    return 2 * sample

whole = Feed(expensive, batch_size=4, transform=cheap)
whole_of_sets = Feed(lambda: ({number} for number in expensive()), batch_size=4, transform=max)
whole_with_work = Feed(expensive, batch_size=4, transform=lambda sample: time.sleep(0.03) or sample)
whole_in_one_lane = Feed(expensive, batch_size=4, transform=cheap, lanes=1)

def numbers(split, least):
    yield from range(10 if split else least)

few = {**pieces, "splits": list(range(4))}
short = Feed(numbers, args=(9,), **few)
long = Feed(numbers, args=(10,), **few)
zipped = Feed.zip({"image": long, "label": short}, transform=lambda pair: pair)
mixed = Feed.mix({"long": long, "short": short})

def undivided():
    yield from range(100)

one_split = Feed(undivided, batch_size=8)

def words(split, rng):
    for i in range(20):
        yield {"text": "x" * i, "ids": rng.integers(9, size=1 + i % 5)}

ragged = Feed(words, **pieces, batching="ragged")

class Endless:
    def __init__(self, n):
        self.n = n
    def generate(self):
        while True:
            yield random.randrange(self.n), random.random()

endless = Feed(Endless, method="generate", args=(50,), segment=30, batch_size=8)

class Cycle(Endless):
    def generate(self):
        for i in itertools.cycle(np.random.permutation(self.n)):
            yield int(i), random.random()

cycle = Feed(Cycle, method="generate", args=(60,), segment=20, samples=60, batch_size=8)

class Batches:
    def generate(self):
        order = np.random.permutation(200)
        while True:
            for rows in np.split(order, 20):
                yield rows, np.random.random(len(rows))
    def without_noise(self):
        for rows, _ in self.generate():
            yield rows, rows % 3

uneven = Feed(Batches, method="generate", segment=50, batch_size=None)
whole_passes = Feed(Batches, method="generate", segment=20, batch_size=None)
passes = Feed(Batches, method="generate", segment=20, samples=20, batch_size=None)
endless_batches = Feed(Batches, method="without_noise", batch_size=None)

def forever(split):
    while True:
        yield from range(40)

endless_splits = Feed(forever, **pieces)
cycle_batches = Feed(Batches, method="generate", segment=7, batch_size=None)
cycle_rows = Feed(Batches, method="generate", segment=70, batch_size=None, rebatch=16)

class OwnSeed:
    def __init__(self, seed):
        self.rng = np.random.RandomState(seed)
    def generate(self, split):
        for i in self.rng.permutation(40):
            yield 40 * split + i

own_seed = Feed(OwnSeed, method="generate", args=(3,), **pieces)
own_order = Feed(OwnSeed, method="generate", args=(3,), **pieces, shuffle=512)
repeats = Feed(lambda: iter(range(30)), segment=30, batch_size=8)

def constant():
    while True:
        yield np.zeros(4)

zeros = Feed(constant, segment=30, batch_size=8)

def one_batch(split):
    while True:
        yield [np.full(4, split), np.ones((4, 2))], np.arange(4)

packed = Feed(one_batch, splits=range(8), batch_size=None, transform=lambda batch: (*batch[0], batch[1]))

def with_locks(split):
    for i in range(40):
        yield i, multiprocessing.current_process(), iter([i])

locks = Feed(with_locks, **pieces, transform=lambda sample: sample[0])

def frames(split):
    yield from range(0 if split in (3, 7, 9, 11) else 20)

few_empty = Feed(frames, splits=range(16), batch_size=8)
few_empty_batches = Feed(frames, splits=range(16), batch_size=8, batch_transform=lambda batch: batch + 1)
most_empty = Feed(lambda split: iter(range(split // 10)), splits=range(16), batch_size=2)
dropped = Feed(numbers, args=(9,), splits=range(16), batch_size=8, transform=lambda x: DROP if x < 9 else x)
unequal = Feed.zip({"a": few_empty, "b": Feed(numbers, args=(9,), splits=range(16), batch_size=8)})
thirty = dict(segment=30, batch_size=8)
repeats_batches = Feed(lambda: iter(range(30)), **thirty, batch_transform=lambda x, rng: x + rng.random())

def noise(batch, rng):
    return {"image": batch["image"] + np.random.random(), "label": batch["label"] + rng.integers(9)}

def unseeded_noise(batch):
    return {**batch, "image": batch["image"] + np.random.default_rng().random()}

def kept_noise(batch):
    return {**batch, "image": batch["image"] + kept.random()}

def slow(batch):
    time.sleep(0.02)
    return batch

def fails(batch):
    return batch if batch["label"][0] < 48 else 1 / 0

def breaks(split, rng):
    yield from itertools.islice(rows(split, rng), 13)
    if split == 2:
        raise OSError("no such image")

of_five = {**pieces, "splits": range(5)}
batches = Feed(breaks, **of_five, on_error="skip", batch_transform=noise)
feed_batches = Feed(rows, **of_five, batch_transform=unseeded_noise)
feed_batches_kept = Feed(rows, **of_five, batch_transform=kept_noise)
slow_batches = Feed(rows, **of_five, batch_transform=slow)
failing_batches = Feed(rows, **of_five, on_error="skip", batch_transform=fails)

def at_import(split):
    for i in range(20):
        yield {"x": unseeded.random(3), "i": i}

def in_generator(split):
    for i in range(20):
        yield {"x": random.Random().random() if i > 4 else 0.0, "i": i}

def lists_of_lists(split):
    for i in range(20):
        yield [[0], [0, random.Random().random()]]

def lengths_of_lists(split):
    for i in range(20):
        yield [[0] * random.Random().randrange(10**3), [0, 0]]

OF_LISTS = {**pieces, "batching": "ragged"}
feed_lists = Feed(lists_of_lists, **OF_LISTS, spec=Leaf("float64", (None, None)))
feed_lengths = Feed(lengths_of_lists, **OF_LISTS, spec=Leaf("int64", (None, None)))

def clock(split):
    for i in range(20):
        yield time.time()

def pid(split):
    yield os.getpid()

def beside_rng(split, rng):
    for i in range(20):
        yield rng.random(), np.random.random()

def from_before(split):
    for i in range(20):
        yield kept.random()

def masked(split):
    os.umask(split)
    for i in range(20):
        before = os.umask(0)
        os.umask(before)
        yield before

def set_order(split):
    yield {"name": list(text)[0], "split": split}

def both(split):
    yield {"name": list(text)[0], "pid": os.getpid()}

def length(split):
    yield from range(int.from_bytes(os.urandom(2), "little") % 1000)

culprits = {function.__name__: function for function in (
    at_import, in_generator, clock, pid, beside_rng, from_before, masked, set_order, both, length)}
globals().update({f"feed_{name}": Feed(function, **pieces) for name, function in culprits.items()})

def list_of_splits():
    found = list(range(50))
    random.Random().shuffle(found)
    return found

lists = Feed(rows, splits=list_of_splits, batch_size=8)

class Counts:
    calls = 0
    def __len__(self):
        return 100
    def __getitem__(self, i):
        self.calls += 1
        return np.array([i, self.calls])

items = Feed(Counts(), batch_size=8)

class Unseeded(Counts):
    def __init__(self):
        self.rng = np.random.default_rng()
    def __getitem__(self, i):
        return np.array([i, self.rng.random()])

unseeded_items = Feed(Unseeded(), batch_size=8)

def bad_spec(split):
    for i in range(600):
        yield np.zeros(3 if i == 499 and split == 1 else 4)

spec = Feed(bad_spec, splits=range(2), batch_size=8)

def a_list(split):
    return [1, 2, 3]

returns_list = Feed(a_list, **pieces)

def fails(split):
    for i in range(40):
        data = {"i": i}
        if split == 3 and i == 7:
            np.zeros(3).reshape(7)
        yield i

raises = Feed(fails, **pieces)
skips = Feed(fails, **pieces, on_error="skip")

def crashes(split):
    yield 1
    ctypes.string_at(0)

segfault = Feed(crashes, **pieces)

def ends(split):
    yield 1
    os._exit(3)

exits = Feed(ends, **pieces)

def hangs(split):
    yield 1
    time.sleep(1000)

hang = Feed(hangs, **pieces)
"""


class Checked:
    """The result of a command."""

    def __init__(self, status: int, told: dict[str, Any]) -> None:
        self.status = status
        self.told = told

    @property
    def about(self) -> list[str]:
        return [finding["about"] for finding in self.told["findings"]]

    def finding(self, about: str) -> dict[str, Any]:
        (found,) = (finding for finding in self.told["findings"] if finding["about"] == about)
        return dict(found)


Check = Callable[..., Checked]


@pytest.fixture
def command(tmp_path: Path, daemon_launchers: list[DaemonLauncher]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `penstock check` with these arguments. It is forked, unless it reads `said` or imports from `path`."""
    (tmp_path / "feeds.py").write_text(FEEDS)

    def run(*arguments: str, said: str = "", path: str = "") -> subprocess.CompletedProcess[str]:
        if not said and not path:
            process = daemon_launchers[0].check("--seconds", "0.3", *arguments, folder=tmp_path)
            try:
                output = process.communicate(150)
                return subprocess.CompletedProcess(arguments, process.wait(), *output)
            finally:
                process.close()
        inherited = os.environ.get("PYTHONPATH", "")
        return subprocess.run(
            [sys.executable, "-m", "penstock_server", "check", "--seconds", "0.3", *arguments],
            input=said,
            capture_output=True,
            text=True,
            timeout=150,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, inherited)))},
        )

    return run


@pytest.fixture
def check(command: Callable[..., subprocess.CompletedProcess[str]]) -> Check:
    def checked(*arguments: str, path: str = "") -> Checked:
        ran = command(*arguments, "--json", path=path)
        assert ran.stdout, ran.stderr
        assert not ran.stderr
        return Checked(ran.returncode, json.loads(ran.stdout))

    return checked


def test_a_feed_without_mistakes_is_described_in_a_screen(command: Callable[..., Any]) -> None:
    ran = command("feeds.py:healthy", "--workers", "4", "--strict")
    lines = ran.stdout.splitlines()
    assert (ran.returncode, ran.stderr, lines[-1]) == (0, "", "nothing is wrong")
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 110
    for words in (
        "healthy: feeds.py:healthy, 64 splits",
        "{'image': float64[4, 4], 'label': int64[]}",
        "8 samples, 1.1 KiB",
        "1, 2, 3, 4, 6, 8 or 16 are useful: 16 lanes",
        "of its 64 splits; a full shuffle would have 8",
        "4 workers could make up to",
        "in another order and with another PYTHONHASHSEED",
    ):
        assert words in ran.stdout


@pytest.mark.parametrize("feed", ["endless", "own_order", "ragged", "with_variables"])
def test_other_feeds_without_mistakes_have_no_findings(check: Check, feed: str) -> None:
    enough = () if feed == "endless" else ("--seconds", "60")  # to read all, however slow the machine
    checked = check(f"feeds.py:{feed}", "--strict", *enough)
    assert (checked.status, checked.told["findings"], checked.told["agree"]) == (0, [], True)
    assert checked.told["compared"] > 0
    if enough:
        assert checked.told["compared"] == checked.told["samples"] > 500


def running_in(folder: Path) -> set[int]:
    """Return the processes with this working directory. (Another process may soon have the pid of one that has ended,
    and the same tests may run elsewhere.)"""
    return {process.pid for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)}


def test_what_a_transform_makes_of_batches_is_compared_and_its_time_counts(check: Check) -> None:
    compared = check("feeds.py:batches", "--seconds", "60")
    assert (compared.about, compared.told["agree"], compared.told["compared"]) == (["skipped"], True, 65)
    done = check("feeds.py:slow_batches", "--seconds", "60").told
    assert done["samples"] == 200
    assert done["seconds"] > 25 * 0.02
    failed = check("feeds.py:failing_batches").finding("sample")
    assert "batch_transform fails raised ZeroDivisionError: division by zero (batch 0 of split 2)" in failed["what"]
    assert "in fails" in failed["where"]


def test_a_feed_that_has_processes_of_its_own_leaves_none_behind(check: Check, tmp_path: Path) -> None:
    checked = check("feeds.py:with_processes")
    assert (checked.status, len(checked.told["findings"]), checked.told["agree"]) == (0, 1, True)
    assert "starts 2 processes of its own. In each of 16 lanes" in checked.finding("processes")["what"]
    wait_until(lambda: not running_in(tmp_path))


def test_an_expensive_generator_that_cannot_be_divided_is_named(check: Check) -> None:
    finding = check("feeds.py:whole", "--workers", "4").finding("lanes")
    assert "each worker runs the whole generator, and they share only the work of transform=" in finding["what"]
    rates = re.fullmatch(r".* makes (\d+) samples/s, so 4 workers make (\d+), and one makes (\d+)", finding["what"])
    assert rates is not None
    assert int(rates[1]) >= int(rates[2]) >= int(rates[3]) > 0
    assert "give segment=N" in finding["fix"]
    for few in (("feeds.py:whole_in_one_lane", "--workers", "4"), ("feeds.py:whole", "--workers", "1")):
        assert not any("runs the whole generator" in one["what"] for one in check(*few).told["findings"])


def test_a_generator_that_each_lane_runs_is_named_with_what_cannot_be_kept_for_other_lanes(check: Check) -> None:
    finding = check("feeds.py:whole_of_sets", "--workers", "4").finding("lanes")
    assert "each of the 16 lanes runs the whole generator, and drops what the others keep" in finding["what"]
    assert "its samples have a value of type set, which cannot be kept for other lanes" in finding["what"]
    assert "yield arrays, numbers and text only" in finding["fix"]


def test_an_expensive_transform_of_a_generator_that_cannot_be_divided_is_fine(check: Check) -> None:
    assert check("feeds.py:whole_with_work", "--workers", "4").told["findings"] == []


def test_data_files_are_checked_as_served(check: Check, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("images", data=np.zeros((500, 4), "u1"))
    checked = check("data.h5", "--leaf", "images", "--batch-size", "8")
    assert (checked.status, checked.told["spec"], checked.told["compared"]) == (0, "uint8[4]", 500)
    assert checked.about == []  # the worker opens the file


@pytest.mark.parametrize(
    ("feed", "where", "what", "fix"),
    [
        ("feed_at_import", "feeds.py:6, at import", "sample['x'][0] is ", "default_rng(0)"),
        ("feed_in_generator", "in in_generator", "sample 5: sample['x'] is 0.", "parameter `rng`"),
        ("feed_lists", "in lists_of_lists", "sample[1, 1] is 0.", "parameter `rng`"),
        ("feed_lengths", "in lengths_of_lists", "sample has lists of other lengths in one run", "parameter `rng`"),
        ("feed_clock", "in clock", "the cause is the clock", "depend on the split"),
        ("feed_pid", "in pid", "the cause is the process id", "depend on the split"),
        ("feed_beside_rng", "", "sample[1] is 0.", "leave the parameter `rng` out"),
        ("feed_from_before", "", "these change: kept in feeds.py", "keep nothing from one split"),
        ("feed_masked", "", "these change: os.umask", "restore it before `yield`"),
        ("feed_both", "in both", "sample['pid']", "depend on the split"),
        ("feed_length", "in length", "samples in one run and another number", "parameter `rng`"),
        (
            "feed_batches",
            "in unseeded_noise",
            "transformed sample['image'][0, 0] is",
            "parameter `rng` of batch_transform",
        ),
        ("feed_batches_kept", "", "these change: kept in feeds.py", "keep nothing from one batch to the next"),
        ("lists", "in list_of_splits", "two runs list different splits", "or sort the list"),
        ("items", "", "these change: Counts.calls in feeds.py", "keep nothing"),
    ],
)
def test_samples_that_differ_from_run_to_run_are_traced_to_their_cause(
    check: Check, feed: str, where: str, what: str, fix: str
) -> None:
    checked = check(f"feeds.py:{feed}")
    assert (checked.status, checked.told["agree"]) == (1, False)
    finding = checked.finding("runs")
    assert finding["severity"] == "error"
    assert where in finding["where"]
    assert what in finding["what"]
    assert fix in finding["fix"]


def test_a_random_state_that_transforms_share_is_to_be_seeded_for_each_sample() -> None:
    shared = Culprit(culprit.BEFORE, names=("imgaug's random state", "flips in feeds.py"))
    what, _, fix = culprit_words.cause(shared)
    assert "these change: imgaug's random state" in what
    assert fix.startswith("begin each sample with imgaug.seed(int(np.random.randint(2**31))), or with int(rng")


def test_a_progress_bar_is_no_thread_that_changes_samples(check: Check, tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    (tmp_path / "bars.py").write_text(
        textwrap.dedent(
            """
            import numpy as np
            from penstock_server import Feed
            from tqdm import tqdm
            kept = np.random.RandomState(5)
            def rows(split):
                for _ in tqdm(range(20)):
                    yield kept.rand(3)
            feed = Feed(rows, splits=range(4), batch_size=10)
            """
        )
    )
    finding = check("bars.py:feed").finding("runs")
    assert "kept in bars.py" in finding["what"]
    assert "thread" not in finding["what"] + finding["fix"]


def test_the_clock_is_found_beside_a_library_that_needs_the_real_datetime(check: Check, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    (packages / "frames").mkdir(parents=True)
    (packages / "frames/__init__.py").write_text(  # a compiled one, such as pandas, crashes
        "import datetime\nif type(datetime.datetime) is not type:\n    raise SystemError\n"
    )
    (tmp_path / "dated.py").write_text(
        textwrap.dedent(
            """
            import frames
            from datetime import datetime
            from penstock_server import Feed
            class Later(datetime):
                pass
            def rows(split):
                assert type(datetime(2020, 1, 1)) is type(datetime.min) and Later(2020, 1, 1).year == 2020
                for _ in range(30):
                    yield datetime.now().timestamp()
            feed = Feed(rows, splits=range(64), batch_size=8)
            """
        )
    )
    finding = check("dated.py:feed", path=str(packages)).finding("runs")
    assert "the cause is the clock" in finding["what"]
    assert finding["where"] == "dated.py:10 in rows"


@pytest.mark.parametrize("drawn", ["at import", "in the generator"])
def test_a_library_that_keeps_a_random_state_is_named(check: Check, tmp_path: Path, drawn: str) -> None:
    packages = tmp_path / "site-packages"
    (packages / "polars").mkdir(parents=True)
    (packages / "polars/__init__.py").write_text(  # as in a C library, nobody sees where its first seed comes from
        "import random\nstate = random.Random(open('/dev/urandom', 'rb').read(8))\n"
        "set_random_seed = state.seed\n"
        "def shuffled(rows):\n    return state.sample(rows, len(rows))\n"
    )
    order = "ROWS" if drawn == "at import" else "polars.shuffled(range(20))"
    (tmp_path / "frames.py").write_text(
        textwrap.dedent(
            f"""
            import polars
            from penstock_server import Feed
            ROWS = polars.shuffled(range(20))
            def rows(split):
                yield from {order}
            feed = Feed(rows, splits=range(8), batch_size=8)
            """
        )
    )
    finding = check("frames.py:feed", path=str(packages)).finding("runs")
    assert "the cause is the random state of polars" in finding["what"]
    assert "seed=" in finding["fix"]


def test_a_library_with_random_numbers_of_its_own_is_named(check: Check, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    (packages / "augmentations").mkdir(parents=True)
    (packages / "augmentations/__init__.py").write_text(
        "import numpy as np\ndef flip(x):\n    return x + np.random.default_rng().random()\n"
    )
    (tmp_path / "augmented.py").write_text(
        textwrap.dedent(
            """
            import augmentations, uuid
            from penstock_server import Feed
            def rows(split):
                for i in range(30):
                    uuid.uuid4()  # is no part of the sample
                    yield augmentations.flip(i)
            feed = Feed(rows, splits=range(64), batch_size=8)
            """
        )
    )
    finding = check("augmented.py:feed", path=str(packages)).finding("runs")
    assert "a generator without a seed in augmentations" in finding["what"]
    assert finding["where"] == "augmented.py:7 in rows"
    assert "give augmentations a seed" in finding["fix"]


def test_the_order_of_a_set_is_a_note_as_workers_have_one_hash_seed(check: Check) -> None:
    checked = check("feeds.py:feed_set_order", "--strict")
    assert (checked.status, checked.told["agree"]) == (0, True)
    assert "PYTHONHASHSEED" in checked.finding("runs")["what"]
    assert checked.finding("runs")["severity"] == "note"


@pytest.mark.parametrize(
    ("feed", "about", "words", "where"),
    [
        ("spec", "sample", "sample 499 of its split, from 0", "in bad_spec"),
        ("returns_list", "first sample", "a_list must return an iterator, got [1, 2, 3]: `yield`", ""),
        ("raises", "sample", "cannot reshape array of size 3", "in fails"),
        ("segfault", "crash", "was killed by SIGSEGV while it read split ", "in crashes"),
        ("exits", "crash", "exited with status 3 while it read split ", ""),
        ("hang", "hang", "while it read split ", "in hangs"),
        ("wrong_samples", "samples", "samples=2561, but an epoch has 2560", ""),
        ("none", "import", "feeds.py has no attribute 'none'; its feeds are", ""),
    ],
)
def test_what_fails_is_reported_with_its_place(check: Check, feed: str, about: str, words: str, where: str) -> None:
    checked = check(f"feeds.py:{feed}", "--hang-timeout", "5" if feed == "hang" else "60", "--seconds", "1")
    assert checked.status == 1
    finding = checked.finding(about)
    assert finding["severity"] == "error"
    assert words in finding["what"]
    assert where in finding["where"]


@pytest.mark.parametrize(
    ("code", "words", "where"),
    [
        ("import nonesuch", "No module named 'nonesuch'", "broken.py:1, at import"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV while importing broken.py:feed", "broken.py:1"),
        ("import time; time.sleep(1000)", "while importing broken.py:feed", "broken.py:1"),
    ],
)
def test_an_import_that_fails_is_reported(check: Check, tmp_path: Path, code: str, words: str, where: str) -> None:
    (tmp_path / "broken.py").write_text(code)
    checked = check("broken.py:feed", "--hang-timeout", "4")
    (finding,) = checked.told["findings"]
    assert checked.status == 1
    assert words in finding["what"]
    assert where in finding["where"]


GUILTY = [Source(kind, "feeds.py:3 in f", library) for kind in ("system", "clock", "pid") for library in ("", "monai")]
CULPRITS = [
    *(Culprit(culprit.SOURCES, (source,)) for source in (*GUILTY, Source("system", "feeds.py:3, at import"))),
    *(Culprit(culprit.SOURCES, (Source(library),)) for library in SEEDED),
    Culprit(culprit.BEFORE, names=("Data.rng",)),
    *(Culprit(kind, at_once=lines) for kind in (culprit.BEFORE, culprit.UNKNOWN) for lines in ((), ("feeds.py:3",))),
]


@pytest.mark.parametrize("found", CULPRITS, ids=str)
def test_an_indexable_feed_is_not_told_to_draw_from_a_generator_that_it_does_not_get(found: Culprit) -> None:
    told, _, fix = culprit_words.cause(replace(found, items=True))
    assert "`rng`" not in fix
    assert "rng." not in fix
    assert "split" not in fix
    assert told == culprit_words.cause(found)[0]


def test_libraries_that_draw_from_the_system_are_named_together() -> None:
    sources = tuple(Source("system", "feeds.py:3", library) for library in ("sklearn", "", "joblib"))
    told = "with the system's random numbers (a generator without a seed in sklearn or joblib, or os.urandom) the same"
    assert told in culprit_words.cause(Culprit(culprit.UNKNOWN, sources))[0]


def test_an_object_that_draws_without_a_seed_is_told_what_is_seeded_for_it(check: Check) -> None:
    finding = check("feeds.py:unseeded_items").finding("runs")
    assert "the system's random numbers" in finding["what"]
    assert finding["fix"] == "draw from random or numpy.random, which Penstock seeds for each batch"


def test_warnings_fail_only_a_strict_check(check: Check) -> None:
    checked = check("feeds.py:one_split")
    assert (checked.status, checked.about) == (0, ["feed"])
    assert "cannot be divided" in checked.finding("feed")["what"]
    assert check("feeds.py:repeats", "--strict").status == 1


def test_splits_that_are_left_out_and_segments_that_repeat_are_warnings(check: Check) -> None:
    skipped = check("feeds.py:skips").finding("skipped")
    assert skipped["what"].startswith("split 3: the rest is left out after 7 samples: fails raised ValueError")
    for name in ("repeats", "repeats_batches"):
        repeated = check(f"feeds.py:{name}").finding("segments")
        assert "every segment repeats" in repeated["what"]


def test_a_constant_is_no_segment_that_repeats(check: Check) -> None:
    assert check("feeds.py:zeros").about == []


def test_a_loop_over_what_only_a_transform_makes_servable_is_compared_or_the_check_says_that_it_is_not(
    check: Check,
) -> None:
    assert "goes through the same 4 rows again and again" in check("feeds.py:packed").finding("epochs")["what"]
    unknown = check("feeds.py:locks").finding("plain loop")
    assert unknown["severity"] == "note"
    assert unknown["what"].startswith("the feed could not be compared with a plain loop over its generator: samples")


def test_splits_without_samples_are_named_if_most_have_some(check: Check) -> None:
    for feed in ("few_empty", "few_empty_batches"):
        empty = check(f"feeds.py:{feed}").finding("splits")
        assert empty["severity"] == "note"
        assert empty["what"] == (
            "the generator yields no sample for 4 of 16 splits that were read: split 3, split 7, split 9 and 1 more"
        )
    for feed in ("most_empty", "dropped"):
        assert "splits" not in check(f"feeds.py:{feed}").about
    assert check("feeds.py:unequal").about.count("splits") == 0  # the part with fewer samples is named


def test_what_a_generator_carries_on_and_the_feed_loses_is_named(check: Check) -> None:
    cycle = check("feeds.py:cycle").finding("segments")
    assert re.match(r"60 samples of an epoch have only [34]\d different ones, and a plain", cycle["what"])
    assert "as splits=" in cycle["fix"]
    assert "; or give segment=60 and samples=60: each epoch is then a whole pass" in cycle["fix"]
    for feed, whole in {"cycle_batches": 20, "cycle_rows": 200}.items():  # no batch comes twice, but its rows do
        lost = check(f"feeds.py:{feed}").finding("segments")
        assert re.match(r"200 rows of an epoch have only 1\d\d different ones, and a plain", lost["what"])
        assert f"; or give segment={whole} and samples={whole}: each epoch" in lost["fix"]
    uneven = check("feeds.py:uneven").finding("segments")
    assert "goes through the same 200 rows again and again. Each segment starts it again" in uneven["what"]
    assert "give segment=20 and samples=20: each epoch" in uneven["fix"]
    own_seed = check("feeds.py:own_seed").finding("epochs")
    assert "each epoch has the same samples in the same order, and in a plain loop over one object" in own_seed["what"]
    assert "let the constructor take `epoch`" in own_seed["fix"]


def test_a_generator_that_goes_through_its_data_for_ever_without_segments_is_named(check: Check) -> None:
    batches = check("feeds.py:endless_batches").finding("epochs")
    assert "goes through the same 200 rows again and again, so an epoch may never end" in batches["what"]
    assert "let it end after one pass; or leave splits= out and give segment=20 and samples=20: each" in batches["fix"]
    splits = check("feeds.py:endless_splits").finding("epochs")
    assert "the same 40 samples again and again" in splits["what"]
    assert "give segment= and samples= of one pass" in splits["fix"]


def test_segments_that_are_whole_passes_are_told_that_the_stream_has_parts_of_several(check: Check) -> None:
    pieces = check("feeds.py:whole_passes").finding("segments")
    assert pieces["severity"] == "note"
    assert (
        "Segments are whole passes, but the stream is made of up to 16 of them at a time: 200 rows in" in pieces["what"]
    )
    assert "give samples=20: each epoch" in pieces["fix"]
    workers = check("feeds.py:passes")
    assert workers.about == ["workers"]
    assert workers.finding("workers")["what"].endswith("workers run no faster than 1")


@pytest.mark.parametrize(
    ("plain", "rows"),
    [
        ([*range(9)] * 2, 9),
        ([*range(9), *range(8, -1, -1), 3], 9),
        ([*range(9)] * 2 + [*range(4)] * 3, 0),
        (range(9), 0),
    ],
)
def test_a_loop_goes_through_its_data_if_each_pass_has_all_of_it(plain: Any, rows: int) -> None:
    assert one_pass([*map(sample, plain)]) == rows


def sample(number: int) -> bytes:
    return number.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("plain", "segments", "lost"),
    [
        (range(100), [range(10), range(10, 20)], None),  # the segments take other parts
        (range(100), [range(20), range(20)], None),  # every segment begins alike
        (range(100), [range(20), range(10, 30)], Carried("segments", 40, 10)),
        ([*range(30)] * 2, [range(10), range(5, 15), range(20, 30)], Carried("segments", 30, 5, 30)),  # it goes round
        (range(30), [range(10), range(5, 15), range(20, 30)], None),  # too few, if it may draw at random
        ([1, 2, 3, 1, 2, 3] * 9, [range(10), range(1, 11)], None),  # a few values come again and again
    ],
)
def test_segments_lose_an_order_if_they_repeat_samples_sooner_than_a_plain_loop(
    plain: Any, segments: Any, lost: Carried | None
) -> None:
    reads = [(number, sample(one)) for segment in segments for number, one in enumerate(segment)]
    assert lost_by_segments([*map(sample, plain)], reads) == lost


@pytest.mark.parametrize(
    ("share", "cpus", "times"),
    [(0.01, 2, 8), (1.0, 8, 7), (1.0, 2, 1), (0.5, 2, 2), (3.5, 8, 2), (1.0, 0.2, 1), (0.25, 1, 2)],
)
def test_a_forecast_leaves_a_cpu_to_the_trainer_and_counts_helpers(share: float, cpus: float, times: float) -> None:
    """`share`: CPUs that one worker keeps busy, with its helpers. `cpus`: what others leave."""
    assert speed(Pace(0.0, 0.01), share, 8, cpus) == pytest.approx(100 * times)


def test_workers_share_only_what_is_divided() -> None:
    pace = Pace(0.01, 0.04)
    assert pace.rate(1) == pytest.approx(20)
    assert pace.rate(4) == pytest.approx(50)
    assert speed(pace, 0.5, 4, 8) == pytest.approx(50)


def test_the_cpu_time_of_processes_that_user_code_starts_is_counted() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass\n"
    watch = CpuWatch()
    subprocess.run([sys.executable, "-c", busy], check=True)
    with subprocess.Popen([sys.executable, "-c", f"{busy}print(1, flush=True); time.sleep(60)"], stdout=-1) as lives:
        assert lives.stdout is not None
        lives.stdout.readline()
        used = watch.used()
        lives.kill()
    assert 0.5 <= used.helpers < 6
    assert used.others >= 0


def test_too_little_memory_is_an_error_with_the_value_to_give(check: Check) -> None:
    finding = check("feeds.py:healthy", "--memory", "20K").finding("memory")
    assert "a stream needs at least" in finding["what"]
    assert "give --memory " in finding["fix"]


def test_costly_imports_open_files_and_gpus_are_named(check: Check, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    for name, code in {
        "tensorflow": "",
        "brings_it": "import tensorflow",
        "cupy": "class cuda:\n    class runtime:\n        getDeviceCount = staticmethod(lambda: 2)\n",
    }.items():
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text(code)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.arange(50)
    (tmp_path / "helper.py").write_text("import brings_it\n")
    (tmp_path / "costly.py").write_text(
        textwrap.dedent(
            """
            import os
            import cupy, h5py, helper
            from penstock_server import Feed
            os.environ["CUDA_VISIBLE_DEVICES"] = "0"
            DATA = h5py.File("data.h5")
            def rows(split):
                yield DATA["x"][split]
            feed = Feed(rows, splits=range(50), batch_size=8)
            """
        )
    )
    checked = check("costly.py:feed", "--strict", path=str(packages))
    assert checked.status == 1
    assert checked.finding("import")["where"] == "costly.py:3 -> helper.py:1 -> brings_it"
    assert "TensorFlow" in checked.finding("import")["what"]
    assert "data.h5 is opened at import and stays open (DATA in costly.py)" in checked.finding("open file")["what"]
    assert checked.finding("gpu")["what"] == "cupy can see 2 GPUs in a worker"
    assert "in the generator, once per split" in checked.finding("open file")["fix"]

    (tmp_path / "indexed.py").write_text(
        textwrap.dedent(
            """
            import h5py
            from penstock_server import Feed
            class Rows:
                file = h5py.File("data.h5")
                def __len__(self):
                    return 50
                def __getitem__(self, i):
                    return self.file["x"][i]
            feed = Feed(Rows(), batch_size=8)
            """
        )
    )
    assert "in __getitem__, for the first item" in check("indexed.py:feed").finding("open file")["fix"]


FORKING = """
import os, time
from penstock_server import Feed
def rows(split):
    if os.fork() == 0:
        os.setsid()
        os.chdir(os.path.dirname(__file__))
        time.sleep(300)
    yield split
feed = Feed(rows, splits=range(4), batch_size=2)
"""


def test_processes_that_outlive_their_generators_are_counted_and_end_with_the_check(
    check: Check, tmp_path: Path
) -> None:
    (tmp_path / "forking.py").write_text(FORKING)
    found = check("forking.py:feed").finding("processes")
    assert re.match("[0-9]+ processes that generators have started still run after", found["what"])
    wait_until(lambda: not running_in(tmp_path))


def test_they_also_end_if_the_process_that_reads_has_ended_before_the_command_looks(tmp_path: Path) -> None:
    (tmp_path / "forking.py").write_text(FORKING)
    task = messages.Task(target=f"{tmp_path}/forking.py:feed", folder=str(tmp_path), name="one", seconds=60.0)
    run = runs.Run(task, os.environ, 60)
    (reads,) = (child for child in psutil.Process().children() if str(tmp_path) in str(child.cmdline()))
    wait_until(lambda: reads.status() == psutil.STATUS_ZOMBIE)
    (outcome,) = runs.finish(run)
    assert outcome.done is not None
    assert outcome.done.processes >= 4
    wait_until(lambda: not running_in(tmp_path), 5)


def test_pdb_stops_in_the_failing_frame_of_user_code(command: Callable[..., Any]) -> None:
    ran = command("feeds.py:raises", "--pdb", said="p split, i, data\nq\n")
    assert "(3, 7, {'i': 7})" in ran.stdout
    assert ran.returncode == 1
    ran = command("feeds.py:spec", "--pdb", said="p 'here', split, i\nq\n")
    assert "('here', 1, 499)" in ran.stdout


# --- what the experiments find, without processes ---

A, B, C = (Source("system", f"feed.py:{line} in rows") for line in (1, 2, 3))


class World:
    """Simulates runs whose samples depend on the sources in `guilty`."""

    def __init__(self, *guilty: Source, used: tuple[Source, ...] = (A, B, C)) -> None:
        self.guilty = set(guilty)
        self.done = Done(1, 0.1, 0.1, True, Gpu(), (), used)
        self.trials: list[Trial] = []

    def attempt(self, trial: Trial) -> Result:
        self.trials.append(trial)
        return Result(self.guilty <= set(trial.fixes), (self.done, self.done))

    def found(self, *, takes_rng: bool = False) -> Culprit:
        return culprit.find(self.attempt, takes_rng=takes_rng)


def test_the_only_culprit_is_found_in_few_experiments() -> None:
    world = World(A)
    assert world.found() == Culprit(culprit.SOURCES, (A,))
    assert len(world.trials) == 2


def test_several_culprits_are_all_found_and_no_others() -> None:
    assert World(A, C).found() == Culprit(culprit.SOURCES, (A, C))


def test_what_no_source_explains_is_not_blamed_on_one() -> None:
    found = World(Source("elsewhere")).found()
    assert (found.kind, found.proven) == (culprit.UNKNOWN, False)


def test_threads_are_named_where_no_source_explains_a_difference() -> None:
    threads = Source("thread", "feed.py:9 in rows")
    found = World(Source("elsewhere"), used=(A, threads)).found()
    assert (found.kind, found.sources, found.at_once) == (culprit.UNKNOWN, (A,), ("feed.py:9 in rows",))


class Race(World):
    """Simulates runs whose samples depend on threads: the experiments of these numbers agree by chance."""

    def __init__(self, *agree: int) -> None:
        super().__init__(used=(A, Source("thread", "feed.py:9 in rows")))
        self.agreeing = set(agree)

    def attempt(self, trial: Trial) -> Result:
        self.trials.append(trial)
        return Result(len(self.trials) - 1 in self.agreeing, (self.done, self.done))


@pytest.mark.parametrize("agree", [(), (0,), (0, 1, 2, 3, 4, 6), (1,), (0, 2), (1, 2, 3), (1, 2, 3, 4, 6)])
def test_runs_that_agree_by_chance_prove_nothing(agree: tuple[int, ...]) -> None:
    found = Race(*agree).found()
    assert (found.kind, found.at_once) == (culprit.UNKNOWN, ("feed.py:9 in rows",))


def test_what_is_always_the_same_if_read_alone_may_still_depend_on_threads() -> None:
    found = Race(*range(100)).found()
    assert (found.kind, found.at_once) == (culprit.BEFORE, ("feed.py:9 in rows",))
    what, where, fix = culprit_words.cause(found)
    assert "or on threads or processes that your code starts" in what
    assert where == "feed.py:9 in rows"
    assert "take the results of threads and processes in a fixed order" in fix


def test_a_library_that_starts_threads_on_its_own_is_named() -> None:
    """As a decorator does that reads ahead: no line of the user's starts the thread."""
    library, imported = Source("thread", "", "prefetch_generator"), Source("thread", "", AT_IMPORT)
    found = World(Source("elsewhere"), used=(A, library, imported)).found()
    assert found.at_once == ("prefetch_generator",)


def test_a_source_is_found_although_there_are_threads() -> None:
    world = World(A, used=(A, B, Source("thread", "feed.py:9 in rows")))
    assert world.found() == Culprit(culprit.SOURCES, (A,))


def test_global_generators_are_suspects_only_where_penstock_does_not_seed_them() -> None:
    drawn = Source("random")
    assert World(drawn, used=(drawn,)).found().kind == culprit.UNKNOWN
    assert World(drawn, used=(drawn,)).found(takes_rng=True) == Culprit(culprit.SOURCES, (drawn,))


def test_a_zip_is_checked_and_what_it_leaves_out_is_named(check: Check) -> None:
    checked = check("feeds.py:zipped", "--seconds", "60")  # long enough to read all, however slow the machine
    assert checked.about == ["skipped"]
    said = checked.finding("skipped")["what"]
    assert said.startswith(
        "split (0, 0): the rest is left out after 9 samples: label has 9 samples there, and image has"
    )


def test_a_mix_is_refused_and_its_feeds_are_named(check: Check) -> None:
    checked = check("feeds.py:mixed")
    assert checked.status == 1
    assert "mixed draws from 2 (long, short): check each of these on its own" in checked.finding("import")["what"]
