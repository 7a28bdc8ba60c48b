"""The batches that every producer sends: their sizes, and the memory that they lie in."""

import numpy as np

ROW_BYTES = 4096  # a row is 1,024 float32
POOL = 12  # distinct batches that are sent in turn, so that large ones come from memory, not cache
ALIGNMENT = 64  # TensorFlow takes an array without a copy only if its address is a multiple of this


def shape(size: int) -> tuple[int, int]:
    """The shape of a float32 batch of `size` bytes, a multiple of `ROW_BYTES`."""
    return size // ROW_BYTES, ROW_BYTES // 4


def aligned(size: int) -> np.ndarray:
    """A zeroed float32 batch whose pages exist and whose address is a multiple of `ALIGNMENT`."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    batch = memory[start : start + size].view(np.float32).reshape(shape(size))
    batch.fill(0)
    return batch


def pool(size: int) -> list[np.ndarray]:
    """`POOL` batches; every element of batch k is k + 1, which `check` relies on."""
    batches = [aligned(size) for _ in range(POOL)]
    for number, batch in enumerate(batches, start=1):
        batch.fill(number)
    return batches


def check(batch: np.ndarray, size: int) -> None:
    """Raises ValueError unless `batch` is one of the pool, whole."""
    if batch.nbytes != size or batch.dtype != np.float32:
        raise ValueError(f"expected {size} bytes of float32, got {batch.nbytes} of {batch.dtype}")
    first = batch.flat[0]
    if first not in range(1, POOL + 1) or not (batch == first).all():
        raise ValueError(f"a damaged batch: starts with {first}, holds {np.unique(batch)[:5]}")
