"""`Feed(cache=)`: each split is made once, the stream is the same as without a cache, and faults cost only time.

Workers, daemons and signals are real. The generator adds a line to the file SIDE each time that it runs for a split.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock_proto.status.feed_status import Cache
from penstock_proto.status.status_shape import Status
from penstock_server.cli.status_lines import status_lines
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Serve, kill
from tests.reference.one_stream import digests

FEEDS = """
    import os
    import random
    import resource
    import time

    import numpy as np
    from penstock_server import Cache, Feed, OnError, Pad

    CACHE = os.environ["CACHE"]
    SLOW = float(os.environ.get("SLOW", 0))
    if "MOST" in os.environ:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["MOST"]),) * 2)

    def note(what):
        with open(os.environ["SIDE"], "ab", 0) as file:
            file.write(f"{what}\\n".encode())

    def rows(split):
        note(split)
        drawn = np.random.RandomState(split)
        for i in range((13 * split) % 47):
            time.sleep(SLOW)
            yield {"id": 1000 * split + i, "x": drawn.normal(size=(20, 10))}

    def random_rows(split):
        note(split)
        for i in range(30):
            yield np.append(np.random.normal(size=200), random.random())

    def whole():
        note("whole")
        level = 0
        for i in range(400):
            level = (3 * level + i) % 1009
            yield i, np.full(200, level)

    def tokens(split):
        note(split)
        for i in range(40):
            yield np.arange((split * i) % 60)

    def failing(split):
        note(split)
        yield from range(20)
        if split % 2:
            raise ValueError("it is damaged")

    def by_shard(shard):
        note(shard)
        for i in range(shard[0], 200, shard[1]):
            yield np.full(200, i)

    def changed(sample, rng):
        sample["x"] += rng.random()
        sample["flip"] = rng.integers(2)
        return sample

    def doubled(sample):
        note("doubled") if sample[0] % 100 == 0 else None
        return sample[0], 2 * sample[1]

    OF_ROWS = dict(splits=range(16), batch_size=8, lanes=4, transform=changed, seed=5,
                   on_error=OnError("raise", crashes=100))
    DROPPING = Pad(buckets=[16, 32], too_long="drop")
    OF_WHOLE = dict(transform=lambda sample: (sample[0], 2 * sample[1]), batch_size=8, lanes=5, turn=2)
    plain = Feed(rows, shuffle=64, **OF_ROWS)
    cached = Feed(rows, shuffle=64, cache=CACHE, **OF_ROWS)
    plain_in_order = Feed(rows, **OF_ROWS)
    cached_in_order = Feed(rows, cache=CACHE, **OF_ROWS)
    plain_whole = Feed(whole, **OF_WHOLE)
    cached_whole = Feed(whole, cache=CACHE, **OF_WHOLE)
    plain_tokens = Feed(
        tokens, splits=range(8), batch_size=8, batching=DROPPING, shuffle=32, lanes=2
    )
    cached_tokens = Feed(
        tokens, splits=range(8), batch_size=8, batching=DROPPING, shuffle=32, lanes=2,
        cache=CACHE,
    )
    plain_shards = Feed(by_shard, batch_size=8, lanes=3)
    cached_shards = Feed(by_shard, batch_size=8, lanes=3, cache=CACHE)
    drawn = Feed(random_rows, splits=range(6), batch_size=8, lanes=3, cache=CACHE)
    drawn_again = Feed(random_rows, splits=range(6), batch_size=8, lanes=3, cache=CACHE, seed=77)
    skipping = Feed(failing, splits=range(6), batch_size=8, lanes=3, cache=CACHE, on_error="skip")
"""

ALONE = """
import sys
from tests.reference.one_stream import digests
import penstock
for feed in sys.argv[1:]:
    with penstock.connect(feed, workers=0) as connection:
        for _ in range(2):
            print(*digests(connection.batches()))
