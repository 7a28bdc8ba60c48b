"""Penstock: a daemon and its workers with default options, and a trainer on the same host."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

from contestants.penstock_service import daemon

from loaders import WORKERS

FEED = Path(__file__).with_name("penstock_feed.py")


@contextmanager
def _batches(name: str, transport: Literal["local", "tcp"]) -> Iterator[Any]:
    import penstock

    with daemon(FEED, {"PIPELINE": name}, "--workers", str(WORKERS)) as url:
        with penstock.connect(url, transport=transport) as connection:
            yield connection.dataset()


def local(name: str) -> AbstractContextManager[Any]:
    return _batches(name, "local")


def tcp(name: str) -> AbstractContextManager[Any]:
    return _batches(name, "tcp")
