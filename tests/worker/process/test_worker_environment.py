"""Workers use one thread in every library and no GPU, whatever the daemon's environment says, unless a feed or --env
says otherwise."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import psutil
import pytest

import penstock
from penstock_proto import StartError
from penstock_server import Feed
from penstock_server.machine import environment
from tests.conftest import Serve

FEEDS = """
    import json
    import os

    import numpy as np
    from penstock_server import Feed
    from threadpoolctl import threadpool_info

    AT_IMPORT = dict(os.environ)
    THREADS = max(pool["num_threads"] for pool in threadpool_info())  # of the BLAS that NumPy has loaded

    def variables(split):
        text = json.dumps({"threads": THREADS, **AT_IMPORT}).encode()
        yield np.frombuffer(text, np.uint8)

    def feed(**env):
        return Feed(variables, splits=[0], batch_size=None, env=env)

    plain = feed()
    threads = feed(OMP_NUM_THREADS="3", OPENBLAS_NUM_THREADS="3", OURS="a b=c", JAX_PLATFORMS=None)
    agrees = feed(OURS="a b=c")
    other = feed(OURS="d")
"""
BATCH_SYSTEM = {
    "OMP_NUM_THREADS": "16",
    "OPENBLAS_NUM_THREADS": "2",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "JAX_PLATFORMS": "cuda",
    "TOKENIZERS_PARALLELISM": "true",
    "OURS": "the daemon's",
}


def read(url: str) -> dict[str, Any]:
    """Return the environment of the worker that makes the feed's batch, and the threads of its BLAS."""
    with penstock.connect(url) as connection:
        (batch,) = connection.batches()
        found: dict[str, Any] = json.loads(batch.tobytes())
        return found


def test_each_library_gets_one_thread_and_no_gpu_whatever_the_daemon_was_started_with(serve: Serve) -> None:
    found = read(serve(FEEDS, "plain", env=BATCH_SYSTEM).url)
    assert found["threads"] == 1
    assert {name: found.get(name) for name in environment.DEFAULTS} == environment.DEFAULTS
    assert found["OURS"] == "the daemon's"
    assert found["PYTHONHASHSEED"] == "0"


def test_a_feed_sets_variables_before_its_modules_and_libraries_are_imported(serve: Serve) -> None:
    daemon = serve(FEEDS, "threads", "agrees", workers=2, env=BATCH_SYSTEM)
    for name in daemon.urls:
        found = read(daemon.urls[name])
        assert found["threads"] == min(3, psutil.cpu_count() or 1)  # OpenBLAS starts no more
        assert (found["OMP_NUM_THREADS"], found["OURS"], found["CUDA_VISIBLE_DEVICES"]) == ("3", "a b=c", "-1")
        assert "JAX_PLATFORMS" not in found
    assert "died" not in daemon.stderr()
    assert "was killed" not in daemon.stderr()

    daemon.workers()[0].kill()  # its replacement has them too
    deadline = time.monotonic() + 60
    while daemon.stderr().count(" is ready: ") < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [read(daemon.urls["agrees"])["OURS"] for _ in range(3)] == ["a b=c"] * 3
    assert daemon.stderr().count("workers start again") == 1


def test_feeds_that_want_different_values_are_refused_and_both_are_named(serve: Serve) -> None:
    daemon = serve(FEEDS, "threads", "other", ready=False)
    assert daemon.process.wait(60) == 1
    assert re.search("feeds threads and other want different values of OURS .*'a b=c' and 'd'.*--env", daemon.stderr())


def test_the_command_line_decides_for_all_feeds(serve: Serve) -> None:
    words = ("--env", "OURS=all", "--env", "OPENBLAS_NUM_THREADS=1", "--env", "CUDA_VISIBLE_DEVICES")
    daemon = serve(FEEDS, "threads", "other", env=BATCH_SYSTEM, words=words)
    for url in daemon.urls.values():
        found = read(url)
        assert (found["OURS"], found["OMP_NUM_THREADS"], found["CUDA_VISIBLE_DEVICES"]) == ("all", "3", "0,1")
        assert found["threads"] == 1
    assert "imported once for all workers" in daemon.stderr().rpartition("workers start again")[2]


def test_an_env_that_differs_at_each_import_ends_the_start_with_the_reason(serve: Serve) -> None:
    source = FEEDS + "\n    unstable = feed(OURS=str(os.getpid()))\n"
    daemon = serve(source, "unstable", ready=False, workers=1)
    assert daemon.process.wait(60) == 1
    assert "the feeds' env= differs each time they are imported" in daemon.stderr()


@pytest.mark.parametrize(
    ("env", "kind", "text"),
    [
        (["OMP_NUM_THREADS=1"], TypeError, "env= must be a dict"),
        ({"OMP_NUM_THREADS": 4}, TypeError, "text as names and values .* got 'OMP_NUM_THREADS': 4"),
        ({"A=B": "1"}, ValueError, "no environment can hold: 'A=B'"),
        ({"A": "\0"}, ValueError, "no environment can hold"),
        ({"PYTHONHASHSEED": "1"}, ValueError, "cannot set PYTHONHASHSEED"),
        ({"PENSTOCK_WORKER": "1"}, ValueError, "cannot set PENSTOCK_WORKER"),
        ({"A": "x" * 20_000}, ValueError, "takes 20002 bytes"),
    ],
)
def test_an_env_that_cannot_be_set_is_refused_when_the_feed_is_declared(env: Any, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        Feed([1], batch_size=1, env=env)


def test_too_many_variables_together_are_refused() -> None:
    feeds = [(name, {f"{name}{i}": "x" * 10_000 for i in range(4)}) for name in ("a", "b")]
    with pytest.raises(StartError, match="env= of all feeds together takes"):
        environment.merged(feeds)
