"""`transform=` makes each sample in the workers, for every kind of source, and the stream keeps every promise."""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_proto.spec import flatten
from penstock_server.to_daemon import control
from penstock_server.worker.batch.shares import Share
from tests.conftest import UNCHECKED, Daemon, Serve, kill
from tests.fakes.inside import handle_of

ROOT = Path(__file__).resolve().parents[2]

FEEDS = """
    import itertools
    import os
    import random
    import time

    import numpy as np
    from penstock_server import Feed, Leaf, Pad

    SIZES = [7, 0, 31, 1, 16, 64, 5, 12]

    def note(what):
        if path := os.environ.get("MADE"):
            with open(path, "ab", 0) as file:
                file.write(f"{what}\\n".encode())

    def by_split(split, rng):
        for i in range(SIZES[split]):
            yield {"id": 1000 * split + i, "x": rng.normal(size=3)}

    def by_split_globally(split):
        for i in range(SIZES[split]):
            yield {"id": 1000 * split + i, "x": np.random.normal(size=3)}

    def by_segment(segment, rng):
        while True:
            yield {"id": segment, "x": rng.normal(size=3)}

    def by_shard(shard):
        for i in range(shard[0], 130, shard[1]):
            yield {"id": i, "x": np.zeros(3)}

    def whole(rng):
        "Each sample depends on all before it."
        level = np.zeros(3)
        for i in range(203):
            level = level + rng.normal(size=3)
            yield {"id": i, "x": level}

    def whole_globally():
        level = 0.0
        for i in range(203):
            level += random.random() + np.random.random()
            yield {"id": i, "x": np.full(3, level)}

    def batches():
        for i in range(40):
            yield np.full((1 + i % 5, 2), i)

    class Table:
        def __len__(self):
            return 203
        def __getitem__(self, i):
            return {"id": i, "x": np.random.normal(size=3)}

    class Walk:
        def __init__(self, start):
            self.level = start + random.random()
        def generate(self):
            for i in range(9):
                yield {"id": i, "x": np.full(3, self.level)}

    def drawn(sample, rng):
        return {**sample, "drawn": rng.random(), "picked": rng.integers(10**9, size=2)}

    def drawn_globally(sample):
        return {**sample, "drawn": np.random.random(), "picked": random.randrange(10**9)}

    def to_tuple(sample):
        return (sample["x"].astype("float32"), sample["picked"]), {"id": sample["id"], "drawn": sample["drawn"]}

    def sized(sample, rng):
        return {"id": sample["id"], "x": rng.random(rng.integers(1, 12))}

    def some(sample, rng):
        for _ in range(rng.integers(0, 3)):
            yield {**sample, "drawn": rng.random()}

    def of_batch(batch, rng):
        return batch[:, 0], rng.random((len(batch), 3))

    def noted(sample):
        note(f"{os.getpid()} {sample['id']}")
        time.sleep(0.001)
        return sample["id"]

    S = range(8)
    splits = Feed(by_split, transform=drawn, splits=S, batch_size=8, lanes=3, turn=2, seed=3)
    shuffled = Feed(by_split, transform=[drawn_globally, to_tuple], splits=S, batch_size=8, lanes=3, shuffle=40)
    globally = Feed(by_split_globally, transform=drawn_globally, splits=S, batch_size=8, lanes=3, turn=1)
    mixed = Feed(by_split_globally, transform=[drawn, drawn_globally], splits=S, batch_size=8, lanes=2, turn=1)
    segments = Feed(by_segment, transform=drawn_globally, segment=10, samples=200, batch_size=7, lanes=3, turn=1)
    shard = Feed(by_shard, transform=drawn, batch_size=8, lanes=5, turn=1)
    undivided = Feed(whole, transform=[drawn, to_tuple], batch_size=8, lanes=5, turn=2)
    undivided_striped = Feed(whole, transform=[drawn, to_tuple], batch_size=8, lanes=5)
    undivided_globally = Feed(whole_globally, transform=drawn_globally, batch_size=8, lanes=4, turn=3)
    undivided_shuffled = Feed(whole_globally, transform=drawn, batch_size=8, lanes=4, shuffle=60, turn=1)
    pad = Pad(buckets=[3, 8], too_long="drop")
    undivided_padded = Feed(whole, transform=sized, batching=pad, batch_size=4, lanes=5, shuffle=60)
    undivided_some = Feed(whole, transform=some, batch_size=8, lanes=5)
    undivided_some_shuffled = Feed(whole, transform=some, batch_size=8, lanes=5, shuffle=60)
    first, second = Feed(whole, batch_size=8), Feed(whole_globally, batch_size=8)
    both = {"a": first, "b": second}
    undivided_pairs = Feed.zip(both, transform=lambda s: {**s, "id": s["a"]["id"]}, batch_size=8, lanes=5)
    parts = {
        "a": Feed(whole, transform=drawn, batch_size=8),
        "b": Feed(whole_globally, transform=[drawn_globally, drawn], batch_size=8),
    }
    undivided_mix = Feed.mix(parts, batch_size=8, lanes=4, seed=3)
    undivided_batches = Feed(batches, transform=of_batch, batch_size=None, lanes=3)
    table = Feed(Table(), transform=drawn, batch_size=8, shuffle=1, turn=1)
    table_globally = Feed(Table(), transform=[drawn_globally, to_tuple], batch_size=8, turn=2)
    table_batches = Feed(list(batches()), transform=of_batch, batch_size=None, shuffle=1)
    walk = Feed(Walk, method="generate", transform=drawn_globally, splits=S, batch_size=8, lanes=3, turn=1)

    def forever(rng):
        for i in itertools.count():
            yield {"id": i, "x": rng.normal(size=3)}

    forever = Feed(forever, transform=drawn_globally, batch_size=8, lanes=4, turn=2)
    def untidy(sample, rng):
        return {**sample, "lost": 0 * (random.random() + np.random.random())}

    tidy = Feed(whole_globally, transform=lambda s: {**s, "lost": 0.0}, batch_size=8, lanes=4)
    untidy = Feed(whole_globally, transform=untidy, batch_size=8, lanes=4)
    one_lane = Feed(whole_globally, transform=drawn_globally, batch_size=8, lanes=1)
    fast = Feed(whole, transform=drawn, batch_size=8, lanes=4, order="fast", samples=203)
    many_lanes = Feed(whole_globally, transform=drawn_globally, batch_size=8, lanes=16)

    def made(rng):
        for sample in whole(rng):
            note(f"{os.getpid()} {sample['id']}")
            time.sleep(0.003)
            yield sample

    once = Feed(made, transform=lambda s: s["x"], batch_size=4, epochs=1, spec=Leaf("float64", (3,)))
    once_shuffled = Feed(made, transform=lambda s: s["x"], batch_size=4, shuffle=60, epochs=1, spec=once.spec)
    counted = Feed(whole, transform=noted, batch_size=4, lanes=4, turn=1, epochs=1, spec=Leaf("int64", ()))
"""
NAMES = re.findall(
    r"^    (\w+) = Feed[.a-z]*\(", FEEDS.partition("    S = ")[2].partition("    def forever")[0], re.MULTILINE
)


