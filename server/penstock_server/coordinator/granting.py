"""Grants: which turn gets the next slot. Slots are granted in stream order, and one is kept for the head.

The head is the turn that stands next in the order. A merged batch becomes known late but may belong early, so it can
become the head after turns behind it were granted. The slot that was kept is then there for it, and the stream cannot
come to a stop. If production may hold fewer slots since then, because slots became larger, the head gets one all the
same: the turns behind it cannot leave before it. The memory of older slots is budgeted apart (`memory.regrown`).
"""

from __future__ import annotations

from collections.abc import Sequence

from .epoch import Epoch
from .order import EpochOrder
from .production import Production


class Granting:
    """See the file's head.

    Args:
        epochs: the stream's open epochs.
        production: what makes the turns.
        exact: whether the order is exact. (In fast order whatever is ready is the head.)
    """

    def __init__(self, epochs: Sequence[Epoch], production: Production, *, exact: bool) -> None:
        self._pool = production.feed.info.pool
        self._epochs = epochs
        self._production = production
        self._turns = production.turns
        self._exact = exact

    def grant(self, slots: int) -> None:
        """Grant turns their slots, as far as production may hold slots."""
        turns = self._turns
        for epoch in self._epochs:
            order = epoch.order
            if order is None:
                return
            while order.ungranted or (order.more and not epoch.failing):
                spare = slots - turns.held
                if spare <= self._kept_for_head(epoch, order) and not self._is_head(epoch, order):
                    return
                if not order.ungranted and spare <= self._kept_for_pools(slots):
                    return
                if order.ungranted:
                    turns.begin(epoch, order.ungranted.popleft())
                else:
                    turn = self._production.next_visit(epoch, slots)
                    if turn is None:
                        return
                    turns.begin(epoch, turn)

    def _kept_for_head(self, epoch: Epoch, order: EpochOrder) -> int:
        """How many slots the next grant must leave: one, unless it is for the head itself.

        In fast order only what is left over of an epoch can come late: it stands behind the epoch's last visit.
        """
        if epoch is not self._epochs[0]:
            return 1
        if not self._exact:
            return 0
        return int(bool(order.window))

    def _kept_for_pools(self, slots: int) -> int:
        """How many slots visits must leave to the turns of pools that are formed later. None where slots are few."""
        return (slots - self._pool) // 3 if self._pool > 1 else 0

    def _is_head(self, epoch: Epoch, order: EpochOrder) -> bool:
        """Whether the next grant is for a merged batch that stands next in the stream."""
        return (
            self._exact
            and epoch is self._epochs[0]
            and bool(order.ungranted)
            and next(iter(order.window)) is order.ungranted[0]
        )
