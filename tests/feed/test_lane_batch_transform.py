"""`Feed(batch_transform=)` for generators: the function runs once over each batch, wherever its rows come from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_server import Feed, Leaf
from penstock_server.worker.isolation.randomness import seeds
from tests.conftest import Serve
from tests.reference.one_stream import digests
from tests.reference.reference import batches_of_lanes

FEEDS = """
import os
import random

import numpy as np
from penstock_server import DROP, Feed, Pad

def rows(split):
    for number in range(3 * split % 17, 3 * split % 17 + 9 + split % 5):
        yield {"x": np.full((4, 3), number, "uint8"), "y": number % 5, "id": 100 * split + number}

def in_batches(split):
    found = list(rows(split))
    for start in range(0, len(found), 6):
        part = found[start : start + 6]
        yield {key: np.stack([row[key] for row in part]) for key in part[0]}

def texts(split):
    for row in rows(split):
        yield {"ids": np.arange(1 + row["id"] % 7), "id": row["id"]}

def endless(segment, rng):
    for number in range(5 + segment % 7):
        yield {"x": rng.random((4, 3), dtype="float32"), "y": number % 5, "id": 100 * segment + number}

class Rows:
    def __len__(self):
        return 101
    def __getitem__(self, index):
        return DROP if index % 9 == 0 else {"x": np.full((4, 3), index, "uint8"), "y": index % 5, "id": index}

def mixup(batch, rng):
    share, order = np.float32(rng.beta(0.2, 0.2)), rng.permutation(len(batch["y"]))
    x, y = batch["x"].astype("float32"), np.eye(5, dtype="float32")[batch["y"]]
    x *= random.random() + np.random.random()
    return {"x": share * x + (1 - share) * x[order], "y": share * y + (1 - share) * y[order], "id": batch["id"]}

def shifted(batch, rng):
    ids = batch["ids"]
    return {"ids": ids[:, 1:], "hidden": rng.random(ids.shape) < 0.5, "id": batch["id"]}

def mean(batch):
    return {"mean": batch["ids"].mean(1), "id": batch["id"]}

def for_the_first_time(name):
    try:
        os.close(os.open(os.path.join(os.environ["FOLDER"], name), os.O_CREAT | os.O_EXCL))
    except (KeyError, FileExistsError):
        return False
    return True

def deadly(batch):
    if 2 in batch["id"] // 100 and for_the_first_time("died"):
        os.kill(os.getpid(), 9)
    return batch

def raising(batch, rng):
    if 10 in batch["id"] // 100 and for_the_first_time("raised"):
        raise OSError("the third batch of its turn")
    return mixup(batch, rng)