def digest(connection: penstock.Connection, batch: Any) -> str:
    leaves = flatten(connection.info.spec, batch)
    return hashlib.sha256(
        b"".join(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes() for leaf in leaves)
    ).hexdigest()


def read(daemon: Daemon, name: str, transport: str = "local", epochs: int = 2) -> list[list[str]]:
    with penstock.connect(daemon.urls[name], transport=transport) as connection:
        return [[digest(connection, batch) for batch in connection.batches()] for _ in range(epochs)]


def batches_of(daemon: Daemon, name: str) -> list[Any]:
    """Return the batches of the first epoch, copied."""
    with penstock.connect(daemon.urls[name], transport="tcp") as connection:
        return list(connection.batches())


def test_every_source_is_transformed_alike_with_1_and_3_workers_through_a_kill_and_from_a_state(serve: Serve) -> None:
    one = serve(FEEDS, *NAMES, workers=1)
    quiet = {name: read(one, name, "tcp") for name in NAMES}
    assert one.stop() == 0

    three = serve(FEEDS, *NAMES, workers=3)
    states = {}
    for number, name in enumerate(NAMES):
        first, second = quiet[name]
        with penstock.connect(three.urls[name]) as connection:
            batches = connection.batches()
            seen = [digest(connection, batch) for batch in itertools.islice(batches, 3)]
            states[name] = connection.state_dict()
            if number % 3 == 0:
                three.workers()[0].kill()
            seen += [digest(connection, batch) for batch in batches]
            assert seen == first, name
            assert [digest(connection, batch) for batch in connection.batches()] == second, name
            assert len({*first, *second}) == len(first) + len(second), f"{name}: other random numbers in each epoch"
    assert not re.search("a different first sample|the same samples", three.stderr()), three.stderr()
    assert three.stop() == 0

    two = serve(FEEDS, *NAMES, workers=2)
    for name in NAMES:
        with penstock.connect(two.urls[name], state=states[name]) as connection:
            assert [digest(connection, batch) for batch in connection.batches()] == quiet[name][0][3:], name


