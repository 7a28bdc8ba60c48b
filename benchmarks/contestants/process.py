"""Producer processes: spawned without TensorFlow, and always ended."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def running(target: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Run `target(*arguments)` in a spawned process while the block runs."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
