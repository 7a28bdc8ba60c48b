"""On a GPU: copies that are still under way when a batch is dropped have that batch's bytes, not those of a later one.

Skipped where there is no GPU of NVIDIA's. It needs the framework's build for CUDA.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import penstock
from tests.conftest import Serve

pytestmark = pytest.mark.skipif(not [*Path("/dev").glob("nvidia[0-9]*")], reason="no GPU of NVIDIA's")

BATCHES, NBYTES = 200, 8 << 20
# There are few slots, so each is written again at once.
FEED = f"""
from penstock_server import Feed
import numpy as np

def numbers(split):
    for number in range(split, split + 20):
        yield np.full({NBYTES // 8}, number, "float32")

feed = Feed(numbers, splits=range(0, {2 * BATCHES}, 20), batch_size=2, turn=1, lanes=2)
"""
HEAD = """
import json, sys
import penstock

connection = penstock.connect(sys.argv[1], transport="local")
found = []
"""
LOOPS = {
    "torch": """
import torch
for batch in connection.torch():
    array = batch.to("cuda", non_blocking=True)
    del batch
    found.append((array.amin(1), array.amax(1)))
print(json.dumps([[part.tolist() for part in pair] for pair in found]))
""",
    "torch, pinned": """
from torch.utils.data import DataLoader
for batch in DataLoader(connection.torch(), batch_size=None, pin_memory=True):
    array = batch.to("cuda", non_blocking=True)
    del batch
    found.append((array.amin(1), array.amax(1)))
print(json.dumps([[part.tolist() for part in pair] for pair in found]))
""",
    "jax": """
import jax
gpu = jax.devices("gpu")[0]
for batch in connection.batches():
    array = jax.device_put(batch, gpu)
    del batch
    found.append((array.min(1), array.max(1)))
print(json.dumps([[part.tolist() for part in pair] for pair in found]))
""",
    "tensorflow": """
import tensorflow as tf
for batch in connection.dataset():
    with tf.device("/GPU:0"):
        array = tf.identity(batch)
        del batch
        found.append((tf.reduce_min(array, 1), tf.reduce_max(array, 1)))
print(json.dumps([[part.numpy().tolist() for part in pair] for pair in found]))
""",
}


@pytest.mark.parametrize("way", LOOPS)
def test_a_copy_to_the_gpu_outlives_its_batch(serve: Serve, way: str) -> None:
    library = way.partition(",")[0]
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    url = serve(FEED, memory=96 << 20).url
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # other tests hide the GPU
    ended = subprocess.run(
        [sys.executable, "-c", HEAD + LOOPS[way], url], capture_output=True, text=True, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    with penstock.connect(url, transport="local") as connection:
        batches = [batch[:, 0].tolist() for batch in connection.batches()]
    assert sorted(itertools.chain.from_iterable(batches)) == [*range(2 * BATCHES)]
    assert json.loads(ended.stdout) == [[batch, batch] for batch in batches]