def test_a_sample_has_random_numbers_of_its_own(serve: Serve) -> None:
    names = ("splits", "globally", "segments", "undivided_globally", "undivided_shuffled", "table")
    daemon = serve(FEEDS, *names)
    for name in names:
        batches = batches_of(daemon, name)
        rows = np.concatenate([batch["drawn"] for batch in batches]).tolist()
        assert len(set(rows)) == len(rows) > 100, name
        assert not set(rows) & set(np.concatenate([batch["x"] for batch in batches]).ravel().tolist()), name


def test_a_generator_that_cannot_be_divided_keeps_its_order_whatever_its_lanes_are(serve: Serve) -> None:
    names = ("one_lane", "many_lanes", "undivided_globally", "undivided_shuffled", "undivided", "undivided_batches")
    daemon = serve(FEEDS, *names, "undivided_striped", "fast", workers=3)
    streams = [batches_of(daemon, name) for name in names]
    for stream in streams[1:3]:
        for one, other in zip(streams[0], stream, strict=True):
            for key in one:
                np.testing.assert_array_equal(one[key], other[key])
    assert np.concatenate([batch["id"] for batch in streams[0]]).tolist() == list(range(203))
    assert np.concatenate([labels["id"] for _, labels in streams[4]]).tolist() == list(range(203))
    assert [ids.tolist() for ids, _ in streams[5]] == [[i] * (1 + i % 5) for i in range(40)]

    with penstock.connect(daemon.urls["undivided_striped"]) as connection:
        assert handle_of(connection).info.turn == 1, "by default, all workers are needed from the first batch on"
    assert read(daemon, "undivided_striped") == read(daemon, "undivided")

    shuffled = [batch["id"].tolist() for batch in streams[3]]
    assert sorted(itertools.chain(*shuffled)) == list(range(203))
    assert np.mean([max(batch) - min(batch) for batch in shuffled[:20]]) > 20, "a batch mixes a wide range"

    with penstock.connect(daemon.urls["fast"]) as connection:
        assert connection.cardinality == 26
        assert sorted(i for batch in connection.batches() for i in batch["id"].tolist()) == list(range(203))
    assert "a full shuffle" not in daemon.stderr()
    assert "cannot be divided" not in daemon.stderr()


def test_a_killed_worker_changes_nothing_where_every_lane_runs_the_whole_generator(serve: Serve) -> None:
    streams = []
    for workers in (1, 3):
        daemon = serve(FEEDS, "forever", workers=workers)
        with penstock.connect(daemon.url) as connection:
            batches = connection.batches()
            seen = [digest(connection, batch) for batch in itertools.islice(batches, 30)]
            kill(daemon.workers() if workers == 3 else ())
            streams.append(seen + [digest(connection, batch) for batch in itertools.islice(batches, 170)])
    assert streams[0] == streams[1]
    assert len(set(streams[0])) == 200


