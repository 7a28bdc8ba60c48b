"""The state of a connection as plain JSON: a position, and the number of batches consumed before it.

PROTOCOL.md ("A state") describes the JSON for other clients.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock_proto import StateMismatch
from penstock_proto.batches.position import Position, differences
from penstock_proto.messages import FeedInfo

VERSION = 3
"""Changes with the format, and with the order of samples in streams, since an old position would mean another place."""
_KEYS = {"penstock", "consumed", "position"}


def dump(position: Position, consumed: int) -> dict[str, Any]:
    """Return the state as plain dicts and lists, for `json.dumps`."""
    return {"penstock": VERSION, "consumed": consumed, "position": msgspec.to_builtins(position)}


def load(state: object) -> tuple[Position, int]:
    """Return the arguments that `dump` was called with.

    Raises:
        ValueError: `dump` did not make the state, or another version did; the message says which part is wrong.
    """
    if not isinstance(state, dict) or "penstock" not in state:
        raise ValueError(
            f"expected the state of a Penstock connection, a dict with the keys {sorted(_KEYS)}, got {state!r:.80}"
        )
    if state["penstock"] != VERSION:
        raise ValueError(f"the state has version {state['penstock']!r:.40}, but this Penstock reads version {VERSION}")
    if state.keys() != _KEYS:
        raise ValueError(f"a state has the keys {sorted(_KEYS)}, but this one has {sorted(map(str, state))!r:.200}")
    consumed = state["consumed"]
    if type(consumed) is not int or not 0 <= consumed <= 2**62:
        raise ValueError(f"the state's `consumed` must be a number of batches, got {consumed!r:.40}")
    try:
        position = msgspec.convert(state["position"], Position)
    except (msgspec.ValidationError, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"the state's position is damaged: {error}") from None
    return position, consumed


def for_feed(position: Position, info: FeedInfo, made: str) -> Position:
    """Return the position with `info` as its feed.

    Args:
        position: made with a feed that must give the same stream.
        info: the feed that is served now.
        made: the beginning of the error message, which says where the position comes from.

    Raises:
        StateMismatch: the feeds differ; the message lists all differences, with both values.
    """
    found = "; ".join(differences(position.feed, info))
    if found:
        renamed = msgspec.structs.replace(position.feed, name=info.name)
        advice = f". If only the variable was renamed, give the Feed name={position.feed.name!r}"
        raise StateMismatch(
            f"{made} a different feed than the one that is served now: {found}. A stream can only continue with the "
            f"feed that it began with{'' if any(differences(renamed, info)) else advice}",
            feed=info.name,
        )
    return msgspec.structs.replace(position, feed=info)


def is_start(position: Position) -> bool:
    """Return whether every stream begins at this position."""
    return not (position.epoch or position.batches or position.skip or position.ended)
