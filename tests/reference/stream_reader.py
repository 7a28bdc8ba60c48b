"""A trainer in its own process, which prints a digest of each batch; and the class `Reader`, with which a test runs it.

It reads epoch after epoch, until its stdin or the stream ends. If it is paced, it reads only as many batches as it was
granted. It imports neither pytest nor TensorFlow.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock

if TYPE_CHECKING:
    from tests.processes.forked import Launcher


def digest(batch: Any) -> str:
    """Return the SHA-256 of a batch."""
    found = hashlib.sha256()
    for leaf in leaves(batch):
        found.update(f"{leaf.dtype}{leaf.shape}".encode())
        found.update(repr(leaf.tolist()).encode() if leaf.dtype == object else leaf.tobytes())
    return found.hexdigest()


def leaves(batch: Any) -> Iterator[Any]:
    """Yield the arrays of a batch."""
    if isinstance(batch, dict):
        for key in sorted(batch):
            yield from leaves(batch[key])
    elif isinstance(batch, tuple):
        for item in batch:
            yield from leaves(item)
    elif isinstance(batch, penstock.Ragged):
        yield from (batch.flat_values, *batch.nested_row_splits)
    else:
        yield batch


def chain(digests: Sequence[str]) -> str:
    """Return the SHA-256 of all batches, in order."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


class Reader:
    """A trainer that reads. `digests` grows meanwhile.

    Args:
        launcher: the process that forks it.
        url: the feed's URL.
        network: the network namespace in which it runs.
        paced: read only as many batches as `grant` allows. Otherwise it reads on while the test does other things.
        options: options of `penstock.connect`.
    """

    def __init__(
        self, launcher: Launcher, url: str, *, network: str = "", paced: bool = False, **options: object
    ) -> None:
        self.digests: list[str] = []
        self.stats: dict[str, Any] = {}
        self._granted = 0
        words = (url, json.dumps(options), *(["paced"] if paced else []))
        code = Path(__file__).read_text()
        self._process = launcher.start(code, *words, stdin=True, stderr=2, network=network)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        for line in self._process.stdout:
            if line.startswith("{"):
                self.stats = json.loads(line)
            else:
                self.digests.append(line.rstrip())

    def grant(self, batches: int) -> None:
        """Let it read `batches` more batches."""
        assert self._process.stdin is not None
        self._granted += batches
        self._process.stdin.write(f"{batches}\n")
        self._process.stdin.flush()

    def wait_for_all(self) -> None:
        """Wait until it has read all batches that it was granted."""
        self.wait_for(self._granted - len(self.digests))

    def wait_for(self, more: int, timeout: float = 90) -> None:
        """Wait until it has read `more` more batches than now."""
        wanted, deadline = len(self.digests) + more, time.monotonic() + timeout
        while len(self.digests) < wanted:
            assert self._process.poll() is None, f"it ended with {self._process.returncode}"
            assert time.monotonic() < deadline, f"it has read {len(self.digests)} batches instead of {wanted}"
            time.sleep(0.02)

    def stop(self) -> list[str]:
        """Stop it after its next batch, and return the digests of all batches that it read."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self.rest()

    def rest(self, timeout: float = 90) -> list[str]:
        """Wait until it ends on its own, and return the digests of all batches that it read."""
        status = self._process.wait(timeout)
        self._thread.join()
        assert status == 0, f"it ended with {status}"
        return self.digests

    def close(self) -> None:
        """Kill it if it still runs."""
        self._process.kill()
        self._thread.join()
        self._process.close()


def main() -> None:
    url, options = sys.argv[1], json.loads(sys.argv[2])
    over, granted = threading.Event(), threading.Semaphore(0 if sys.argv[3:] else 1 << 40)

    def listen() -> None:
        for line in sys.stdin:
            granted.release(int(line))
        over.set()
        granted.release()

    threading.Thread(target=listen, daemon=True).start()
    with penstock.connect(url, **options) as connection:
        while not over.is_set():
            try:
                granted.acquire()
                for batch in connection.batches():
                    print(digest(batch), flush=True)
                    if over.is_set():
                        break
                    granted.acquire()
            except penstock.EndOfStream:
                break
        print(json.dumps({name: connection.stats()[name] for name in ("transport", "reconnects")}), flush=True)


if __name__ == "__main__":
    main()
