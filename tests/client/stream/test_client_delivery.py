"""The guarantees for a consumer of NumPy batches, over both transports."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock._state import counters
from penstock._stream import handoff, receiver, stream_handle
from penstock._transport import tcp_connection, tcp_transport
from penstock_proto import Leaf, TupleSpec
from penstock_proto.batches.inferring import infer
from penstock_proto.messages import (
    Ack,
    Begin,
    Begun,
    Chunk,
    Close,
    End,
    LaneEnded,
    Leave,
    Map,
    MissingRanks,
    Ping,
    Pong,
    SentElsewhere,
    Slab,
    Unmap,
    Welcome,
)
from penstock_proto.transport.codec import MAX_CHUNK
from tests.fakes.fake_daemon import Fail, FakeDaemon, Stall, Vanish, feed_info, numbers, slab
from tests.fakes.inside import handle_of, transport_of
from tests.simulation.clock import Clock

both = pytest.mark.parametrize("transport", ["local", "tcp"])


@pytest.fixture
def no_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the client's timers during a test, so that only events can end its waits."""
    monkeypatch.setattr(tcp_transport, "PING_AFTER", 1000.0)
    monkeypatch.setattr(tcp_transport, "LOST_AFTER", 1000.0)
    monkeypatch.setattr(receiver, "IDLE", 1000.0)
    monkeypatch.setattr(receiver, "STEP", 1000.0)
    monkeypatch.setattr(handoff, "STEP", 1000.0)
    monkeypatch.setattr(stream_handle, "STEP", 1000.0)


def first(batch: tuple[np.ndarray, np.ndarray]) -> int:
    """Return which batch of `numbers` this is, after checking all of it."""
    x, y = batch
    assert (x == y[0]).all()
    assert (y == y[0]).all()
    return int(y[0])


