"""An endless generator, cut into segments: many workers make the same stream, and little is made again after a
fault."""

from __future__ import annotations

import gc
import hashlib
import itertools
import math
import re
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from tests.conftest import UNCHECKED, Daemon, Serve

SEGMENT = 24
LANES = 4

FEEDS = f"""
    import os
    import random
    import time

    import numpy as np
    from penstock_server import Feed

    def note(what):
        if path := os.environ.get("MADE"):
            with open(path, "ab", 0) as file:
                file.write(f"{{what}}\\n".encode())

    def numbered(segment, rng):
        note(f"run {{segment}}")
        i = 0
        while True:
            note(f"{{segment}}.{{i}}")
            yield {{"id": np.array([segment, i]), "noise": rng.normal(size=50)}}
            i += 1

    def batches(segment, rng):
        for i in range(100):
            yield {{"id": np.array([[segment, i]]), "noise": rng.normal(size=(1, 50))}}

    def drawn():
        while True:
            yield np.array([random.random(), np.random.random()])

    def training(rng):
        while True:
            x = rng.normal(size=8).astype("float32")
            yield x, x.sum(keepdims=True)

    def once_in_a_while(segment):
        if segment < 3:
            yield np.float32(segment)

    def broken(segment):
        yield np.int64(segment)
        if segment == 12:
            raise OSError("no more")

    def deadly(segment):
        yield np.int64(segment)
        if segment == 12:
            os._exit(1)

    ordered = Feed(numbered, segment={SEGMENT}, batch_size=5, lanes={LANES}, turn=2, seed=1)
    shuffled = Feed(numbered, segment={SEGMENT}, batch_size=5, lanes=3, shuffle=60, seed=1)
    blind = Feed(drawn, segment=10, batch_size=4, lanes=5)
    fast = Feed(numbered, segment={SEGMENT}, batch_size=5, order="fast")
    ready = Feed(batches, segment=7, batch_size=None)
    counted = Feed(numbered, segment={SEGMENT}, samples=100, batch_size=8, lanes=3, shuffle=30)
    train = Feed(training, segment=32, batch_size=4, lanes=2)
    dry = Feed(once_in_a_while, segment=4, batch_size=1, lanes=1)
    broken = Feed(broken, segment=4, batch_size=4, lanes=2, turn=1)
    deadly = Feed(deadly, segment=4, batch_size=4, lanes=2, turn=1)
"""


def digest(batch: Any) -> str:
    leaves = [batch[key] for key in sorted(batch)] if isinstance(batch, dict) else [batch]
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def read(daemon: Daemon, name: str, count: int, transport: str = "local", state: Any = None) -> list[str]:
    with penstock.connect(daemon.urls[name], transport=transport, state=state) as connection:
        return list(map(digest, itertools.islice(connection.batches(), count)))


def made(path: Path) -> Counter[str]:
    """Return how often each sample was made and each segment begun."""
    return Counter(path.read_text().split("\n")[:-1])


def test_an_endless_stream_is_the_same_with_1_2_and_3_workers_and_from_a_state_deep_in_it(
    serve: Serve, tmp_path: Path
) -> None:
    names = ("ordered", "shuffled", "blind", "ready")
    streams: dict[str, set[tuple[str, ...]]] = {name: set() for name in names}
    for workers, transport in ((1, "local"), (2, "tcp"), (3, "local")):
        daemon = serve(FEEDS, *names, workers=workers, env={"MADE": str(tmp_path / f"made{workers}")})
        for name in names:
            streams[name].add(tuple(read(daemon, name, 300, transport)))
    assert {name: len(found) for name, found in streams.items()} == dict.fromkeys(names, 1)
    for name, (stream,) in streams.items():
        assert len(set(stream)) == 300, name
    assert not re.search("made again|the same samples|neither", daemon.stderr()), "these feeds are reproducible"

    with penstock.connect(daemon.urls["ordered"]) as connection:
        assert connection.cardinality == math.inf
        batches = itertools.islice(connection.batches(), 200)
        before = [f"{segment}.{i}" for batch in batches for segment, i in batch["id"].tolist()]
        state = connection.state_dict()
    log = tmp_path / "made again"
    other = serve(FEEDS, "ordered", workers=2, patched=UNCHECKED, env={"MADE": str(log)})
    (stream,) = streams["ordered"]
    assert tuple(read(other, "ordered", 100, state=state)) == stream[200:]
    again = made(log)
    for what in [f"run {segment}" for segment in (0, 1)] + [
        f"{segment}.{i}" for segment in (0, 1) for i in range(SEGMENT)
    ]:
        again.pop(what, None)  # the daemon checks these when it starts
    assert sum(again[sample] for sample in before) <= LANES * SEGMENT
    assert all(again[sample] <= 1 for sample in again)


