"""The client that PROTOCOL.md prints speaks the protocol: it reads the same stream as this distribution's own client.

It also computes the hashes that PROTOCOL.md gives for testing other clients.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from conftest import Serve

import penstock
import penstock_proto

FEED = """
    import time

    import numpy as np
    from penstock_server import Feed

    def samples(split):
        for i in range(10 + split):
            time.sleep(0.002)  # so that some turns are reported in parts
            yield {"x": np.full(50_000, 100 * split + i, "float32"), "y": np.int64(i), "z": np.arange(3, dtype="uint8")}

    def batches(split):
        for i in range(3):
            yield np.full((split + i, 2), i, "float64"), np.int32(split)

    fixed = Feed(samples, splits=range(5), batch_size=4, turn=3, lanes=2)
    varying = Feed(batches, splits=range(4), batch_size=None, lanes=2)
"""
SHOWN = 'f"{array.dtype}{array.shape}"'
HASHED = """
import hashlib
digest = hashlib.sha256()

def print(*_):  # it is called with `epoch` and `arrays` in the frame of the reading function
    seen = sys._getframe(1).f_locals
    shapes = " ".join(f"{array.dtype}[{','.join(map(str, array.shape))}]" for array in seen["arrays"])
    digest.update(f"{seen['epoch']} {shapes}\\n".encode() + b"".join(array.tobytes() for array in seen["arrays"]))

for epoch in range(2):
    position, ended = read(sys.argv[1], None, epoch, stop=7)
    assert not ended
    read(sys.argv[1], position, epoch)
sys.stdout.write(digest.hexdigest())
"""
STREAMS = Path(__file__).parent / "data"


def protocol() -> str:
    return (Path(penstock_proto.__file__).parent / "PROTOCOL.md").read_text()


def small_client() -> str:
    return protocol().partition("## A small client")[2].split("```python\n")[1].partition("```")[0]


@pytest.mark.parametrize("name", ["five_lanes", "shuffled_rng", "ready", "table_shuffled"])
def test_the_small_client_finds_the_published_hash_of_a_stream_that_it_resumes(serve: Serve, name: str) -> None:
    daemon = serve((STREAMS / "stream_feeds.py").read_text(), name)
    code = small_client().partition("\nurl = sys.argv[1]")[0] + HASHED
    run = subprocess.run([sys.executable, "-c", code, daemon.url], capture_output=True, text=True, timeout=30)
    assert run.returncode == 0, run.stderr
    assert f"| `{run.stdout}` |" in protocol()


def test_the_protocol_prints_the_hashes_that_are_published() -> None:
    published = json.loads((STREAMS / "stream_hashes.json").read_text())["streams"]
    printed = re.findall(r"^\| `(\w+)` \| .* \| `([0-9a-f]{64})` \|$", protocol(), re.MULTILINE)
    assert len(printed) == 5
    assert all(published[name] == digest for name, digest in printed)


def test_the_protocols_small_client_reads_every_batch(serve: Serve) -> None:
    daemon = serve(FEED, "fixed", "varying")
    code = small_client()
    assert code.count(SHOWN) == 1
    code = "import zlib\n" + code.replace(SHOWN, SHOWN[:-1] + ':{zlib.crc32(array.tobytes())}"')
    for url in daemon.urls.values():
        run = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, timeout=30)
        assert run.returncode == 0, run.stderr
        with penstock.connect(url) as connection:
            batches = [batch.values() if isinstance(batch, dict) else batch for batch in connection.batches()]
            want = [" ".join(f"{a.dtype}{a.shape}:{zlib.crc32(a.tobytes())}" for a in batch) for batch in batches]
        assert run.stdout.splitlines() == want
        assert len(want) > 5, "it reads five batches, and the rest in a second session"
