"""A stream as a PyTorch dataset: the same batches, over the slots' memory, with states."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_proto.spec import flatten
from tests.conftest import Serve
from tests.proto.test_stream_hashes import FEEDS

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

COUNTING = """
from penstock_server import Feed
import numpy as np

def generate(split):
    for i in range(50):
        yield {"image": np.full((8, 8, 32), split, "float32"), "label": 100 * split + i}

feed = Feed(generate, splits=range(4), batch_size=8, lanes=2, turn=1, samples=200)
"""

# 5 ms a batch, so that a rank can be killed between two checkpoints.
SLOW_LINE = """
from penstock_server import Feed
import numpy as np, time

def points(rng):
    while True:
        time.sleep(0.005 / 64)
        x = rng.uniform(-1, 1)
        yield {"x": np.float32(x), "y": np.float32(3 * x - 1)}

feed = Feed(points, segment=1000, batch_size=64, seed=1)
"""

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def labels(batches: Any) -> list[list[int]]:
    return [batch["label"].tolist() for batch in batches]


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_tensors_are_the_arrays_of_each_batch(serve: Serve, transport: str) -> None:
    daemon = serve(FEEDS, "all_types", "table_shuffled")
    for url in daemon.urls.values():
        with (
            penstock.connect(url, transport=transport) as first,
            penstock.connect(url, transport=transport) as second,
        ):
            for batch, tensors in zip(first.batches(), second.torch(), strict=True):
                arrays = flatten(first.info.spec, batch)
                for array, tensor in zip(arrays, flatten(first.info.spec, tensors), strict=True):
                    assert str(tensor.dtype).removeprefix("torch.") == array.dtype.name
                    wide = "complex128" if array.dtype.kind == "c" else "float64"
                    values = tensor.to(getattr(torch, wide)).numpy()
                    np.testing.assert_array_equal(array.astype(wide), values)


def test_a_loader_reads_epoch_by_epoch_and_a_slot_lives_as_long_as_its_tensors(serve: Serve) -> None:
    daemon = serve(COUNTING)
    with penstock.connect(daemon.url, transport="local") as connection:
        expected = [labels(connection.batches()) for _ in range(2)]
    with penstock.connect(daemon.url, transport="local") as connection:
        batches = connection.torch()
        assert len(batches) == 25
        loader = DataLoader(batches, batch_size=None)
        assert [labels(loader) for _ in range(2)] == expected
        held = next(iter(loader))["image"][2:5]
        assert connection.stats()["aliased"] == 1
        assert held.tolist() == np.zeros((3, 8, 8, 32)).tolist()
        del held
        assert connection.stats()["aliased"] == 0
        assert connection.stats()["copies"] == 0


def test_a_state_is_that_of_the_batches_that_the_loop_has_had(serve: Serve) -> None:
    daemon = serve(COUNTING)
    with penstock.connect(daemon.url) as connection:
        batches = connection.torch()
        reading = iter(DataLoader(batches, batch_size=None))
        assert len(list(islice(reading, 7))) == 7
        state = json.loads(json.dumps(batches.state_dict()))
        assert state["consumed"] == 7
        rest = labels(reading)
    with penstock.connect(daemon.url) as connection:
        batches = connection.torch()
        batches.load_state_dict(state)
        assert labels(DataLoader(batches, batch_size=None)) == rest


def test_workers_of_a_loader_are_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = serve(COUNTING)
    with penstock.connect(daemon.url) as connection:
        monkeypatch.setattr("penstock._adapters.torch.get_worker_info", lambda: object())  # as in a loader's worker
        with pytest.raises(RuntimeError, match="num_workers=0"):
            iter(connection.torch())


def test_a_feed_of_unknown_length_has_no_len(serve: Serve) -> None:
    daemon = serve(COUNTING.replace(", samples=200", ""))
    with penstock.connect(daemon.url) as connection:
        assert not hasattr(connection.torch(), "__len__"), "Keras asks so, and then calls len()"


def test_a_loader_that_would_make_batches_of_batches_is_refused(serve: Serve) -> None:
    daemon = serve(COUNTING)
    with penstock.connect(daemon.url) as connection, pytest.raises(TypeError, match="batch_size=None"):
        next(iter(DataLoader(connection.torch())))


def test_batches_cannot_be_sent_to_a_spawned_worker_of_a_loader(serve: Serve) -> None:
    daemon = serve(COUNTING)
    with penstock.connect(daemon.url) as connection:
        with pytest.raises(TypeError, match="num_workers=0, because the feed has workers of its own"):
            pickle.dumps(connection.torch())


def test_the_example_trains() -> None:
    ended = subprocess.run([sys.executable, EXAMPLES / "train_torch.py"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "resumed at step 50" in ended.stdout
    assert "the error is below 0.01" in ended.stdout


def run_ranks(url: str, folder: Path, kill: bool) -> str:
    """Return what two ranks of the example print under torchrun. With `kill`, one is killed after a checkpoint."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=9"]
    example = [EXAMPLES / "train_ddp.py", url, "--checkpoint", folder / "checkpoint.pt"]
    printed = ""
    with subprocess.Popen([*torchrun, *example], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout
        for line in running.stdout:
            printed += line
            if kill and line.startswith("saved at step 50"):
                children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
                ranks = [pid for pid in children if b"train_ddp.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
                assert len(ranks) == 2
                os.kill(int(ranks[-1]), signal.SIGKILL)
    assert running.returncode == 0, printed
    return printed


@pytest.mark.timeout(400)
def test_ranks_under_torchrun_end_with_the_same_model_if_one_is_killed(serve: Serve, tmp_path: Path) -> None:
    daemon = serve(SLOW_LINE)
    learned = []
    for kill in (False, True):
        folder = tmp_path / f"{kill}"
        folder.mkdir()
        printed = run_ranks(daemon.url, folder, kill)
        resumed = re.findall(r"rank (\d) resumes at step (\d+)", printed)
        assert {rank for rank, _ in resumed} == ({"0", "1"} if kill else set())
        learned.append(sorted(re.findall(r"rank (\d) has learned (.*)", printed)))
    assert learned[0] == learned[1]
    (_, first), (_, second) = learned[0]
    assert first == second
    assert re.match(r"y = (3.0|2.9)\d* x \+ -(1.0|0.9)", first)
