"""A consumer of the simulation that is the client's own state machine: `penstock._state.consumer_state.ConsumerState`.

It acts at any time, so also between the loss of a connection and the reply of the next one. A reconnection takes three
steps, with time between them for everything else: it computes its position, the daemon opens the session, the reply
arrives. A failure of an epoch that it left before makes it connect again, as the client does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from msgspec.structs import replace as replace_struct

from penstock._state.consumer_state import ConsumerState, Received, Refused
from penstock._state.state_dict import is_start
from penstock_proto import ConnectionLost, DaemonStopped, MemoryBound, ProtocolError, StreamClosed
from penstock_proto import messages as m
from penstock_proto.batches.layout import SlotLayout
from penstock_proto.batches.position import Position, pack, unpack
from penstock_server.coordinator.model import commands as do
from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.model.consumer import Consumer as Reader
from penstock_server.coordinator.model.open_request import OpenRequest
from tests.simulation.simulation import Consumer, Event, Slab, World, hold

LAYOUT = SlotLayout((), 1, 64)


class Client(Consumer):
    """The state machine with a random reader, over a connection that breaks.

    Attributes:
        began: the position at which it began; None: at epoch 0.

    Args:
        leaves: how it reads each epoch: after how many slabs it leaves it, or None to read all of it. A negative number
            means that it begins the next epoch, after so many slabs, without leaving this one first.
        impatient: leave an epoch, with this probability, while there is no connection.
        breaks: how often its connection breaks at an odd moment: when something has just come, or was just said.
    """

    def __init__(
        self,
        world: World,
        reader: Reader,
        reads: Sequence[tuple[int, int | None]],
        *,
        leaves: Sequence[int | None],
        impatient: float = 0.0,
        breaks: int = 0,
        ask: OpenRequest,
        position: Position | None = None,
        **habits: Any,
    ) -> None:
        super().__init__(world, reader, reads, ask=ask, position=position, **habits)
        shared_from = reader.epoch if self._shares else None
        info = self.stream.feed.info
        self.state = ConsumerState(info, position, 0, shared_from, ranks=ask.world_size or 1)
        self.began = position
        self._leaves = list(leaves)
        self._impatient = impatient
        self._breaks = breaks
        self._there: dict[int, Slab] = {}
        """The slabs that came and were neither handed over nor void."""
        self._place: Position | None = None
        """The position at which it will ask, or has asked, for another session."""
        self._awaiting = False
        """Whether it waits for the reply of another session."""

    def options(self) -> list[Event]:
        """Return the steps that are possible now."""
        if self.gone:
            return []
        state = self.state
        away = self.lost or self._awaiting
        options: list[Event] = []
        if self._epoch is not None:
            due = self._leave_after is not None and self._handed_here >= abs(self._leave_after)
            if due or (away and self._world.random.random() < self._impatient):
                early = due and self._leave_after is not None and self._leave_after < 0 and self._leaves
                options.append(self._begin if early else self._leave)
            elif state.waiting:
                options += [self._hand] if self._there[state.waiting[0][0].slab.seq].is_there else []
            elif state._end is not None or state._failure is not None or state.error is not None:
                options.append(self._hand)
        elif not self.closed:
            options.append(self._begin if self._leaves and state.error is None else self._close)
        if self.lost:
            options.append(self._compute if self._place is None else self._request)
        elif not self._awaiting:
            if state.passed_by is not None and not self.closed:
                options.append(self.cut)
            if (state.handed, state._ended) != state._acked or state._released:
                options.append(self._acknowledge)
            if not self._local and self._unfetched:
                options.append(self._fetch)
            if self._aliased and (not self._hoards or self.closed):
                options.append(self._release)
            if self.closed and not (self._local and (self._aliased or state._released)):
                options.append(self.vanish)
        return options

    # messages from the daemon

    def slab(self, slab: Slab) -> None:
        self._there[slab.seq] = slab
        self.state.queue(Received(slab.message, LAYOUT, cast(Any, slab)))
        self._drop_void()

    def hear(self, message: do.Said) -> None:
        match message:
            case m.Failed():
                error = message.error.error()
                if isinstance(error, ConnectionLost | DaemonStopped):
                    self.cut()
                else:
                    self.state.fail(error)
            case m.Opened():
                self._quota = message.quota
                if self._awaiting:
                    self._awaiting, place, self._place = False, self._place, None
                    assert place is not None
                    self._send(self.state.go_on_at(place, message.epoch))
                    if self.closed:
                        self._say(on.Close(self.number, self.state.given))
            case _:
                self.state.apply(message)
        if isinstance(message, m.Failed | m.End):
            self._may_break()

    # actions

    def _begin(self) -> None:
        """Begin the next epoch, perhaps without leaving the one before."""
        self._leave_unread()
        messages = self.state.begin()
        self._epoch, self._leave_after = self.state.epoch, self._leaves.pop(0)
        self._handed_here = self._last_batches = 0
        self.read[self._epoch] = []
        self._drop_void()
        self._send(messages)
        self._may_break()

    def _hand(self) -> None:
        assert self._epoch is not None
        try:
            item = self.state.take(self._epoch)
        except Refused as refused:
            self.failures.append(refused.error)
            self._epoch = None
            return
        if isinstance(item, Received):
            slab = self._there.pop(item.slab.seq)
            slab.verify()
            self.read[slab.epoch] += slab.batches.values()
            self._last_batches = len(slab.batches)
            self._handed_here += 1
            if self._local and len(self._aliased) < self._quota:
                self._aliased.append(slab)
            else:
                self._let_go(slab)
        elif item is not None:
            self.ended[self._epoch] = item
            self._epoch = None

    def _leave(self) -> None:
        assert self._epoch is not None
        self._leave_unread()
        messages, self._epoch = self.state.leave(self._epoch), None
        self._drop_void()
        self._send(messages)
        self._may_break()

    def _close(self) -> None:
        self.closed = True
        self.state.close(StreamClosed("closed"))
        self._drop_void()
        if self.lost:
            self.gone = True
        elif not self._awaiting:
            self._say(on.Close(self.number, self.state.given))

    def _acknowledge(self) -> None:
        ack = self.state.ack()
        assert ack is not None
        self._say(on.Acknowledge(self.number, ack.handed, ack.released, ack.ended))

    # another connection

    def _may_break(self) -> None:
        if self._breaks and not self.lost and self._world.random.random() < 0.5:
            self._breaks -= 1
            self.cut()

    def cut(self) -> None:
        self.state.on_disconnected()
        self._handed = self._given = self.state.handed_before
        self._there.clear()
        self._place, self._awaiting, self.lost = None, False, True
        self._forget()
        if self.closed:
            self.gone = True

    def _compute(self) -> None:
        self._place = self.state.place()

    def _request(self) -> None:
        """Ask for another session, which ends the old one. Begin again if there is no memory for it."""
        assert self._place is not None
        if self._ask.identity and self.number in self._world.coordinator.consumers:
            self._world.handle(on.Cut(self.number, self.state.handed_before))
        begins = self._shares or is_start(self._place)
        position = None if begins else unpack(pack(replace_struct(self._place, feed=self.stream.feed.info)))
        ask = replace(self._ask, position=position, again=True, had=tuple(self.state.untold))
        try:
            reader = self._world.ask(self.stream.feed.name, ask)
        except (MemoryBound, ProtocolError):
            self._place = None
            return
        del self._world.consumers[self.number]
        self.reader, self.number = reader, reader.number
        self.stream = self._world.coordinator.streams[reader.stream]
        self._world.consumers[self.number] = self
        self.lost, self._awaiting = False, True
        self._quota = reader.share.quota

    def _send(self, messages: Sequence[m.Begin | m.Leave]) -> None:
        """Send messages, unless there is no connection: the next one begins from the state."""
        if self.lost or self._awaiting:
            return
        for message in messages:
            if isinstance(message, m.Begin):
                self._say(on.Begin(self.number, message.epoch))
            else:
                self._say(on.Leave(self.number, message.epoch, message.handed))

    def _drop_void(self) -> None:
        queued = {received.slab.seq for received, _ in self.state.waiting}
        for seq in [seq for seq in self._there if seq not in queued]:
            hold(seq < self.state.handed, f"slab {seq} is neither handed over nor void")
            self._let_go(self._there.pop(seq))

    def _let_go(self, slab: Slab) -> None:
        slab.slot.readers.remove((self, slab.seq))
        if self._local:
            self.state.release(slab.seq)

    @property
    def _unfetched(self) -> list[Slab]:
        unfetched = [slab for slab in self._there.values() if not slab.fetched]
        return [slab for slab in unfetched if any(not at.lost for at in map(slab.slot.kept.get, slab.batches) if at)]