"""


class Place:
    """A cache and a side file, for the daemons of a test."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.side = folder / "side"
        self.feeds = folder / "feeds.py"
        self.feeds.write_text(textwrap.dedent(FEEDS))
        self.env = {"CACHE": str(self.cache), "SIDE": str(self.side)}
        self.made()

    def made(self) -> Counter[str]:
        """Return how often the generator has run for each split since the last call."""
        found = Counter(self.side.read_text().split("\n")[:-1]) if self.side.exists() else Counter[str]()
        self.side.write_bytes(b"")
        return found

    def alone(self, *names: str) -> dict[str, list[list[str]]]:
        """Return the digests of two epochs of these feeds, read with workers=0."""
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", ALONE, *(f"{self.feeds}:{name}" for name in names)],
            env={**os.environ, **self.env},
            cwd=Path(__file__).resolve().parents[3],
            capture_output=True,
            text=True,
            check=True,
        )
        epochs = [line.split() for line in run.stdout.splitlines()]
        return {name: epochs[2 * number : 2 * number + 2] for number, name in enumerate(names)}

    def only(self, name: str) -> list[list[str]]:
        """Return the digests of two epochs of one feed, read with workers=0. Empty the side file."""
        found = self.alone(name)[name]
        self.made()
        return found

    def files(self) -> list[Path]:
        return sorted(self.cache.glob("*/*"))

    def is_whole(self, splits: int) -> bool:
        """Return whether the cache has exactly `splits` splits, and nothing else."""
        return [file.suffix for file in self.files()] == [".split"] * splits

    def fill(self, daemon: Daemon, name: str = "", splits: int = 16) -> None:
        """Read epochs until the cache has exactly `splits` splits, and nothing else.

        A split is not written while another run reads it. That may be a run of the previous epoch, or one that is just
        being dropped.
        """
        for _ in range(8):
            if self.is_whole(splits):
                break
            read(daemon, name, epochs=1)
        assert self.is_whole(splits)
        self.made()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def read(daemon: Daemon, name: str = "", epochs: int = 2) -> list[list[str]]:
    with penstock.connect(daemon.urls[name] if name else daemon.url, transport="local") as connection:
        return [digests(connection.batches()) for _ in range(epochs)]


def status(daemon: Daemon) -> Status:
    return control.status(daemon.url, 5.0)


def wait_for(daemon: Daemon, enough: Callable[[Cache], bool]) -> Cache:
    """Wait until `enough` is true for the status of the only feed's cache, and return this status."""
    deadline = time.monotonic() + 20
    while (found := status(daemon).feeds[0].cache) is None or not enough(found):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


SPLITS = {"": 16, "_in_order": 16, "_whole": 1, "_tokens": 8, "_shards": 3}
"""The number of splits of each kind of feed. The first two kinds have the same splits."""


def test_the_stream_is_that_without_a_cache_and_the_generator_runs_once(serve: Serve, place: Place) -> None:
    plain = place.alone(*(f"plain{kind}" for kind in SPLITS))
    daemon = serve(FEEDS, *(f"cached{kind}" for kind in SPLITS), workers=3, env=place.env)
    splits = 0
    for kind, count in SPLITS.items():
        assert read(daemon, f"cached{kind}") == plain[f"plain{kind}"]
        splits += count if kind != "_in_order" else 0
        place.fill(daemon, f"cached{kind}", splits)
        read(daemon, f"cached{kind}", epochs=1)
        assert not place.made()
    daemon.stop()
    daemon = serve(FEEDS, *(f"cached{kind}" for kind in SPLITS), workers=1, env=place.env)
    for kind in SPLITS:
        assert read(daemon, f"cached{kind}") == plain[f"plain{kind}"]
    found = place.alone(*(f"cached{kind}" for kind in SPLITS))
    assert found == {name.replace("plain", "cached"): epochs for name, epochs in plain.items()}
    assert not place.made()


def test_the_cache_can_be_filled_without_workers(serve: Serve, place: Place) -> None:
    assert place.alone("cached", "plain")["cached"] == (plain := place.only("plain"))
    assert place.is_whole(16)
    assert read(serve(FEEDS, "cached", env=place.env)) == plain
    assert not place.made()


def test_kills_while_splits_are_written_leave_whole_splits_and_the_same_stream(serve: Serve, place: Place) -> None:
    plain = place.only("plain")
    daemon = serve(FEEDS, "cached", workers=3, env={**place.env, "SLOW": "0.002"})
    left = 0
    with penstock.connect(daemon.url, transport="local") as connection:
        found: list[list[str]] = []
        for _ in range(2):
            found.append([])
            for number, batch in enumerate(connection.batches()):
                found[-1] += digests([batch])
                if number % 9 == 4 and (workers := daemon.workers()):
                    left += any(file.suffix == ".writing" for file in place.files())
                    kill([workers[number % len(workers)]])
        assert found == plain
        assert left  # some workers were killed while they wrote
    place.fill(daemon)
    assert read(daemon) == plain
    assert not place.made()


