"""Checks that the stream of a feed is the same, however it is made and read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import penstock
from tests.conftest import Daemon


def arrays(batch: Any) -> Iterator[Any]:
    """Yield the leaves of a batch."""
    if isinstance(batch, dict):
        for key in sorted(batch):
            yield from arrays(batch[key])
    elif isinstance(batch, tuple):
        for item in batch:
            yield from arrays(item)
    elif isinstance(batch, penstock.Ragged):
        yield from arrays(batch.flat_values)
        yield from batch.nested_row_splits
    elif batch.dtype == object:  # strings
        yield np.array([len(text) for text in batch.reshape(-1)])
        yield np.frombuffer(b"".join(batch.reshape(-1).tolist()), np.uint8)
    else:
        yield batch


def digests(batches: Iterable[Any]) -> list[str]:
    """Return a digest of each batch."""
    found = []
    for batch in batches:
        digest = hashlib.sha256()
        for leaf in arrays(batch):
            digest.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
        found.append(digest.hexdigest())
    return found


def one_stream(serve: Callable[..., Daemon], source: str, folder: Path) -> list[Any]:
    """Read an epoch of `feed` with 1 worker, then with 3 over TCP through a SIGKILL and a resume: they must be equal.

    Returns:
        The batches.
    """
    env = {"DATA": str(folder)}
    with penstock.connect(serve(source, workers=1, env=env).url, transport="local") as connection:
        batches = list(connection.batches())
    daemon = serve(source, workers=3, env=env)
    with penstock.connect(daemon.url, transport="tcp") as connection:
        reading = connection.batches()
        began = digests(next(reading) for _ in range(3))
        daemon.workers()[0].kill()
        began += digests(next(reading) for _ in range(2))
        state = connection.state_dict()
    with penstock.connect(daemon.url, transport="tcp", state=state) as connection:
        began += digests(connection.batches())
    assert began == digests(batches)
    return batches
