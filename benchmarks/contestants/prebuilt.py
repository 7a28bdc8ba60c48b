"""The batches that every producer sends: what a load is, the memory that its batches lie in, and when each is sent."""

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

ALIGNMENT = 64  # TensorFlow takes an array without a copy only if its address is a multiple of this
POOL = 12  # distinct batches that are sent in turn, so that large ones come from memory, not cache
LARGE, LARGE_POOL = 128 << 20, 4  # from so many bytes on, fewer
STAMP = 2  # elements at the start of the first leaf that have the time of sending, an int64; they are not checked


@dataclass(frozen=True, slots=True)
class Load:
    """What all contestants move in one run: batches of so many bytes, in so many leaves, so many seconds apart.

    A batch of one leaf is a float32 array, one of more a dict of them, all of one size.
    """

    nbytes: int
    leaves: int = 1
    pause: float = 0.0  # 0: as fast as they are taken

    @property
    def shape(self) -> tuple[int]:
        """The shape of each leaf."""
        return (self.nbytes // self.leaves // 4,)

    @property
    def pool(self) -> int:
        return POOL if self.nbytes < LARGE else LARGE_POOL

    def structure(self, parts: list[Any]) -> Any:
        """A batch, or what describes one, of these leaves."""
        return parts[0] if self.leaves == 1 else {f"leaf{index:02}": part for index, part in enumerate(parts)}

    def text(self) -> str:
        """For another process; `of` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> "Load":
        return cls(**json.loads(text))


def leaves(batch: Any) -> list[np.ndarray]:
    """The leaves of a batch, of tensors or of arrays, as flat arrays; no copy."""
    return [np.asarray(leaf).reshape(-1) for leaf in (batch.values() if isinstance(batch, dict) else [batch])]


def aligned(nbytes: int) -> np.ndarray:
    """So many zeroed bytes as float32, whose pages exist and whose address is a multiple of `ALIGNMENT`."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    array = memory[start : start + nbytes].view(np.float32)
    array.fill(0)
    return array


def pool(load: Load) -> list[Any]:
    """The batches; every element of batch k is k + 1, which `check` relies on."""
    batches = []
    for number in range(1, load.pool + 1):
        parts = [aligned(load.nbytes // load.leaves) for _ in range(load.leaves)]
        for part in parts:
            part.fill(number)
        batches.append(load.structure(parts))
    return batches


def stream(load: Load, batches: list[Any]) -> Iterator[Any]:
    """These batches in turn without end; with a pause before each, it is stamped with the time at which it is sent."""
    for batch in itertools.cycle(batches):
        if load.pause:
            time.sleep(load.pause)
            leaves(batch)[0][:STAMP].view(np.int64)[0] = time.monotonic_ns()
        yield batch


def stamp(batch: Any) -> int:
    """When it was sent, by the clock of `time.monotonic_ns`, which all processes of a machine share."""
    return int(leaves(batch)[0][:STAMP].view(np.int64)[0])


def check(batch: Any, load: Load) -> None:
    """Raises ValueError unless `batch` is one of the pool, whole."""
    parts = leaves(batch)
    if len(parts) != load.leaves or any((part.shape, part.dtype) != (load.shape, np.float32) for part in parts):
        raise ValueError(f"expected {load}, got {[(part.shape, part.dtype) for part in parts]}")
    parts[0] = parts[0][STAMP:]
    number = parts[0][0]
    if number not in range(1, load.pool + 1) or not all((part == number).all() for part in parts):
        raise ValueError(f"a damaged batch: starts with {number}, holds {np.unique(np.concatenate(parts))[:5]}")
