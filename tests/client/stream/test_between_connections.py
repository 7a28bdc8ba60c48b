"""Whatever a client does between the loss of a connection and the reply of the next one, its stream stays the same.

A test holds the receiver thread at one point of a reconnection, acts, and lets it go on.
"""

from __future__ import annotations

import itertools
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

import penstock
from penstock._state import state_dict
from penstock._state.mailbox import Mailbox
from penstock._stream import receiver, reconnecting
from penstock._stream.connecting import Connector, Link
from penstock._stream.handoff import HandOff
from penstock_proto.batches.position import Position
from penstock_proto.messages import Close, ErrorReport, Failed, Open
from tests.client.stream.test_client_resume import LANES, TOTAL, both, seen
from tests.conftest import Serve
from tests.fakes.fake_daemon import Fail, FakeDaemon, Stall, Vanish, dealt
from tests.fakes.inside import handle_of, receiver_of, state_of, transport_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnecting, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(reconnecting, "LAST_PAUSE", 0.1)


class Held:
    """Holds the first thread that comes to a point."""

    def __init__(self) -> None:
        self.there, self._go_on = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.there.set()
        assert self._go_on.wait(60)

    def __enter__(self) -> None:
        assert self.there.wait(60)

    def __exit__(self, *_: object) -> None:
        self._go_on.set()


def _held(monkeypatch: pytest.MonkeyPatch, point: str) -> Held:
    """Hold the receiver thread before an attempt to connect, or before it asks at the position that it has computed, or
    before it passes on the reply."""
    held = Held()
    if point == "before the attempt":
        real = Connector.connect

        def connect(self: Connector, *args: Any, **more: Any) -> Link:
            if len(args) > 3:  # another connection after a loss
                held.wait()
            return real(self, *args, **more)

        monkeypatch.setattr(Connector, "connect", connect)
    elif point == "before the request":
        place = HandOff.restart_position

        def computed(self: HandOff) -> Position:
            position = place(self)
            held.wait()
            return position

        monkeypatch.setattr(HandOff, "restart_position", computed)
    else:
        go_on = HandOff.connect

        def replied(self: HandOff, link: Link, position: Position, url: str, *, lost: bool) -> None:
            held.wait()
            go_on(self, link, position, url, lost=lost)

        monkeypatch.setattr(HandOff, "connect", replied)
    return held


class Losing:
    """The epochs of a feed. The connection breaks once, after 5 slabs of an epoch."""

    def __init__(self, epoch: Callable[[int], list[Any]]) -> None:
        self.epoch, self.lost = epoch, False

    def __call__(self, e: int) -> list[Any]:
        plan = self.epoch(e)
        if not self.lost and threading.current_thread().name == "fake-daemon":
            self.lost = True
            return [*plan[:5], Stall(), Vanish()]
        return plan


def _whole(e: int) -> list[int]:
    return [1000 * e + i for i in range(TOTAL)]


class Acts:
    """The things that a client may do at such a point. Each returns a function that reads on and checks the stream."""

    def __init__(self, connection: penstock.Connection, batches: Iterator[Any], daemon: FakeDaemon) -> None:
        self.connection, self.batches, self.daemon = connection, batches, daemon

    def nothing(self) -> Callable[[], None]:
        def then() -> None:
            assert seen(self.batches) == _whole(0)[3:]
            assert seen(self.connection.batches()) == _whole(1)

        return then

    def leave(self) -> Callable[[], None]:
        self.batches.close()  # type: ignore[attr-defined]

        def then() -> None:
            assert seen(self.connection.batches()) == _whole(1)
            assert self.connection.error is None

        return then

    def begin(self) -> Callable[[], None]:
        return self._begins(1)

    def leave_and_begin(self) -> Callable[[], None]:
        self.batches.close()  # type: ignore[attr-defined]
        return self._begins(1)

    def begin_twice(self) -> Callable[[], None]:
        handle_of(self.connection).begin()
        return self._begins(2)

    def _begins(self, epoch: int) -> Callable[[], None]:
        results: list[Any] = []
        reader = threading.Thread(target=lambda: results.append(seen(self.connection.batches())))
        reader.start()
        self.daemon.wait_for(lambda: state_of(self.connection).epoch == epoch)

        def then() -> None:
            reader.join(60)
            assert results == [_whole(epoch)]

        return then

    def state(self) -> Callable[[], None]:
        state = self.connection.state_dict()

        def then() -> None:
            assert seen(self.batches) == _whole(0)[3:]
            with penstock.connect(self.daemon.url, state=state) as other:
                assert seen(other.batches()) == _whole(0)[3:]

        return then

    def close(self) -> Callable[[], None]:
        closing = threading.Thread(target=self.connection.close)
        closing.start()
        self.daemon.wait_for(lambda: handle_of(self.connection).handoff.mailbox.closing)

        def then() -> None:
            closing.join(60)
            with pytest.raises(penstock.StreamClosed):
                next(self.batches)  # which lets go of the last slab
            receiver_of(self.connection).join(60)
            assert not receiver_of(self.connection).is_alive()

        return then


