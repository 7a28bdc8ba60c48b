"""The turns of a stream that are in production: from the grant of a slot until the turn has left the order.

A turn is *open* from that grant until no run fills it, now or later. So an abandoned turn is still open, although it
has left the order; a complete turn is not, although it has not. production.py decides which run fills a turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from penstock_proto import PenstockError

from ..model.leases import Leases
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
        stripes: the stripes whose slot is not found yet, with their epochs, by the ticket of the slot.
        held: how many slots production holds: those of turns and stripes that are open, or wait until the order comes
            to them.
    """

    def __init__(self, slots: Leases) -> None:
        self.by_ticket: dict[int, tuple[Epoch, Turn]] = {}
        self.stripes: dict[int, tuple[Epoch, Stripe]] = {}
        self.held = 0
        self._sharing: Counter[int] = Counter()
        """How many visits of each stripe production still has, by the ticket of the slot."""
        self._slots = slots

    def begin(self, epoch: Epoch, turn: Turn) -> None:
        """Ask for a slot for the turn. Production has the turn filled when the slot is found."""
        turn.become(WAITING)
        turn.slot = self._slots.acquire()
        turn.ticket = turn.slot.ticket
        self.by_ticket[turn.ticket] = epoch, turn
        self.held += 1
        if turn.lane >= 0:
            if epoch.lane_sets is not None:
                epoch.lane_sets.on_turn_begun(turn.lane_set)
            epoch.lane(turn.key).turns.append(turn)

    def begin_stripe(self, epoch: Epoch, stripe: Stripe) -> None:
        """Ask for a slot for the stripe. Its visits are tickets of their own."""
        stripe.slot = self._slots.acquire()
        self.stripes[stripe.slot.ticket] = epoch, stripe
        self.held += 1
        self._sharing[stripe.slot.ticket] = len(stripe.visits)
        for visit in stripe.visits:
            visit.become(WAITING)
            visit.slot, visit.ticket = stripe.slot, self._slots.new_ticket()
            self.by_ticket[visit.ticket] = epoch, visit
            epoch.lane(visit.key).turns.append(visit)

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
        if turn.striped:
            ticket = turn.slot.ticket
            self._sharing[ticket] -= 1
            if self._sharing[ticket]:
                return
            del self._sharing[ticket]
            self.stripes.pop(ticket, None)
        self.held -= 1
        self._slots.release(turn.slot)