some = {"splits": list(range(13)), "batch_size": 8, "lanes": 5, "seed": 3}
ordered = Feed(rows, batch_transform=mixup, **some)
pooled = Feed(rows, batch_transform=[mixup, deadly], shuffle=40, **some)
rebatched = Feed(in_batches, batch_transform=mixup, shuffle=40, rebatch=8, **{**some, "batch_size": None})
padded = Feed(texts, batch_transform=shifted, batching="pad", shuffle=20, **some)
bucketed = Feed(texts, batch_transform=shifted, batching=Pad(buckets=(4, 8)), shuffle=40, **some)
means = Feed(texts, batch_transform=mean, batching="pad", shuffle=20, **some)
retried = Feed(rows, batch_transform=raising, on_error="retry", turn=4, **some)
fast = Feed(rows, batch_transform=mixup, order="fast", **some)
full = Feed(rows, batch_transform=mixup, drop_remainder=True, **some)
dropping = Feed(Rows(), batch_transform=mixup, drops=True, shuffle=1, batch_size=8, lanes=3)
segments = Feed(endless, batch_transform=mixup, segment=11, batch_size=8, lanes=4)
"""
NAMES = (
    "ordered",
    "pooled",
    "rebatched",
    "padded",
    "bucketed",
    "means",
    "full",
    "dropping",
    "segments",
    "retried",
    "fast",
)
MOST = 20


def read(connection: Any, most: int = MOST) -> list[Any]:
    batches = connection.batches()
    return [batch for batch, _ in zip(batches, range(most), strict=False)]


def in_process(feed: Any, state: Any = None) -> list[Any]:
    with penstock.connect(feed, workers=0, state=state) as connection:
        return read(connection)


def test_the_stream_is_the_same_with_any_workers_through_a_kill_and_a_resume(tmp_path: Path, serve: Serve) -> None:
    feeds: dict[str, Any] = {}
    exec(FEEDS, feeds)
    alone = {name: in_process(feeds[name]) for name in NAMES}
    assert digests(alone["rebatched"]) == digests(alone["pooled"])
    daemon = serve(FEEDS, *NAMES, workers=3, env={"FOLDER": str(tmp_path)})
    for name in NAMES:
        url = daemon.urls[name]
        with penstock.connect(url, transport="tcp") as connection:
            reading = connection.batches()
            began = [next(reading) for _ in range(3)]
            if name == "ordered":
                daemon.workers()[0].kill()
            began += [next(reading) for _ in range(2)]
            state = connection.state_dict()
        with penstock.connect(url, state=state) as connection:
            began += read(connection, MOST - len(began))
        if name == "fast":
            assert len(began) == len(alone[name])
            continue
        assert digests(began) == digests(alone[name]), name
    assert (tmp_path / "died").exists(), "a function has ended its worker in the middle of a pool"
    assert (tmp_path / "raised").exists(), "a function has raised in the middle of a turn"
    assert 0 < len(alone["ordered"][-1]["id"]) < 8 == len(alone["full"][-1]["id"])
    for name in ("padded", "bucketed"):
        assert len({batch["ids"].shape for batch in alone[name]}) > 1
        assert all(batch["hidden"].shape[1] == batch["ids"].shape[1] + 1 for batch in alone[name])


def counted(split: int) -> Any:
    for number in range(5 + 3 * split % 7):
        yield {"id": 100 * split + number}


def drawn(batch: Any, rng: np.random.Generator) -> Any:
    return {**batch, "drawn": rng.random(len(batch["id"]))}


def places() -> Iterator[tuple[int, int, list[int]]]:
    """Yield the lane, the number and the samples of each batch of 4 of an epoch of `counted`, in order."""
    lanes = [[(lane, row["id"]) for split in range(lane, 9, 3) for row in counted(split)] for lane in range(3)]
    made: dict[int, int] = {}
    for rows in batches_of_lanes(lanes, batch_size=4, turn=1):
        lane = rows[0][0] if len(rows) == 4 and len({of for of, _ in rows}) == 1 else -1
        made[lane] = made.get(lane, -1) + 1
        yield lane, made[lane], [number for _, number in rows]


MERGED = next(samples[-1] for lane, _, samples in places() if lane == -1)
"""A sample of a merged batch."""


def test_the_random_numbers_depend_on_the_seed_the_epoch_and_the_place_of_the_batch() -> None:
    feed = Feed(counted, splits=list(range(9)), batch_size=4, lanes=3, seed=7, epochs=2, batch_transform=drawn)
    with penstock.connect(feed, workers=0) as connection:
        for epoch in range(2):
            for batch, (lane, number, samples) in zip(connection.batches(), places(), strict=True):
                assert batch["id"].tolist() == samples
                rng = np.random.default_rng(seeds("batch transform rng", 7, epoch, lane, number))
                assert batch["drawn"].tolist() == rng.random(len(samples)).tolist()
    assert {lane for lane, _, _ in places()} == {-1, 0, 1, 2}


def test_a_pool_has_the_same_batches_as_without_the_function() -> None:
    options: dict[str, Any] = {"splits": list(range(9)), "batch_size": 4, "lanes": 3, "shuffle": 30, "turn": 2}
    plain = in_process(Feed(counted, **options))
    batches = in_process(Feed(counted, batch_transform=drawn, **options))
    assert [batch["id"].tolist() for batch in batches] == [batch["id"].tolist() for batch in plain]
    assert all((one["drawn"][:3] != other["drawn"][:3]).any() for one, other in pairwise(batches))


def test_samples_that_are_dropped_or_doubled_come_before_it() -> None:
    def twice(sample: Any) -> Any:
        if sample["id"] % 4:
            yield from (sample, sample)

    def noted(batch: Any) -> Any:
        return {"id": batch["id"], "rows": np.full(len(batch["id"]), len(batch["id"]))}

    options: dict[str, Any] = {"splits": list(range(9)), "batch_size": 4, "lanes": 3, "transform": twice}
    plain = in_process(Feed(counted, **options))
    batches = in_process(Feed(counted, batch_transform=noted, **options))
    assert [batch["id"].tolist() for batch in batches] == [batch["id"].tolist() for batch in plain]
    assert all(batch["rows"].tolist() == [len(batch["id"])] * len(batch["id"]) for batch in batches)


def test_a_declared_spec_is_that_of_the_result() -> None:
    spec = {"id": Leaf("int64", ()), "drawn": Leaf("float64", ())}
    options: dict[str, Any] = {"splits": [1, 2, 3], "batch_size": 4, "lanes": 2, "batch_transform": drawn}
    assert digests(in_process(Feed(counted, spec=spec, **options))) == digests(in_process(Feed(counted, **options)))


WHERE = [
    ({}, 0, r", batch 0 of lane 0"),
    ({}, MERGED, r"split merged batch 0"),
    ({"shuffle": 30}, 0, r", batch \d"),
]
"""Options of a feed, a sample, and how errors name the batch with this sample."""


@pytest.mark.parametrize(("options", "sample", "place"), WHERE, ids=["lane", "merged", "pool"])
@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (lambda batch: 1 / 0, r"batch_transform Failing raised ZeroDivisionError"),
        (lambda batch: {"id": batch["id"][:2]}, r"batch_transform Failing returned .* for batch\['id'\] of . rows"),
        (lambda batch: {"id": batch["id"] / 2}, r"batch_transform Failing returned .* return arrays of one dtype"),
        (lambda batch: {"no": batch["id"]}, r"batch_transform Failing returned .*, and the feed's spec has \{'id'"),
    ],
    ids=["raises", "rows", "dtype", "structure"],
)
def test_an_error_names_the_function_the_feed_and_the_batch(
    options: dict[str, Any], sample: int, place: str, returns: Any, message: str
) -> None:
    class Failing:
        calls = 0

        def __call__(self, batch: Any) -> Any:
            self.calls += 1
            return returns(batch) if self.calls > 1 and sample in batch["id"] else batch

    feed = Feed(
        counted, splits=list(range(9)), batch_size=4, lanes=3, name="train", batch_transform=Failing(), **options
    )
    with pytest.raises(penstock.FeedError, match=message) as raised:
        in_process(feed)
    assert "in feed train" in str(raised.value)
    assert re.search(place, str(raised.value))


@pytest.mark.parametrize("options", [{}, {"shuffle": 30}], ids=["lanes", "pools"])
def test_retry_tries_a_failed_batch_again_and_skip_does_not_leave_it_out(options: dict[str, Any]) -> None:
    class Sometimes:
        calls = 0

        def __call__(self, batch: Any, rng: np.random.Generator) -> Any:
            self.calls += 1
            if self.calls % 5 == 0:
                raise OSError("try again")
            return drawn(batch, rng)

    some: dict[str, Any] = {"splits": list(range(9)), "batch_size": 4, "lanes": 3, **options}
    wanted = digests(in_process(Feed(counted, batch_transform=drawn, **some)))
    assert digests(in_process(Feed(counted, batch_transform=Sometimes(), on_error="retry", **some))) == wanted
    with pytest.raises(penstock.FeedError, match="batch_transform Sometimes raised OSError: try again"):
        in_process(Feed(counted, batch_transform=Sometimes(), on_error="skip", **some))


def test_a_function_that_ends_its_workers_is_named(serve: Serve) -> None:
    source = FEEDS + "\n".join(
        (
            "def ends(batch):",
            "    if 8 in batch['id'] // 100:",
            "        os._exit(3)",
            "    return batch",
            "ordered = Feed(rows, batch_transform=ends, **some)",
            "pooled = Feed(rows, batch_transform=ends, shuffle=40, **some)",
        )
    )
    daemon = serve(source, "ordered", "pooled", workers=2)
    for name in ("ordered", "pooled"):
        with (
            penstock.connect(daemon.urls[name]) as connection,
            pytest.raises(penstock.FeedError, match=r"batch_transform= ended its worker process 3 times in epoch 0"),
        ):
            list(connection.batches())


RARE = """
    import numpy as np
    from penstock_server import Feed

    calls = 0

    def often_the_same(batch):
        global calls
        calls += 1
        return batch + (calls if calls > 40 else 0)

    def noisy(batch, rng):
        batch += rng.integers(9)  # the arrays are the function's
        return batch + np.random.randint(9)

    def numbers(split):
        yield from range(2000)

    lanes = {"splits": [0, 1], "batch_size": 2, "lanes": 2}
    rare = Feed(numbers, batch_transform=often_the_same, **lanes)
    pooled = Feed(numbers, batch_transform=often_the_same, shuffle=16, **lanes)
    items = Feed(range(4000), batch_transform=often_the_same, batch_size=2)
    honest = Feed(numbers, batch_transform=noisy, **lanes)
    honest_items = Feed(range(4000), batch_transform=noisy, batch_size=2)
"""


def test_a_function_that_makes_another_batch_now_and_then_is_noticed_while_the_feed_is_read(serve: Serve) -> None:
    names = ("rare", "pooled", "items", "honest", "honest_items")
    daemon = serve(RARE, *names, workers=2)
    for name in names:
        with penstock.connect(daemon.urls[name]) as connection:
            assert sum(1 for _ in connection.batches()) == 2000
    found = re.findall(
        r"WARNING penstock: feed (\w+): batch_transform (\w+) for (?:merged )?batch \d+", daemon.stderr()
    )
    assert sorted(found) == [(name, "often_the_same") for name in ("items", "pooled", "rare")], daemon.stderr()
    assert len(re.findall("WARNING", daemon.stderr())) == 3, daemon.stderr()
