"""Slots go back to the system as soon as nobody needs them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.model.commands import FindSlot
from penstock_server.shared_memory.arena import Arena
from penstock_server.shared_memory.slot_assignment import SlotAssignment

uvloop.new_event_loop().close()  # the first loop opens a pipe that stays
TICKET = 1
NOTHING: Any = SimpleNamespace(nbytes_reserved=0, slots_reserved=0)


@pytest.mark.parametrize("sizes", [[4096], [4096, 40960]], ids=["its first slot", "a larger one"])
def test_a_ticket_that_is_freed_while_it_waits_for_a_slot_leaves_none_behind(sizes: list[int]) -> None:
    async def play() -> tuple[int, list[on.Event]]:
        found: list[on.Event] = []
        arena = Arena()
        slots = SlotAssignment(arena, NOTHING, found.append, [])
        for nbytes in sizes[:-1]:
            slots.request(FindSlot(TICKET, nbytes))
            while not found:
                await asyncio.sleep(0.001)
        slots.request(FindSlot(TICKET, sizes[-1]))
        await asyncio.sleep(0)  # its slot is on its way now
        slots.free(TICKET)
        while slots._waiting:
            await asyncio.sleep(0.001)
        await slots.stop()
        return arena.nbytes, found

    nbytes, found = uvloop.run(play())
    assert nbytes == 0
    assert found == [on.SlotFound(TICKET)] * (len(sizes) - 1)


def test_a_ticket_may_be_freed_as_soon_as_its_slot_is_found() -> None:
    async def play() -> int:
        arena = Arena()

        def tell(event: on.Event) -> None:
            assert isinstance(event, on.SlotFound)
            slots.free(event.ticket)

        slots = SlotAssignment(arena, NOTHING, tell, [])
        for ticket in range(5):  # the first gets a new slot, the others reuse it
            slots.request(FindSlot(ticket, 4096))
        (serving,) = slots._tasks
        await serving
        slots.trim()
        return arena.nbytes

    assert uvloop.run(play()) == 0
