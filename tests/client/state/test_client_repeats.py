"""A loop that makes a new dataset for each epoch gets one warning; correct programs get none."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

import penstock
from penstock._state import repeats
from penstock_proto.messages import FeedInfo
from tests.fakes.fake_daemon import FakeDaemon, numbers

SAID = "reads epoch 0 of this feed again"


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], int]]:
    """`said()` is the number of these warnings in this test."""
    repeats.registry.forget()
    with caplog.at_level(logging.WARNING, "penstock"):
        yield lambda: sum(SAID in record.getMessage() for record in caplog.records)


def feed(batches: int = 3, **more: Any) -> FakeDaemon:
    info, epoch = numbers(batches)
    return FakeDaemon(msgspec.structs.replace(info, **{"shuffle": 100, **more}), epoch)


def read(url: str, most: int | None = None, **options: Any) -> None:
    """Read an epoch over a new connection."""
    with penstock.connect(url, **options) as connection:
        for number, _ in enumerate(connection.batches(), 1):
            if number == most:
                break


def test_a_new_dataset_in_each_epoch_is_told_once(
    tf: Any, said: Callable[[], int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "logThreads", False)  # it would keep a Thread object for TensorFlow's thread
    with feed() as daemon:
        for epoch in range(6):
            assert [int(y[0]) for _, y in penstock.dataset(daemon.url)] == [0, 1, 2]
            assert said() == (epoch >= 2), epoch
        gc.collect()  # until then, a TensorFlow iterator may keep its connection
    (record,) = [record for record in caplog.records if SAID in record.getMessage()]
    assert record.getMessage().startswith(f"{daemon.url}: a new connection {SAID} and gets the same batches as")
    assert "Create the dataset (or connection) once" in record.getMessage()


def test_so_is_one_beside_a_validation_dataset_that_is_new_too(said: Callable[[], int]) -> None:
    with feed() as train, feed(shuffle=0) as val:
        for _ in range(4):
            read(train.url)
            read(val.url)
    assert said() == 1


def test_and_one_of_a_stream_without_end_of_which_it_takes_some(said: Callable[[], int]) -> None:
    with feed(repeats.MANY + 50, shuffle=0, segment=10) as daemon:
        for _ in range(4):
            read(daemon.url, repeats.MANY)
        assert said() == 1


def test_a_dataset_that_is_made_once_is_right(tf: Any, said: Callable[[], int]) -> None:
    with feed() as daemon:
        train, val = penstock.dataset(daemon.url), penstock.dataset(daemon.url)
        for _ in range(4):
            list(train)
            list(val)
        del train, val
    assert said() == 0


def test_a_loop_that_goes_on_from_states_is_right(said: Callable[[], int]) -> None:
    with feed() as daemon:
        state = None
        for epoch in range(5):
            with penstock.connect(daemon.url, state=state) as connection:
                assert [int(y[0]) for _, y in connection.batches()] == [100 * epoch + i for i in range(3)]
                state = connection.state_dict()
    assert said() == 0


@pytest.mark.parametrize("inside", [False, True])
def test_evaluations_beside_a_training_are_right(said: Callable[[], int], inside: bool) -> None:
    with feed(5) as train, feed() as val, penstock.connect(train.url) as connection:
        read(val.url)
        for _ in range(5):
            for _ in connection.batches():
                if inside:
                    read(val.url)
            if not inside:
                read(val.url)
    assert said() == 0


def test_evaluations_alone_of_a_feed_that_is_not_shuffled_are_right(said: Callable[[], int]) -> None:
    with feed(shuffle=0) as val:
        for _ in range(5):
            read(val.url)
    assert said() == 0


def test_two_jobs_in_a_process_one_after_another_are_right(said: Callable[[], int]) -> None:
    with feed() as daemon:
        for epochs in (1, 3, 2, 3, 2, 1):
            with penstock.connect(daemon.url) as connection:
                for _ in range(epochs):
                    list(connection.batches())
    assert said() == 0


def test_looks_at_a_few_batches_and_cached_ones_are_right(tf: Any, said: Callable[[], int]) -> None:
    with feed() as daemon:
        for _ in range(5):
            read(daemon.url, 2)
            list(penstock.dataset(daemon.url, cached=2))
        read(daemon.url)
    assert said() == 0


def test_feeds_with_one_epoch_can_be_read_no_other_way(said: Callable[[], int]) -> None:
    with feed(epochs=1) as daemon:
        for _ in range(4):
            read(daemon.url)
    assert said() == 0


def test_which_feeds_differ_from_epoch_to_epoch_is_known() -> None:
    info, _ = numbers(1)
    assert not repeats.may_repeat(info)
    changed: list[FeedInfo] = [msgspec.structs.replace(info, **new) for new in ({"shuffle": 1}, {"segment": 5})]
    assert all(repeats.may_repeat(info) for info in changed)
