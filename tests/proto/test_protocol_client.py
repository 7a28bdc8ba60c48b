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

import penstock
import penstock_proto
from penstock_proto.spec import flatten
from tests.conftest import Serve
from tests.proto.test_stream_hashes import ENDLESS_BATCHES, stored

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

    def texts(split):
        for i in range(7):
            row = np.full(i % 4, split, "int16")
            yield {"text": "ab" * i, "two": np.array([b"x", b"y" * i], object), "row": row, "z": np.int64(i)}

    fixed = Feed(samples, splits=range(5), batch_size=4, turn=3, lanes=2)
    texts = Feed(texts, splits=range(6), batch_size=4, lanes=2, batching="ragged")
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

if (most := int(sys.argv[2])):  # batches of an endless feed
    position, _ = read(sys.argv[1], None, 0, stop=7)
    read(sys.argv[1], position, 0, stop=most - 7)
else:
    for epoch in range(2):
        position, ended = read(sys.argv[1], None, epoch, stop=7)
        assert not ended
        read(sys.argv[1], position, epoch)
sys.stdout.write(digest.hexdigest())
"""
AFTER_EACH_BATCH = """
seen = []

def print(*_):
    seen.append(b"".join(array.tobytes() for array in sys._getframe(1).f_locals["arrays"]))

read(sys.argv[1], None, 0)
whole, pooled = list(seen), 0
for count in range(len(whole)):
    seen.clear()
    position, _ = read(sys.argv[1], None, 0, stop=count)
    position, _ = read(sys.argv[1], position, 0, stop=0)  # what comes before the first slab is not applied
    assert position.at["batches"] + position.at["skip"] == count
    pooled += position.at["skip"] > 0
    read(sys.argv[1], position, 0)
    assert seen == whole, f"other batches after {count}"
assert pooled > len(whole) // 2, "most positions are within a pool"
"""
STREAMS = Path(__file__).resolve().parents[1] / "data"


def protocol() -> str:
    return (Path(penstock_proto.__file__).parent / "PROTOCOL.md").read_text()


def small_client() -> str:
    return protocol().partition("## A small client")[2].split("```python\n")[1].partition("```")[0]


def printed() -> dict[str, str]:
    """The feeds and hashes of the page's table."""
    return dict(re.findall(r"^\| `(\w+)` \| .* \| `([0-9a-f]{64})` \|$", protocol(), re.MULTILINE))


def test_the_small_client_finds_the_published_hashes_of_the_streams_that_it_resumes(serve: Serve) -> None:
    published = printed()
    del published["all_types"]  # it has bfloat16
    daemon = serve((STREAMS / "stream_feeds.py").read_text(), *published)
    code = small_client().partition("\nurl = sys.argv[1]")[0] + HASHED
    found = {}
    for name, url in daemon.urls.items():
        words = [sys.executable, "-c", code, url, str(ENDLESS_BATCHES if "endless" in name else 0)]
        run = subprocess.run(words, capture_output=True, text=True, timeout=30)
        assert run.returncode == 0, run.stderr
        found[name] = run.stdout
    assert found == published


def test_the_small_client_goes_on_after_each_batch_of_pools_also_from_a_session_without_a_slab(serve: Serve) -> None:
    daemon = serve((STREAMS / "stream_feeds.py").read_text(), "shuffled_rng")
    code = small_client().partition("\nurl = sys.argv[1]")[0] + AFTER_EACH_BATCH
    run = subprocess.run([sys.executable, "-c", code, daemon.url], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_the_protocol_prints_published_hashes_and_the_command_that_serves_their_feeds() -> None:
    published = json.loads((STREAMS / "stream_hashes.json").read_text())["streams"]
    assert printed() == {name: published[name] for name in printed()}
    assert re.findall(r"stream_feeds\.py:(\w+)", protocol()) == list(printed())


def test_the_protocols_small_client_reads_every_batch(serve: Serve) -> None:
    daemon = serve(FEED, "fixed", "varying", "texts")
    code = small_client()
    assert code.count(SHOWN) == 1
    code = "import zlib\n" + code.replace(SHOWN, SHOWN[:-1] + ':{zlib.crc32(array.tobytes())}"')
    for url in daemon.urls.values():
        run = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, timeout=30)
        assert run.returncode == 0, run.stderr
        with penstock.connect(url) as connection:
            spec = connection.info.spec
            batches = [[a for leaf in flatten(spec, b) for a in stored(leaf)] for b in connection.batches()]
            want = [" ".join(f"{a.dtype}{a.shape}:{zlib.crc32(a.tobytes())}" for a in batch) for batch in batches]
        assert run.stdout.splitlines() == want
        assert len(want) > 5, "it reads five batches, and the rest in a second session"
