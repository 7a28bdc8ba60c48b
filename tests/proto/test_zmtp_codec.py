"""ZMTP as bytes: what both ends share, and how the daemon handles arbitrary bytes."""

from __future__ import annotations

import contextlib
import itertools
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_proto import ProtocolError
from penstock_proto.transport import zmtp
from penstock_proto.transport.codec import MAX_MESSAGE
from penstock_server.net.incoming import MAX_FRAMES, READY, Incoming
from penstock_server.net.outgoing import Outgoing

SHAKEN = zmtp.GREETING + zmtp.ready(b"DEALER")


def frame(data: bytes, more: bool = False) -> bytes:
    return zmtp.head_of(len(data), more) + data


def events(incoming: Incoming, *parts: bytes) -> list[object]:
    """Return the events of bytes that are received in these parts."""
    found: list[object] = []
    for part in parts:
        incoming.feed(memoryview(part))
        while (event := incoming.next()) is not None:
            found.append(event)
    return found


@pytest.mark.parametrize("size", [0, 1, 255, 256, 1 << 20, 1 << 40])
@pytest.mark.parametrize("more", [False, True])
def test_heads_are_read_as_they_were_written(size: int, more: bool) -> None:
    data = zmtp.head_of(size, more)
    assert zmtp.head(data + b"body") == zmtp.Head(len(data), size, more, False)
    assert all(zmtp.head(data[:cut]) is None for cut in range(len(data)))


@pytest.mark.parametrize("size", [0, 200, 240, 249, 250, 251, 5000])
def test_commands_of_all_lengths_are_read_as_they_were_written(size: int) -> None:
    data = zmtp.command(b"NAME", b"x" * size)
    head = zmtp.head(data)
    assert head is not None
    assert head.command
    assert len(data) == head.nbytes + head.size
    assert zmtp.parse_command(data[head.nbytes :]) == (b"NAME", b"x" * size)


def test_the_type_of_socket_is_found_among_other_properties_and_letters_of_either_case() -> None:
    other = b"\x03Foo\0\0\0\1x"
    for name in (b"Socket-Type", b"SOCKET-TYPE", b"socket-type"):
        assert zmtp.socket_type(other + b"\x0b" + name + b"\0\0\0\6DEALER" + other) == b"DEALER"
    assert zmtp.socket_type(other) == zmtp.socket_type(b"") == b""


@pytest.mark.parametrize("cut", range(1, 22))
def test_properties_that_are_cut_short_are_refused(cut: int) -> None:
    whole = b"\x0bSocket-Type\0\0\0\6DEALER"
    with pytest.raises(ProtocolError, match="cut short"):
        zmtp.socket_type(whole[:cut])


def test_a_pong_repeats_no_more_than_the_context_may_have() -> None:
    ping = zmtp.parse_ping(b"\0\x19" + b"x" * 100)
    assert ping.patience == 2.5
    assert ping.pong == zmtp.command(b"PONG", b"x" * 16)


def test_a_message_may_have_a_few_frames_and_so_many_bytes_in_all() -> None:
    for frames in ([b""] * MAX_FRAMES, [b"x" * (MAX_MESSAGE // 2)] * 2, [b"x" * MAX_MESSAGE]):
        stream = b"".join(frame(data, True) for data in frames[:-1]) + frame(frames[-1])
        expected = frames[0] if len(frames) == 1 else b""
        assert events(Incoming(), SHAKEN + stream + frame(b"next")) == [READY, expected, b"next"]
    for stream in (
        frame(b"", True) * (MAX_FRAMES + 1),
        frame(b"", True) * MAX_FRAMES + b"\0\0",
        zmtp.head_of(MAX_MESSAGE + 1),
        frame(b"x" * MAX_MESSAGE, True) + zmtp.head_of(1),
        b"\3" + b"\xff" * 8,
    ):
        with pytest.raises(ProtocolError, match="a message of more than"):
            events(Incoming(), SHAKEN, stream)


any_frame = st.one_of(
    st.binary(max_size=600).map(frame),
    st.lists(st.binary(max_size=20), min_size=2, max_size=MAX_FRAMES).map(
        lambda all_: b"".join(frame(data, True) for data in all_[:-1]) + frame(all_[-1])
    ),
    st.binary(min_size=2, max_size=300).map(lambda data: zmtp.command(b"PING", data)),
    st.binary(max_size=300).map(lambda data: zmtp.command(b"OTHER", data)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(any_frame, max_size=6), st.lists(st.integers(0, 3000), max_size=6))
def test_bytes_mean_the_same_however_they_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    stream = SHAKEN + b"".join(frames)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    parts = [stream[start:stop] for start, stop in itertools.pairwise(places)]
    whole = events(Incoming(), stream)
    assert len(whole) == 1 + len(frames)
    assert events(Incoming(), *parts) == whole


def feed_anything(stream: bytes, cut: int) -> None:
    incoming = Incoming()
    try:
        events(incoming, stream[:cut], stream[cut:])
    except ProtocolError:
        return
    assert len(incoming._held) - incoming._at <= MAX_MESSAGE + 9


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([b"", zmtp.GREETING, SHAKEN]), st.binary(max_size=200), st.integers(0, 300))
def test_arbitrary_bytes_are_messages_or_errors_and_nothing_else(before: bytes, junk: bytes, cut: int) -> None:
    feed_anything(before + junk, cut)


@pytest.mark.fuzz
@settings(max_examples=50_000, deadline=None)
@given(
    st.sampled_from([b"", zmtp.GREETING, SHAKEN]),
    st.lists(st.one_of(any_frame, st.binary(max_size=40)), max_size=5),
    st.integers(0, 2000),
)
def test_fuzz_what_a_peer_may_send(before: bytes, pieces: list[bytes], cut: int) -> None:
    feed_anything(before + b"".join(pieces), cut)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3000), st.one_of(st.none(), st.integers(1, 300_000)), st.booleans()), max_size=40
    ),
    st.integers(1, 1 << 20),
    st.integers(0, 60),
)
def test_what_is_queued_arrives_in_order_with_commands_between_messages(
    messages: list[tuple[int, int | None, bool]], most: int, command_after: int
) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        outgoing, expected = Outgoing(), []
        for i, (size, body, answer) in enumerate(messages):
            head, tail = bytes([i % 200]) * size, None if body is None else memoryview(bytes([i % 200 + 1]) * body)
            outgoing.put(head, tail, answer=answer)
            frames = [head] if tail is None else [head, tail]
            expected.append(b"".join(zmtp.head_of(len(part), part is not frames[-1]) + part for part in frames))
        most = max(most, sum(map(len, expected)) // 1000)  # otherwise it can take minutes
        assert outgoing.cost >= sum(size for size, _, _ in messages)
        got, turns, command = b"", 0, b"\xff" * 7
        while outgoing or turns <= command_after:
            if turns == command_after:
                outgoing.put_first(command)
            turns += 1
            if outgoing:
                buffers = outgoing.buffers(most)
                assert 0 < sum(map(len, buffers)) <= most
                with contextlib.suppress(BlockingIOError):
                    outgoing.sent(near.sendmsg(buffers))
            while True:
                try:
                    got += far.recv(1 << 20)
                except BlockingIOError:
                    break
        at = got.index(command)
        assert got[:at] + got[at + len(command) :] == b"".join(expected)
        borders = {sum(map(len, expected[:i])) for i in range(len(expected) + 1)}
        assert at in borders
        assert outgoing.cost == outgoing.answers == 0