@both
@pytest.mark.parametrize("point", ["before the attempt", "before the request", "before the reply"])
@pytest.mark.parametrize(
    "act", [Acts.nothing, Acts.leave, Acts.begin, Acts.leave_and_begin, Acts.begin_twice, Acts.state, Acts.close]
)
def test_whatever_a_client_does_during_a_reconnection_its_stream_stays_the_same(
    transport: str, point: str, act: Callable[[Acts], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = _held(monkeypatch, point)
    info, epoch = dealt(LANES)
    with (
        FakeDaemon(info, Losing(epoch), digest=b"d" * 32) as daemon,
        penstock.connect(daemon.url, transport=transport) as connection,
    ):
        batches = connection.batches()
        assert seen(itertools.islice(batches, 3)) == [0, 1, 2]
        daemon.wait_for(lambda: state_of(connection).waiting)  # slabs that will not be handed over
        daemon.go_on()
        with held:
            then = act(Acts(connection, batches, daemon))
        then()
        del then, batches
        assert connection.stats()["reconnects"] == 1 or act is Acts.close


FEED = """
    import numpy as np
    from penstock_server import Feed

    def generate(split):
        for i in range(20):
            yield np.full(4, 20 * split + i, "int64")

    feed = Feed(generate, splits=range(4), batch_size=5, lanes=2, turn=1)
"""


def _rows(batches: Any) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch]


def _break(connection: penstock.Connection) -> None:
    """Break the connection, as the death of its daemon does."""
    transport: Any = transport_of(connection)
    broken = transport._socket if transport.name == "local" else transport._dealer._socket
    broken.shutdown(socket.SHUT_RDWR)


class Attempt:
    """Holds a receiver thread in its attempt to connect, until another stream has opened or the attempt is ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()
        real = Connector.connect

        def connect(
            connector: Connector, mailbox: Mailbox, start: Any, timeout: float, *more: Any, **options: Any
        ) -> Link:
            if not more:
                link = real(connector, mailbox, start, timeout, **options)
                if self.begun.is_set():
                    self.opened.set()
                return link

            def late(info: Any) -> Any:
                self.begun.set()
                deadline = time.monotonic() + 3
                while not self.opened.wait(0.01) and time.monotonic() < deadline:
                    more[0]()
                return start(info)

            return real(connector, mailbox, late, timeout, *more)

        monkeypatch.setattr(Connector, "connect", connect)


@both
def test_a_state_can_be_loaded_while_the_lost_connection_is_replaced(
    serve: Serve, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = serve(FEED)
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        start = _rows(itertools.islice(batches, 5))
        state = connection.state_dict()
        rest = _rows(batches)
    assert sorted(start + rest) == list(range(80))
    attempt = Attempt(monkeypatch)
    with penstock.connect(daemon.url, transport=transport) as connection:
        _break(connection)
        assert attempt.begun.wait(60)
        connection.load_state_dict(state)
        assert _rows(connection.batches()) == rest
        assert sorted(_rows(connection.batches())) == list(range(80))
        assert connection.stats()["reconnects"] == 0


@both
def test_a_connection_that_is_replaced_connects_again_if_the_state_cannot_be_loaded(
    serve: Serve, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = serve(FEED + "    other = Feed(generate, splits=range(3), batch_size=5)\n", "feed", "other")
    with penstock.connect(daemon.urls["other"]) as other:
        state = other.state_dict()
    attempt = Attempt(monkeypatch)
    with penstock.connect(daemon.urls["feed"], transport=transport) as connection:
        _break(connection)
        assert attempt.begun.wait(60)
        with pytest.raises(penstock.StateMismatch):
            connection.load_state_dict(state)
        attempt.opened.set()
        assert sorted(_rows(connection.batches())) == list(range(80))


@both
def test_a_state_that_the_daemon_refuses_leaves_the_connection_as_it_was(serve: Serve, transport: str) -> None:
    daemon = serve(FEED)
    with penstock.connect(daemon.url, transport=transport) as connection:
        next(connection.batches())
        position, consumed = state_dict.load(connection.state_dict())
    elsewhere = msgspec.structs.replace(position, digest=b"another list of splits".ljust(32))
    state = state_dict.dump(elsewhere, consumed)
    with penstock.connect(daemon.url, transport=transport) as connection:
        with pytest.raises(penstock.PenstockError, match="list of splits of epoch 0 has changed"):
            connection.load_state_dict(state)
        assert sorted(_rows(connection.batches())) == list(range(80))


@both
def test_a_session_that_an_older_attempt_displaces_is_replaced(serve: Serve, transport: str) -> None:
    daemon = serve(FEED)
    with penstock.connect(daemon.url, transport=transport) as connection:
        connector: Any = handle_of(connection).receiver._connector
        late = connector.connect(Mailbox(), lambda info: None, 10.0)  # an Open that was long on its way
        assert sorted(_rows(connection.batches())) == list(range(80))
        late.transport.close()
        assert sorted(_rows(connection.batches())) == list(range(80))


FAILING = """
    import numpy as np
    from penstock_server import Feed

    def generate(split, epoch):
        for i in range(20):
            if epoch == 0 and (split, i) == (1, 12):
                raise OSError("the disk is away")
            yield np.full(4, 1000 * epoch + 20 * split + i, "int64")

    feed = Feed(generate, splits=range(2), batch_size=4, lanes=1, turn=1, on_error="raise")
"""
"""Epoch 0 fails after 8 batches."""


@pytest.mark.parametrize("transport", ["local", "tcp", "process"])
def test_an_error_of_a_batch_made_ahead_does_not_end_a_stream_that_leaves_the_epoch_before_it(
    serve: Serve, transport: str, tmp_path: Any
) -> None:
    if transport == "process":
        (tmp_path / "failing.py").write_text(textwrap.dedent(FAILING))
        connection = penstock.connect(f"{tmp_path}/failing.py:feed", workers=0)
    else:
        connection = penstock.connect(serve(FAILING).url, transport=transport)
    with connection:
        state = state_of(connection)
        batches = connection.batches()
        read = _rows(itertools.islice(batches, 4))
        deadline = time.monotonic() + 60
        while state.reads(0) and transport != "process":  # until the error has come
            read += _rows([next(batches)])
            time.sleep(0.05)
            assert len(read) <= 32
            assert time.monotonic() < deadline
        assert connection.error is None
        assert read == list(range(len(read)))
        left = connection.state_dict()
        del batches
        assert _rows(connection.batches()) == list(range(1000, 1040))
        assert connection.error is None
        assert _rows(connection.batches()) == list(range(2000, 2040))
        with penstock.connect(handle_of(connection).handoff.url, state=left) as other:  # it begins before the error
            assert next(iter(other.batches()))[0, 0] == len(read)


@both
def test_batches_before_an_error_come_even_if_the_connection_is_lost_between_them(transport: str) -> None:
    info, epoch = dealt(LANES)
    error = penstock.GeneratorError("the disk is away")

    def plan(e: int) -> list[Any]:
        made = epoch(e)
        if threading.current_thread().name != "fake-daemon":
            return made
        return [*made[:5], Fail(error)] if not daemon.positions else [*made[:9], Fail(error)]

    with FakeDaemon(info, plan) as daemon, penstock.connect(daemon.url, transport=transport) as connection:
        batches = connection.batches()
        start = seen(itertools.islice(batches, 2))
        daemon.wait_for(lambda: not state_of(connection).reads(0))  # the error has come
        _break(connection)
        daemon.wait_for(lambda: daemon.positions)
        with pytest.raises(penstock.GeneratorError, match="the disk is away"):
            for x, _ in batches:
                start.append(int(x[0, 0]))
        assert start == list(range(len(start)))
        assert len(start) >= 7
        for _ in range(2):
            with pytest.raises(penstock.GeneratorError, match="the disk is away"):
                next(connection.batches())
        del batches, x


@both
@pytest.mark.parametrize("point", ["before the attempt", "before the request", "before the reply"])
def test_a_member_of_a_group_that_closes_during_a_reconnection_says_what_it_was_handed(
    transport: str, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = _held(monkeypatch, point)
    info, epoch = dealt(LANES)
    with FakeDaemon(info, Losing(epoch)) as daemon:
        connection = penstock.connect(daemon.url, transport=transport, group="g")
        batches = connection.batches()
        seen(itertools.islice(batches, 3))
        daemon.go_on()
        with held:
            closing = threading.Thread(target=connection.close)
            closing.start()
            daemon.wait_for(lambda: handle_of(connection).handoff.mailbox.closing)
        closing.join(60)
        daemon.wait_for(lambda: daemon.count(Close) == 1)
        opened = [message for message in daemon.got if isinstance(message, Open)]
        assert [(message.again, message.handed) for message in opened] == [(False, 0), (True, 3)]
        assert opened[1].last
        del batches


def test_a_member_of_a_group_that_closes_while_no_daemon_runs_gives_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "FAREWELL", 0.3)
    info, epoch = dealt(LANES)
    with FakeDaemon(info, lambda e: [*epoch(e)[:5], Stall()]) as daemon:
        connection = penstock.connect(daemon.url, group="g")
        next(connection.batches())
    connection.close()
    assert not receiver_of(connection).is_alive()


def test_arrays_stay_as_they_are_if_the_daemon_lives_and_the_connection_cannot_be_replaced() -> None:
    info, epoch = dealt(LANES)
    with FakeDaemon(info, lambda e: [*epoch(e)[:5], Stall()]) as daemon:
        with penstock.connect(daemon.url, transport="local") as connection:
            held = list(itertools.islice(connection.batches(), 3))
            daemon.info = msgspec.structs.replace(info, seed=1)  # so another session is refused
            daemon.say(Failed(ErrorReport.of(penstock.ConnectionLost("the session was ended"))))
            with pytest.raises(penstock.StateMismatch):
                list(connection.batches())
        assert seen(held) == [0, 1, 2]
        assert daemon.ended_sessions == 0
        held.clear()
        daemon.wait_for(lambda: daemon.ended_sessions == 1)


@both
def test_without_reconnection_an_error_of_an_epoch_that_was_left_is_raised_by_the_next(transport: str) -> None:
    info, epoch = dealt(LANES)
    with (
        FakeDaemon(info, lambda e: [*epoch(e)[:3], Fail(penstock.GeneratorError("the disk is away"))]) as daemon,
        penstock.connect(daemon.url, transport=transport, reconnect=0) as connection,
    ):
        held = list(itertools.islice(connection.batches(), 1))
        daemon.wait_for(lambda: not state_of(connection).reads(0))  # the error has come
        for _ in range(2):
            with pytest.raises(penstock.GeneratorError, match="the disk is away"):
                next(connection.batches())
        assert isinstance(connection.error, penstock.GeneratorError)
        assert seen(held) == [0]  # the connection stays open while arrays lie over its slots
        assert daemon.ended_sessions == 0
        held.clear()
