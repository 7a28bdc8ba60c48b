"""The client that PROTOCOL.md prints speaks the protocol: it reads what this distribution's own client reads."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

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


def test_the_protocols_small_client_reads_every_batch(serve: Serve) -> None:
    daemon = serve(FEED, "fixed", "varying")
    text = (Path(penstock_proto.__file__).parent / "PROTOCOL.md").read_text()
    code = text.partition("## A small client")[2].split("```python\n")[1].partition("```")[0]
    assert code.count(SHOWN) == 1
    code = "import zlib\n" + code.replace(SHOWN, SHOWN[:-1] + ':{zlib.crc32(array.tobytes())}"')
    for url in daemon.urls.values():
        run = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, timeout=30)
        assert run.returncode == 0, run.stderr
        with penstock.connect(url) as connection:
            batches = [batch.values() if isinstance(batch, dict) else batch for batch in connection.batches()]
            want = [" ".join(f"{a.dtype}{a.shape}:{zlib.crc32(a.tobytes())}" for a in batch) for batch in batches]
        assert run.stdout.splitlines() == want
        assert len(want) > 5, "it reads five batches, and the others in another session"
