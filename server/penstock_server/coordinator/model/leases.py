"""The slots that a stream has leased: who holds each of them, and when it is free. No other code frees a slot.

Each lease has a ticket, the name by which the daemon knows the slot. (shared_memory/slots.py knows only the memfd of
each ticket.) A lease may have several holders: production until the turn has left the order and no run writes to the
slot; delivery for a batch that waits for the rest of its round, that a member of a group returned, or that a job which
is behind still needs; a consumer for each slab that it was sent; a copy for its slot and the original's; remaking until
the slot is filled again. The slot is free when the last holder has released it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from msgspec import Struct

from . import commands as do


class Recipe(Struct, frozen=True):
    """How a slot's batches are made: those from number `index` of a lane on, from the restart record before them."""

    epoch: int
    lane: int
    splits: int
    index: int
    record: bytes


@dataclass(slots=True, eq=False)
class Lease:
    """The lease of one slot.

    Attributes:
        ticket: the name by which the daemon knows the slot.
        nbytes: the slot's size in bytes.
        holders: how many hold it; 0 once it was freed.
        recipe: how its first batches are made again, if their bytes may have stayed at the host that made them.
        made: how many batches these are.
    """

    ticket: int
    nbytes: int
    holders: int = 1
    recipe: Recipe | None = None
    made: int = 0


NO_SLOT = Lease(-1, 0, 0)
"""The lease of a turn that has no slot yet."""


class Leases:
    """The leases of one stream.

    Args:
        ids: numbers for new tickets.
        slot_nbytes: bytes of a new slot.
        out: where commands go.

    Attributes:
        nbytes: bytes of all slots.
        slot_nbytes: bytes of a new slot.
    """

    def __init__(self, ids: Iterator[int], slot_nbytes: int, out: Callable[[do.Command], None]) -> None:
        self.nbytes = 0
        self.slot_nbytes = slot_nbytes
        self._ids = ids
        self._do = out
        self._leases: dict[int, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._leases

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def find(self, ticket: int) -> Lease | None:
        """Return the lease with this ticket; None if it was freed."""
        return self._leases.get(ticket)

    def resize(self, slot_nbytes: int) -> None:
        """Give new slots this size in bytes from now on."""
        self.slot_nbytes = slot_nbytes

    def acquire(self) -> Lease:
        """Lease a slot for one holder. The daemon finds it later (`SlotFound`)."""
        lease = Lease(next(self._ids), self.slot_nbytes)
        self._leases[lease.ticket] = lease
        self.nbytes += lease.nbytes
        self._do(do.FindSlot(lease.ticket, lease.nbytes))
        return lease

    def new_ticket(self) -> int:
        """Return the number of a ticket without a slot of its own: one of several that fill the same slot."""
        return next(self._ids)

    def enlarge(self, lease: Lease) -> None:
        """Exchange the slot for a new one of the current size. The daemon finds it later (`SlotFound`)."""
        self.nbytes += self.slot_nbytes - lease.nbytes
        lease.nbytes = self.slot_nbytes
        self._do(do.FindSlot(lease.ticket, lease.nbytes))

    def hold(self, lease: Lease) -> None:
        """Add a holder."""
        assert lease.holders > 0, f"the slot of ticket {lease.ticket} was freed"
        lease.holders += 1

    def release(self, lease: Lease) -> None:
        """Remove a holder, and free the slot if it was the last."""
        assert lease.holders > 0, f"the slot of ticket {lease.ticket} was freed"
        lease.holders -= 1
        if not lease.holders:
            self._free(lease)

    def leave_to(self, held: Iterable[Lease], never: Collection[int]) -> None:
        """Leave the leases in `held` to their consumers, who hold each as often as it occurs there. Free all others,
        except those whose tickets are in `never`, which are never freed."""
        consumers = Counter(lease.ticket for lease in held)
        for lease in list(self._leases.values()):
            lease.holders = consumers[lease.ticket] + (lease.ticket in never)
            if not lease.holders:
                self._free(lease)

    def _free(self, lease: Lease) -> None:
        del self._leases[lease.ticket]
        self.nbytes -= lease.nbytes
        self._do(do.Free(lease.ticket))
