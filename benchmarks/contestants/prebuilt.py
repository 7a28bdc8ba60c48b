"""The batches that every producer sends: their sizes, their memory, and the times of sending."""

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

ALIGNMENT = 64  # TensorFlow takes an array without a copy only if its address is a multiple of this
POOL = 12  # distinct batches to cycle through, so that large ones come from memory, not cache
LARGE, LARGE_POOL = 128 << 20, 4  # from LARGE bytes on
STAMP = 2  # elements at the start of the first leaf with the time of sending, an int64; they are not checked


@dataclass(frozen=True, slots=True)
class Load:
    """The batches that all contestants move in one run: bytes, leaves, and seconds between them.

    A batch of one leaf is a float32 array, one of several leaves a dict of arrays of one size.
    """

    nbytes: int
    leaves: int = 1
    pause: float = 0.0  # seconds; 0: as fast as they are taken

    @property
    def shape(self) -> tuple[int]:
        """The shape of each leaf."""
        return (self.nbytes // self.leaves // 4,)

    @property
    def pool(self) -> int:
        return POOL if self.nbytes < LARGE else LARGE_POOL

    def structure(self, parts: list[Any]) -> Any:
        """Return a batch of these leaves, or a description of one."""
        return parts[0] if self.leaves == 1 else {f"leaf{index:02}": part for index, part in enumerate(parts)}

    def text(self) -> str:
        """Return the load as text for another process. `of` parses it."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> "Load":
        return cls(**json.loads(text))


def leaves(batch: Any) -> list[np.ndarray]:
    """Return the leaves of a batch of tensors or arrays, as flat arrays, without a copy."""
    return [np.asarray(leaf).reshape(-1) for leaf in (batch.values() if isinstance(batch, dict) else [batch])]


def aligned(nbytes: int) -> np.ndarray:
    """Return `nbytes` bytes of zeros as float32, with existing pages, at a multiple of `ALIGNMENT`."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    array = memory[start : start + nbytes].view(np.float32)
    array.fill(0)
    return array


def pool(load: Load) -> list[Any]:
    """Return the distinct batches. Every element of batch k is k + 1, which `check` relies on."""
    batches = []
    for number in range(1, load.pool + 1):
        parts = [aligned(load.nbytes // load.leaves) for _ in range(load.leaves)]
        for part in parts:
            part.fill(number)
        batches.append(load.structure(parts))
    return batches


def stream(load: Load, batches: list[Any]) -> Iterator[Any]:
    """Cycle through these batches without end. With a pause before each, stamp it with the time of sending."""
    for batch in itertools.cycle(batches):
        if load.pause:
            time.sleep(load.pause)
            leaves(batch)[0][:STAMP].view(np.int64)[0] = time.monotonic_ns()
        yield batch


def stamp(batch: Any) -> int:
    """Return when the batch was sent, by `time.monotonic_ns`, whose clock all processes of a machine share."""
    return int(leaves(batch)[0][:STAMP].view(np.int64)[0])


def check(batch: Any, load: Load) -> None:
    """Raise ValueError unless `batch` equals one of the pool."""
    parts = leaves(batch)
    if len(parts) != load.leaves or any((part.shape, part.dtype) != (load.shape, np.float32) for part in parts):
        raise ValueError(f"expected {load}, got {[(part.shape, part.dtype) for part in parts]}")
    parts[0] = parts[0][STAMP:]
    number = parts[0][0]
    if number not in range(1, load.pool + 1) or not all((part == number).all() for part in parts):
        raise ValueError(f"a damaged batch: starts with {number}, holds {np.unique(np.concatenate(parts))[:5]}")
