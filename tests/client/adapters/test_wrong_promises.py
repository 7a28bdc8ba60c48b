"""What is not as promised is an error also at readers that ask for no more batches than promised, and mixed ways of
reading one connection keep its count."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.conftest import Serve

FEEDS = """
from penstock_server import Feed

def samples():
    yield from range(100)

more = Feed(samples, samples=64, batch_size=8, lanes=1)
more_small = Feed(samples, samples=64, batch_size=1, lanes=1)
more_slabs = Feed(samples, samples=64, batch_size=1, lanes=1, turn=2)
less = Feed(samples, samples=104, batch_size=8, lanes=1)
right = Feed(samples, samples=100, batch_size=2, turn=8, lanes=1)
"""
MORE = ("more", "more_small", "more_slabs")


@pytest.mark.parametrize("name", MORE)
def test_an_epoch_that_is_too_long_is_an_error_within_the_batches_that_are_promised(
    tf: Any, serve: Serve, name: str
) -> None:
    """So many batches does `fit` ask for."""
    with penstock.connect(serve(FEEDS, name, workers=1).urls[name]) as connection:
        dataset = connection.dataset()
        with pytest.raises(tf.errors.OpError, match="IncompleteEpoch: epoch 0 has more than the"):
            list(itertools.islice(dataset, int(dataset.cardinality())))
        assert isinstance(connection.error, penstock.IncompleteEpoch)


@pytest.mark.parametrize("name", MORE)
def test_so_it_is_for_keras_on_other_backends(tf: Any, serve: Serve, name: str) -> None:
    with penstock.connect(serve(FEEDS, name, workers=1).urls[name]) as connection:
        batches = connection.keras()
        with pytest.raises(penstock.IncompleteEpoch, match="epoch 0 has more than the"):
            list(itertools.islice(batches, batches.num_batches))


def test_an_epoch_that_is_as_long_as_promised_ends_and_the_next_one_begins(tf: Any, serve: Serve) -> None:
    daemon = serve(FEEDS, "right", "less", workers=1)
    with penstock.connect(daemon.urls["right"]) as connection:
        dataset = connection.dataset()
        for _ in range(2):
            assert [int(batch[0]) for batch in dataset] == list(range(0, 100, 2))
        assert [int(batch[0]) for batch in itertools.islice(dataset, 50)] == list(range(0, 100, 2))
    with penstock.connect(daemon.urls["less"]) as connection:
        with pytest.raises(tf.errors.OpError, match="IncompleteEpoch"):
            list(itertools.islice(connection.dataset(), 13))


def test_a_state_counts_what_was_read_of_a_slab_before_tensorflow_read_on(tf: Any, serve: Serve) -> None:
    url = serve(FEEDS, "right", workers=1).urls["right"]
    with penstock.connect(url) as connection:
        next(connection.batches())
        assert [int(batch[0]) for batch in connection.dataset().take(10)] == list(range(0, 20, 2))
        state = connection.state_dict(consumed=1 + 10)
    with penstock.connect(url, state=state) as connection:
        assert next(connection.batches()).tolist() == [20, 21]


def test_lists_in_a_batch_stay_apart_on_tensorflow(tf: Any, serve: Serve) -> None:
    with penstock.connect(serve(FEEDS, "right", workers=1).urls["right"]) as connection:
        batches = connection.keras(map=lambda batch: ([batch, {"twice": [2 * batch, batch]}], batch))
        (x, y), *_ = batches.get_tf_dataset()
        assert (x[0].numpy().tolist(), y.numpy().tolist()) == ([0, 1], [0, 1])
        assert [part.numpy().tolist() for part in x[1]["twice"]] == [[0, 2], [0, 1]]


@pytest.mark.parametrize(
    "way",
    [
        "it = iter(penstock.dataset(target, workers=0)); next(it)\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "it = iter(penstock.dataset(target, workers=1)); next(it)\n"
        "threading.Thread(target=lambda: [None for _ in it], daemon=True).start(); time.sleep(0.2)",
    ],
    ids=["idle", "reads"],
)
def test_a_process_ends_while_a_daemon_thread_runs(tmp_path: Path, way: str) -> None:
    source = FEEDS + "\ndef slow():\n    import time\n    for i in range(2000):\n        time.sleep(0.002)\n"
    source += "        yield i\n\nslow = Feed(slow, batch_size=2, lanes=1)\n"
    (tmp_path / "feeds.py").write_text(source)
    code = f"import threading, time, penstock\ntarget = {str(tmp_path / 'feeds.py') + ':slow'!r}\n{way}\nprint('end')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-1:]) == (0, ["end"]), ended.stderr


def test_the_debug_mode_of_tf_data_reads_it(tmp_path: Path) -> None:
    (tmp_path / "feeds.py").write_text(FEEDS)
    code = f"""
import tensorflow as tf, penstock
tf.data.experimental.enable_debug_mode()
dataset = penstock.dataset({str(tmp_path / "feeds.py") + ":right"!r}, workers=0)
for _ in range(2):
    print(len(list(dataset)))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert ended.stdout.split() == ["50", "50"], ended.stderr