def test_a_killed_daemon_leaves_what_the_next_one_goes_on_from(serve: Serve, place: Place) -> None:
    plain = place.only("plain_in_order")
    place.made()
    daemon = serve(FEEDS, "cached_in_order", workers=2, env={**place.env, "SLOW": "0.002"})
    with penstock.connect(daemon.url, transport="tcp") as connection:
        batches = connection.batches()
        found = digests(next(batches) for _ in range(20))
        state = connection.state_dict()
        daemon.process.kill()
        daemon.process.wait()
    whole = {file.name for file in place.files() if file.suffix == ".split"}
    assert whole
    daemon = serve(FEEDS, "cached_in_order", workers=2, env=place.env)
    place.made()
    with penstock.connect(daemon.url, transport="tcp", state=state) as connection:
        found += digests(connection.batches())
        assert found == plain[0]
        assert digests(connection.batches()) == plain[1]
    assert len(set(place.made())) <= 16 - len(whole)
    place.fill(daemon)


def test_two_daemons_fill_one_cache_at_the_same_time(serve: Serve, place: Place) -> None:
    plain = place.only("plain")
    daemons = [serve(FEEDS, "cached", workers=2, env={**place.env, "SLOW": "0.001"}) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(penstock.connect(daemon.url, transport="local")) for daemon in daemons]
        for epoch in range(2):
            together: list[list[str]] = [[], []]
            for batches in zip(*(connection.batches() for connection in connections), strict=True):
                for found, batch in zip(together, batches, strict=True):
                    found += digests([batch])
            assert together == [plain[epoch]] * 2
    place.fill(daemons[0])
    assert read(daemons[0]) == plain
    assert not place.made()


@pytest.mark.parametrize("what", ["_in_order", "", "_whole"])
def test_a_resume_seeks_in_the_cache(serve: Serve, place: Place, what: str) -> None:
    plain = place.only(f"cached{what}")
    daemon = serve(FEEDS, f"cached{what}", env=place.env)
    place.made()
    for count in (1, 11, 23):
        with penstock.connect(daemon.url, transport="local") as connection:
            batches = connection.batches()
            found = digests(next(batches) for _ in range(count))
            state = connection.state_dict()
        with penstock.connect(daemon.url, transport="local", state=state) as connection:
            assert found + digests(connection.batches()) == plain[0]
    assert not place.made()


def test_what_a_split_draws_depends_on_the_split_alone(serve: Serve, place: Place) -> None:
    first = place.only("drawn")
    assert first[0] == first[1]
    for file in place.files():
        file.unlink()
    # The numbers are the same with another seed, in another epoch or process, and without a writable cache.
    daemon = serve(FEEDS, "drawn_again", workers=3, env=place.env)
    assert read(daemon) == first
    place.fill(daemon, splits=6)
    assert read(daemon) == first
    other = {**place.env, "CACHE": "/proc/no such place"}
    daemon = serve(FEEDS, "drawn", workers=2, env=other)
    assert read(daemon) == first


@contextlib.contextmanager
def full_disk(place: Place, how: str) -> Iterator[dict[str, str]]:
    """Make a cache with room for about one of sixteen splits. Yield the environment variables of its daemons."""
    if how == "limit":
        yield {**place.env, "MOST": "100000"}
        return
    place.cache.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", place.cache], stderr=subprocess.PIPE
    ).returncode:
        pytest.skip("mounting a small tmpfs is not permitted")
    try:
        yield place.env
    finally:
        subprocess.run(["umount", "-l", place.cache], check=True)


@pytest.mark.parametrize(("how", "cause"), [("tmpfs", "No space left on device"), ("limit", "File too large")])
def test_on_a_full_disk_the_stream_goes_on_and_says_so_once(serve: Serve, place: Place, how: str, cause: str) -> None:
    plain = place.only("plain_whole")
    with full_disk(place, how) as env:
        daemon = serve(FEEDS, "cached_whole", workers=2, env=env)
        assert read(daemon) == plain
        found = wait_for(daemon, lambda cache: cache.problem is not None)
        assert found.problem == f"not written: {cause}"
        assert (found.hits, found.written, found.bytes) == (0, 0, 0)
        assert daemon.stderr().count("WARNING") == 1
        assert f"feed cached_whole, cache: not written: {cause}. The stream goes on" in daemon.stderr()
        assert f"; not written: {cause}" in "\n".join(status_lines(status(daemon)))
        assert not [file for file in place.files() if file.suffix == ".split"]
        daemon.stop()


def test_a_directory_that_cannot_be_made_costs_only_the_cache(serve: Serve, place: Place) -> None:
    plain = place.only("plain")
    place.cache.write_text("a file is in the way")
    daemon = serve(FEEDS, "cached", env=place.env)
    assert read(daemon) == plain
    assert wait_for(daemon, lambda cache: cache.problem is not None).problem == "not written: Not a directory"


