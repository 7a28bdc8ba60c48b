"""Workers that Penstock itself ends are no failures."""

from __future__ import annotations

import penstock
from penstock_server.to_daemon import control
from tests.conftest import Serve, wait_until

FEED = """
    import time
    import numpy as np
    from penstock_server import Feed

    def numbers(split):
        if split:
            time.sleep(1000)
        yield np.int64(split)

    feed = Feed(numbers, splits=range(32), batch_size=1, lanes=8, turn=1)
"""


def test_the_log_says_that_penstock_ended_the_workers_that_were_to_leave(serve: Serve) -> None:
    daemon = serve(FEED, workers=3)
    wait_until(lambda: daemon.stderr().count(" is ready") == 3)
    with penstock.connect(daemon.url) as connection:
        next(connection.batches())
        control.scale(daemon.url, 1, now=True, timeout=60)
        ended = "was ended, as it was to leave and still had work; other workers take over its work"
        wait_until(lambda: daemon.stderr().count(ended) == 2, 10, said=daemon.stderr)
    log = daemon.stderr()
    assert "SIGKILL" not in log
    assert " ERROR " not in log
    assert log.count(" INFO    penstock: worker") >= 5
