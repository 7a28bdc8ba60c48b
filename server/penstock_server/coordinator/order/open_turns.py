"""The turns of a stream that are in production: from the grant of a slot until the turn has left the order.

A turn is *open* from that grant until no run fills it, now or later. So an abandoned turn is still open, although it
has left the order; a complete turn is not, although it has not. production.py decides which run fills a turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from penstock_proto import PenstockError

from ..model.leases import Lease, Leases
from ..model.stripe import Stripe
from ..model.turn import ABANDONED, COMPLETE, DONE, FILLING, IDLE, PLANNED, WAITING, Turn, TurnState
from ..model.workers import VACANT
from .epoch import Epoch
from .lane import Filler


class OpenTurns:
    """The open turns of one stream, each with the slot that production holds for it.

    Args:
        slots: the stream's slots.

    Attributes:
        by_ticket: the open turns, with their epochs.
        sharing: the visits that share a slot which is not found yet, with their epochs, by the ticket of the slot.
        held: how many slots production holds: those of turns and stripes that are open, or wait until the order comes
            to them.
        room_left: how many further batches fit into the slot of the latest range.
    """

    def __init__(self, slots: Leases) -> None:
        self.by_ticket: dict[int, tuple[Epoch, Turn]] = {}
        self.sharing: dict[int, list[tuple[Epoch, Turn]]] = {}
        self.held = 0
        self.room_left = 0
        self._last: Lease | None = None
        """The slot of the latest range, if production still holds it."""
        self._visits: Counter[int] = Counter()
        """How many visits of each shared slot production still has, by the ticket of the slot."""
        self._slots = slots

    def begin(self, epoch: Epoch, turn: Turn) -> None:
        """Ask for a slot for the turn. Production has the turn filled when the slot is found."""
        turn.become(WAITING)
        turn.slot = self._slots.acquire()
        turn.ticket = turn.slot.ticket
        self.held += 1
        self._open(epoch, turn)

    def begin_stripe(self, epoch: Epoch, stripe: Stripe) -> None:
        """Ask for a slot for the stripe. Its visits are tickets of their own."""
        stripe.slot = self._acquire_shared()
        for visit in stripe.visits:
            self._share(epoch, visit, stripe.slot)

    def begin_range(self, epoch: Epoch, turn: Turn, room: int) -> bool:
        """Have a range made in the slot of the range before it. If that slot is full, ask for one, which has room for
        `room` batches. Return whether the slot was found already."""
        if not self.room_left or self._last is None:
            self._last, self.room_left = self._acquire_shared(), room
        turn.place = room - self.room_left
        self.room_left -= turn.batches
        self._share(epoch, turn, self._last)
        return self._last.ticket not in self.sharing

    def begin_rest(self, epoch: Epoch, rest: Turn, turn: Turn) -> None:
        """Have a part of the range `turn`, which was cut, made in the places that the range had for it."""
        rest.place = turn.place + rest.index - turn.index
        self._share(epoch, rest, turn.slot)
        rest.become(IDLE)

    def _acquire_shared(self) -> Lease:
        """Ask for a slot that several visits share."""
        slot = self._slots.acquire()
        self.held += 1
        self.sharing[slot.ticket] = []
        return slot

    def _share(self, epoch: Epoch, visit: Turn, slot: Lease) -> None:
        """Let the visit have a part of the slot, and a ticket of its own."""
        visit.become(WAITING)
        visit.slot, visit.ticket = slot, self._slots.new_ticket()
        self._visits[slot.ticket] += 1
        if slot.ticket in self.sharing:
            self.sharing[slot.ticket].append((epoch, visit))
        self._open(epoch, visit)

    def _open(self, epoch: Epoch, turn: Turn) -> None:
        self.by_ticket[turn.ticket] = epoch, turn
        if turn.lane >= 0:
            if epoch.lane_sets is not None:
                epoch.lane_sets.on_turn_begun(turn.lane_set)
            epoch.lane(turn.key).turns.append(turn)

    def on_left_order(self, epoch: Epoch, turn: Turn) -> None:
        """Note that the turn has left the order: all of it was delivered, all of its pool is mixed, or its epoch is
        closed."""
        if turn.left_order:
            return
        if turn.state is FILLING:
            self.take_from(turn, lambda filler: filler[0] == VACANT)  # nobody will answer for it
        if turn.state is FILLING:
            turn.become(ABANDONED)
        elif turn.state is COMPLETE:
            self._remove(turn)
        elif turn.state is not PLANNED:
            self.complete(epoch, turn, DONE)

    def complete(self, epoch: Epoch, turn: Turn, state: TurnState) -> None:
        """Complete the turn: no run fills its slot any longer. `state` is DONE if the turn has left the order, else
        COMPLETE."""
        del self.by_ticket[turn.ticket]
        if turn.lane >= 0:
            if epoch.lane_sets is not None:
                epoch.lane_sets.on_turn_ended(turn.lane_set)
            epoch.lane(turn.key).turns.remove(turn)
        if state is DONE:
            self._remove(turn)
        else:
            turn.become(state)
            if epoch.order is not None:
                epoch.order.on_completed(turn)

    def fail(self, epoch: Epoch, turn: Turn, error: PenstockError) -> None:
        """Fail the turn: the stream fails with this error when the turn is next."""
        turn.error = error
        epoch.failing = True
        if not turn.left_order and epoch.order is not None:
            epoch.order.on_ready(turn)

    def take_from(self, turn: Turn, gone: Callable[[Filler], bool]) -> None:
        """Remove the fillers of the turn that are gone."""
        turn.fillers = [filler for filler in turn.fillers if not gone(filler)]
        if not turn.fillers and turn.state is FILLING:
            turn.become(IDLE)

    def complete_abandoned(self, gone: Callable[[Filler], bool]) -> None:
        """Complete the abandoned turns whose last filler is gone."""
        for epoch, turn in list(self.by_ticket.values()):
            if turn.left_order and any(map(gone, turn.fillers)):
                self.take_from(turn, gone)
                if not turn.fillers:
                    self.complete(epoch, turn, DONE)

    def merged(self, epoch: Epoch) -> Iterator[Turn]:
        """Iterate over the merged batches of the epoch that are wanted and not complete."""
        for other, turn in list(self.by_ticket.values()):
            if other is epoch and turn.merged and not turn.complete and not turn.left_order:
                yield turn

    def filled_by(self, worker: int) -> bool:
        """Whether the worker fills an open turn."""
        return any(filler[0] == worker for _, turn in self.by_ticket.values() for filler in turn.fillers)

    def _remove(self, turn: Turn) -> None:
        """Remove the turn from production. Its slot is then free, unless others still hold it."""
        turn.become(DONE)
        if turn.shares:
            ticket = turn.slot.ticket
            self._visits[ticket] -= 1
            if self._visits[ticket]:
                return
            del self._visits[ticket]
            self.sharing.pop(ticket, None)
            if turn.slot is self._last:
                self._last, self.room_left = None, 0
        self.held -= 1
        self._slots.release(turn.slot)
