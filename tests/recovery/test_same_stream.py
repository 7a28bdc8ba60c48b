"""The stream is a function of the feed and its seed: the same bytes with any number of workers, over both
transports."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from tests.conftest import Serve

FEEDS = """
    import random

    import numpy as np
    from penstock_server import Feed

    SIZES = [7, 0, 31, 1, 16, 64, 5, 12, 3, 40, 2, 9]   # uneven, one empty

    def plain(split):
        for i in range(SIZES[split]):
            yield {"x": np.full((3, 5), 1000 * split + i, "float32"), "id": np.int64(1000 * split + i)}

    def drawn(split, rng):
        for sample in plain(split):
            yield {**sample, "noise": rng.normal(size=4)}

    def drawn_globally(split):
        for sample in plain(split):
            yield {**sample, "noise": np.random.normal(size=4), "pick": random.randrange(10**9)}

    class Table:
        def __len__(self):
            return 101
        def __getitem__(self, i):
            return np.int64(i), np.random.normal(size=3)

    SPLITS = list(range(len(SIZES)))
    ordered = Feed(plain, splits=SPLITS, batch_size=8, lanes=5, turn=3)
    ordered_rng = Feed(drawn, splits=SPLITS, batch_size=8, lanes=4, seed=3)
    shuffled = Feed(plain, splits=lambda: SPLITS, batch_size=8, shuffle=64, lanes=3, seed=5)
    shuffled_rng = Feed(drawn, splits=SPLITS, batch_size=7, shuffle=100, lanes=5, seed=9, turn=2)
    shuffled_global = Feed(drawn_globally, splits=SPLITS, batch_size=7, shuffle=50, lanes=4, seed=9, turn=1)
    ordered_global = Feed(drawn_globally, splits=SPLITS, batch_size=4, lanes=16)
    dropping = Feed(drawn, splits=SPLITS, batch_size=32, shuffle=64, lanes=4, drop_remainder=True)
    table = Feed(Table(), batch_size=8, shuffle=1, seed=4, turn=2)
    table_ordered = Feed(Table(), batch_size=8)
