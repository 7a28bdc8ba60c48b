"""A generator that holds a lock while it yields is refused: the generator of the next split would wait forever."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import penstock
from penstock_server import Feed
from penstock_server.worker.isolation.held_locks import held_locks

lock = threading.Lock()
again = threading.RLock()
turns = threading.Semaphore(2)


class Store:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def rows(self, split: int) -> Iterator[int]:
        with self.lock:
            yield from (split, split + 1)


store = Store()


def holds(split: int) -> Iterator[int]:
    with lock:
        yield from (split, split + 1)


def takes_both_turns(split: int) -> Iterator[int]:
    with turns, turns:
        yield split


def through_an_object(split: int) -> Iterator[int]:
    with store.lock:
        yield split


def passed_on(function: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Iterator[int]:
        return function(*args)

    return wrapper


def around() -> Callable[[int], Iterator[int]]:
    mine = threading.Lock()

    def rows(split: int) -> Iterator[int]:
        with mine:
            yield split

    return rows


@pytest.mark.parametrize(
    ("generate", "name"),
    [
        (holds, "lock"),
        (takes_both_turns, "turns"),
        (through_an_object, "store.lock"),
        (Store().rows, "Store.lock"),
        (passed_on(holds), "lock"),
        (functools.partial(holds), "lock"),
        (around(), "mine around rows"),
    ],
    ids=["global", "semaphore", "object", "method", "decorated", "partial", "nested"],
)
def test_the_lock_is_named(generate: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_server.worker.isolation.held_locks._PATIENCE", 0.1)
    feed = Feed(generate, splits=[0, 10, 20], batch_size=2)
    with pytest.raises(
        penstock.FeedError,
        match=rf"its generator holds the lock '{name}' while it yields\. .*release it before each yield",
    ):
        penstock.connect(feed, workers=0)


def lets_the_same_thread_in(split: int) -> Iterator[int]:
    with again:
        yield split


def releases(split: int) -> Iterator[int]:
    with lock, turns:
        made = split
    yield made


def one_of_two_turns(split: int) -> Iterator[int]:
    with turns:
        yield split


@pytest.mark.parametrize("generate", [lets_the_same_thread_in, releases, one_of_two_turns])
def test_other_locks_are_not_in_the_way(generate: Any) -> None:
    with penstock.connect(Feed(generate, splits=[0, 10], batch_size=1), workers=0) as connection:
        assert len(list(connection.batches())) == 2


def test_a_lock_that_another_thread_holds_for_a_moment_is_free() -> None:
    taken = threading.Event()

    def work() -> None:
        with lock:
            taken.set()
            time.sleep(0.1)

    thread = threading.Thread(target=work)
    thread.start()
    taken.wait()
    assert held_locks(releases) == ()
    thread.join()
