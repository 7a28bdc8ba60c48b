"""Takes the batches of a source apart (`Feed(rebatch=)`): the rest of the worker sees their rows as samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock_proto import SpecError
from penstock_proto.batches.inferring import as_array, as_text, infer
from penstock_proto.spec import DictSpec, Leaf, Spec, TupleSpec, leaves, unflatten

from .leaf_check import flattener


class NoRows(Exception):
    """Batch `number`, from 0, cannot be taken apart; `message` says why."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message, number)
        self.message = message
        self.number = number


class BatchRows(Iterator[Any]):
    """The rows of batches, one by one. A row is a view of its batch, and the next batch is requested only after the
    last row was used. So a generator may reuse its arrays."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._number = -1
        self._rows: Iterator[Any] = iter(())
        self._apart: Callable[[Any], Iterator[Any]] | None = None

    def __next__(self) -> Any:
        """Return the next row.

        Raises:
            NoRows: the next batch cannot be taken apart.
        """
        while True:
            for row in self._rows:
                return row
            batch = next(self._batches)
            self._number += 1
            try:
                self._apart = self._apart or _takes_apart(batch)
                self._rows = self._apart(batch)
            except SpecError as error:
                raise NoRows(error.message, self._number) from None

    def close(self) -> None:
        """End the generator of the batches."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


def _takes_apart(batch: Any) -> Callable[[Any], Iterator[Any]]:
    """Return a function that takes batches of the structure of this one apart.

    Raises:
        SpecError: a leaf cannot be served, or has no rows.
    """
    spec = infer(batch, _in_another_generator)
    paths = [path for path, _ in leaves(spec)]
    for path, leaf in leaves(spec):
        if not leaf.shape:
            raise SpecError(
                f"batch{path} is a single value and has no rows. rebatch= takes whole batches apart, so each leaf "
                "needs a value for each row. If the generator yields samples, give batch_size= instead of rebatch="
            )
    flat, build = flattener(spec), _builder(spec)

    def apart(batch: Any) -> Iterator[Any]:
        arrays = [_array(value, path) for value, path in zip(flat(batch), paths, strict=True)]
        if len(set(map(len, arrays))) > 1:
            each = [f"batch{path} has {len(array)}" for path, array in zip(paths, arrays, strict=True)]
            raise SpecError(
                f"the leaves of a batch have different numbers of rows: {', '.join(each[:8])}"
                f"{', ...' if len(each) > 8 else ''}. rebatch= takes a row of each, so all need the same number"
            )
        return build(arrays)

    return apart


def _in_another_generator(path: str, *, is_list: bool = False) -> str:
    """Return the advice for a batch: `transform=` gets its rows, and is called after it was taken apart."""
    advice = "With rebatch= a transform= gets single rows and cannot do so: serve another generator"
    examples = {
        "": "def packed(): yield from map(tuple, batches())",
        "[0]": "def packed(): yield from ((tuple(inputs), y) for inputs, y in batches())",
    }
    return f"{advice}, such as `{examples[path]}`" if is_list and path in examples else f"{advice} that does"


def _builder(spec: Spec) -> Callable[[list[Any]], Iterator[Any]]:
    """Return a function that makes rows with the structure of `spec` from equally long arrays, one for each leaf. It is
    fast for common structures."""
    if isinstance(spec, TupleSpec) and all(isinstance(item, Leaf) for item in spec.items):
        return lambda arrays: zip(*arrays, strict=True)
    if isinstance(spec, DictSpec) and all(isinstance(item, Leaf) for item in spec.items):
        order = spec.in_order
        keys = [spec.keys[i] for i in order]
        # strict=True would take as long as the rest; the numbers are equal.
        return lambda arrays: (dict(zip(keys, row)) for row in zip(*(arrays[i] for i in order)))  # noqa: B905
    if isinstance(spec, Leaf):
        return lambda arrays: iter(arrays[0])
    return lambda arrays: (unflatten(spec, row) for row in zip(*arrays, strict=True))


def _array(value: Any, path: str) -> Any:
    text = as_text(value)
    array = as_array(value, path, _in_another_generator) if text is None else text
    if not array.ndim:
        raise SpecError(f"batch{path} is a single value and has no rows, unlike in the batches before")
    return array