"""
NAMES = (
    "ordered ordered_rng shuffled shuffled_rng shuffled_global ordered_global dropping table table_ordered"
).split()
SAMPLES = 190


def leaves(batch: Any) -> list[np.ndarray]:
    if isinstance(batch, dict):
        return [batch[key] for key in sorted(batch)]
    return list(batch)


def read(url: str, transport: str, epochs: int = 2) -> tuple[str, list[list[int]]]:
    """Return the SHA-256 of everything that `epochs` epochs hand over, and the ids by epoch."""
    digest = hashlib.sha256()
    ids: list[list[int]] = []
    with penstock.connect(url, transport=transport) as connection:
        for _ in range(epochs):
            seen: list[int] = []
            for batch in connection.batches():
                for leaf in leaves(batch):
                    digest.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
                seen += (batch["id"] if isinstance(batch, dict) else batch[0]).tolist()
            ids.append(seen)
    return digest.hexdigest(), ids


def test_the_stream_is_the_same_with_1_2_and_3_workers_over_shared_memory_and_tcp(serve: Serve) -> None:
    streams: dict[str, set[str]] = {name: set() for name in NAMES}
    orders: dict[str, list[list[int]]] = {}
    for workers in (1, 2, 3):
        daemon = serve(FEEDS, *NAMES, workers=workers)
        for name in NAMES:
            for transport in ("local", "tcp"):
                digest, ids = read(daemon.urls[name], transport)
                streams[name].add(digest)
                orders[name] = ids
        assert daemon.stop() == 0
    assert {name: len(digests) for name, digests in streams.items()} == dict.fromkeys(NAMES, 1)

    sizes = [7, 0, 31, 1, 16, 64, 5, 12, 3, 40, 2, 9]
    whole = sorted(1000 * split + i for split, n in enumerate(sizes) for i in range(n))
    assert len(whole) == SAMPLES
    for name in NAMES[:6]:
        first, second = orders[name]
        assert sorted(first) == sorted(second) == whole, name
        assert (first == second) == (not name.startswith("shuffled")), name
    for epoch in orders["dropping"]:
        assert len(epoch) == len(set(epoch)) == SAMPLES // 32 * 32
    assert orders["table_ordered"] == [list(range(101))] * 2
    first, second = orders["table"]
    assert sorted(first) == sorted(second) == list(range(101))
    assert first != second != list(range(101))


def test_a_stream_starts_at_epoch_0_for_every_connection(serve: Serve) -> None:
    daemon = serve(FEEDS, "shuffled_rng")
    assert read(daemon.url, "local", epochs=1) == read(daemon.url, "local", epochs=1)


def test_only_the_last_batch_is_smaller(serve: Serve) -> None:
    daemon = serve(FEEDS, "ordered")
    with penstock.connect(daemon.url) as connection:
        rows = [len(batch["id"]) for batch in connection.batches()]
    assert rows == [8] * (SAMPLES // 8) + [SAMPLES % 8]


def test_without_shuffling_one_lane_keeps_the_input_order(serve: Serve) -> None:
    daemon = serve(
        """
        import numpy as np
        from penstock_server import Feed
        feed = Feed(lambda split: iter(range(10 * split, 10 * split + 10)), splits=range(5), batch_size=4, lanes=1)
        """
    )
    with penstock.connect(daemon.url) as connection:
        assert np.concatenate(list(connection.batches())).tolist() == list(range(50))


def test_fast_order_delivers_every_sample_once(serve: Serve, tmp_path: Path) -> None:
    go = tmp_path / "go"
    daemon = serve(
        f"""
        import os, time
        import numpy as np
        from penstock_server import Feed, Leaf

        def waits_first(split):
            while split == 1 and not os.path.exists({str(go)!r}):
                time.sleep(0.01)
            for i in range(20):
                yield np.int64(100 * split + i)

        spec = Leaf("int64", ())  # so that no worker makes a first sample before anybody reads
        feed = Feed(waits_first, splits=range(8), batch_size=8, lanes=8, order="fast", turn=1, spec=spec)
        """,
        workers=2,
    )
    with penstock.connect(daemon.url) as connection:
        epoch = connection.batches()
        batches = [next(epoch).tolist() for _ in range(3)]  # the lane that waits does not hold up the others
        go.touch()
        batches += [batch.tolist() for batch in epoch]
    seen = [i for batch in batches for i in batch]
    assert sorted(seen) == sorted(100 * split + i for split in range(8) for i in range(20))
    assert len(batches) == 20


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_ready_batches_of_varying_shape_arrive_as_they_were_yielded(serve: Serve, transport: str) -> None:
    source = """
        import numpy as np
        from penstock_server import Feed, Leaf, TupleSpec

        def batches(split):
            rng = np.random.default_rng(split)
            for i in range(6):
                rows, width = rng.integers(1, 200), rng.integers(1, 300)
                yield np.full((rows, width), split * 10 + i, "float32"), np.arange(rows)

        feed = Feed(batches, splits=range(4), batch_size=None,
                    spec=TupleSpec((Leaf("float32", (None, None)), Leaf("int64", (None,)))), lanes=4)
        """
    expected = {}
    for split in range(4):
        rng = np.random.default_rng(split)
        for i in range(6):
            expected[split * 10 + i] = tuple(int(n) for n in (rng.integers(1, 200), rng.integers(1, 300)))
    daemon = serve(source, workers=2)
    with penstock.connect(daemon.url, transport=transport) as connection:
        for _ in range(2):
            seen = {}
            for x, n in connection.batches():
                assert (x == x[0, 0]).all()
                assert n.tolist() == list(range(len(x)))
                seen[int(x[0, 0])] = x.shape
            assert seen == expected
