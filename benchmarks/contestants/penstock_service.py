"""Penstock: a daemon with one worker, and a trainer on the same host, over either transport."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

from contestants import prebuilt

BENCHMARKS = Path(__file__).resolve().parents[1]
FEED = BENCHMARKS / "contestants" / "penstock_feed.py"
LEAST_SLOT = 16 << 20  # small batches share slots of about this size
ROOM = 64 << 10  # bytes that a slot may need beside its batch
STOP_SECONDS = 30.0


@contextmanager
def daemon(module: Path, variables: Mapping[str, str], *options: str) -> Iterator[str]:
    """Serve the feed of `module`, with `variables` in its environment, and yield the feed's URL."""
    command = [sys.executable, "-m", "penstock_server", "serve", f"{module}:feed", "--bind", "tcp://127.0.0.1:0"]
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(BENCHMARKS), os.getenv("PYTHONPATH")])),
    }
    process = subprocess.Popen([*command, *options], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if len(words) != 2 or words[0] != "ready":
            raise RuntimeError("the Penstock daemon did not start; see its error above")
        yield words[1]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _batches(
    load: prebuilt.Load, transport: Literal["local", "tcp"], *extra: str, keys: Path | None = None
) -> Iterator[Iterable[Any]]:
    import penstock

    memory = 2 * load.pool * max(load.nbytes + ROOM, LEAST_SLOT)  # a stream gets half: a slot for each batch
    options = ("--workers", "1", "--memory", str(memory), *extra)
    given: dict[str, Any] = {} if keys is None else {"keys": keys}  # compare.py also runs Penstock from before keys
    with (
        daemon(FEED, {"TRANSPORT_LOAD": load.text()}, *options) as url,
        penstock.connect(url, transport=transport, **given) as connection,
    ):
        yield connection.dataset()


def batches_local(load: prebuilt.Load) -> AbstractContextManager[Iterable[Any]]:
    return _batches(load, "local")


def batches_tcp(load: prebuilt.Load) -> AbstractContextManager[Iterable[Any]]:
    return _batches(load, "tcp")


@contextmanager
def batches_encrypted(load: prebuilt.Load) -> Iterator[Iterable[Any]]:
    from penstock_server.cli.keygen import generate

    with tempfile.TemporaryDirectory() as folder:
        _, client = generate(Path(folder))
        with _batches(load, "tcp", "--keys", folder, keys=client) as batches:
            yield batches