def test_transforms_run_in_all_workers_once_a_sample_and_not_for_samples_that_are_dropped(
    serve: Serve, tmp_path: Path
) -> None:
    log = tmp_path / "made"
    daemon = serve(FEEDS, "counted", workers=2, env={"MADE": str(log)}, patched=UNCHECKED)
    while not all(worker.ready for worker in control.status(daemon.url, 60).workers):
        time.sleep(0.02)
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        seen = list(map(np.ndarray.tolist, itertools.islice(batches, 30)))
        state = connection.state_dict()
        seen += map(np.ndarray.tolist, batches)
        del batches
    assert list(itertools.chain(*seen)) == list(range(203))
    lines = [line.split() for line in log.read_text().splitlines()]
    assert Counter(int(sample) for _, sample in lines) == Counter(range(203))
    assert len({pid for pid, _ in lines}) == 2
    log.unlink()
    with penstock.connect(daemon.url, state=state) as connection:
        assert [batch.tolist() for batch in connection.batches()] == seen[30:]
    assert sorted(int(line.split()[1]) for line in log.read_text().splitlines()) == list(range(120, 203))


SHARED: dict[str, object] = {"worker.reading.passes.MEASURED": 0.0}
"""Lanes share even a generator that is cheaper than copying its samples."""

LITTLE = SHARED | {"worker.reading.passes.MOST_KEPT": 1500}
"""A pass keeps a few samples. So lanes leave it, and begin others."""


@pytest.mark.parametrize(("name", "most"), [("once", 1), ("once_shuffled", 4)])  # late lanes run it again
def test_a_worker_runs_a_generator_that_cannot_be_divided_once_for_all_its_lanes(
    serve: Serve, tmp_path: Path, name: str, most: int
) -> None:
    log = tmp_path / "made"
    daemon = serve(FEEDS, name, workers=2, env={"MADE": str(log)}, patched=UNCHECKED | SHARED)
    while not all(worker.ready for worker in control.status(daemon.url, 60).workers):
        time.sleep(0.02)
    with penstock.connect(daemon.url) as connection:
        assert sum(len(batch) for batch in connection.batches()) == 203
    made = Counter(log.read_text().splitlines())
    assert len({line.split()[0] for line in made}) == 2
    assert len(made) == 2 * 203
    assert max(made.values()) <= most


