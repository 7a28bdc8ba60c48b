"""The structure of samples that are made of named columns: a name, or a tuple or dict of them, nested as you like."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from penstock_proto.value_text import shown

from .names_on_disk import on_disk_as


@on_disk_as("penstock_server.sources.structure.Columns")
class Columns:
    """Names of columns in the structure of a sample.

    Args:
        leaves: a str, or a tuple or dict of such structures: `("images", "labels")`, `{"x": "images"}`.
        what: what a name stands for, such as "dataset", for messages.

    Attributes:
        names: all names, in order.

    Raises:
        TypeError: `leaves` has another form.
        ValueError: it has no names.
    """

    def __init__(self, leaves: Any, what: str) -> None:
        self._leaves = _copied(leaves, what)
        self.names: list[str] = list(_names(self._leaves))
        if not self.names:
            raise ValueError(f"leaves is empty: name at least one {what}")

    def samples(self, columns: Iterable[Iterable[Any]]) -> Iterator[Any]:
        """Yield one sample for each row. `columns` has one iterable for each of `names`, all of one length."""
        rows, make = zip(*columns, strict=True), self.maker()
        return rows if make is tuple else map(make, rows)

    def maker(self) -> Callable[[Sequence[Any]], Any]:
        """Return a function that makes a sample of a row: of the values for `names`."""
        leaves = self._leaves
        if isinstance(leaves, str):
            return itemgetter(0)
        if isinstance(leaves, tuple) and all(isinstance(item, str) for item in leaves):
            return tuple
        if isinstance(leaves, dict) and all(isinstance(item, str) for item in leaves.values()):
            keys = tuple(leaves)
            return lambda row: dict(zip(keys, row, strict=True))
        return lambda row: _built(leaves, iter(row))


def _copied(leaves: Any, what: str) -> Any:
    if isinstance(leaves, str):
        return leaves
    if isinstance(leaves, tuple):
        return tuple(_copied(item, what) for item in leaves)
    if isinstance(leaves, Mapping) and all(isinstance(key, str) for key in leaves):
        return {key: _copied(item, what) for key, item in leaves.items()}
    raise TypeError(
        f"leaves must be the name of a {what}, or a tuple or a dict of names, such as "
        f'{{"image": "images", "label": "labels"}}, got {shown(leaves)}'
    )


def _names(leaves: Any) -> Iterator[str]:
    if isinstance(leaves, str):
        yield leaves
    else:
        for item in leaves.values() if isinstance(leaves, dict) else leaves:
            yield from _names(item)


def _built(leaves: Any, row: Iterator[Any]) -> Any:
    if isinstance(leaves, str):
        return next(row)
    if isinstance(leaves, tuple):
        return tuple(_built(item, row) for item in leaves)
    return {key: _built(item, row) for key, item in leaves.items()}
