"""The state of a connection as plain JSON: a position, and how many batches were consumed before it."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock_proto import StateMismatch
from penstock_proto.messages import FeedInfo
from penstock_proto.position import Position, differences

VERSION = 2
"""It changes with the form, and with the order of samples in streams, in which a place would be another one."""
_KEYS = {"penstock", "consumed", "position"}


def dump(position: Position, consumed: int) -> dict[str, Any]:
    """The state as what `json.dumps` takes."""
    return {"penstock": VERSION, "consumed": consumed, "position": msgspec.to_builtins(position)}


def load(state: object) -> tuple[Position, int]:
    """What `dump` was given.

    Raises:
        ValueError: it was not made by `dump`, or by another version; the message says where it is wrong.
    """
    if not isinstance(state, dict) or "penstock" not in state:
        raise ValueError(
            f"this is no state of a Penstock connection, which is a dict with {sorted(_KEYS)}: {state!r:.80}"
        )
    if state["penstock"] != VERSION:
        raise ValueError(f"the state has version {state['penstock']!r:.40}, and this Penstock reads version {VERSION}")
    if state.keys() != _KEYS:
        raise ValueError(f"a state has the keys {sorted(_KEYS)}; this one has {sorted(map(str, state))!r:.200}")
    consumed = state["consumed"]
    if type(consumed) is not int or not 0 <= consumed <= 2**62:
        raise ValueError(f"the state's `consumed` is {consumed!r:.40}, and not a number of batches")
    try:
        position = msgspec.convert(state["position"], Position)
    except (msgspec.ValidationError, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"the state's position is damaged: {error}") from None
    return position, consumed


def for_feed(position: Position, info: FeedInfo, made: str) -> Position:
    """The position in the feed that `info` describes.

    Args:
        position: made with a feed that must decide the same stream.
        info: what the daemon serves now.
        made: where the position comes from.

    Raises:
        StateMismatch: the feeds differ; the message names all that does, both sides of it.
    """
    found = "; ".join(differences(position.feed, info))
    if found:
        raise StateMismatch(
            f"{made} another feed than the one that is served now: {found}. A stream can only go on with the feed that "
            "it began with",
            feed=info.name,
        )
    return msgspec.structs.replace(position, feed=info)


def is_start(position: Position) -> bool:
    """Whether it is where every stream begins."""
    return not (position.epoch or position.batches or position.skip or position.ended)