def test_a_killed_worker_costs_its_open_segments_at_the_most(serve: Serve, tmp_path: Path) -> None:
    log = tmp_path / "made"
    daemon = serve(FEEDS, "ordered", workers=2, patched=UNCHECKED, env={"MADE": str(log)})
    quiet = read(daemon, "ordered", 400)
    log.unlink()
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        seen = list(map(digest, itertools.islice(batches, 150)))
        daemon.workers()[0].kill()
        seen += map(digest, itertools.islice(batches, 250))
    assert seen == quiet
    counts = made(log)
    runs = [count for what, count in counts.items() if what.startswith("run ")]
    # The worker had half of all lanes. Each costs its open segment, and perhaps one that was begun next and not
    # reported. So it does once more when it goes from the other worker back to the new process.
    assert sum(count - 1 for count in runs) <= 4 * LANES // 2
    # and for unreported batches, the samples after them in the segments that were begun next
    assert sum(count - 1 for count in counts.values()) <= LANES * (SEGMENT + 2 * 5 + 1) + len(runs)


def test_fast_order_gives_each_sample_of_a_segment_once(serve: Serve) -> None:
    daemon = serve(FEEDS, "fast", workers=2)
    with penstock.connect(daemon.url) as connection:
        batches = list(itertools.islice(connection.batches(), 200))
        ids = [tuple(sample) for batch in batches for sample in batch["id"].tolist()]
        del batches
    assert len(set(ids)) == len(ids) == 1000
    assert max(i for _, i in ids) == SEGMENT - 1


def test_with_samples_epochs_end_and_have_a_length(serve: Serve) -> None:
    daemon = serve(FEEDS, "counted", workers=2)
    with penstock.connect(daemon.url) as connection:
        assert connection.cardinality == 13
        epochs = [np.concatenate([batch["id"] for batch in connection.batches()]).tolist() for _ in range(2)]
    for epoch in epochs:
        assert sorted(map(tuple, epoch)) == [divmod(at, SEGMENT) for at in range(100)]
    assert epochs[0] != epochs[1]


def test_a_generator_that_dries_up_or_breaks_is_an_error_that_names_the_segment(serve: Serve) -> None:
    daemon = serve(FEEDS, "dry", "broken", "deadly", workers=2)
    for name, error, text in (
        ("dry", penstock.FeedError, r"has stopped yielding samples: 1001 segments .*\n  in feed dry, .*segment 1003"),
        ("broken", penstock.GeneratorError, r"broken raised OSError: no more\n  in feed broken, .*, segment 12\n"),
        (
            "deadly",
            penstock.WorkerDied,
            r"a segment ended its worker process 3 times.*\n  in feed deadly, .*segment 12",
        ),
    ):
        with penstock.connect(daemon.urls[name]) as connection, pytest.raises(error, match=text):
            for _ in itertools.islice(connection.batches(), 1000):
                pass


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_a_daemon_that_drains_ends_an_endless_stream_where_it_stands(serve: Serve, transport: str) -> None:
    daemon = serve(FEEDS, "ordered", workers=2)
    quiet = read(daemon, "ordered", 300)
    with penstock.connect(daemon.url, transport=transport, reconnect=0) as connection:
        idle = penstock.connect(daemon.url, transport=transport, reconnect=0)
        batches = connection.batches()
        seen = list(map(digest, itertools.islice(batches, 20)))
        daemon.process.send_signal(signal.SIGTERM)
        with pytest.raises(penstock.DaemonStopped):
            for batch in itertools.islice(batches, 280):
                seen.append(digest(batch))
        state = connection.state_dict()
        assert daemon.process.wait(50) == 0
        idle.close()
    assert state["consumed"] == len(seen)
    assert seen == quiet[: len(seen)]
    other = serve(FEEDS, "ordered", workers=1)
    assert read(other, "ordered", 300 - len(seen), state=state) == quiet[len(seen) :]


