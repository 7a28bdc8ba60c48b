"""Streams that continue within an epoch, with real daemons: no sample is lost or comes twice, and changes are
noticed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

import penstock
from penstock_proto import messages as m
from penstock_proto.batches import arrays
from penstock_proto.batches.position import Place, Position
from penstock_proto.transport import codec
from tests.conftest import Daemon, Serve, wait_until

FEEDS = """
    import os
    import time

    import numpy as np
    from penstock_server import Feed, Shuffle

    FOLDER = os.environ["FOLDER"]
    SIZES = [int(size) for size in os.environ.get("SIZES", "41,30,55,0,17,38").split(",")]

    def there(name):
        return os.path.exists(os.path.join(FOLDER, name))

    def numbered(split):
        for i in range(SIZES[split]):
            if there(f"raise@{split}.{i}"):
                raise OSError("the disk is away")
            if there(f"once@{split}.{i}"):
                os.unlink(os.path.join(FOLDER, f"once@{split}.{i}"))
                raise OSError("the disk was away")
            yield np.array([split, i])

    splits = list(range(len(SIZES)))
    raising = Feed(numbered, splits=splits, batch_size=4, lanes=2, turn=8)
    retrying = Feed(numbered, splits=splits, batch_size=4, lanes=2, turn=8, on_error="retry")
    grown = Feed(numbered, splits=splits, batch_size=4, lanes=2, turn=8, shuffle=Shuffle(24, interleave=2))
    fast = Feed(numbered, splits=splits, batch_size=4, lanes=2, turn=8, order="fast")

    def slow(split):
        for i in range(100_000):
            time.sleep(0.001)
            yield np.array([split, i])

    slowly = Feed(slow, splits=[0], batch_size=4, lanes=1, turn=8)
    cached = Feed(list(np.arange(100)), batch_size=4, turn=8)