def test_the_stream_is_the_same_if_lanes_run_their_generator_apart(serve: Serve) -> None:
    names = [name for name in NAMES if name.startswith("undivided")]
    streams = []
    for patched in (UNCHECKED, SHARED, LITTLE):
        daemon = serve(FEEDS, *names, workers=2, patched=patched)
        streams.append([read(daemon, name) for name in names])
        for name, (first, _) in zip(names, streams[0], strict=True):
            with penstock.connect(daemon.urls[name]) as connection:
                read_before = len(list(itertools.islice(connection.batches(), len(first) // 2)))
                state = connection.state_dict()
            with penstock.connect(daemon.urls[name], state=state) as connection:
                assert [digest(connection, batch) for batch in connection.batches()] == first[read_before:], name
    assert streams[0] == streams[1] == streams[2]


def test_what_a_transform_draws_does_not_change_the_generator_that_lanes_share(serve: Serve) -> None:
    daemon = serve(FEEDS, "tidy", "untidy", workers=2, patched=UNCHECKED | SHARED)
    assert read(daemon, "untidy") == read(daemon, "tidy")


@pytest.mark.parametrize(("run", "count"), [(1, 1), (1, 3), (4, 3), (5, 2), (100, 2)])
def test_shares_are_all_of_the_generator_and_know_their_places_in_it(run: int, count: int) -> None:
    for samples in (0, 1, 7, 60, 61):
        shares = [Share(index, count, run) for index in range(count)]
        parts = [list(share.of(iter(range(samples)))) for share in shares]
        assert sorted(itertools.chain(*parts)) == list(range(samples))
        for share, part in zip(shares, parts, strict=True):
            assert [share.place_of(number) for number in range(len(part))] == part


FAULTY = """
    import numpy as np
    from penstock_server import Feed, Leaf

    def numbers(split):
        yield from range(10)

    def whole():
        yield from range(100)

    def fails(sample):
        if sample == 7:
            raise ValueError("no pixels")
        return sample

    def stops(sample):
        if sample == 7:
            return next(iter(()))
        return sample

    def forgets(sample):
        sample + 1

    def grows(sample):
        return np.zeros(3 + (sample == 7))

    def splits(**options):
        return Feed(numbers, splits=["a", "b"], batch_size=4, lanes=1, **options)

    raised = splits(transform=[abs, fails])
    stopped = splits(transform=stops)
    grown = splits(transform=grows)
    skipped = splits(transform=fails, on_error="skip")
    segment = Feed(numbers, transform=fails, segment=10, batch_size=4, lanes=1)
    shared = Feed(whole, transform=fails, batch_size=4, lanes=3, turn=1)
    table = Feed(range(20), transform=fails, batch_size=4)
    declared = splits(transform=grows, spec=Leaf("float64", 2))
    forgotten = splits(transform=forgets)
    table_forgotten = Feed(range(20), transform=forgets, batch_size=4)
"""


def test_an_error_of_a_transform_says_so_and_names_the_sample(serve: Serve) -> None:
    texts = {
        "raised": r"transform fails raised ValueError: no pixels \(sample 7 of its split, from 0\)\n.*split 'a'",
        "stopped": r"transform stops raised StopIteration: +\(sample 7 of its split, from 0\)\n.*split 'a'",
        "grown": r"sample is .*if samples differ in shape.*\(the output of transform= for sample 7 .*\)\n.*split 'a'",
        "segment": r"transform fails raised ValueError: no pixels \(sample 7 of its segment, from 0\)\n.*segment 0",
        "shared": r"transform fails raised ValueError: no pixels \(sample 7 of whole, from 0\)\n.*share 1 of 3",
        "table": r"transform fails raised ValueError: no pixels\n.*item 7",
        "declared": r"sample is .*, but the feed's spec has float64\[2\] there.*for sample 0 of its split",
    }
    daemon = serve(FAULTY, *texts, "skipped")
    for name, text in texts.items():
        with penstock.connect(daemon.urls[name]) as connection, pytest.raises(penstock.FeedError, match=text) as caught:
            for _ in itertools.islice(connection.batches(), 50):
                pass
        if name in ("raised", "table"):
            assert 'raise ValueError("no pixels")' in str(caught.value.remote_traceback)
            assert "transforming.py" not in str(caught.value.remote_traceback)
    with penstock.connect(daemon.urls["skipped"]) as connection:
        assert np.concatenate(list(connection.batches())).tolist() == [*range(7), *range(7)]


@pytest.mark.parametrize("name", ["forgotten", "table_forgotten"])
def test_a_transform_that_returns_nothing_is_refused_at_the_start(serve: Serve, name: str) -> None:
    daemon = serve(FAULTY, name, ready=False, workers=1)
    assert daemon.process.wait(60) == 1
    assert "transform forgets returned None: did you forget to `return` the sample?" in daemon.stderr()


def test_a_transform_that_draws_from_elsewhere_is_said_to_change_the_stream(serve: Serve) -> None:
    source = """
    import numpy as np
    from penstock_server import Feed
    feed = Feed(range(20), transform=lambda sample: np.random.default_rng().random(), batch_size=4)
    """
    daemon = serve(source)
    read(daemon, "feed", epochs=1)
    while "gave a different first sample" not in daemon.stderr():
        time.sleep(0.02)


def test_the_spec_is_that_of_what_the_transform_returns(serve: Serve, tf: Any) -> None:
    daemon = serve(FEEDS, "undivided")
    with penstock.connect(daemon.url) as connection:
        dataset = connection.dataset()
        (x, picked), labels = dataset.element_spec
        assert (x.dtype, x.shape[1:]) == (tf.float32, (3,))
        assert (picked.shape[1:], sorted(labels)) == ((2,), ["drawn", "id"])
        assert [int(i) for _, labels in dataset for i in labels["id"]] == list(range(203))
        del dataset


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT / "examples" / "transform")
    monkeypatch.setattr(sys, "path", [str(Path.cwd()), *sys.path])
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(Path("feed.py").read_text(), "feed.py", "exec"), names)
    assert capfd.readouterr().out == "400 samples, in order: True\n"
