"""Grants: which turn gets the next slot. Slots are granted in stream order, and one is kept for the head.

The head is the next turn in the order. A merged batch becomes known late but may belong early, so it can become the
head when turns after it already have slots. It then gets the slot that was kept, and the stream cannot stall. It gets
one even if production holds more slots than it may by now, because slots became larger: the turns after the head cannot
leave the order before it. The memory of older slots is budgeted separately (`memory.regrown`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..order.epoch import Epoch
from ..order.order import EpochOrder
from .production import Production


class Granting:
    """Asks for slots for one stream, as many as production may hold.

    Args:
        epochs: the stream's open epochs.
        production: makes the turns.
        exact: whether the order is exact. (In fast order any turn that is ready is the head.)
    """

    def __init__(self, epochs: Sequence[Epoch], production: Production, *, exact: bool) -> None:
        self._pool = production.feed.info.pool
        self._epochs = epochs
        self._production = production
        self._turns = production.turns
        self._exact = exact

    def grant(self, slots: int) -> None:
        """Grant slots to the next turns. Production may hold `slots` slots in all."""
        turns = self._turns
        for epoch in self._epochs:
            order = epoch.order
            if order is None:
                return
            while order.ungranted or (order.more and not epoch.failing):
                spare = slots - turns.held
                if not self._production.has_place and not self._may_take(spare, epoch, order):
                    return
                if order.ungranted:
                    turns.begin(epoch, order.ungranted.popleft())
                    continue
                if self._pool > 1 and spare <= (slots - self._pool) // 3:
                    return  # the rest is for turns of pools that are formed later (if slots are few: none)
                turn = self._production.next_visit(epoch, slots)
                if turn is None:
                    return
                self._production.begin(epoch, turn)

    def _may_take(self, spare: int, epoch: Epoch, order: EpochOrder) -> bool:
        """Whether the next grant may take one of the spare slots. It must leave one, unless it is for the head itself.

        In fast order only an epoch's last merged batches can come late: they come after its last visit.
        """
        if epoch is not self._epochs[0]:
            return spare > 1
        head = order.head
        if not self._exact or head is None:
            return spare > 0
        return spare > 1 or (
            bool(order.ungranted) and head is order.ungranted[0]
        )  # a merged batch that is next in the stream gets a slot even if none is spare
