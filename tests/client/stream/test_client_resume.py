"""A stream continues after a cut, which its reader does not notice, and in another run from a saved state."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import penstock
from penstock._stream import reconnecting
from penstock._transport import tcp_transport
from penstock_proto.messages import Begin, FeedInfo, Hello
from tests.fakes.fake_daemon import Fail, FakeDaemon, Stall, Vanish, dealt
from tests.fakes.inside import handle_of, transport_of

both = pytest.mark.parametrize("transport", ["local", "tcp"])
LANES = [41, 30, 0, 27]
"""Rows of each lane: 25 batches of 4, several of them merged from leftovers."""
TOTAL = -(-sum(LANES) // 4)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnecting, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(reconnecting, "LAST_PAUSE", 0.1)


def seen(batches: Any) -> list[int]:
    """Return the numbers of these batches of `dealt`, after checking all values."""
    found = []
    for x, y in batches:
        assert (x == y[0]).all()
        assert (y == y[0]).all()
        found.append(int(y[0]))
    return found


class Cutting:
    """The epochs of a feed. The connection is cut before each slab in `cuts`, counted over all epochs."""

    def __init__(self, epoch: Callable[[int], list[Any]], cuts: list[int]) -> None:
        self.epoch, self.cuts, self.asked = epoch, sorted(cuts), 0

    def __call__(self, e: int) -> list[object]:
        plan: list[object] = list(self.epoch(e))
        self.asked += 1
        if self.asked > 1 and self.cuts and self.cuts[0] < (e + 1) * len(plan):
            plan.insert(max(0, self.cuts.pop(0) - e * len(plan)), Vanish())
        return plan


@both
@pytest.mark.parametrize("turn", [1, 3])
@pytest.mark.parametrize("cuts", [[0], [1, 2, 3], [7, 9, 20, 24], [26, 27, 40], [29, 30, 58]])
def test_a_cut_anywhere_is_a_pause_and_nothing_else(transport: str, turn: int, cuts: list[int]) -> None:
    info, epoch = dealt(LANES, turn=turn)
    with (
        FakeDaemon(info, Cutting(epoch, cuts), digest=b"d" * 32) as daemon,
        penstock.connect(daemon.url, transport=transport) as connection,
    ):
        for e in range(3):
            assert seen(connection.batches()) == [1000 * e + i for i in range(TOTAL)]
        stats = connection.stats()
        assert stats["reconnects"] == daemon.count(Hello) - 1
        assert stats["reconnects"] >= 1
        assert stats["batches"] == 3 * TOTAL
        assert connection.error is None


def test_arrays_held_over_a_reconnect_stay_as_they_are() -> None:
    info, epoch = dealt(LANES)
    with FakeDaemon(info, Cutting(epoch, [2, 30])) as daemon, penstock.connect(daemon.url) as connection:
        held = list(itertools.islice(connection.batches(), 3))
        batches = connection.batches()
        held += list(batches)
        assert seen(held) == [0, 1, 2, *range(1000, 1000 + TOTAL)]
        assert connection.stats()["reconnects"] == 2
        assert len(handle_of(connection).handoff._lost) >= 1
        del held, batches
        gc.collect()
        daemon.wait_for(lambda: not handle_of(connection).handoff._lost)


@both
def test_a_daemon_that_comes_back_at_its_address_goes_on(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    info, epoch = dealt(LANES, turn=2)
    with FakeDaemon(info, lambda e: [*epoch(e)[:9], Stall(), *epoch(e)[9:]]) as first:
        connection = penstock.connect(first.url, transport=transport)
        batches = connection.batches()
        start = seen(itertools.islice(batches, 6))
        port = first.port
    with caplog.at_level(logging.WARNING, "penstock"):
        time.sleep(0.5)
        with FakeDaemon(info, epoch, port=port) as second, connection:
            assert start + seen(batches) == list(range(TOTAL))
            assert connection.stats()["reconnects"] == 1
            (position,) = second.positions
            assert position.batches == 6
    said = [record.getMessage() for record in caplog.records]
    assert any("Trying to reconnect for up to 60 s; the stream then continues where it was" in text for text in said)
    assert any("connected again after" in text for text in said)


@both
def test_when_the_time_is_up_the_error_names_it_and_the_first_cause(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnecting, "FIRST_PAUSE", 1000.0)  # even so, no pause lasts longer than the time left
    info, epoch = dealt(LANES)
    with FakeDaemon(info, lambda e: [*epoch(e)[:9], Stall()]) as daemon:
        connection = penstock.connect(daemon.url, transport=transport, reconnect=0.5)
        batches = connection.batches()
        next(batches)
    with pytest.raises(penstock.ConnectionLost, match=r"(?s)killed.*Within 0\.5 s no attempt .*no daemon"):
        list(batches)
    assert isinstance(connection.error, penstock.ConnectionLost)
    connection.close()


@both
def test_connections_that_break_at_once_are_said_once_and_in_the_error(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    info, epoch = dealt(LANES)
    breaks = itertools.count()
    with (
        FakeDaemon(info, lambda e: [*(epoch(e)[:2] if next(breaks) == 0 else ()), Vanish()]) as daemon,
        penstock.connect(daemon.url, transport=transport, reconnect=1.0) as connection,
        pytest.raises(penstock.ConnectionLost, match=r"(?s)Within 1 s \d+ connections were made, but broke"),
    ):
        list(connection.batches())
    said = [record.getMessage() for record in caplog.records]
    assert sum("Trying to reconnect for up to 1 s" in text for text in said) == 1
    assert sum("connected again" in text for text in said) == 1
    assert sum("the new connection broke before data came" in text for text in said) == 1
    assert 2 < next(breaks) < 20, "it must pause, even when the time is nearly up"


def test_a_connection_that_nobody_reads_outlives_restarts_that_are_far_apart() -> None:
    info, epoch = dealt(LANES)
    with contextlib.ExitStack() as running:
        daemon = running.enter_context(FakeDaemon(info, epoch))
        port = daemon.port
        connection = penstock.connect(daemon.url, reconnect=60)
        for restarts in (1, 2):
            running.close()
            daemon = running.enter_context(FakeDaemon(info, epoch, port=port))
            daemon.wait_for(lambda n=restarts: connection.stats()["reconnects"] == n)
            handle_of(connection).receiver._reconnector._connected -= 100  # a loss of that length would be given up
        assert seen(connection.batches()) == list(range(TOTAL))
        connection.close()


def test_a_daemon_that_stops_is_waited_for_and_close_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnecting, "FIRST_PAUSE", 1000.0)  # the wait does not end on its own
    info, epoch = dealt(LANES)
    stop = Fail(penstock.DaemonStopped("the daemon was stopped"))
    with FakeDaemon(info, lambda e: [*epoch(e)[:5], Stall(), stop]) as daemon:
        connection = penstock.connect(daemon.url, reconnect=1000)
        batches = connection.batches()
        next(batches)
        daemon.go_on()  # only now: batches not handed over before the stop would come again after the pause
        daemon.wait_for(lambda: transport_of(connection) is None)
    threading.Timer(0.5, connection.close).start()
    with pytest.raises(penstock.StreamClosed):
        list(batches)


@both
def test_a_session_that_reconnected_is_freed_without_the_garbage_collector(transport: str) -> None:
    info, epoch = dealt(LANES)
    causes = [
        Fail(penstock.DaemonStopped("the daemon was stopped")),
        Vanish(),
        Stall(),
    ]  # the last one is only inspected
    gc.collect()
    gc.disable()
    try:
        with FakeDaemon(info, lambda e: [*epoch(e)[:5], causes.pop()] if causes else epoch(e)) as daemon:
            with penstock.connect(daemon.url, transport=transport) as connection:
                assert len(seen(connection.batches())) == TOTAL
                assert connection.stats()["reconnects"] == 2
                bell = weakref.ref(handle_of(connection).handoff.mailbox.wakeup)
                receiver = weakref.ref(handle_of(connection).receiver)
            del connection
            daemon.wait_for(lambda: receiver() is None and bell() is None)
    finally:
        gc.enable()


def test_an_error_of_the_feed_is_not_tried_again() -> None:
    info, epoch = dealt(LANES)
    failed = Fail(penstock.WorkerDied("a split killed its worker"))
    with FakeDaemon(info, lambda e: [*epoch(e)[:5], failed]) as daemon, penstock.connect(daemon.url) as connection:
        with pytest.raises(penstock.WorkerDied):
            list(connection.batches())
        assert daemon.count(Hello) == 1


def test_another_feed_at_the_same_address_is_refused_with_both_sides() -> None:
    info, epoch = dealt(LANES)
    with FakeDaemon(info, lambda e: [*epoch(e)[:5], Stall()]) as daemon:
        connection = penstock.connect(daemon.url)
        batches = connection.batches()
        next(batches)
        port = daemon.port
    other = msgspec.structs.replace(info, seed=1)
    with (
        FakeDaemon(other, epoch, port=port),
        connection,
        pytest.raises(penstock.StateMismatch, match="seed was 0 and is 1 now"),
    ):
        list(batches)


def test_an_iteration_asked_for_during_the_wait_begins_after_it() -> None:
    info, epoch = dealt(LANES)
    with FakeDaemon(info, lambda e: [*epoch(e)[:5], Stall()]) as daemon:
        connection = penstock.connect(daemon.url)
        next(connection.batches())
        port = daemon.port
    batches = connection.batches()
    results: list[list[int]] = []
    reader = threading.Thread(target=lambda: results.append(seen(batches)))
    reader.start()
    time.sleep(0.2)
    with FakeDaemon(info, epoch, port=port) as second, connection:
        reader.join(60)
        assert results == [[1000 + i for i in range(TOTAL)]]
        assert [message.epoch for message in second.got if isinstance(message, Begin)] == [1]


def test_a_client_over_tcp_that_had_no_contact_hands_nothing_more_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_transport, "PING_AFTER", 0.1)
    info, epoch = dealt(LANES)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url, transport="tcp") as connection:
        batches = connection.batches()
        start = [next(batches)]
        transport = transport_of(connection)
        assert isinstance(transport, tcp_transport.TcpTransport)
        time.sleep(0.2)
        with handle_of(connection).handoff._lock:  # the receiver thread stands still
            transport.heard_at -= 2 * tcp_transport.LOST_AFTER
        start.append(next(batches))
        assert connection.stats()["reconnects"] == 1
        assert seen([*start, *batches]) == list(range(TOTAL))


# --- states ---


@both
@pytest.mark.parametrize("turn", [1, 3])
def test_a_state_taken_behind_any_batch_gives_the_rest_in_another_connection(transport: str, turn: int) -> None:
    info, epoch = dealt(LANES, turn=turn)
    with FakeDaemon(info, epoch, digest=b"d" * 32) as daemon:
        states = []
        with penstock.connect(daemon.url, transport=transport) as connection:
            for _ in range(2):
                for _ in connection.batches():
                    states.append(connection.state_dict())
            assert [state["consumed"] for state in states] == list(range(1, 2 * TOTAL + 1))
        want = [*range(TOTAL), *range(1000, 1000 + TOTAL), *range(2000, 2000 + TOTAL)]
        for consumed in (1, 2, 7, TOTAL - 1, TOTAL, TOTAL + 5, 2 * TOTAL):
            state = json.loads(json.dumps(states[consumed - 1]))
            with penstock.connect(daemon.url, transport=transport, state=state) as connection:
                rest: list[int] = []
                while len(rest) < 3 * TOTAL - consumed:
                    rest += seen(connection.batches())
                assert rest == want[consumed:]
                assert connection.state_dict()["consumed"] == 3 * TOTAL


def test_a_state_of_a_state_is_as_good(tmp_path: Any) -> None:
    info, epoch = dealt(LANES, turn=3)
    found: list[int] = []
    state = None
    with FakeDaemon(info, epoch) as daemon:
        while len(found) < 2 * TOTAL:
            with penstock.connect(daemon.url, state=state) as connection:
                found += seen(itertools.islice(connection.batches(), 5))
                state = connection.state_dict()
    assert found[: 2 * TOTAL] == [*range(TOTAL), *range(1000, 1000 + TOTAL)]


def test_a_count_behind_what_was_handed_is_a_state_too() -> None:
    info, epoch = dealt(LANES, turn=3)
    with FakeDaemon(info, epoch) as daemon:
        with penstock.connect(daemon.url) as connection:
            list(connection.batches())
            state = connection.state_dict(consumed=8)
            with pytest.raises(ValueError, match="consumed=7, but the oldest"):
                connection.state_dict(consumed=7)
            with pytest.raises(ValueError, match=rf"consumed=99, but only {TOTAL} batches"):
                connection.state_dict(consumed=99)
        other = penstock.connect(daemon.url)
        other.load_state_dict(state)
        with other:
            assert seen(other.batches()) == list(range(8, TOTAL))
            with pytest.raises(ValueError, match="has been read already"):
                other.load_state_dict(state)


def test_a_state_survives_a_cut_in_the_resumed_run() -> None:
    info, epoch = dealt(LANES, turn=3)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:
        list(itertools.islice(connection.batches(), 5))
        state = connection.state_dict()
    with (
        FakeDaemon(info, Cutting(epoch, [8])) as daemon,
        penstock.connect(daemon.url, state=state) as connection,
    ):
        assert seen(connection.batches()) == list(range(5, TOTAL))
        assert connection.stats()["reconnects"] == 1


def test_a_state_is_small() -> None:
    info, epoch = dealt([41] * 16)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:
        for n, _ in enumerate(connection.batches()):
            assert len(json.dumps(connection.state_dict())) < 8000, n


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda s: [], "expected the state of a Penstock connection"),
        (lambda s: {**s, "penstock": 7}, "the state has version 7, but this Penstock reads version 3"),
        (lambda s: {**s, "more": 1}, "a state has the keys"),
        (lambda s: {**s, "consumed": -1}, "`consumed` must be a number of batches, got -1"),
        (lambda s: {**s, "position": None}, "position is damaged: Expected `object`"),
        (lambda s: {**s, "position": {**s["position"], "places": [[0, 1, "%%%"]]}}, "position is damaged"),
        (lambda s: {**s, "position": {**s["position"], "batches": "1"}}, r"damaged: .*batches"),
    ],
)
def test_garbage_is_refused_with_what_is_wrong(damage: Callable[[dict[str, Any]], object], says: str) -> None:
    info, epoch = dealt(LANES)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:
        state = connection.state_dict()
        with pytest.raises(ValueError, match=says):
            connection.load_state_dict(damage(state))  # type: ignore[arg-type]
        assert seen(itertools.islice(connection.batches(), 1)) == [0]  # the connection has not changed


def test_a_state_of_another_feed_is_refused_with_all_that_differs() -> None:
    info, epoch = dealt(LANES)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:
        state = connection.state_dict()
    other: FeedInfo = msgspec.structs.replace(info, seed=5, lanes=8)
    with FakeDaemon(other, epoch) as daemon:
        says = r"seed was 0 and is 5 now; lanes was 4 and is 8 now.*began with\n"
        with pytest.raises(penstock.StateMismatch, match=says):
            penstock.connect(daemon.url, state=state)
    other = msgspec.structs.replace(info, name="other")
    says = rf"name was {info.name} and is other now.*If only the variable was renamed, give the Feed name='{info.name}'"
    with FakeDaemon(other, epoch) as daemon, pytest.raises(penstock.StateMismatch, match=says):
        penstock.connect(daemon.url.replace(info.name, "other"), state=state)


def test_other_splits_than_those_of_the_state_are_refused() -> None:
    info, epoch = dealt(LANES)
    with FakeDaemon(info, epoch, digest=b"a" * 32) as daemon, penstock.connect(daemon.url) as connection:
        next(connection.batches())
        state = connection.state_dict()
    with (
        FakeDaemon(info, epoch, digest=b"b" * 32) as daemon,
        penstock.connect(daemon.url, state=state) as connection,
        pytest.raises(penstock.StateMismatch, match="the list of splits of epoch 0 has changed"),
    ):
        list(connection.batches())


@pytest.mark.parametrize("turn", [1, 3])
def test_a_dataset_goes_on_from_a_state_with_its_cardinality(tf: Any, turn: int) -> None:
    info, epoch = dealt(LANES, turn=turn)
    with FakeDaemon(info, epoch) as daemon:
        with penstock.connect(daemon.url) as connection:
            iterator = iter(connection.dataset(prefetch=4))
            for _ in range(10):
                next(iterator)
            with pytest.raises(ValueError, match="needs `consumed` when a tf"):
                connection.state_dict()
            state = connection.state_dict(consumed=10)
            del iterator
        dataset = penstock.dataset(daemon.url, state=state)
        assert dataset.cardinality() == TOTAL
        assert [int(y[0]) for _, y in dataset] == list(range(10, TOTAL))
        assert [int(y[0]) for _, y in dataset] == [1000 + i for i in range(TOTAL)]
        del dataset
        gc.collect()
