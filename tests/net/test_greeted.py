"""Sessions that are not open yet share one limit, and do not keep out clients that open at once."""

from __future__ import annotations

import pytest

from penstock_proto import ProtocolError
from penstock_proto.messages import FeedInfo
from penstock_proto.spec import Leaf
from penstock_server.consumers import greeted
from penstock_server.consumers.greeted import Greeted
from penstock_server.consumers.link import TcpLink
from penstock_server.consumers.sessions import Session


def session(name: str) -> Session:
    link = TcpLink(None, b"")  # type: ignore[arg-type]  # nothing is sent
    return Session(name.encode(), "feed", name, b"", link, 0.0)


def feed(lanes: int) -> FeedInfo:
    return FeedInfo("feed", Leaf("int64", ()), 1, 1, False, "exact", lanes, 0, None, None, None)


def test_the_largest_position_goes_first_and_the_oldest_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeted, "MOST_BYTES", 1000)
    waiting, large, also, small = Greeted(), session("large"), session("also"), session("small")
    for one in (large, also, small):
        assert waiting.add(one, 0.0) is None
    assert waiting.sent(large, bytes(500), feed(1)) is None
    assert waiting.sent(also, bytes(500), feed(1)) is None
    assert waiting.sent(small, bytes(10), feed(1)) is large
    waiting.remove(large)
    assert (waiting.nbytes, large.position, len(waiting)) == (510, b"", 2)
    assert waiting.sent(also, bytes(491), feed(1)) is also
    waiting.remove(also)
    waiting.remove(small)
    waiting.remove(small)
    assert (waiting.nbytes, len(waiting)) == (0, 0)


def test_where_too_many_wait_the_oldest_goes_and_all_go_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeted, "MOST", 2)
    waiting, sessions = Greeted(), [session(str(number)) for number in range(3)]
    assert waiting.add(sessions[0], 0.0) is None
    assert waiting.add(sessions[1], 10.0) is None
    assert waiting.add(sessions[2], 20.0) is sessions[0]
    waiting.remove(sessions[0])
    assert waiting.late(greeted.SECONDS + 15) == [sessions[1]]


def test_a_position_has_no_more_bytes_than_its_feed_has_lanes_for() -> None:
    waiting, one = Greeted(), session("one")
    waiting.add(one, 0.0)
    waiting.sent(one, bytes(160 * 1024), feed(1))
    with pytest.raises(ProtocolError, match="which this feed cannot have"):
        waiting.sent(one, bytes(2 * 1024), feed(1))
    waiting.sent(one, bytes(1 << 20), feed(64))
    with pytest.raises(ProtocolError, match="more than 8388608 bytes"):
        waiting.sent(one, bytes(8 << 20), feed(2**16))
