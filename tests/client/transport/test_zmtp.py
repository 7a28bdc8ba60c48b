"""The client's side of ZeroMQ: against libzmq, and against peers that do what libzmq never would."""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_proto import ProtocolError
from penstock_proto.transport import zmtp_dealer as _zmtp

GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL".ljust(64, b"\0")
READY = b"\4\x1c\5READY\x0bSocket-Type\0\0\0\6ROUTER"
SIZES = [0, 1, 255, 256, 16 * 1024, 1 << 20]


@contextmanager
def router(**options: int) -> Iterator[tuple[zmq.Socket[bytes], int]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as made:
        made.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            made.setsockopt(getattr(zmq, name), value)
        yield made, made.bind_to_random_port("tcp://127.0.0.1")


def connected(port: int, host: str = "127.0.0.1", timeout: float = 10) -> _zmtp.Dealer:
    return _zmtp.connected(host, port, timeout, lambda: None)


@contextmanager
def peer(says: bytes) -> Iterator[int]:
    """Yield the port of a peer that accepts one connection, sends `says`, and listens until the connection ends."""

    def serve() -> None:
        with suppress(OSError):
            connection, _ = server.accept()
            with connection:
                connection.sendall(says)
                while connection.recv(4096):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def frame(dealer: _zmtp.Dealer) -> tuple[bytes, bool]:
    """Return the next frame, and whether the message has another."""
    while (begun := dealer.begin()) is None:
        assert dealer.wait(60)
    nbytes, more = begun
    data = bytearray(nbytes)
    while dealer.left:
        if not dealer.read_into(memoryview(data)[nbytes - dealer.left :]):
            assert dealer.wait(60)
    return bytes(data), more


def test_frames_of_all_sizes_go_both_ways() -> None:
    with router() as (there, port):
        dealer = connected(port)
        for size in SIZES:
            sent = bytes(i % 251 for i in range(size))
            while not dealer.send(sent):
                dealer.wait(60)
            while dealer.unsent:
                dealer.wait(60)
                dealer.flush()
            name, got = there.recv_multipart()
            assert got == sent
            there.send_multipart([name, sent, b"", sent])
            assert [frame(dealer) for _ in range(3)] == [(sent, True), (b"", True), (sent, False)]
        dealer.close(1)


def test_frames_that_come_byte_by_byte_are_the_same() -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    dealer = _zmtp.Dealer(near)
    data = bytes(range(256)) * 2
    stream = b"\1\3abc" + b"\0\0" + b"\2" + len(data).to_bytes(8, "big") + data + b"\4\x08\4PING\0\x0ax" + b"\0\1z"

    def dribble() -> None:
        for i in range(len(stream)):
            far.sendall(stream[i : i + 1])

    thread = threading.Thread(target=dribble)
    thread.start()
    assert [frame(dealer) for _ in range(4)] == [(b"abc", True), (b"", False), (data, False), (b"z", False)]
    thread.join()
    dealer.close(0)
    far.close()


def test_a_command_may_come_in_a_long_frame_in_the_handshake_too() -> None:
    ready = b"\6" + (0x1C).to_bytes(8, "big") + READY[2:]
    long_command = b"\6" + (3000).to_bytes(8, "big") + b"\5OTHER".ljust(3000, b"x")
    with peer(GREETING + ready + long_command + b"\0\2hi") as port:
        dealer = connected(port)
        assert frame(dealer) == (b"hi", False)
        dealer.close(0)


def test_a_large_frame_goes_straight_to_its_place_and_what_follows_is_kept() -> None:
    with router() as (there, port):
        dealer = connected(port)
        dealer.send(b"hello")
        name, _ = there.recv_multipart()
        for number in range(20):
            there.send_multipart([name, b"head", bytes([number]) * (1 << 20)])
        for number in range(20):
            assert frame(dealer) == (b"head", True)
            assert frame(dealer) == (bytes([number]) * (1 << 20), False)
        dealer.close(1)


def test_a_poll_waits_for_as_many_bytes_as_it_was_told_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            near.setblocking(False)
            dealer = _zmtp.Dealer(near)
            far.sendall(b"\2" + (100_000).to_bytes(8, "big") + bytes(1000))
            assert dealer.wait(60)
            data = bytearray(100_000)
            assert dealer.begin() == (100_000, False)
            while dealer.left > 99_000:
                if not dealer.read_into(memoryview(data)):
                    assert dealer.wait(60)
            dealer.wake_at(dealer.left)
            far.sendall(bytes(98_999))
            assert not dealer.wait(0.3)
            dealer.wake_at(1)
            assert dealer.wait(60)
            dealer.wake_at(dealer.left)
            far.sendall(b"\1")
            assert dealer.wait(60)
            assert dealer.read_into(memoryview(data)) == 99_000
            dealer.wake_at(1 << 40)  # the last bytes come, although more are waited for
            far.sendall(b"\0\1z")
            far.shutdown(socket.SHUT_WR)
            assert dealer.wait(60)
            assert frame(dealer) == (b"z", False)


def test_the_heartbeats_of_the_peer_are_answered() -> None:
    with router(HEARTBEAT_IVL=50, HEARTBEAT_TIMEOUT=1500) as (there, port):
        dealer = connected(port)
        dealer.send(b"hello")
        name, _ = there.recv_multipart()
        until = time.monotonic() + 2
        while time.monotonic() < until:
            dealer.wait(0.05)
            assert dealer.begin() is None
        there.send_multipart([name, b"still there"])
        assert frame(dealer) == (b"still there", False)
        dealer.close(1)


def test_who_answers_no_heartbeat_is_let_go() -> None:
    """Shows that the test before this one can fail."""
    with router(HEARTBEAT_IVL=50, HEARTBEAT_TIMEOUT=400) as (_, port):
        dealer = connected(port)
        target = memoryview(bytearray(4096))
        with pytest.raises(OSError, match="closed"):
            while True:
                assert dealer.wait(60)
                dealer.left = 4096
                dealer.read_into(target)  # and does not look for commands
        dealer.close(0)


def test_what_was_said_last_arrives_though_much_was_not_read() -> None:
    for _ in range(5):
        with router() as (there, port):
            dealer = connected(port)
            dealer.send(b"hello")
            name, _ = there.recv_multipart()
            for _ in range(30):
                there.send_multipart([name, bytes(1 << 20)])
            assert dealer.wait(60)
            dealer.send(b"bye")
            dealer.close(5)
            assert there.poll(10_000)
            assert there.recv_multipart() == [name, b"bye"]


def test_what_finds_no_room_waits_and_is_sent_later() -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    dealer = _zmtp.Dealer(near)
    sent = 0
    while dealer.send(b"x" * 1000):
        sent += 1
    assert dealer.unsent
    far.settimeout(10)
    expected, got = (b"\2" + (1000).to_bytes(8, "big") + b"x" * 1000) * sent, b""
    while len(got) < len(expected):
        got += far.recv(1 << 16)
        dealer.flush()
    assert got == expected
    dealer.close(0)
    far.close()


def test_nobody_there_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        connected(port)


def test_an_attempt_in_vain_leaves_nothing_to_the_garbage_collector() -> None:
    class Watch:
        def __call__(self) -> None: ...

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        watch = Watch()
        watcher = weakref.ref(watch)
        gc.collect()
        gc.disable()
        try:
            with suppress(ConnectionRefusedError):
                _zmtp.connected("127.0.0.1", closed.getsockname()[1], 10, watch)
            del watch
            assert watcher() is None
        finally:
            gc.enable()


def test_of_several_addresses_the_one_that_answers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with router() as (there, port), socket.create_server(("127.0.0.1", 0)) as silent:
        real = socket.getaddrinfo

        def addresses(host: str, port: int, **kinds: int) -> object:
            return [*real("127.0.0.1", silent.getsockname()[1], **kinds), *real("127.0.0.1", port, **kinds)]

        monkeypatch.setattr(socket, "getaddrinfo", addresses)
        dealer = connected(port, timeout=4)  # half of it for the one that is silent
        dealer.send(b"hello")
        assert there.recv_multipart()[1] == b"hello"
        dealer.close(1)


def test_who_accepts_and_says_nothing_is_silent_and_the_wait_can_be_broken_off() -> None:
    class Enough(Exception):
        pass

    def watch() -> None:
        raise Enough

    with peer(b"") as port:
        with pytest.raises(_zmtp.Silent):
            connected(port, timeout=0.2)
    with peer(GREETING) as port:
        with pytest.raises(Enough):
            _zmtp.connected("127.0.0.1", port, 10, watch)


@pytest.mark.parametrize(
    ("says", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(64), "which is not ZeroMQ"),
        (GREETING.replace(b"\x7f\3", b"\x7f\1"), "which is not ZeroMQ"),
        (GREETING.replace(b"NULL\0\0", b"GSSAPI"), "security mechanism 'GSSAPI'"),
        (GREETING + b"\4\x0a\5ERROR\3no!", "refuses the connection: no!"),
        (GREETING + b"\0\x05hello", "a message where ZeroMQ's READY belongs"),
    ],
)
def test_a_peer_that_is_no_zeromq_peer_is_refused(says: bytes, error: str) -> None:
    with peer(says) as port, pytest.raises(ProtocolError, match=error):
        connected(port)


