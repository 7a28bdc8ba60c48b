"""A rank in its own process, which executes a test's commands line by line.

It does not import pytest, because each test of ranks starts several of these processes.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
from typing import Any

import penstock
from tests.fakes.inside import transport_of


def digest(batch: Any) -> str:
    """Return the SHA-256 of a batch: a dict of arrays, or a sequence of arrays."""
    found = hashlib.sha256()
    for leaf in [batch[key] for key in sorted(batch)] if isinstance(batch, dict) else batch:
        found.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
    return found.hexdigest()


Epochs = list[list[str]]
"""The SHA-256 of each batch, by epoch."""


class Reading:
    """A connection of one rank, and its current iteration."""

    def connect(self, url: str, options: dict[str, Any]) -> int | None:
        self.connection = penstock.connect(url, **options)
        self.batches = iter(self.connection.batches())
        return self.connection.cardinality

    def read(self, count: int) -> list[str]:
        """Read `count` batches, across the end of an epoch if necessary."""
        found: list[str] = []
        while len(found) < count:
            batch = next(self.batches, None)
            if batch is None:
                self.batches = iter(self.connection.batches())
            else:
                found.append(digest(batch))
        return found

    def rest(self) -> list[str]:
        """Read the rest of the epoch."""
        found = [digest(batch) for batch in self.batches]
        self.batches = iter(self.connection.batches())
        return found

    def epochs(self, count: int) -> Epochs:
        return [self.rest() for _ in range(count)]

    def whole(self, url: str, count: int, options: dict[str, Any]) -> list[Any]:
        """Read `count` epochs over a new connection. Return its cardinality and the epochs."""
        cardinality = self.connect(url, options)
        found = self.epochs(count)
        self.close()
        return [cardinality, found]

    def state(self, consumed: int) -> dict[str, Any]:
        return self.connection.state_dict(consumed=consumed)

    def load(self, state: dict[str, Any]) -> None:
        self.connection.load_state_dict(state)
        self.batches = iter(self.connection.batches())

    def stats(self) -> dict[str, Any]:
        return self.connection.stats()

    def cut(self) -> None:
        """Cut the connection at this end, as the kernel might."""
        transport: Any = None
        while transport is None:  # it may just be connecting again
            transport = transport_of(self.connection)
        transport._socket.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        self.batches = iter(self.connection.batches())

    def close(self) -> None:
        self.connection.close()


def main() -> None:
    """Execute each line of stdin, and answer with a line: [result, null] or [null, error]."""
    reading = Reading()
    for line in sys.stdin:
        name, *values = json.loads(line)
        try:
            answer = [getattr(reading, name)(*values), None]
        except (penstock.PenstockError, ValueError) as error:
            answer = [None, f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
