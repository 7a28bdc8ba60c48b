"""The samples of sharing.py. They know no loader."""

import time

import numpy as np

COST = 0.004
"""CPU seconds of a heavy sample."""


def heavy_sample(number: int) -> tuple[np.ndarray, int]:
    """Return a small array, after Python has run for COST seconds of CPU time."""
    done = time.thread_time() + COST
    while time.thread_time() < done:
        pass
    return np.full((28, 28), number, np.float32), number


def large_sample(number: int) -> tuple[np.ndarray, int]:
    """Return an image of 150,528 bytes."""
    return np.full((224, 224, 3), number % 251, np.uint8), number


def small_sample(number: int) -> tuple[np.ndarray, int]:
    """Return a small array."""
    return np.full((28, 28), number, np.float32), number
