"""Invariants: what must hold after every event. A bug that breaks one of them must not go unnoticed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from ..model.turn import Turn, TurnState
from ..model.workers import VACANT, Workers
from ..order.epoch import Epoch
from ..order.lane import LaneState
from .budget import Budget
from .stream import Stream


def check(budget: Budget, streams: Mapping[int, Stream], workers: Workers) -> list[str]:
    """Return the invariants that are broken, in words."""
    found = [] if budget.nbytes_reserved <= budget.memory else ["more memory is reserved than allowed"]
    for stream in streams.values():
        found += [f"stream {stream.number}: {said}" for said in (*_stream(stream), *_staff(stream, workers))]
    return found


def _staff(stream: Stream, workers: Workers) -> Iterator[str]:
    """Check that only workers that exist have work, and only work that they may have."""
    makers = {*workers.makers, VACANT} if workers.available == [VACANT] else {*workers.makers}
    own = {*workers.own}
    for epoch in stream.epochs:
        if epoch.listing is not None and epoch.listing[0] not in own:
            yield f"epoch {epoch.number}: worker {epoch.listing[0]} is to list its splits"
        for key, lane in epoch.lanes.items():
            for run in (lane.run, lane.dropped):
                if run is not None and run[0] not in makers:
                    yield f"epoch {epoch.number}: worker {run[0]} is to make lane {key}"
    for worker, _ in stream.remaking.fillers:
        if worker not in makers:
            yield f"worker {worker} is to make batches again"
    for epoch, turn in stream.production.turns.by_ticket.values():
        for worker, _ in turn.fillers:
            may = own if turn.pooled or turn.transforming else makers
            if worker not in may or (turn.left_order and worker == VACANT):
                yield f"epoch {epoch.number}: worker {worker} is to fill a turn that is {turn.state.name}"


def _stream(stream: Stream) -> Iterator[str]:
    slots = stream.slots
    if slots.nbytes != sum(lease.nbytes for lease in slots):
        yield "the bytes of its slots are counted wrong"
    nbytes, _ = stream.reserved
    if slots.nbytes > nbytes:
        yield f"its slots take {slots.nbytes} bytes of {nbytes}"
    if any(lease.holders < 1 for lease in slots):
        yield "a slot that nobody holds was not freed"
    for consumer in stream.consumers:
        if any(lease.ticket not in slots for lease in consumer.out.values()):
            yield f"consumer {consumer.number} has a slab in a slot that was freed"
    for epoch in stream.epochs:
        yield from _epoch(stream, epoch)


def _epoch(stream: Stream, epoch: Epoch) -> Iterator[str]:
    makers = [(lane.run[0], lane.ended) for lane in epoch.lanes.values() if lane.run is not None]
    if not _counts(epoch.runs, [worker for worker, _ in makers]):
        yield f"epoch {epoch.number}: the lanes of workers are counted wrong"
    if not _counts(epoch.loads, [worker for worker, ended in makers if not ended]):
        yield f"epoch {epoch.number}: the lanes that have not ended are counted wrong"
    if stream.feed.plan.length is None and epoch.order is not None and epoch.loads.total() > epoch.live:
        yield f"epoch {epoch.number}: more lanes have a run than have not ended"
    for key, lane in epoch.lanes.items():
        if (lane.state is LaneState.RUNNING) != (lane.run is not None) and not lane.ended:
            yield f"epoch {epoch.number}: lane {key} is {lane.state.name} with the run {lane.run}"
        for turn in lane.turns:
            if turn.fillers and any(filler not in (lane.run, lane.dropped) for filler in turn.fillers):
                yield f"epoch {epoch.number}: a turn of lane {key} is filled by a run of another lane"
    if epoch.order is None:
        return
    tickets: set[int] = set()
    for turn in epoch.order.window:
        state, fillers = turn.state, turn.fillers
        if (state is TurnState.FILLING or state is TurnState.ABANDONED) != bool(fillers):
            yield f"epoch {epoch.number}: a turn is {state.name} with the fillers {fillers}"
        if len(fillers) > 1 and not turn.merged:
            yield f"epoch {epoch.number}: a turn of lane {turn.lane} has two writers: {fillers}"
        if state is not TurnState.PLANNED and state is not TurnState.DONE:
            if turn.ticket in tickets or turn.slot.ticket not in stream.slots:
                yield f"epoch {epoch.number}: ticket {turn.ticket} is not the turn's own"
            tickets.add(turn.ticket)
    head = epoch.order.head
    if head is not None and epoch is stream.epochs[0] and stream.feed.plan.order == "exact":
        yield from _head(epoch, head)


def _counts(counted: Counter[int], workers: list[int]) -> bool:
    """Whether `counted` counts each worker as often as it is in `workers`, and no other worker."""
    return counted.total() == len(workers) and all(counted[worker] == workers.count(worker) for worker in counted)


def _head(epoch: Epoch, head: Turn) -> Iterator[str]:
    """Check the next turn in the order: it can be delivered, or it has failed, or somebody is working towards it."""
    if head.shows or head.state is not TurnState.IDLE or head.failures:  # it may wait for another attempt
        return
    if head.pooled:
        yield f"epoch {epoch.number}: the next turn (of a pool) has its slot, and nobody copies its rows"
        return
    lanes = [epoch.lanes.get(rows.lane) for rows in head.leftovers] if head.merged else list(epoch.lanes.values())
    awaits_slot = any(turn.state is TurnState.WAITING for lane in epoch.lanes.values() for turn in lane.turns)
    if not awaits_slot and not any(lane is not None and (lane.waits or lane.busy) for lane in lanes):
        yield f"epoch {epoch.number}: the next turn has its slot, and nobody is to fill it"
