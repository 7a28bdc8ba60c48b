"""What a consumer asks for when it opens its stream."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_proto.messages import Had
from penstock_proto.position import Position


@dataclass(frozen=True, slots=True)
class Ask:
    """See the file's head.

    Attributes:
        credit, credit_bytes: how many slabs and bytes may be under way to it; one slab is always allowed.
        quota: how many slabs it may hold under tensors; 0 says that slots are free when their slabs are handed (the
            consumer has bytes of its own).
        position: where it begins; None for epoch 0.
        again: whether it read this stream before and was cut off there.
        group, rank, world_size: which rank of which group it is; world_size 0: none. A group alone shares a stream;
            neither: the stream is its own.
        pad: as a rank: whether the last round of an epoch is filled up.
        identity: the same whenever the client comes again.
        had: in a group: the last slabs that it was handed.
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
