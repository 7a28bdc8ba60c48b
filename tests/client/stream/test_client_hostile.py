"""The client does not believe its daemon. Whatever comes, the client ends with an error of Penstock that says what was
wrong, in time, and its memory stays bounded. (The daemons here speak the protocol up to the attack.)"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from msgspec import structs

from penstock._state import epoch_bounds
from penstock._state import progress as _progress
from penstock._state.credit import Credit
from penstock._state.epoch_bounds import EpochBounds
from penstock._state.memory import CHECKED, Pool
from penstock._transport import local_transport, tcp_transport
from penstock._transport.slab_views import SlabViews
from penstock_proto import Leaf, MemoryBound, PenstockError, ProtocolError, TupleSpec
from penstock_proto import messages as m
from penstock_proto.batches.layout import POOL_LANE, lay_out
from penstock_proto.batches.position import EndedLane, Place, Position
from penstock_proto.transport import ledger, sealed, zmtp
from penstock_proto.transport.codec import MAX_MESSAGE, MAX_STATUS, encode
from penstock_server.to_daemon import control
from tests.fakes.fake_daemon import sealed_memfd
from tests.fakes.hostile_daemon import PATIENCE, Clients, HostileDaemon, Outcome, Peer, layout_of, slabs, small_feed

MIB = 1 << 20
BOTH = pytest.mark.parametrize("transport", ["tcp", "local"])
RECORD = bytes(32 * 1024)


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    with Clients() as found:
        yield found


def check(
    outcome: Outcome, match: str, *, kind: str = "ProtocolError", mib: float = 160, seconds: float = 4 * PATIENCE
) -> None:
    """Check that a client ended with this error, in time and with bounded memory."""
    assert outcome.kind == kind, outcome
    assert match in outcome.text, outcome
    assert "report this as a bug" not in outcome.text
    assert outcome.mib < mib, outcome
    assert outcome.seconds < seconds, outcome


def with_memory(peer: Peer, info: m.FeedInfo, count: int = 1) -> None:
    """Over unix, send memory for slabs."""
    for number in range(count if peer.unix else 0):
        nbytes = layout_of(info).nbytes
        fd = sealed_memfd(nbytes)
        peer.say(m.Map(number, nbytes), fd)
        os.close(fd)


# --- slabs ---


@BOTH
def test_slabs_beyond_the_credit_end_the_stream(clients: Clients, transport: str) -> None:
    info = small_feed()

    def attack(peer: Peer) -> None:
        with_memory(peer, info)
        for slab in slabs(info):
            peer.say(slab)
            if not peer.unix:
                peer.say_bytes(m_chunk(slab), bytes(slab.nbytes))

    with HostileDaemon(info, attack) as daemon:
        check(clients.read(daemon.url, transport), "without credit")


def m_chunk(slab: m.Slab) -> bytes:
    return encode(m.Chunk(slab.seq, 0))


@pytest.mark.parametrize("width", [4096, 16 * MIB])
def test_slabs_without_their_bytes_end_the_stream(clients: Clients, width: int) -> None:
    info = small_feed(spec=Leaf("uint8", (width,)))

    def attack(peer: Peer) -> None:
        for slab in slabs(info):
            peer.say(slab)

    with HostileDaemon(info, attack) as daemon:
        check(clients.read(daemon.url, "tcp"), "without credit")


def test_credit_is_exact_in_slabs_and_in_bytes() -> None:
    def slab(seq: int, nbytes: int) -> m.Slab:
        return m.Slab(seq, 0, 0, seq, 1, 1, nbytes)

    credit = Credit(3, 100)
    credit.on_slab(slab(0, 1000))  # one slab of any size
    with pytest.raises(ProtocolError, match="without credit: 1 slabs of 1000 bytes are under way"):
        credit.on_slab(slab(1, 1))
    credit.tell(1)
    for seq in (1, 2):
        credit.on_slab(slab(seq, 40))
    with pytest.raises(ProtocolError, match="without credit"):
        credit.on_slab(slab(3, 21))
    credit.on_slab(slab(3, 20))
    with pytest.raises(ProtocolError, match="without credit: 3 slabs"):
        credit.on_slab(slab(4, 0))
    credit.tell(3)
    with pytest.raises(ProtocolError, match="slab 5, but slab 4 was due"):
        credit.on_slab(slab(5, 0))
    credit.on_slab(slab(4, 0))


def test_a_stream_of_one_client_gets_no_more_credit_than_it_asked_for() -> None:
    opened = m.Opened(4096, 4096)
    for shares, most in ((False, 4), (True, 4096)):
        credit = Credit.granted(opened, 4, 1 << 62, shares=shares)
        for seq in range(most):
            credit.on_slab(m.Slab(seq, 0, 0, seq, 1, 1, 64))
        with pytest.raises(ProtocolError, match="without credit"):
            credit.on_slab(m.Slab(most, 0, 0, most, 1, 1, 64))


# --- messages beside slabs ---


def lanes_that_end(peer: Peer) -> None:
    for number in range(1 << 20):
        peer.say(m.LaneEnded(0, number % 60000, number % 60000, 0, 0, RECORD))


def lanes_that_end_again(peer: Peer) -> None:
    for number in range(1 << 20):
        peer.say(m.LaneEnded(0, 0, number % 3, 0, 0, b""))


def batches_elsewhere(peer: Peer) -> None:
    for number in range(1 << 20):
        peer.say(m.SentElsewhere(0, 0, number, 1, 4, RECORD))


def pools(peer: Peer) -> None:
    for number in range(1 << 20):
        lanes = tuple(m.LaneInPool(lane, number, RECORD) for lane in range(3))
        peer.say(m.PoolBegun(0, number, 0, 0, lanes))


def pools_that_are_not_read(peer: Peer) -> None:
    for number in range(1 << 20):
        peer.say(m.PoolBegun(0, number, 1 << 40, 1 << 50, (m.LaneInPool(0, number, RECORD),)))


def a_pool_that_goes_on(peer: Peer) -> None:
    while True:
        peer.say(m.PoolBegun(0, 0, 1, 1, (m.LaneInPool(0, 0, RECORD),), more=True))


def lanes_without_end(peer: Peer) -> None:
    peer.say(m.LaneEnded(0, 0, 1 << 30, 0, 0, b""))


@BOTH
@pytest.mark.parametrize(
    ("attack", "match"),
    [
        (lanes_that_end, "bytes"),
        (lanes_that_end_again, "again"),
        (batches_elsewhere, "elsewhere"),
        (pools, "bytes"),
        (pools_that_are_not_read, "bytes"),
        (a_pool_that_goes_on, "a pool of 33 lanes"),
        (lanes_without_end, "of lane 1073741824, but the feed has"),
    ],
)
def test_messages_without_end_end_the_stream(
    clients: Clients, transport: str, attack: Callable[[Peer], None], match: str
) -> None:
    with HostileDaemon(small_feed(lanes=1 << 16, pool=32), attack) as daemon:
        check(clients.read(daemon.url, transport, patience=30), match, seconds=40)


def test_messages_behind_a_slab_that_does_not_come_are_bounded(clients: Clients) -> None:
    info = small_feed(lanes=1 << 16)

    def attack(peer: Peer) -> None:
        peer.say(next(slabs(info)))
        lanes_that_end(peer)

    with HostileDaemon(info, attack) as daemon:
        check(clients.read(daemon.url, "tcp", patience=30), "bytes of messages before a slab's bytes", seconds=40)


@pytest.mark.parametrize("message", [m.Pong(), m.HostAt(1, "tcp://127.0.0.1:9")])
def test_messages_that_say_nothing_do_not_come_without_end(clients: Clients, message: m.Message) -> None:

    data = encode(message)
    frames = (zmtp.head_of(len(data)) + data) * 1000

    def attack(peer: Peer) -> None:
        while True:
            peer.raw(frames)

    with HostileDaemon(small_feed(), attack) as daemon:
        outcome = clients.read(daemon.url, "tcp")
    if outcome.kind == "StreamClosed":  # it took them as fast as they came, until it was closed
        check(outcome, "closed", kind="StreamClosed")
    else:
        check(outcome, "in a row that say nothing of the stream")


@BOTH
def test_a_flood_of_messages_that_change_nothing_neither_grows_nor_keeps_close_waiting(
    clients: Clients, transport: str
) -> None:
    def attack(peer: Peer) -> None:
        while True:
            peer.say(m.Opened(1, 0))
            peer.say(m.Begun(0, bytes(32)))
            peer.say(m.MissingRanks(()))

    with HostileDaemon(small_feed(), attack) as daemon:
        check(clients.read(daemon.url, transport), "closed", kind="StreamClosed", mib=32)


def between(count: int, nbytes: int) -> list[m.LaneEnded]:
    return [m.LaneEnded(0, lane, lane, 0, 0, bytes(nbytes)) for lane in range(count)]


def test_the_bound_of_messages_between_slabs_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    info = small_feed(lanes=100)
    messages = between(3, 1000)
    monkeypatch.setattr(epoch_bounds, "MAX_BETWEEN", sum(map(epoch_bounds.nbytes_of, messages)))
    bounds = EpochBounds(info)
    for message in messages:
        bounds.on_message(message)
    bounds.on_slab(m.Slab(0, 0, 50, 0, 1, 4, 64))
    for message in between(7, 0)[3:6]:
        bounds.on_message(message)
    for message in (m.LaneEnded(0, 6, 6, 0, 0, bytes(1100)), m.LaneEnded(0, 7, 7, 0, 0, bytes(1100))):
        bounds.on_message(message)
    with pytest.raises(ProtocolError, match="messages between two slabs"):
        bounds.on_message(m.LaneEnded(0, 8, 8, 0, 0, bytes(1000)))


def test_the_bound_of_records_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_bounds, "MAX_RECORDS", 3000)
    info = small_feed(lanes=3)
    place = Position(info, 0, 1, 4, bytes(32), (Place(0, 1, bytes(500)),), (EndedLane(1, 1, 1, bytes(500)),))
    bounds = EpochBounds(info, place)
    for size in (1000, 2000, 1000, 2500):  # the latest record of a lane counts
        bounds.on_slab(m.Slab(0, 0, 0, 1, 1, 4, 64, record=bytes(size)))
    with pytest.raises(ProtocolError, match="records of more than 3000 bytes"):
        bounds.on_slab(m.Slab(0, 0, 2, 1, 1, 4, 64, record=b"x"))


def test_what_was_sent_elsewhere_lies_within_the_skip_or_goes_to_other_ranks() -> None:
    info = small_feed()
    place = Position(info, 0, skip=3)
    elsewhere, slab = m.SentElsewhere(0, 0, 0, 2, 8), m.Slab(0, 0, 0, 1, 1, 4, 64)
    for ranks, fine in ((1, 1), (2, 2), (4, 3)):
        bounds = EpochBounds(info, place, ranks=ranks)
        for _ in range(fine):
            bounds.on_message(elsewhere)
        with pytest.raises(ProtocolError, match="elsewhere"):
            bounds.on_message(elsewhere)
    bounds = EpochBounds(info, ranks=3)
    for _ in range(5):
        bounds.on_message(elsewhere)
        bounds.on_slab(slab)
    with pytest.raises(ProtocolError, match="not for a group's stream"):
        EpochBounds(info, shares=True).on_message(elsewhere)


def test_batches_of_several_rounds_come_only_to_a_rank_of_them_and_between_two_rounds() -> None:
    info = small_feed()
    several = m.Slab(0, 0, 0, 1, 2, 8, 128, stride=3)
    bounds = EpochBounds(info, ranks=3)
    for _ in range(2):
        bounds.on_slab(several)
        for _ in range(2):
            bounds.on_message(m.SentElsewhere(0, 0, 0, 1, 4))
        bounds.on_slab(m.Slab(0, 0, 0, 1, 1, 4, 64))
    bounds.on_message(m.SentElsewhere(0, 0, 0, 1, 4))
    with pytest.raises(ProtocolError, match="of 3 ranks within a round"):
        bounds.on_slab(several)
    for ranks in (1, 2, 4):
        with pytest.raises(ProtocolError, match=f"or to one of {ranks} ranks"):
            EpochBounds(info, ranks=ranks).on_slab(several)


@pytest.mark.parametrize("wrong", [{"first": 4}, {"batches": 3, "rows": 12}, {"stride": 5}, {"nbytes": 1}])
def test_batches_of_several_rounds_lie_within_their_slot(wrong: dict[str, int]) -> None:
    views = SlabViews(small_feed(turn=7, batch_size=4))
    assert views.fixed is not None
    good = m.Slab(0, 0, 0, 0, 2, 8, views.fixed.nbytes_of(2), first=3, stride=3)
    assert views.layout(good) is views.fixed
    with pytest.raises(ProtocolError, match="does not match"):
        views.layout(structs.replace(good, **{"nbytes": views.fixed.nbytes_of(wrong.get("batches", 2)), **wrong}))
    varying = SlabViews(small_feed(batch_size=None))
    with pytest.raises(ProtocolError, match="does not match"):
        varying.layout(m.Slab(0, 0, 0, 0, 1, 1, 64, shapes=((1,),), stride=2))


def test_the_batches_of_pools_are_counted() -> None:
    info = small_feed(lanes=4, pool=2)
    slab, elsewhere = m.Slab(0, 0, POOL_LANE, 0, 1, 4, 64), m.SentElsewhere(0, POOL_LANE, 0, 1, 4)
    lanes = (m.LaneInPool(0, 2, b"a"), m.LaneInPool(1, 1, b"b"))
    bounds = EpochBounds(info, ranks=2)
    bounds.on_message(m.PoolBegun(0, 0, 2, 8, lanes))
    bounds.on_message(elsewhere)
    bounds.on_slab(slab)
    bounds.on_slab(structs.replace(slab, repeat=True))  # a copy, which fills up a round
    with pytest.raises(ProtocolError, match="which has fewer"):
        bounds.on_slab(slab)
    bounds.on_message(m.PoolBegun(0, 1, 1, 4, lanes[:1], more=True))
    with pytest.raises(ProtocolError, match="before the other lanes of pool 1"):
        bounds.on_slab(slab)
    with pytest.raises(ProtocolError, match="before the other lanes of pool 1"):
        bounds.on_message(elsewhere)
    bounds.on_message(m.PoolBegun(0, 1, 1, 4, lanes[1:]))
    bounds.on_slab(slab)
    with pytest.raises(ProtocolError, match="lane 4"):
        bounds.on_slab(m.Slab(0, 0, 4, 0, 1, 4, 64, repeat=True))


def test_old_places_are_forgotten_when_they_take_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "KEEP_BYTES", 10_000)
    progress = _progress.Progress(small_feed())
    for number in range(100):
        progress.on_handed(m.Slab(number, 0, 0, number, 1, 4, 64, record=bytes(1000)), ())
    assert progress.position(100).batches == 100
    kept = _progress.Progress(small_feed())
    for number in range(100):
        kept.on_handed(m.Slab(number, 0, 0, number, 1, 4, 64, record=bytes(1000)), ())
    with pytest.raises(ValueError, match=r"the oldest state that is kept is after 9[0-9] batches"):
        kept.position(80)
    assert kept.position(95).places[0].index == 95


# --- memory ---


def test_memory_is_mapped_only_if_it_cannot_shrink() -> None:
    for seals in (0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL):
        fd = sealed_memfd(4096, seals)
        with pytest.raises(ProtocolError, match="F_SEAL_SHRINK"):
            sealed.mapped(fd, 4096)
        os.close(fd)
    fd = sealed_memfd(4096)
    sealed.mapped(fd, 4096).close()
    for nbytes in (4097, 2**62, 2**70):
        with pytest.raises(ProtocolError, match=f"it does not have {nbytes} bytes"):
            sealed.mapped(fd, nbytes)
    os.close(fd)
    with open(os.devnull, "rb") as file, pytest.raises(ProtocolError, match="F_SEAL_SHRINK"):
        sealed.mapped(file.fileno(), 4096)


def test_a_slot_that_could_shrink_ends_the_stream_and_not_the_trainer(clients: Clients) -> None:
    info = small_feed()
    nbytes = layout_of(info).nbytes

    def attack(peer: Peer) -> None:
        fd = sealed_memfd(nbytes, 0)
        try:
            peer.say(m.Map(1, nbytes), fd)
            peer.say(structs.replace(next(slabs(info)), memfd=1))  # the client may be gone by now
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)

    with HostileDaemon(info, attack) as daemon:
        check(clients.read(daemon.url, "local"), "F_SEAL_SHRINK")


@pytest.mark.parametrize("nbytes", [ledger.NBYTES, 1])
def test_a_ledger_that_could_shrink_or_is_too_small_is_refused(clients: Clients, nbytes: int) -> None:
    made: list[int] = []

    def page() -> int:
        fd = sealed_memfd(nbytes, 0 if nbytes > 1 else fcntl.F_SEAL_SHRINK)
        made.append(os.dup(fd))
        return fd

    def attack(peer: Peer) -> None:
        os.ftruncate(made[-1], 0)

    with HostileDaemon(small_feed(), attack, ledger=page) as daemon:
        check(clients.read(daemon.url, "local"), "the ledger is not as it must be")
    for fd in made:
        os.close(fd)


def test_memory_without_end_ends_the_stream(clients: Clients) -> None:
    fd = sealed_memfd(4096)

    def attack(peer: Peer) -> None:
        for number in range(1 << 20):
            peer.say(m.Map(number, 4096), fd)

    with HostileDaemon(small_feed(), attack) as daemon:
        outcome = clients.read(daemon.url, "local", 60)
    os.close(fd)
    check(outcome, "", seconds=60)


def test_the_number_of_mapped_memfds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock._transport import memfds as _memfds

    monkeypatch.setattr(_memfds, "MAX_MEMFDS", 2)
    fd, memfds = sealed_memfd(4096), _memfds.Memfds()
    memfds.map(m.Map(1, 4096), fd)
    memfds.map(m.Map(2, 4096), fd)
    with pytest.raises(ProtocolError, match="2 memfds are mapped already"):
        memfds.map(m.Map(3, 4096), fd)
    memfds.unmap(1)
    memfds.map(m.Map(3, 4096), fd)
    os.close(fd)


# --- sizes ---


@pytest.mark.parametrize(
    ("spec", "batch_size"),
    [
        (Leaf("float64", (2**40,)), 4),
        (Leaf("float64", (2**40, 2**40)), 2**31),
        (Leaf("float64", (2**40, 2**40, 2**40, 0)), 4),
        (TupleSpec((Leaf("uint8", (4,)), Leaf("uint8", (2**40,)))), 4),
    ],
)
@BOTH
def test_a_sample_larger_than_any_machine_is_refused_in_words(
    clients: Clients, spec: object, batch_size: int, transport: str
) -> None:
    info = small_feed(spec=spec, batch_size=batch_size)

    def attack(peer: Peer) -> None:
        peer.say(next(slabs(info)))

    with HostileDaemon(info, attack) as daemon:
        outcome = clients.read(daemon.url, transport)
    assert outcome.kind in ("ProtocolError", "MemoryBound"), outcome
    check(outcome, "", kind=outcome.kind)


@pytest.mark.parametrize(
    "shapes",
    [((2**40, 3),), ((4, 2**40),), ((4, 2**62),), ((4, 0, 3),), ((2**62, 0),), ((4,),), ((2**40, 2**40),), ()],
)
@BOTH
def test_a_shape_that_does_not_fit_is_refused_in_words(
    clients: Clients, shapes: tuple[tuple[int, ...], ...], transport: str
) -> None:
    info = small_feed(spec=Leaf("float64", (None,)), batch_size=None)
    info = structs.replace(info, spec=Leaf("float64", (None, None)))

    def attack(peer: Peer) -> None:
        size = 8
        for dim in shapes[0] if shapes else ():
            size *= dim
        nbytes = 64 + -(-size // 64) * 64
        peer.say(m.Slab(0, 0, 0, 0, 1, 4, min(nbytes, 2**62), shapes=shapes))

    with HostileDaemon(info, attack) as daemon:
        outcome = clients.read(daemon.url, transport)
    assert outcome.kind in ("ProtocolError", "MemoryBound", "StreamClosed"), outcome
    assert "report this as a bug" not in outcome.text
    assert outcome.mib < 32


def test_a_slab_that_this_machine_cannot_hold_is_refused_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from penstock._state import memory as _memory

    monkeypatch.setattr(_memory, "_available", lambda: CHECKED)
    assert Pool(1).take(CHECKED).__array_interface__["shape"] == (CHECKED,)
    with pytest.raises(MemoryBound, match=f"a slab of {CHECKED + 1} bytes came"):
        Pool(1).take(CHECKED + 1)
    monkeypatch.undo()
    with pytest.raises(MemoryBound):
        Pool(1).take(2**62)


# --- connecting ---


def drip(data: bytes, pause: float = 0.05) -> Callable[[Peer], None]:
    """Return an attack that sends these bytes one at a time, and then PINGs without end."""

    def attack(peer: Peer) -> None:
        for byte in data:
            peer.raw(bytes([byte]))
            time.sleep(pause)
        pings(peer)

    return attack


def pings(peer: Peer) -> None:
    while True:
        peer.raw(zmtp.command(b"PING", bytes(2)) * 100)
        time.sleep(0.001)


def greeted(then: Callable[[Peer], None]) -> Callable[[Peer], None]:
    def attack(peer: Peer) -> None:
        peer.raw(zmtp.GREETING + zmtp.ready(b"ROUTER"))
        then(peer)

    return attack


def a_large_frame_that_drips(peer: Peer) -> None:
    peer.raw(zmtp.head_of(100_000))
    while True:
        peer.raw(b"x")
        time.sleep(0.05)


@pytest.mark.parametrize(
    "greet",
    [
        drip(zmtp.GREETING),
        drip(zmtp.GREETING[:12]),
        greeted(pings),
        greeted(lambda peer: None),
        greeted(a_large_frame_that_drips),
        lambda peer: peer.raw(zmtp.GREETING),
    ],
    ids=["drips", "drips the version", "pings", "says nothing", "a frame drips", "no ready"],
)
def test_connecting_takes_no_longer_than_its_timeout(clients: Clients, greet: Callable[[Peer], None]) -> None:
    with HostileDaemon(small_feed(), greet=greet) as daemon:
        outcome = clients.read(daemon.url, "tcp")
    assert outcome.kind in ("Unreachable", "ProtocolError"), outcome
    assert outcome.seconds < PATIENCE + 1.5, outcome


def test_all_steps_of_connecting_share_the_timeout(clients: Clients) -> None:
    def answer(peer: Peer) -> None:
        time.sleep(0.8 * PATIENCE)
        peer.say(m.Welcome(bytes(16), small_feed(), ""))
        time.sleep(0.8 * PATIENCE)
        peer.say(m.Opened(1, 0))

    with HostileDaemon(small_feed(), answer=answer) as daemon:
        outcome = clients.read(daemon.url, "tcp")
    check(outcome, "did not open the session", kind="Unreachable")
    assert outcome.seconds < PATIENCE + 1.0


def test_a_name_with_several_addresses_gets_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock_proto.transport import zmtp_dealer as _zmtp

    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = silent.getsockname()
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place)] * 8
        monkeypatch.setattr(_zmtp.socket, "getaddrinfo", lambda *_, **__: found)
        began = time.monotonic()
        with pytest.raises(zmtp.Silent):
            _zmtp.connected("several", place[1], 0.8, lambda: None)
        assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("say", "match"),
    [
        (lambda peer: peer.raw(zmtp.head_of(MAX_MESSAGE + 1)), "the limit is"),
        (lambda peer: peer.say_bytes(b"\xc1"), "malformed message"),
        (lambda peer: peer.say_bytes(b"\x91" * 100_000), "malformed message"),
        (lambda peer: peer.say(m.Pong()), "answered Hello with Pong"),
        (lambda peer: peer.say(m.Welcome(bytes(16), small_feed(name="other"), "")), "another feed"),
        (lambda peer: peer.raw(b"\x07\x01x"), "flags"),
    ],
    ids=["too large", "not a message", "deep", "pong", "another feed", "flags"],
)
def test_a_wrong_answer_to_hello_is_named(clients: Clients, say: Callable[[Peer], None], match: str) -> None:
    with HostileDaemon(small_feed(), answer=say) as daemon:
        check(clients.read(daemon.url, "tcp"), match)


@BOTH
def test_a_failure_with_terminal_escapes_is_safe_to_print(clients: Clients, transport: str) -> None:
    def attack(peer: Peer) -> None:
        peer.say(m.Failed(m.ErrorReport("GeneratorError", "\x1b[2Jgone\u202e", split="\x07", remote_traceback="\x9b")))

    with HostileDaemon(small_feed(), attack) as daemon:
        outcome = clients.read(daemon.url, transport)
    check(outcome, "\\x1b[2Jgone\\u202e", kind="GeneratorError")
    assert all(letter.isprintable() or letter == "\n" for letter in outcome.text)


def test_each_bound_has_a_default_that_a_daemon_does_not_reach() -> None:
    assert epoch_bounds.MAX_BETWEEN == epoch_bounds.MAX_RECORDS == _progress.KEEP_BYTES == 64 * MIB
    assert (tcp_transport.CREDIT, tcp_transport.CREDIT_BYTES) == (16, 64 * MIB)
    assert local_transport.CREDIT == 4
    assert threading.active_count() < 50


@pytest.mark.parametrize("offsets", [[0, 2, 5, 4], [0, 2, 3, 9], [1, 2, 3, 4], [0, -1, 3, 4], [0, 2**62, 3, 4]])
@pytest.mark.parametrize("leaf", [Leaf("string", ()), Leaf("uint8", (None,), ragged=True)])
@BOTH
def test_offsets_outside_their_values_end_the_stream(
    clients: Clients, leaf: Leaf, transport: str, offsets: list[int]
) -> None:
    info = small_feed(spec=leaf, batch_size=3)
    slot = np.zeros(256, np.uint8)
    slot[128:160].view(np.int64)[:] = offsets  # after the header, and 4 bytes of values
    slab = m.Slab(0, 0, 0, 0, 1, 3, 192, memfd=1, shapes=((4,), (4,)))

    def attack(peer: Peer) -> None:
        if peer.unix:
            fd = sealed_memfd(len(slot))
            os.pwrite(fd, slot.tobytes(), 0)
            peer.say(m.Map(1, len(slot)), fd)
            os.close(fd)
            peer.say(slab)
        else:
            peer.say(structs.replace(slab, memfd=0))
            peer.say_bytes(encode(m.Chunk(0, 0)), slot[:192].tobytes())

    with HostileDaemon(info, attack) as daemon:
        check(clients.read(daemon.url, transport), "the daemon sent offsets that do not fit the 4 values")


@pytest.mark.parametrize(
    ("leaf", "offsets", "fits"),
    [
        (Leaf("uint8", (None, None), ragged=True), [[0, 2, 3], [0, 1, 1, 4]], True),
        (Leaf("uint8", (None, None), ragged=True), [[0, 2, 4], [0, 1, 1, 4]], False),
        (Leaf("uint8", (None, None), ragged=True), [[0, 2, 2], [0, 1, 1, 4]], False),
        (Leaf("uint8", (None, None), ragged=True), [[0, 2, 3], [0, 1, 0, 4]], False),
        (Leaf("uint8", (None, None), ragged=True), [[0, 4, 3], [0, 1, 1, 4]], False),
        (Leaf("uint8", (None, None), ragged=True), [[0, 2, 3], [0, 1, 1, 3]], False),
        (Leaf("string", (None,), ragged=True), [[0, 1, 1, 4], [0, 2, 3]], True),
        (Leaf("string", (None,), ragged=True), [[0, 1, 1, 5], [0, 2, 3]], False),
        (Leaf("string", (None,), ragged=True), [[0, 1, 1, 4], [0, 2, 4]], False),
        (Leaf("string", (None,), ragged=True), [[0, 1, 1, 4], [0, 3, 2]], False),
    ],
)
def test_offsets_of_each_level_have_to_fit_those_of_the_next(leaf: Leaf, offsets: list[list[int]], fits: bool) -> None:
    views = SlabViews(small_feed(spec=leaf, batch_size=2))
    layout = lay_out(["uint8", "int64", "int64"], [(4,), *((len(ends),) for ends in offsets)])
    slot = np.zeros(layout.nbytes, np.uint8)
    for array, ends in zip(layout.leaves(slot)[1:], offsets, strict=True):
        array[0] = ends
    if fits:
        views.check_offsets(layout, slot)
        return
    with pytest.raises(ProtocolError, match="offsets that do not fit the 4 values"):
        views.check_offsets(layout, slot)


@pytest.mark.parametrize(("batch_size", "shape"), [(4, (None,)), (4, (2, None)), (None, (None, None))])
def test_text_of_an_unknown_shape_is_refused(batch_size: int | None, shape: tuple[int | None, ...]) -> None:
    with pytest.raises(ProtocolError, match="text of an unknown shape"):
        SlabViews(small_feed(spec=Leaf("string", shape), batch_size=batch_size))


@pytest.mark.parametrize(
    ("shape", "fits"), [((2, 3), {6}), ((None, 3), {0, 3, 6}), ((None,), set(range(8))), ((), {1}), ((None, 0), {0})]
)
def test_a_whole_batch_of_text_has_a_number_of_strings_that_fits(shape: tuple[int | None, ...], fits: set[int]) -> None:
    views = SlabViews(small_feed(spec=Leaf("string", shape), batch_size=None))
    for strings in range(8):
        layout = lay_out(["uint8", "int64"], [(0,), (strings + 1,)])
        slot = np.zeros(layout.nbytes, np.uint8)
        if strings in fits:
            views.check_offsets(layout, slot)
        else:
            with pytest.raises(ProtocolError, match="offsets that do not fit"):
                views.check_offsets(layout, slot)


# --- the commands ---


def a_message_of_many_frames(peer: Peer) -> None:
    frame = zmtp.head_of(1 << 16, more=True) + bytes(1 << 16)
    while True:
        peer.raw(frame)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (a_message_of_many_frames, "malformed message"),
        (pings, "commands in a row|no daemon answered"),
        (lambda peer: peer.raw(zmtp.head_of(MAX_STATUS + 1)), "at most 1048576 are read"),
        (lambda peer: peer.say(m.Status("[" * 100_000)), "the daemon's status cannot be read"),
        (lambda peer: peer.say(m.Status("{}")), "the daemon's status cannot be read"),
        (lambda peer: peer.say(m.Pong()), "answered Pong to a status request"),
        (a_large_frame_that_drips, "no daemon answered"),
        (lambda peer: None, "no daemon answered"),
    ],
    ids=["frames", "pings", "too large", "deep", "empty", "pong", "drips", "says nothing more"],
)
def test_commands_do_not_believe_their_daemon(answer: Callable[[Peer], None], match: str) -> None:
    def greet(peer: Peer) -> None:
        peer.raw(zmtp.GREETING + zmtp.ready(b"ROUTER"))
        answer(peer)

    before, began = memory(), time.monotonic()
    with HostileDaemon(small_feed(), greet=greet) as daemon, pytest.raises(PenstockError, match=match):
        control.status(daemon.url, 1.0)
    assert time.monotonic() - began < 4
    assert memory() - before < 100 * MIB


def memory() -> int:
    """Return the bytes of memory that this process has taken at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
