"""The request of a consumer that opens a stream."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_proto.batches.position import Position
from penstock_proto.messages import Had, Start


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What a consumer asks for.

    Attributes:
        credit, credit_bytes: how many slabs and bytes may be under way to it; one slab is always allowed.
        quota: how many slabs it may hold under tensors. 0: a slot is free as soon as its slab is handed over, because
            the consumer has its own copy of the bytes.
        position: where it begins; None for epoch 0.
        again: whether it read this stream before and was cut off.
        group, rank, world_size: it is rank `rank` of `world_size` in `group`. With a `world_size` of 0 it is not a
            rank: it shares the stream of the group or, without a group, has its own.
        pad: for a rank: whether the last round of an epoch is filled up.
        identity: stays the same when the client comes back.
        machine: the machine on which it runs; "": that of the daemon.
        had: in a group: the last slabs that it was handed.
        shares: alone: whether it may read a stream that others read, too.
        start: where it begins without a position, if there are others whose stream it can share: with the next batch
            that these are sent ("latest"), or with the next epoch that they begin ("next_epoch").
    """

    credit: int
    credit_bytes: int
    quota: int
    position: Position | None = None
    again: bool = False
    group: str = ""
    rank: int = 0
    world_size: int = 0
    pad: bool = False
    identity: bytes = b""
    had: tuple[Had, ...] = ()
    machine: str = ""
    shares: bool = False
    start: Start = "beginning"