@both
@pytest.mark.parametrize("turn", [1, 4])
def test_every_batch_arrives_once_in_order_epoch_after_epoch(transport: str, turn: int) -> None:
    info, epoch = numbers(10, turn=turn, batches=10)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url, transport=transport) as connection:
        for e in range(3):
            assert [first(batch) for batch in connection.batches()] == [100 * e + i for i in range(10)]
        stats = connection.stats()
        assert (stats["epoch"], stats["batches"], stats["rows"]) == (2, 30, 120)
        assert stats["slabs"] == 3 * -(-10 // turn)
        assert stats["first_batch_seconds"] > 0
        daemon.wait_for(lambda: isinstance(daemon.got[-1], Ack) and daemon.got[-1].ended == 3)


@both
def test_bytes_arrive_as_they_were_sent_for_every_dtype_and_structure(transport: str) -> None:
    rng = np.random.default_rng(0)
    dtypes = (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()
    )

    def batch(rows: int) -> dict[str, object]:
        arrays = {name: (rng.random((rows, 3, 5)) * 100).astype(name) for name in dtypes}
        return {**arrays, "pair": (rng.random((rows,)), rng.integers(0, 9, (rows, 0)))}

    sample = {key: tuple(a[0] for a in v) if isinstance(v, tuple) else v[0] for key, v in batch(7).items()}  # type: ignore[index]
    info = feed_info(infer(sample), 7, turn=2)
    made = [batch(7), batch(7), batch(3)]
    with (
        FakeDaemon(info, lambda _: [slab(info, *made[:2]), slab(info, made[2])]) as daemon,
        penstock.connect(daemon.url, transport=transport) as connection,
    ):
        for place, (want, have) in enumerate(zip(made, connection.batches(), strict=True)):
            assert have.keys() == want.keys()
            for key in want:
                wants, haves = (want[key], have[key]) if isinstance(want[key], tuple) else ((want[key],), (have[key],))
                for w, h in zip(wants, haves, strict=True):  # type: ignore[call-overload]
                    np.testing.assert_array_equal(w, h)
                    assert w.dtype == h.dtype
                    assert h.ctypes.data % (h.itemsize if place == 1 else 64) == 0  # the first in a slab is aligned
                    assert h.flags.writeable


@both
def test_batches_of_varying_shapes_arrive_whole(transport: str) -> None:
    info = feed_info(TupleSpec((Leaf("float64", (None, 2)), Leaf("int32", ()))), None)
    made = [(np.random.rand(n, 2), np.array(n, np.int32)) for n in (4, 0, 1000)]
    with (
        FakeDaemon(info, lambda _: [slab(info, m) for m in reversed(made)]) as daemon,
        penstock.connect(daemon.url, transport=transport) as connection,
    ):
        for want, have in zip(reversed(made), connection.batches(), strict=True):
            np.testing.assert_array_equal(want[0], have[0])
            assert have[1].shape == ()
            assert have[1] == want[1]


def test_large_slabs_come_in_chunks_of_any_size() -> None:
    info, epoch = numbers(3, rows=64, width=20_000)
    for chunk in (MAX_CHUNK, 1 << 20, 65_536 + 1):
        with (
            FakeDaemon(info, epoch, chunk=chunk) as daemon,
            penstock.connect(daemon.url, transport="tcp") as connection,
        ):
            assert [first(batch) for batch in connection.batches()] == [0, 1, 2]


def test_a_chunk_over_4_mib_breaks_the_protocol() -> None:
    info, epoch = numbers(1, rows=64, width=20_000)
    with (
        FakeDaemon(info, epoch, chunk=MAX_CHUNK + 1) as daemon,
        penstock.connect(daemon.url, transport="tcp") as connection,
    ):
        with pytest.raises(penstock.ProtocolError, match="room for"):
            list(connection.batches())
        assert isinstance(connection.error, penstock.ProtocolError)
        daemon.wait_for(lambda: daemon.count(Close))


def test_same_host_batches_lie_in_the_shared_memory() -> None:
    info, epoch = numbers(1)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:
        x, _ = next(connection.batches())
        x[:] = 77
        assert any(x.tobytes() in os.pread(memfd, 1 << 20, 0) for memfd in daemon.memfds)


@both
def test_an_epoch_that_is_left_is_void_and_the_next_begins_at_once(transport: str) -> None:
    info, epoch = numbers(50)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url, transport=transport) as connection:
        for batch in connection.batches():
            if first(batch) == 3:
                break
        del batch
        assert first(next(connection.batches())) == 100
        daemon.wait_for(lambda: daemon.count(Leave) == 2)
        assert [m.epoch for m in daemon.got if isinstance(m, Begin)] == [0, 1]
        daemon.wait_for(lambda: daemon.in_use == 0)  # void slabs are released, with nobody iterating
        assert connection.stats()["batches"] == 5


@both
def test_the_daemon_hears_of_a_slab_that_was_handed_though_nobody_takes_another(transport: str) -> None:
    info, epoch = numbers(50)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url, transport=transport) as connection:
        batches = connection.batches()
        for count in (1, 2):
            next(batches)
            daemon.wait_for(lambda count=count: any(isinstance(m, Ack) and m.handed == count for m in daemon.got))


def test_a_dropped_iterator_leaves_its_epoch_without_another() -> None:
    info, epoch = numbers(50)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        next(batches)
        del batches
        daemon.wait_for(lambda: daemon.count(Leave) == 1)


def test_an_epoch_begins_with_the_first_next_and_not_before() -> None:
    info, epoch = numbers(2)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:
        connection.batches()
        assert first(next(connection.batches())) == 0
        assert daemon.count(Begin) == 1


@both
def test_a_newer_iterator_takes_over_and_the_older_says_so(transport: str) -> None:
    info, epoch = numbers(50)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url, transport=transport) as connection:
        older, newer = connection.batches(), connection.batches()
        assert first(next(older)) == 0
        assert first(next(newer)) == 100
        with pytest.raises(penstock.StreamClosed, match=r"epoch 0.*a newer one"):
            next(older)
        assert first(next(newer)) == 101
        assert connection.error is None


def test_a_feed_with_epochs_ends() -> None:
    info, epoch = numbers(2, epochs=1)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:
        assert len(list(connection.batches())) == 2
        with pytest.raises(penstock.EndOfStream):
            next(connection.batches())
        assert connection.error is None


