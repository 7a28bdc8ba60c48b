"""Draws some items at random from a stream of any length."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Reservoir(Generic[Item]):
    """Keeps `most` items of a stream, each with the same probability (reservoir sampling).

    The draw depends only on the number of items, so two reservoirs of the same size keep items at the same places of
    two streams. The draw is random because taking every n-th item would miss a part of periodic data.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._random = random.Random(0)
        self._items: dict[int, Item] = {}
        self._places: list[int] = []
        self._offered = 0

    def offer(self, make: Callable[[], Item]) -> None:
        """Offer the next item of the stream. `make` is called to make the item, but only if it is kept."""
        place = self._offered
        self._offered += 1
        if place < self._most:
            self._places.append(place)
        else:
            slot = self._random.randrange(self._offered)
            if slot >= self._most:
                return
            del self._items[self._places[slot]]
            self._places[slot] = place
        self._items[place] = make()

    def kept(self) -> list[Item]:
        """Return the items that were drawn, in the order of the stream."""
        return [self._items[place] for place in sorted(self._places)]