"""

SIZES = [41, 30, 55, 0, 17, 38]
EVERY = [(split, i) for split, size in enumerate(SIZES) for i in range(size)]


def samples(batch: Any) -> list[tuple[int, int]]:
    return [(int(split), int(i)) for split, i in batch]


def start(serve: Serve, folder: Path, *feeds: str, sizes: list[int] = SIZES, **options: Any) -> Daemon:
    env = {"FOLDER": str(folder), "SIZES": ",".join(map(str, sizes))}
    return serve(FEEDS, *feeds, env=env, **options)


@pytest.mark.parametrize("place", [(0, 10), (1, 1), (2, 54), (4, 0), (5, 37)])
def test_nothing_is_lost_when_user_code_raises_and_the_job_goes_on_from_a_state(
    serve: Serve, tmp_path: Path, place: tuple[int, int]
) -> None:
    flag = tmp_path / f"raise@{place[0]}.{place[1]}"
    flag.touch()
    daemon = start(serve, tmp_path, "raising")
    seen: list[tuple[int, int]] = []
    with penstock.connect(daemon.url) as connection:
        with pytest.raises(penstock.GeneratorError):
            for batch in connection.batches():
                seen += samples(batch)
        state = connection.state_dict()
    flag.unlink()
    with penstock.connect(daemon.url, state=state) as connection:
        for batch in connection.batches():
            seen += samples(batch)
    assert sorted(seen) == EVERY


def test_nothing_is_lost_when_what_raises_is_tried_again(serve: Serve, tmp_path: Path) -> None:
    daemon = start(serve, tmp_path, "retrying")
    with penstock.connect(daemon.url) as connection:
        quiet = [samples(batch) for batch in connection.batches()]
    for place in ("0.10", "0.33", "2.1", "2.2", "1.29", "5.37"):
        (tmp_path / f"once@{place}").touch()
    with penstock.connect(daemon.url) as connection:
        assert [samples(batch) for batch in connection.batches()] == quiet
    assert not list(tmp_path.glob("once@*"))
    assert sorted(sample for batch in quiet for sample in batch) == EVERY


def state_within(daemon: Daemon, feed: str, batches: int) -> Any:
    """Return a state after `batches` batches."""
    with penstock.connect(daemon.urls[feed]) as connection:
        for _, _ in zip(range(batches), connection.batches(), strict=False):
            pass
        return connection.state_dict()


def state_within_a_slab(daemon: Daemon, feed: str, batches: int) -> Any:
    """Return a state after `batches` batches that lies within a slab. A worker that lacks a CPU reports its turn in
    parts, and then a slab may end there. So read again."""
    for _ in range(50):
        state = state_within(daemon, feed, batches)
        if state["position"]["skip"]:
            return state
    raise AssertionError("a slab ended there each time")


@pytest.mark.parametrize("feed", ["raising", "grown", "fast"])
@pytest.mark.parametrize("change", ["shorter", "longer", "ends"])
def test_a_split_that_has_changed_is_noticed_within_a_slab(
    serve: Serve, tmp_path: Path, feed: str, change: str
) -> None:
    before = [9, 10, 11, 0, 7, 8] * 4
    daemon = start(serve, tmp_path, feed, sizes=before, workers=1)
    state = state_within_a_slab(daemon, feed, 15)  # in the second lane's first turn, of 32 samples
    more = {"shorter": -2, "longer": 3, "ends": -100}[change]
    sizes = [max(3, size + more) if size else 0 for size in before]
    other = start(serve, tmp_path, feed, sizes=sizes, workers=1)
    with (
        penstock.connect(other.url, state=state) as connection,
        pytest.raises((penstock.FeedError, penstock.StateMismatch), match=r"lane [01]|only 3 when it was run again"),
    ):
        for _ in connection.batches():
            pass


def test_a_state_within_a_slab_goes_on_where_nothing_has_changed(serve: Serve, tmp_path: Path) -> None:
    daemon = start(serve, tmp_path, "raising", "grown")
    for feed in ("raising", "grown"):
        with penstock.connect(daemon.urls[feed]) as connection:
            quiet = [samples(batch) for batch in connection.batches()]
        for consumed in (1, 7, 13, 20, 30):
            with penstock.connect(daemon.urls[feed], state=state_within(daemon, feed, consumed)) as connection:
                assert [samples(batch) for batch in connection.batches()] == quiet[consumed:]


@pytest.mark.parametrize("feed", ["raising", "cached"])
@pytest.mark.parametrize("skip", [10**12, 26])
def test_a_state_that_passes_over_more_than_there_is_is_refused(
    serve: Serve, tmp_path: Path, feed: str, skip: int
) -> None:
    daemon = start(serve, tmp_path, feed, sizes=[30, 30, 30])
    state = state_within(daemon, feed, 1)
    state["position"]["skip"] = skip
    with pytest.raises((ValueError, penstock.StateMismatch)):
        with penstock.connect(daemon.url, state=state) as connection:
            for _ in connection.batches():
                pass


# --- forged positions ---


@contextmanager
def forged(daemon: Daemon, feed: str, change: Callable[[Position], bytes]) -> Iterator[zmq.Socket[bytes]]:
    """Open a session that reads from a forged position."""
    context = zmq.Context()
    connection = context.socket(zmq.DEALER)
    connection.connect(daemon.urls[feed].rpartition("/")[0])
    try:
        connection.send(codec.encode(m.Hello(m.VERSION, feed)))
        welcome = codec.from_server(connection.recv())
        assert isinstance(welcome, m.Welcome)
        connection.send(codec.encode(m.PositionPart(welcome.session, change(Position(welcome.feed, 0)))))
        connection.send(codec.encode(m.Open(welcome.session, b"", 4, 1 << 24, 0)))
        connection.send(codec.encode(m.Begin(0)))
        yield connection
        connection.send(codec.encode(m.Close()))
    finally:
        connection.close(500)
        context.term()


def failure(daemon: Daemon, feed: str, change: Callable[[Position], bytes]) -> m.ErrorReport:
    """Return the error of such a session."""
    with forged(daemon, feed, change) as connection:
        while True:
            assert connection.poll(20_000)
            message = codec.from_server(connection.recv_multipart()[0])
            if isinstance(message, m.Failed):
                return message.error


def packed(position: Position, *places: Place) -> bytes:
    """Return the encoded position with these places."""
    batches = sum(one.index for one in places)
    return msgspec.msgpack.encode(msgspec.structs.replace(position, batches=batches, rows=4 * batches, places=places))


def edited(position: Position, **fields: Any) -> bytes:
    """Return the encoded position with these fields, even if they are invalid."""
    return msgspec.msgpack.encode({**msgspec.to_builtins(position, builtin_types=(bytes,)), **fields})


def place(taken: int, index: int) -> bytes:
    """Return a record of a lane that does not shuffle."""
    found = {"seats": [[0, taken]], "next": 1, "done": 0, "block": 0, "made": 0, "index": index, "skipped": []}
    return arrays.pack(found)


def longest_gap(daemon: Daemon, feed: str) -> float:
    """Return the longest wait of a consumer that reads an epoch."""
    seen: list[tuple[int, int]] = []
    longest, last = 0.0, time.monotonic()
    with penstock.connect(daemon.urls[feed]) as connection:
        for batch in connection.batches():
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            seen += samples(batch)
    assert sorted(seen) == EVERY
    return longest


def test_a_place_deep_in_a_split_costs_its_own_stream_alone(serve: Serve, tmp_path: Path) -> None:
    daemon = start(serve, tmp_path, "slowly", "raising", workers=1)
    deep = 80_000  # samples, which take 80 s or more
    with forged(daemon, "slowly", lambda p: packed(p, Place(0, deep // 4, place(deep, deep // 4)))):
        for _ in range(3):
            assert longest_gap(daemon, "raising") < 40
    assert daemon.stop() == 0


def test_places_that_cannot_be_fail_their_stream_and_end_no_worker(serve: Serve, tmp_path: Path) -> None:
    daemon = start(serve, tmp_path, "raising")
    wait_until(lambda: len(daemon.workers()) == 2)  # the feed may be ready before the second worker is
    before = {worker.pid for worker in daemon.workers()}
    far = 2**53
    for one in (
        Place(0, far, place(4 * far, far)),
        Place(0, far, place(far, far // 4)),
        Place(0, far, b""),
        Place(0, 1, place(7, 1)),
        Place(0, 1, place(4, 1), place(9, 2)),
        Place(0, 1, b"\x80"),
    ):
        error = failure(daemon, "raising", lambda p, one=one: packed(p, one))
        assert error.kind in ("ProtocolError", "FeedError"), error
    for fields in (
        {"batches": 2**62},
        {"rows": 2**62},
        {"merged": 2**62},
        {"places": [[0, 2**62, b""]]},
        {"ended": [[0, 2**62, 0, b""]]},
        {"ended": [[0, 0, 2**62, b""]]},
        {"skip": 10**12},
    ):
        assert failure(daemon, "raising", lambda p, fields=fields: edited(p, **fields)).kind == "ProtocolError"
    far_place = Place(0, 2**50, place(2**52, 2**50))
    error = failure(daemon, "raising", lambda p: packed(p, far_place))
    assert (error.kind, error.split) == ("FeedError", "0")
    assert f"yielded {2**52} samples of a split, and only 41 when it was run again" in error.message
    longest_gap(daemon, "raising")
    assert {worker.pid for worker in daemon.workers()} == before
