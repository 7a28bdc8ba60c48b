"""Random sequences of a hostile daemon's messages, to real clients in another process. Whatever comes, each client ends
with an error of Penstock, in time and with bounded memory.

`make fuzz ARGS='tests/client/stream/test_fuzz_client.py --fuzz-seconds 600'` runs it for ten minutes.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from msgspec import structs

from penstock_proto import Leaf, TupleSpec, errors
from penstock_proto import messages as m
from penstock_proto.transport import ledger, zmtp
from penstock_proto.transport.codec import encode
from tests.fakes.fake_daemon import sealed_memfd
from tests.fakes.hostile_daemon import PATIENCE, Attack, Clients, HostileDaemon, Peer, layout_of, small_feed

COUNTS = (0, 1, 2, 3, 7, 64, 4096, 2**16, 2**31 - 1, 2**40, 2**53, 2**62)
MIB = 200
"""More than this no client's memory may grow."""


class Dice:
    """Draws hostile things.

    Args:
        seed: decides all of them.
    """

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def count(self, likely: int | None = None) -> int:
        """Return a number; half of the time `likely`."""
        if likely is not None and self.dice.random() < 0.7:
            return likely
        return self.dice.choice(COUNTS)

    def index(self) -> int:
        return min(self.count(self.dice.randrange(4)), 2**31 - 1)

    def text(self) -> str:
        return self.dice.choice(("", "feed", "\x1b[2J\x9b", "\u202e" * 40, "x" * 1000, "{", "%s %n"))

    def record(self) -> bytes:
        return bytes(self.dice.choice((0, 0, 1, 100, 32 * 1024)))

    def feed(self) -> m.FeedInfo:
        """Return a feed, now and then an impossible one."""
        spec = self.dice.choice(
            [
                Leaf("uint8", (4096,)),
                Leaf("float64", (self.count(8) % 2**40,)),
                Leaf("string", ()),
                Leaf("float32", (None,), ragged=True),
                Leaf("string", (None, None), ragged=True),
                TupleSpec((Leaf("int64", ()), Leaf("uint8", (None, 3)))),
            ]
        )
        fixed = isinstance(spec, Leaf) and spec.sized
        return small_feed(
            spec=spec,
            turn=self.dice.choice((1, 1, 4, 2**16)) if fixed else 1,
            batch_size=self.dice.choice((4, 4, 1, 2**31)),
            lanes=self.dice.choice((1, 4, 2**16)),
            pool=self.dice.choice((1, 1, 2, 32)),
            batches=self.dice.choice((None, 3)),
        )

    def slab(self, info: m.FeedInfo, seq: int) -> m.Slab:
        shapes: m.Shapes = ()
        if isinstance(info.spec, Leaf) and info.spec.sized:
            batches = self.dice.choice((1, info.turn))
            rows = batches * (info.batch_size or 1)
            nbytes = layout_of(info).nbytes_of(batches)
        else:
            batches, rows, nbytes = 1, info.batch_size or 1, 64 * self.dice.randrange(1, 64)
            shapes = tuple((self.count(4), 3)[: self.dice.randrange(3)] for _ in range(self.dice.randrange(4)))
        slab = m.Slab(
            self.count(seq),
            self.count(0),
            self.dice.choice((0, 0, -1, -2, self.index())),
            self.count(seq),
            min(self.count(batches) or 1, 2**16),
            self.count(rows),
            min(self.count(nbytes), 2**62),
            self.dice.randrange(3),
            self.count(0),
            shapes,
            self.record(),
            self.dice.random() < 0.05,
        )
        return slab if self.dice.random() < 0.9 else structs.replace(slab, kept=m.Kept(1, 1, bytes(16)))

    def message(self, info: m.FeedInfo, seq: int) -> m.Message:
        """Return a message of the daemon, often one that could come."""
        lanes = tuple(
            m.LaneInPool(self.index(), self.count(1), self.record(), self.dice.choice((-1, -1, self.index())))
            for _ in range(self.dice.randrange(4))
        )
        makers: list[Callable[[], m.Message]] = [
            lambda: self.slab(info, seq),
            lambda: self.slab(info, seq),
            lambda: m.Chunk(self.count(seq), self.count(0)),
            lambda: m.LaneEnded(0, self.count(0), self.index(), self.count(1), self.count(0), self.record()),
            lambda: m.SentElsewhere(0, self.index(), self.count(0), 1, self.count(4), self.record()),
            lambda: m.PoolBegun(0, self.count(1), self.count(1), self.count(4), lanes, self.dice.random() < 0.3),
            lambda: m.Begun(self.count(0), self.dice.randbytes(32)),
            lambda: m.End(self.count(0), self.count(1), self.count(1), self.count(4)),
            lambda: m.Opened(self.dice.choice((1, 16, 4096)), self.dice.choice((0, 8, 4096)), self.count(0)),
            lambda: m.MissingRanks((self.index(),)),
            lambda: m.HostAt(self.count(1), self.dice.choice(("tcp://127.0.0.1:1", "tcp://[::1:x", self.text()))),
            lambda: m.Failed(m.ErrorReport(self.text() or "Own", self.text(), split=self.text())),
            lambda: m.Pong(),
            lambda: m.Unmap(self.index()),
            lambda: m.Status(self.text()),
            lambda: m.Scaled(1, 2),
            lambda: m.Greeting(11),
        ]
        return self.dice.choice(makers)()

    def damaged(self, data: bytes) -> bytes:
        out = bytearray(data)
        for _ in range(self.dice.randrange(1, 4)):
            out[self.dice.randrange(len(out))] = self.dice.randrange(256)
        return bytes(out)

    def attack(self, info: m.FeedInfo) -> Attack:
        """Return a random sequence of messages, which ends, goes on without end, or breaks off."""
        steps = self.dice.choice((3, 30, 1000))
        repeats = self.dice.choice((1, 1, 1, 100_000))
        breaks = self.dice.random() < 0.3

        def attack(peer: Peer) -> None:
            seq = 0
            for _ in range(steps):
                message = self.message(info, seq)
                data = encode(message)
                if self.dice.random() < 0.05:
                    data = self.damaged(data)
                frames = () if peer.unix or type(message) is not m.Chunk else (bytes(self.dice.randrange(5000)),)
                fd = None
                if peer.unix and self.dice.random() < 0.2:
                    data = encode(m.Map(self.dice.randrange(3), self.count(1 << 16)))
                    fd = sealed_memfd(1 << 16, self.dice.choice((0, 2, 2, 2)))
                try:
                    for _ in range(1 if fd is not None else repeats):
                        peer.say_bytes(data, *frames, fd=fd)
                finally:
                    if fd is not None:
                        os.close(fd)
                if type(message) is m.Slab:
                    seq += 1
                    if not peer.unix and self.dice.random() < 0.7 and message.nbytes < 1 << 20:
                        peer.say_bytes(encode(m.Chunk(message.seq, 0)), bytes(message.nbytes))
                if self.dice.random() < 0.02:
                    time.sleep(0.05)
            if breaks:
                peer.connection.close()

        return attack

    def greeting(self) -> Attack | None:
        """Return a handshake, or None for a right one."""
        if self.dice.random() < 0.85:
            return None
        noise = self.dice.choice((zmtp.GREETING + zmtp.ready(b"ROUTER"), zmtp.GREETING, b""))
        noise += self.damaged(zmtp.command(b"PING", bytes(2)) * self.dice.randrange(1, 1000))

        def attack(peer: Peer) -> None:
            at = 0
            while at < len(noise):
                step = self.dice.randrange(1, 200)
                peer.raw(noise[at : at + step])
                at += step
                time.sleep(0.001)

        return attack

    def daemon(self) -> HostileDaemon:
        info = self.feed()
        ledgers = [ledger.NBYTES] * 9 + [1]
        return HostileDaemon(
            info,
            self.attack(info),
            greet=self.greeting(),
            unix=self.dice.random() < 0.8,
            ledger=lambda: sealed_memfd(self.dice.choice(ledgers), self.dice.choice((2, 2, 2, 0))),
            opened=self.dice.choice((None, None, m.Opened(4096, 4096, self.count(0)))),
        )


