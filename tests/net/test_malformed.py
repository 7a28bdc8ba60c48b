"""The daemon answers a malformed message by saying what is wrong, even before a session exists, but at a limited
rate."""

from __future__ import annotations

import logging

import msgspec
import pytest

from penstock_proto import ProtocolError
from penstock_proto import messages as m
from penstock_proto.transport import codec
from penstock_server.consumers.malformed import Malformed
from penstock_server.logs.rate_limited_log import RateLimitedLog
from tests.conftest import Serve
from tests.net.test_attacks import answer, beside, dealer, greeted, state

FEED = """
    from penstock_server import Feed
    feed = Feed(range(10), batch_size=2)
"""
pack = msgspec.msgpack.encode

BROKEN = [
    (b"nonsense", "malformed message: Expected `object`"),
    (pack({"version": m.VERSION}), "missing required field `type`"),
    (pack({"type": "hallo"}), "of type 'hallo': Invalid value 'hallo'"),
    (pack({"type": "hello", "version": m.VERSION}), "of type 'hello': Object missing required field `feed`"),
    (pack({"type": "hello", "version": "6", "feed": "feed"}), r"of type 'hello': .*got `str` - at `\$.version`"),
    (pack({"type": "open", "session": bytes(16), "credit": 0}), r"of type 'open': .* >= 1 - at `\$.credit`"),
    (pack({"type": "ping", "a\nline": 1}), r"of type 'ping': Object contains unknown field `a line`"),
]


@pytest.mark.parametrize(("data", "says"), BROKEN, ids=range(len(BROKEN)))
def test_the_error_names_the_messages_type_and_field(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        codec.from_client(data)


def refusal(said: m.ServerMessage) -> tuple[str, str]:
    assert isinstance(said, m.Failed)
    return said.error.kind, said.error.message


def test_over_tcp_a_client_is_told_what_is_wrong_with_its_first_message(serve: Serve) -> None:
    daemon = serve(FEED)
    with dealer(daemon) as connection:
        connection.send(pack({"type": "hello", "version": m.VERSION, "fed": "feed"}))
        kind, text = refusal(answer(connection))
        assert kind == "ProtocolError"
        assert "of type 'hello'" in text
        greeted(connection)  # the connection still works
    with dealer(daemon) as connection:
        connection.send_multipart([codec.encode(m.Hello(m.VERSION, "feed")), b""])
        assert "send each message as one frame" in refusal(answer(connection))[1]
    assert "refused a message over TCP: malformed message of type 'hello'" in daemon.stderr()


@pytest.mark.parametrize("message", [m.Begin(0), m.Ack(0), m.Leave(0), m.Ping()], ids=lambda message: type(message))
def test_over_tcp_a_client_without_a_session_is_told_to_send_hello(serve: Serve, message: m.ClientMessage) -> None:
    with dealer(serve(FEED)) as connection:
        connection.send(codec.encode(message))
        kind, text = refusal(answer(connection))
        assert kind == "ConnectionLost", "a client that had a session connects again"
        assert "send Hello first" in text


def test_on_this_host_a_client_is_told_as_well(serve: Serve) -> None:
    daemon = serve(FEED)
    for data, says in [
        (b"nonsense", "malformed message"),
        (codec.encode(m.Begin(0)), "Begin before Open"),
        (codec.encode(m.Hello(m.VERSION, "feed")), "send Hello over TCP"),
    ]:
        with beside(daemon) as connection:
            connection.send(data)
            kind, text = refusal(codec.from_server(connection.recv(1 << 17)))
            assert kind == "ProtocolError"
            assert says in text


def test_a_connection_is_answered_once_a_second_and_every_message_is_counted(serve: Serve) -> None:
    daemon = serve(FEED)
    with dealer(daemon) as connection:
        for _ in range(1000):
            connection.send(b"nonsense")
        greeted_behind_them = False
        answers = 0
        connection.send(codec.encode(m.Hello(m.VERSION, "feed")))
        while not greeted_behind_them:
            greeted_behind_them = isinstance(answer(connection), m.Welcome)
            answers += 1
        assert answers < 20
    assert state(daemon).malformed == 1000
    assert daemon.stderr().count("refused a message") <= 150, "50 a minute, and a minute may end meanwhile"


def test_after_a_second_a_connection_is_answered_again(caplog: pytest.LogCaptureFixture) -> None:
    malformed, log = Malformed(), RateLimitedLog(logging.getLogger("penstock_server.test"))
    error = ProtocolError("malformed message")
    assert malformed.came(b"one", "TCP", error, log)
    assert malformed.came(b"other", "TCP", error, log)
    assert not malformed.came(b"one", "TCP", error, log)
    malformed.look_at_the_clock()
    assert malformed.came(b"one", "TCP", error, log)
    assert malformed.count == 4
    assert len(caplog.records) == 4
