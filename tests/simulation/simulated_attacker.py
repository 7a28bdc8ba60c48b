"""A simulated peer that sends anything the protocol can carry: impossible counts, forged positions, wrong ranks.

It gives its messages to the coordinator as `sessions.py` gives those of a peer. If the coordinator refuses a message,
the session ends, and the message must not have changed anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from penstock_proto import PenstockError
from penstock_proto.batches.position import Position, unpack
from penstock_proto.messages import Had
from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.model.consumer import Consumer as Reader
from penstock_server.coordinator.model.open_request import OpenRequest

if TYPE_CHECKING:
    from tests.simulation.simulation import World

ABSURD = (0, 0, 1, 2, 3, 7, 100, 2**31 - 1, 2**53, 2**53 + 1, 2**62)


class Attacker:
    """A peer that takes random steps.

    Args:
        feed: the feed that it attacks.
        acts: the number of steps that it takes before it is gone.
        group: a group of other consumers, which it joins. It makes no credible claim that it was handed batches.
    """

    def __init__(self, world: World, feed: str, acts: int, group: str = "") -> None:
        self.acts = acts
        self._world = world
        self._dice = world.random
        self._feed = feed
        self._group = group
        self._readers: list[Reader] = []
        self._there: list[Reader] = []
        self._failed: list[Reader] = []

    def act(self) -> None:
        """Take one step."""
        self.acts -= 1
        if not self.acts:
            for reader in (*self._there, *self._failed):
                self._world.handle(on.Lost(reader.number, self._handed(reader)))
            return
        what = self._dice.choice((self._open, self._say, self._say, self._say, self._go))
        what()

    def _open(self) -> None:
        coordinator = self._world.coordinator
        before, reserved = set(coordinator.streams), coordinator.budget.nbytes_reserved
        try:
            reader = self._world.ask(self._feed, self._ask())
        except PenstockError:
            assert set(coordinator.streams) <= before, "a refused session has a stream"
            assert coordinator.budget.nbytes_reserved <= reserved, "a refused session keeps memory"
            return
        if reader.stream not in before:
            self._world.forged.add(reader.stream)
        self._readers.append(reader)
        self._there.append(reader)

    def _say(self) -> None:
        if not self._there:
            return
        handle, dice = self._world.handle, self._dice
        reader = dice.choice(self._there)
        before = _state(reader)
        try:
            match dice.choice(("begin", "begin", "acknowledge", "leave", "leave", "close")):
                case "begin":
                    handle(on.Begin(reader.number, dice.choice((0, 0, 1, 2, 2**53))))
                case "acknowledge":
                    known = [*reader.out][:3] * 2  # each twice
                    released = tuple(dice.choice([*known, self._absurd()]) for _ in range(dice.choice((0, 0, 1, 2, 3))))
                    ended = dice.choice((reader.ended, reader.ends, self._absurd()))
                    handle(on.Acknowledge(reader.number, self._handed(reader), released, ended))
                case "leave":
                    handle(on.Leave(reader.number, dice.choice((reader.epoch, 0, 1)), self._handed(reader)))
                case "close":
                    handle(on.Close(reader.number, self._handed(reader)))
        except PenstockError:
            assert _state(reader) == before, "a refused message has changed something"
            self._there.remove(reader)
            self._failed.append(reader)  # its connection is still open, but its messages are ignored
            handle(on.Cut(reader.number, reader.handed))

    def _go(self) -> None:
        readers = self._dice.choice((self._there, self._failed))
        if readers:
            reader = readers.pop(self._dice.randrange(len(readers)))
            self._world.handle(on.Lost(reader.number, self._handed(reader)))

    def _handed(self, reader: Reader) -> int:
        """Return the number of slabs that it claims were handed to it."""
        if self._group:
            return self._dice.choice((reader.handed, reader.sent + 1, 2**62))
        return self._dice.choice((reader.handed, reader.sent, reader.sent + 1, self._absurd()))

    def _absurd(self) -> int:
        return self._dice.choice(ABSURD)

    def _ask(self) -> OpenRequest:
        dice = self._dice
        shared: dict[str, Any] = {}
        if self._group:
            batches = dice.choice((1, 1, 1, 2**16))
            had = tuple(Had(0, dice.randint(-1, 3), self._absurd(), batches) for _ in range(2))
            shared = {"group": self._group, "had": had}
        elif dice.random() < 0.4:
            shared = {"world_size": dice.choice((1, 2, 3, 60_000)), "rank": dice.choice((0, 1, 2, 2**16 - 1))}
        return OpenRequest(
            credit=dice.randint(1, 8),
            credit_bytes=self._absurd(),
            quota=dice.randint(0, 3),
            position=self._position() if dice.random() < 0.5 else None,
            again=dice.random() < 0.2,
            pad=dice.random() < 0.5,
            identity=dice.choice((b"", b"a" * 16)),
            **shared,
        )

    def _position(self) -> Position:
        """Return a forged position, decoded. Raise ProtocolError if the decoder refuses a number in it."""
        dice = self._dice
        few = dice.random() < 0.7  # absurd numbers
        info = self._world.coordinator.feeds[self._feed].info

        def number() -> int:
            return dice.randint(0, 3) if few and dice.random() < 0.8 else self._absurd()

        def lane() -> int:
            return min(number(), 2**31 - 1)

        def record() -> bytes:
            return dice.choice((b"", dice.randint(0, 3).to_bytes(8), dice.randbytes(8), dice.randbytes(5)))

        forged = {
            "feed": info,
            "epoch": dice.choice((0, 0, 1, 2**53)),
            "batches": number(),
            "rows": number(),
            "digest": dice.choice((b"", bytes(32))),
            "places": [
                (lane(), dice.choice((number(), number(), 2**62)), record(), dice.choice((b"", record())))
                for _ in range(dice.randint(0, 3))
            ],
            "ended": [(lane(), number(), number(), record()) for _ in range(dice.randint(0, 2))],
            "merged": number(),
            "skip": number(),
        }
        return unpack(msgspec.msgpack.encode(forged))


def _state(reader: Reader) -> tuple[object, ...]:
    """Return everything about the reader that its own messages can change."""
    sent = (reader.sent, reader.handed, reader.ends, reader.ended, reader.under_way, tuple(reader.out))
    epochs = (reader.epoch, reader.reading, reader.begun, reader.gone)
    held = tuple(lease.holders for lease in reader.out.values())
    return *sent, *epochs, held