def attacked(clients: Clients, seed: int) -> str:
    """Attack one client. Return the class of its error."""
    dice = Dice(seed)
    options = dice.dice.choice(({}, {}, {"group": "g"}, {"rank": 0, "world_size": 2}))
    with dice.daemon() as daemon:
        outcome = clients.read(daemon.url, dice.dice.choice(("auto", "tcp", "local")), **options)
    where = f"seed {seed}: {outcome}"
    assert outcome.kind == "End" or outcome.kind in errors.BY_NAME, where
    assert "report this as a bug" not in outcome.text or outcome.kind == "IncompleteEpoch", where
    assert all(letter.isprintable() or letter in "\n\t" for letter in outcome.text), where
    assert outcome.mib < MIB, where
    assert outcome.seconds < 3 * PATIENCE + 5, where
    return outcome.kind


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    with Clients() as found:
        yield found


@pytest.mark.parametrize("seed", range(12))
def test_a_client_survives_whatever_its_daemon_sends(seed: int, clients: Clients) -> None:
    attacked(clients, seed)


@pytest.mark.fuzz
def test_fuzz_clients_by_a_hostile_daemon(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], clients: Clients
) -> None:
    seconds, seed = request.config.getoption("--fuzz-seconds"), request.config.getoption("--fuzz-seed")
    kinds: Counter[str] = Counter()
    until, number = time.monotonic() + seconds, 1000 * seed
    while time.monotonic() < until:
        kinds[attacked(clients, number)] += 1
        number += 1
    with capsys.disabled():
        print(f"\n{seconds:g} s, seed {seed}: {sum(kinds.values())} hostile daemons: {dict(kinds.most_common())}")