@pytest.mark.parametrize("stream", [b"\x08\1x", b"\5\1x", b"\7" + bytes(7) + b"\1x", b"\xff" * 16])
def test_what_is_no_frame_is_refused(stream: bytes) -> None:
    with peer(GREETING + READY + stream) as port:
        dealer = connected(port)
        with pytest.raises(ProtocolError, match="flags"):
            frame(dealer)
        dealer.close(0)


def test_a_peer_that_goes_away_is_an_error_behind_what_it_said() -> None:
    with peer(GREETING + READY + b"\0\2hi") as port:
        dealer = connected(port)
        assert frame(dealer) == (b"hi", False)
        dealer._socket.shutdown(socket.SHUT_WR)  # then the peer closes
        with pytest.raises(ConnectionResetError, match="closed"):
            frame(dealer)
        dealer.close(0)


def test_forget_leaves_the_connection_to_the_parent() -> None:
    with router() as (there, port):
        dealer = connected(port)
        other = _zmtp.Dealer(dealer._socket.dup())
        other.forget()
        dealer.send(b"still here")
        assert there.recv_multipart()[1] == b"still here"
        dealer.close(1)


def frames_of(stream: bytes, cut: int) -> list[bytes]:
    """Return the frames in a stream that comes in two parts."""
    near, far = socket.socketpair()
    near.setblocking(False)
    dealer, found = _zmtp.Dealer(near), []
    try:
        for part in (stream[:cut], stream[cut:]):
            far.sendall(part)
            while dealer.left or dealer.begin() is not None:
                if dealer.left > len(stream):
                    raise ProtocolError("more than is there")
                data = memoryview(bytearray(dealer.left))
                while dealer.left and dealer.read_into(data[len(data) - dealer.left :]):
                    pass
                found.append(bytes(data[: len(data) - dealer.left]))
                if dealer.left:
                    break
    finally:
        dealer.forget()
        far.close()
    return found


@pytest.mark.fuzz
@settings(max_examples=50_000, deadline=None)
@given(st.lists(st.binary(max_size=600), max_size=5), st.integers(0, 3000), st.binary(max_size=40))
def test_fuzz_frames_and_arbitrary_bytes_behind_them(frames: list[bytes], cut: int, junk: bytes) -> None:
    stream = b"".join(b"\2" + len(data).to_bytes(8, "big") + data for data in frames)
    assert b"".join(frames_of(stream, cut)) == b"".join(frames)
    with suppress(ProtocolError):
        frames_of(stream + junk, cut)