def test_who_reads_an_endless_stream_goes_on_with_the_next_daemon(serve: Serve) -> None:
    first = serve(FEEDS, "ordered", workers=2)
    quiet = read(first, "ordered", 200)
    with penstock.connect(first.url, reconnect=60) as connection:
        batches = connection.batches()
        seen = list(map(digest, itertools.islice(batches, 20)))
        reader = threading.Thread(target=lambda: seen.extend(map(digest, itertools.islice(batches, 180))))
        reader.start()
        assert first.stop() == 0
        second = serve(FEEDS, "ordered", workers=1, bind=first.url.rpartition("/")[0])
        reader.join(60)
        assert seen == quiet
        assert connection.stats()["reconnects"] == 1
    assert second.stop() == 0


def test_two_ranks_share_an_endless_stream_and_both_are_drained(serve: Serve) -> None:
    daemon = serve(FEEDS, "ordered", workers=2)
    quiet = read(daemon, "ordered", 40)
    found: list[list[str]] = [[], []]
    errors: list[BaseException] = []

    def consume(rank: int) -> None:
        with penstock.connect(daemon.url, rank=rank, world_size=2, reconnect=0) as connection:
            assert connection.cardinality == math.inf
            batches = connection.batches()
            found[rank] += map(digest, itertools.islice(batches, 20))
            there.wait(60)
            with pytest.raises(penstock.DaemonStopped) as caught:
                for _ in batches:
                    pass
            errors.append(caught.value)

    there = threading.Barrier(3)
    ranks = [threading.Thread(target=consume, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    there.wait(60)
    assert daemon.stop() == 0
    for thread in ranks:
        thread.join(60)
    assert len(errors) == 2
    assert [digest for both in zip(*found, strict=True) for digest in both] == quiet


def test_a_dataset_without_end_can_be_taken_from_and_fitted(serve: Serve, tf: Any) -> None:
    import keras

    daemon = serve(FEEDS, "train", workers=2)
    with penstock.connect(daemon.url) as connection:
        dataset = connection.dataset()
        assert int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
        assert dataset.element_spec[0].shape == (4, 8)
        first = [x.numpy().tobytes() for x, _ in dataset.take(50)]
        second = [x.numpy().tobytes() for x, _ in dataset.take(50)]
        assert len({*first, *second}) == 100
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        history = model.fit(
            dataset, steps_per_epoch=7, epochs=3, validation_data=dataset.take(2), verbose=0, shuffle=False
        )
        assert len(history.history["val_loss"]) == 3
        del dataset, model, history
        keras.utils.clear_session(free_memory=True)
        gc.collect()


class _Crash(Exception):
    pass


def test_fit_over_an_endless_stream_goes_on_within_its_epoch_after_a_crash(
    serve: Serve, tf: Any, tmp_path: Path
) -> None:
    import keras

    from penstock.keras import Resume

    daemon = serve(FEEDS, "train", workers=2)
    steps: list[tuple[int, int]] = []

    def train(folder: Path, crash_at: int = 0, epochs: int = 4) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        with penstock.connect(daemon.url) as connection:
            resume = Resume(connection, folder, every=3)

            class Steps(keras.callbacks.Callback):  # type: ignore[misc]
                def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                    self.epoch = epoch

                def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                    steps.append((self.epoch, resume.consumed))
                    if len(steps) == crash_at:
                        raise _Crash

            data = connection.dataset()
            model.fit(data, steps_per_epoch=10, epochs=epochs, verbose=0, shuffle=False, callbacks=[resume, Steps()])
            return [np.array(weight) for weight in model.get_weights()]

    whole = train(tmp_path / "whole")
    quiet, steps = steps, []
    assert quiet == [(at // 10, at + 1) for at in range(40)]
    with pytest.raises(_Crash):
        train(tmp_path / "crashed", crash_at=28)
    assert steps == quiet[:28]
    steps = []
    again = train(tmp_path / "crashed")
    assert steps == quiet[26:]
    for one, other in zip(whole, again, strict=True):
        np.testing.assert_array_equal(one, other)
    steps = []
    train(tmp_path / "crashed", epochs=5)  # from the end of an epoch: the next one is whole
    assert [epoch for epoch, _ in steps] == [4] * 10

    with penstock.connect(daemon.url) as connection:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        with pytest.raises(ValueError, match="needs steps_per_epoch="):
            model.fit(connection.dataset(), verbose=0, callbacks=[Resume(connection, tmp_path / "other")])
        del model
    keras.utils.clear_session(free_memory=True)
    gc.collect()