def test_the_status_shows_size_and_hit_rate(serve: Serve, place: Place) -> None:
    daemon = serve(FEEDS, "cached", env=place.env)
    (line,) = (line for line in status_lines(status(daemon)) if line.startswith("cache "))
    assert re.fullmatch(
        r"cache    cached: 0 bytes in .*/cache/rows-[0-9a-f]+, 0 of 0 splits read from it \(0 %\)", line
    )
    read(daemon, epochs=1)
    place.fill(daemon)
    wait_for(daemon, lambda cache: cache.written == 16)
    read(daemon, epochs=1)
    found = wait_for(daemon, lambda cache: cache.hits >= 16)
    nbytes = sum(file.stat().st_size for file in place.files())
    assert found.misses >= 16
    directory = str(place.files()[0].parent)
    assert (found.directory, found.bytes, found.written, found.problem) == (directory, nbytes, 16, None)
    (line,) = (line for line in status_lines(status(daemon)) if line.startswith("cache "))
    match = re.search(r"KiB in .*, (\d+) of (\d+) splits read from it \((\d+) %\)$", line)
    assert match is not None, line
    assert int(match[1]) >= found.hits
    assert int(match[3]) == 100 * int(match[1]) // int(match[2])
    daemon.stop()
    again = serve(FEEDS, "cached", env=place.env)
    assert wait_for(again, lambda cache: cache.bytes > 0).bytes == nbytes
    assert status(serve(FEEDS, "plain", env=place.env)).feeds[0].cache is None


def test_damaged_and_foreign_files_are_written_again(serve: Serve, place: Place) -> None:
    plain = place.only("cached")
    whole = {file: file.read_bytes() for file in place.files()}
    for number, (file, data) in enumerate(whole.items()):
        file.write_bytes([b"", data[: len(data) // 2], b"PENSTOCK" * 100, bytes(len(data)), data][number % 5])
    place.made()
    assert read(serve(FEEDS, "cached", env=place.env)) == plain
    assert len(set(place.made())) == 13  # 3 of 16 did not change
    assert {file: file.read_bytes() for file in place.files()} == whole


def test_a_split_that_fails_is_not_cached(serve: Serve, place: Place) -> None:
    daemon = serve(FEEDS, "skipping", env=place.env)
    place.fill(daemon, splits=3)
    read(daemon, epochs=1)
    assert set(place.made()) == {"1", "3", "5"}


def test_an_epoch_that_is_left_caches_the_splits_that_were_read(serve: Serve, place: Place) -> None:
    plain = place.only("plain_in_order")
    daemon = serve(FEEDS, "cached_in_order", env=place.env)
    with penstock.connect(daemon.url, transport="local") as connection:
        next(connection.batches())
        assert digests(connection.batches()) == plain[1]
    place.fill(daemon)


def test_a_data_file_that_was_replaced_is_read_again(serve: Serve, place: Place, tmp_path: Path) -> None:
    source = """
        import os
        from penstock_server import Feed
        feed = Feed.from_numpy(os.environ["DATA"], batch_size=10, cache=os.environ["CACHE"], split_rows=25)
    """
    data = tmp_path / "rows.npy"
    env = {**place.env, "DATA": str(data)}
    for number in (1, 2):
        np.save(data, np.full((100, 300), number))
        os.utime(data, (number, number))
        for _ in range(2):
            daemon = serve(source, env=env)
            with penstock.connect(daemon.url, transport="local") as connection:
                assert {int(value) for batch in connection.batches() for value in np.unique(batch)} == {number}
            daemon.stop(signal.SIGTERM)
        assert len([file for file in place.files() if file.suffix == ".split"]) == 4 * number


def test_other_versions_have_splits_of_their_own(place: Place) -> None:
    place.only("drawn")
    place.made()
    text = place.feeds.read_text()
    place.feeds.write_text(
        re.sub(r"(drawn = Feed\(random_rows,.*) cache=CACHE", r"\1 cache=Cache(CACHE, version=1)", text, count=1)
    )
    place.alone("drawn")
    assert len(set(place.made())) == 6
    assert len(list(place.cache.iterdir())) == 2


def test_the_example_runs() -> None:
    pytest.importorskip("PIL")
    example = Path(__file__).resolve().parents[3] / "examples" / "cached_images.py"
    run = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"^epoch [012]: 480 images in ", run.stdout, re.MULTILINE)) == 3
    assert "the cache holds 37 MB in 16 files" in run.stdout