@both
def test_an_error_comes_where_the_data_would_have_been_and_stays(transport: str) -> None:
    info, epoch = numbers(3)
    failed = Fail(penstock.GeneratorError("boom", feed="feed", worker=1, split="'a.h5'", remote_traceback="File x"))
    with (
        FakeDaemon(info, lambda e: [*epoch(e), failed]) as daemon,
        penstock.connect(daemon.url, transport=transport) as connection,
    ):
        batches = connection.batches()
        assert [first(next(batches)) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(penstock.GeneratorError) as caught:
            next(batches)
        assert str(caught.value) == "boom\n  in feed feed, worker 1, split 'a.h5'\n\nFile x"
        assert connection.error is caught.value
        with pytest.raises(penstock.GeneratorError) as again:
            next(connection.batches())
        assert again.value is caught.value


@both
def test_a_daemon_that_vanishes_is_noticed_at_once(transport: str, no_timers: None) -> None:
    info, epoch = numbers(3)
    with (
        FakeDaemon(info, lambda e: [*epoch(e), Stall(), Vanish()]) as daemon,
        penstock.connect(daemon.url, transport=transport, reconnect=0) as connection,
    ):
        batches = connection.batches()
        held = [next(batches) for _ in range(3)]
        assert daemon.stalled.wait(60)
        daemon.go_on()
        with pytest.raises(penstock.ConnectionLost, match="killed"):
            next(batches)
        assert isinstance(connection.error, penstock.ConnectionLost)
        assert [first(batch) for batch in held] == [0, 1, 2]
        del batches


def test_the_daemons_farewell_is_read_before_its_end_of_file() -> None:
    info, epoch = numbers(1)
    for transport in ("local", "tcp"):
        with (
            FakeDaemon(
                info, lambda e: [*epoch(e), Stall(), Fail(penstock.DaemonStopped("the daemon stops")), Vanish()]
            ) as daemon,
            penstock.connect(daemon.url, transport=transport, reconnect=0) as connection,
        ):
            batches = connection.batches()
            next(batches)
            daemon.go_on()
            with pytest.raises(penstock.DaemonStopped, match="the daemon stops"):
                next(batches)


def test_a_silent_daemon_is_pinged_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in (tcp_connection, tcp_transport):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(receiver, "IDLE", 0.01)
    info, epoch = numbers(1)
    with (
        FakeDaemon(info, lambda e: [*epoch(e), Stall()]) as daemon,
        penstock.connect(daemon.url, transport="tcp", reconnect=0) as connection,
    ):
        transport: Any = transport_of(connection)
        for pings in range(4):
            clock.now += 2 * tcp_transport.PING_AFTER
            daemon.wait_for(lambda n=pings: daemon.count(Ping) > n)
            # The next poll may miss a Pong that comes while messages are taken, so another one is sent.
            daemon.wait_for(lambda: transport.heard_at == clock.now or daemon.say(Pong()))
        assert 4 * 2 * tcp_transport.PING_AFTER > tcp_transport.LOST_AFTER, "only Pongs kept it alive"
        batches = connection.batches()
        assert first(next(batches)) == 0
        daemon.wait_for(lambda: daemon.count(Ack))
        monkeypatch.setattr(daemon, "heard", lambda *_: None)
        clock.now += tcp_transport.LOST_AFTER + 1
        with pytest.raises(penstock.ConnectionLost, match=r"was silent for 30 s"):
            next(batches)


def test_an_end_whose_counts_differ_is_an_error() -> None:
    info, epoch = numbers(2)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:
        daemon.wrong_end = True
        with pytest.raises(penstock.IncompleteEpoch):
            list(connection.batches())


@both
def test_what_the_daemon_must_not_send_fails_the_stream(transport: str) -> None:
    info, epoch = numbers(1)
    for message in (
        Slab(7, 0, 0, 0, 1, 4, 384),
        Slab(1, 0, 0, 0, 1, 4, 1 << 40),
        Slab(1, 0, 0, 0, 1, 4, 384, 99, 0),
        Slab(1, 0, 0, 0, 1, 4, 384, 1, 1),
        Slab(1, 0, 0, 0, 1, 4, 384, 1, 1 << 40),
        Slab(1, 0, 0, 1, 1, 5, 384, 1, 0),  # more rows than a batch has
        Slab(1, 1, 0, 1, 1, 4, 384, 1, 0),
        End(1, 1, 1, 4),  # of an epoch that was not asked for
        LaneEnded(1, 0, 0, 1, 0, b""),
        SentElsewhere(1, 0, 1, 1, 4),
        Begun(1, bytes(32)),
        MissingRanks((0,)),  # there are no ranks
        Chunk(5, 0),
        Welcome(b"0" * 16, info, "x"),
    ):
        if transport == "tcp" and isinstance(message, Slab) and message.nbytes == 384:
            continue  # over TCP these are correct, or incomplete
        with (
            FakeDaemon(info, lambda e: [*epoch(e), Stall()]) as daemon,
            penstock.connect(daemon.url, transport=transport) as connection,
        ):
            batches = connection.batches()
            batch = next(batches)
            assert daemon.stalled.wait(60)
            daemon.say(message)
            with pytest.raises(penstock.ProtocolError):
                next(batches)
            assert isinstance(connection.error, penstock.ProtocolError)
            assert first(batch) == 0
            assert connection.state_dict()["position"]["batches"] == 1, "its position must not change"
            assert connection.stats()["reconnects"] == 0
            del batches, batch


def test_a_memfd_without_its_descriptor_breaks_the_protocol() -> None:
    info, epoch = numbers(1)
    with FakeDaemon(info, lambda e: [*epoch(e), Stall()]) as daemon, penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        assert first(next(batches)) == 0
        assert daemon.stalled.wait(60)
        daemon.say(Map(1, 4096))
        with pytest.raises(penstock.ProtocolError, match="came without its fd"):
            next(batches)
        del batches


def test_messages_that_say_nothing_new_are_taken_without_harm() -> None:
    info, epoch = numbers(2)
    with FakeDaemon(info, lambda e: [*epoch(e), Stall()]) as daemon, penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        held = [next(batches), next(batches)]
        assert daemon.stalled.wait(60)
        daemon.say(Pong())
        daemon.say(Unmap(1))
        daemon.go_on()
        assert list(batches) == []
        assert [first(batch) for batch in held] == [0, 1]  # the memfd is unmapped with the last array over it
        del batches


def test_beyond_the_quota_slabs_are_copied_and_their_slots_are_free() -> None:
    info, epoch = numbers(20)
    with FakeDaemon(info, epoch, slots=4, quota=3) as daemon, penstock.connect(daemon.url) as connection:
        held = list(connection.batches())
        assert [first(batch) for batch in held] == list(range(20))
        stats = connection.stats()
        assert (stats["aliased"], stats["copies"]) == (3, 17)
        daemon.wait_for(lambda: daemon.in_use == 3)
        del held[10:]
        del held[0]
        daemon.wait_for(lambda: daemon.in_use == 2)  # with nobody iterating
        assert [first(batch) for batch in held] == list(range(1, 10))
        daemon.wait_for(lambda: connection.stats()["aliased"] == 2)


def test_a_slot_is_released_with_the_last_view_of_it_and_not_before() -> None:
    info, epoch = numbers(2)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        x, y = next(batches)
        view = x[1:][::2][:, 3:7].T
        del x, y, batches
        time.sleep(0.3)
        assert (view == 0).all()
        assert daemon.in_use == 1
        del view
        daemon.wait_for(lambda: daemon.in_use == 0)


def test_a_slot_that_somebody_waits_for_is_given_back_at_once(no_timers: None) -> None:
    info, epoch = numbers(40)
    with FakeDaemon(info, epoch, slots=2) as daemon, penstock.connect(daemon.url) as connection:
        assert sum(1 for _ in connection.batches()) == 40


def test_arrays_outlive_close_and_the_lease_lives_as_long_as_they() -> None:
    info, epoch = numbers(5)
    with FakeDaemon(info, epoch) as daemon:
        with penstock.connect(daemon.url) as connection:
            batches = connection.batches()
            held = [next(batches), next(batches)]
        with pytest.raises(penstock.StreamClosed, match="was closed"):
            next(batches)
        with pytest.raises(penstock.StreamClosed, match="was closed"):
            next(connection.batches())
        daemon.wait_for(lambda: daemon.count(Close) == 1)
        held.pop()
        daemon.wait_for(lambda: daemon.in_use <= 1)
        assert daemon.ended_sessions == 0
        assert first(held[0]) == 0
        held.clear()
        daemon.wait_for(lambda: daemon.ended_sessions == 1)
        assert daemon.marked == [2]
        assert connection.error is None


@both
def test_close_ends_a_wait_at_once(transport: str, no_timers: None) -> None:
    info, _ = numbers(1)
    with (
        FakeDaemon(info, lambda _: [Stall()]) as daemon,
        penstock.connect(daemon.url, transport=transport) as connection,
    ):
        threading.Timer(0.3, connection.close).start()
        with pytest.raises(penstock.StreamClosed):
            next(connection.batches())


@both
def test_a_connection_that_nobody_holds_closes(transport: str) -> None:
    info, epoch = numbers(5)
    with FakeDaemon(info, epoch) as daemon:
        batches = penstock.connect(daemon.url, transport=transport).batches()
        assert first(next(batches)) == 0
        time.sleep(0.2)
        assert first(next(batches)) == 1  # the iterator holds it
        del batches
        daemon.wait_for(lambda: daemon.ended_sessions == 1)


def test_a_daemon_that_reads_nothing_does_not_block_the_consumer() -> None:
    info, epoch = numbers(4)
    with FakeDaemon(info, lambda e: [*epoch(e), Stall()]) as daemon:
        connection = penstock.connect(daemon.url)
        batches = connection.batches()
        next(batches)
        assert daemon.stalled.wait(60)
        frozen, go, thawed = threading.Event(), threading.Event(), threading.Event()
        daemon.do(lambda: (frozen.set(), go.wait(100), thawed.set()))  # type: ignore[func-returns-value, arg-type, return-value]
        assert frozen.wait(60)
        for _ in range(3):
            next(batches)
        for _ in range(600):  # more messages than the connection's buffer takes
            handle_of(connection).handoff.begin()
        del batches
        connection.close()
        assert not thawed.is_set()
        go.set()
        daemon.wait_for(lambda: daemon.ended_sessions == 1)


@both
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_disturbs_nothing_and_says_what_to_do(transport: str) -> None:
    info, epoch = numbers(10)
    with FakeDaemon(info, epoch) as daemon:
        connection = penstock.connect(daemon.url, transport=transport)
        batches = connection.batches()
        kept = next(batches)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(write)
            status = 1
            try:
                try:
                    next(batches)
                except penstock.StreamClosed as error:
                    status = 0 if "connect again" in str(error) else 2
                assert first(kept) == 0
                del kept, batches
                connection.close()
                del connection
                gc.collect()
                os.read(read, 1)  # until the parent lets it end
            finally:
                os._exit(status)
        assert [first(batch) for batch in batches] == list(range(1, 10))
        del kept, batches
        connection.close()
        daemon.wait_for(lambda: daemon.ended_sessions == 1)  # the child still lives, but has closed its copy
        os.close(write)
        os.close(read)
        assert os.waitpid(child, 0)[1] == 0
        assert daemon.count(Close) == 1


@both
@pytest.mark.parametrize("how", ["exit", "exception", "SIGKILL", "SIGINT"])
def test_a_trainer_that_ends_in_any_way_ends_its_session(transport: str, how: str, tmp_path: Path) -> None:
    code = """
import os, signal, sys, threading, penstock
penstock._stream.receiver._CLOSE = 1000  # so that an end that waits for anybody shows
connection = penstock.connect(sys.argv[1], transport=sys.argv[2])
batches = connection.batches()
kept = [next(batches) for _ in range(2)]
if sys.argv[3] == "exception":
    raise RuntimeError("the step failed")
if sys.argv[3].startswith("SIG"):
    threading.Timer(0.3, lambda: os.kill(os.getpid(), getattr(signal, sys.argv[3]))).start()
    for batch in batches:
        pass
"""
    info, epoch = numbers(3)
    with FakeDaemon(info, lambda e: [*epoch(e), Stall()]) as daemon:
        done = subprocess.run(
            [sys.executable, "-c", code, daemon.url, transport, how], capture_output=True, text=True, timeout=60
        )
        want = {"exit": 0, "exception": 1, "SIGKILL": -signal.SIGKILL, "SIGINT": -signal.SIGINT}[how]
        assert done.returncode == want, done.stderr
        if how == "SIGINT":
            assert "KeyboardInterrupt" in done.stderr
        if transport == "local" or how != "SIGKILL":
            daemon.wait_for(lambda: daemon.ended_sessions == 1)


def test_a_long_wait_is_logged_once_with_what_to_look_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(counters, "SLOW", 0.3)
    info, epoch = numbers(1)
    with FakeDaemon(info, lambda e: [Stall(), *epoch(e)]) as daemon, penstock.connect(daemon.url) as connection:
        began = time.monotonic()
        threading.Timer(1, daemon.go_on).start()
        with caplog.at_level(logging.WARNING, "penstock"):
            next(connection.batches())
        (record,) = caplog.records
        assert re.match(f"{daemon.url}: no data for [0-9]+ s, since ", record.getMessage())
        assert f"penstock status {daemon.url}" in record.getMessage()
        assert 0.9 < connection.stats()["wait_seconds"] <= time.monotonic() - began


def test_only_an_unbroken_wait_is_one_for_which_the_generator_can_be_blamed() -> None:
    counts, now = counters.Counters(0.0), 100.0

    def wait(seconds: float) -> float | None:
        nonlocal now
        for _ in range(round(seconds * 10)):
            counts.waiting(now)
            counts.count_wait(now, now + 0.1)
            now += 0.1
        return counts.slow(now)

    assert wait(9) is None
    counts.waiting(now)
    now += 300  # it was stopped during a wait
    counts.count_wait(now - 300, now)
    assert counts.slow(now) is None
    assert wait(9) is None
    now += 300  # and between two
    assert wait(9) is None
    assert wait(1.5) == pytest.approx(10.5)
    assert wait(20) is None, "once is enough"


STOPPED = """
import sys
import penstock
from penstock._state import counters as _counters
from penstock._stream import handoff as _handoff, receiver as _receiver, stream_handle as _stream_handle
from penstock._transport import tcp_connection as _tcp_connection, tcp_transport as _tcp_transport
_counters.SLOW, _receiver.STOOD, _tcp_transport.LOST_AFTER, _tcp_transport.PING_AFTER = 8.0, 4.0, 8.0, 0.3
for batch in penstock.connect(sys.argv[1], transport=sys.argv[2]).batches():
    print("got", flush=True)
"""


@both
def test_a_trainer_that_was_stopped_blames_neither_the_generator_nor_the_daemon(transport: str) -> None:
    info, epoch = numbers(2)
    with FakeDaemon(info, lambda e: [epoch(e)[0], Stall(), epoch(e)[1]]) as daemon, contextlib.ExitStack() as stack:
        trainer = subprocess.Popen(
            [sys.executable, "-c", STOPPED, daemon.url, transport],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.enter_context(trainer)
        stack.callback(trainer.kill)
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "got\n"
        assert daemon.stalled.wait(60)
        time.sleep(0.3)  # it waits, but not long enough to complain, even on a busy machine
        trainer.send_signal(signal.SIGSTOP)
        time.sleep(9)
        trainer.send_signal(signal.SIGCONT)
        if transport == "tcp":  # it reconnects
            daemon.wait_for(lambda: daemon.count(Begin) == 2)
        else:
            time.sleep(0.5)
        daemon.go_on()
        out, err = trainer.communicate(timeout=60)
        assert out == "got\n"
        said = err.splitlines()
        if transport == "tcp":
            stood = r".*: this process stood still for \d+ s, so the daemon ended its session\. Trying"
            assert re.match(stood, said.pop(0))
            assert "connected again after" in said.pop(0)
        assert not said
