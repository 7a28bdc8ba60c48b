"""What an earlier Penstock wrote is read by this one: states, state files and caches of the feeds in tests/golden.

The streams of these feeds have published hashes, like those of tests/proto/test_stream_hashes.py, whose first lines say
what a changed hash means. These feeds also put Penstock's own classes on disk. The names of classes are part of the
digest of a list of splits, which every state has, and of the keys of cached splits. So these tests fail if such a class
gets another name, for example because its file has moved.

`python -m tests.golden.test_golden` records what is missing in tests/golden, and changes nothing that is recorded. To
add a kind of feed, add it to tests/golden/feeds.py and run it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import penstock
from penstock_proto.status.feed_status import Cache
from penstock_server.to_daemon import control
from tests.conftest import UNCHECKED, Daemon, Serve
from tests.proto.test_stream_hashes import (
    EPOCHS,
    PATIENCE,
    WAYS,
    WHY,
    WORLD,
    Batches,
    add,
    encoded,
    read,
    read_groups,
    read_ranks,
    record_groups,
    serving,
    sha256,
    state_file,
    whole_streams,
)

GOLDEN = Path(__file__).parent
FEEDS = (GOLDEN / "feeds.py").read_text()
HASHES = GOLDEN / "hashes.json"
STATES = GOLDEN / "states.json"
RANK_STATES = GOLDEN / "rank_states.json"
GROUPS = GOLDEN / "groups.sql"
CACHE = GOLDEN / "cache"

NAMES = [line.split(" = ")[0] for line in FEEDS.splitlines() if " = Feed" in line and line[0] not in "_ "]
CACHED = [name for name in NAMES if "cached" in name]
GROUPED = {"parquet": 5, "hdf5_shuffled": 15}
"""Feeds that a group reads, and how many batches it had read when its daemon was killed. A slab is one batch."""
RANKED = "parquet"


EXACT = [name for name in NAMES if not name.startswith("fast")]

ALONE = """
import json, sys
import penstock
from tests.golden.test_golden import NAMES, STATES, fingerprint
print("begin")
for name in NAMES:
    with penstock.connect(f"feeds.py:{name}", workers=0) as connection:
        print(json.dumps([name, fingerprint(name, connection)]))
for saved in json.loads(STATES.read_text()):
    name, state = saved["feed"], saved["state"]
    with penstock.connect(f"feeds.py:{name}", workers=0, state=state) as connection:
        print(json.dumps([name, fingerprint(name, connection, state["consumed"], saved["epoch"])]))
"""
"""Reads all streams, and goes on from all states, with workers=0."""


def fingerprint(name: str, connection: penstock.Connection, consumed: int = 0, epoch: int = 0) -> str:
    """Return the hash of the rest of a stream. In fast order only the rows of an epoch are always the same."""
    if name in EXACT:
        return sha256(read(connection, consumed, epoch))
    return sha256(str(ids_of(connection.batches())).encode() for _ in range(epoch, EPOCHS))


def ids_of(batches: Iterable[Any]) -> list[int]:
    return sorted(number for batch in batches for number in batch["id"].tolist())


def folder_of_feeds(folder: Path, *, cache: bool) -> Path:
    """Copy the data files of the feeds, and their cache, to a folder for a daemon."""
    shutil.copytree(GOLDEN / "files", folder / "files")
    if cache:
        shutil.copytree(CACHE, folder / "cache")
    return folder


def files_in(cache: Path) -> dict[str, int]:
    """Return when each file in a cache was written, by its path."""
    return {str(path.relative_to(cache)): path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}


@WAYS
def test_every_stream_has_its_published_hash_with_and_without_the_recorded_cache(
    serve: Serve, tmp_path: Path, workers: int, transport: str
) -> None:
    published = json.loads(HASHES.read_text())["streams"]
    assert set(published) == set(NAMES)
    folder_of_feeds(tmp_path / "daemon0", cache=workers == 1)
    daemon = serve(FEEDS, *NAMES, workers=workers)
    found = {}
    for name in NAMES:
        with penstock.connect(daemon.urls[name], transport=transport) as connection:
            found[name] = fingerprint(name, connection)
    assert found == published, WHY


@WAYS
def test_a_state_that_was_saved_long_ago_is_accepted_and_gives_the_rest_of_its_stream(
    serve: Serve, tmp_path: Path, workers: int, transport: str
) -> None:
    states = json.loads(STATES.read_text())
    assert {saved["feed"] for saved in states} == set(NAMES)
    folder_of_feeds(tmp_path / "daemon0", cache=False)
    daemon = serve(FEEDS, *NAMES, workers=workers, patched=UNCHECKED)
    for saved in states:
        name, state = saved["feed"], saved["state"]
        with penstock.connect(daemon.urls[name], transport=transport, state=state) as connection:
            rest = fingerprint(name, connection, state["consumed"], saved["epoch"])
        assert rest == saved["rest"], f"{name} from batch {state['consumed']}: {WHY}"


def test_streams_states_and_the_cache_are_the_same_without_a_daemon(tmp_path: Path) -> None:
    hashes, states = json.loads(HASHES.read_text()), json.loads(STATES.read_text())
    folder = folder_of_feeds(tmp_path / "alone", cache=True)
    (folder / "feeds.py").write_text(FEEDS)
    before = files_in(folder / "cache")
    path = os.pathsep.join((str(GOLDEN.parents[1]), *filter(None, sys.path)))
    run = subprocess.run(
        [sys.executable, "-c", ALONE],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.partition("begin\n")[2].splitlines()]
    streams, rests = found[: len(NAMES)], found[len(NAMES) :]
    assert dict(streams) == hashes["streams"], WHY
    assert rests == [[saved["feed"], saved["rest"]] for saved in states], WHY
    assert files_in(folder / "cache") == before, "a split that is in the cache was written again"


def test_every_split_is_found_in_a_cache_that_was_written_long_ago(serve: Serve, tmp_path: Path) -> None:
    folder = folder_of_feeds(tmp_path / "daemon0", cache=True)
    before = files_in(folder / "cache")
    daemon = serve(FEEDS, *CACHED, workers=1, patched=UNCHECKED)
    for name in CACHED:
        with penstock.connect(daemon.urls[name]) as connection:
            for _ in range(EPOCHS):
                assert list(connection.batches())
    deadline = time.monotonic() + 20
    while not all(used.hits for used in uses_of_caches(daemon).values()) and time.monotonic() < deadline:
        time.sleep(0.05)  # until the worker has reported them
    for name, used in uses_of_caches(daemon).items():
        assert used.hits > 0, name
        assert used.misses == 0, name
    assert files_in(folder / "cache") == before, "a split that is in the cache was written again"


def uses_of_caches(daemon: Daemon) -> dict[str, Cache]:
    """Return the use of each cache, from the daemon's status."""
    found = {}
    for feed in control.status(next(iter(daemon.urls.values())), 5.0).feeds:
        if feed.cache:
            found[feed.name] = feed.cache
        found |= {f"{feed.name} {part}": used for part, used in feed.part_caches.items() if used}
    assert {name.partition(" ")[0] for name in found} == set(CACHED)
    return found


@WAYS
def test_ranks_read_their_published_parts_also_from_states_that_were_saved_long_ago(
    serve: Serve, tmp_path: Path, workers: int, transport: str
) -> None:
    folder_of_feeds(tmp_path / "daemon0", cache=False)
    daemon = serve(FEEDS, RANKED, workers=workers)
    assert read_ranks(daemon.url, transport, "pad") == json.loads(HASHES.read_text())["ranks"][RANKED], WHY
    for saved in json.loads(RANK_STATES.read_text()):
        assert read_ranks(daemon.url, transport, "pad", saved["states"], saved["epoch"]) == saved["rest"], WHY


def test_groups_go_on_from_a_state_file_that_was_written_long_ago(serve: Serve, tmp_path: Path) -> None:
    published = json.loads(HASHES.read_text())["groups"]
    folder_of_feeds(tmp_path / "daemon0", cache=False)
    daemon = serve(FEEDS, *GROUPED, state=state_file(GROUPS, tmp_path / "state"), patched=PATIENCE)
    assert read_groups(daemon, published) == published, WHY


# --- record what is missing ---


def states_of(url: str, name: str, stream: Batches) -> list[dict[str, Any]]:
    """Return a state in each epoch, or one in fast order, after two thirds of its batches, with the hash of the
    rest."""
    states: list[tuple[int, dict[str, Any]]] = []
    rest: list[int] = []
    with penstock.connect(url) as connection:
        for epoch in range(1 if connection.info.endless or name not in EXACT else EPOCHS):
            batches = connection.batches()
            length = len([batch for batch in stream if batch.startswith(b"%d " % epoch)])
            assert list(islice(batches, 2 * length // 3))
            states.append((epoch, connection.state_dict()))
            if not connection.info.endless:
                rest = ids_of(batches) if name not in EXACT else [len(list(batches))]
        if name not in EXACT:
            found = sha256(str(ids).encode() for ids in (rest, ids_of(connection.batches())))
            return [{"feed": name, "epoch": 0, "state": states[0][1], "rest": found}]
    found_all = []
    for epoch, state in states:
        with penstock.connect(url, state=state) as connection:
            rest_of = sha256(read(connection, state["consumed"], epoch))
        found_all.append({"feed": name, "epoch": epoch, "state": state, "rest": rest_of})
    return found_all


def states_of_ranks(url: str) -> list[dict[str, Any]]:
    """Return the states of all ranks within each epoch, with the hashes of what each reads from there on."""
    together = threading.Barrier(WORLD)
    found: list[dict[str, Any]] = [
        {"epoch": epoch, "states": [{}] * WORLD, "rest": [""] * WORLD} for epoch in range(EPOCHS)
    ]

    def rank(number: int) -> None:
        with penstock.connect(url, rank=number, world_size=WORLD, last_round="pad") as connection:
            rests: list[Batches] = []
            for epoch in range(EPOCHS):
                batches = connection.batches()
                first = encoded(connection, epoch, next(batches))
                found[epoch]["states"][number] = connection.state_dict()
                together.wait()  # so that each rank has its state before another ends the epoch
                rests.append([first, *(encoded(connection, epoch, batch) for batch in batches)])
        for epoch in range(EPOCHS):
            found[epoch]["rest"][number] = sha256(chain(rests[epoch][1:], *rests[epoch + 1 :]))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main() -> None:
    """Record what is missing."""
    hashes = json.loads(HASHES.read_text()) if HASHES.exists() else {"streams": {}, "ranks": {}, "groups": {}}
    states = json.loads(STATES.read_text()) if STATES.exists() else []
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        daemon = serving(folder_of_feeds(Path(folder) / "daemon", cache=True), NAMES, feeds=FEEDS)
        try:
            streams = whole_streams(daemon)
            for name in NAMES:
                with penstock.connect(daemon.urls[name]) as connection:
                    add(hashes["streams"], name, fingerprint(name, connection))
            add(hashes["ranks"], RANKED, read_ranks(daemon.urls[RANKED], "auto", "pad"))
            if not RANK_STATES.exists():
                lines = [json.dumps(saved) for saved in states_of_ranks(daemon.urls[RANKED])]
                RANK_STATES.write_text("[\n" + ",\n".join(lines) + "\n]\n")
            for name in set(NAMES) - {saved["feed"] for saved in states}:
                found = states_of(daemon.urls[name], name, streams[name])
                for saved in found if name in EXACT else ():
                    assert saved["rest"] == sha256(streams[name][saved["state"]["consumed"] :]), (name, saved)
                states += found
        finally:
            daemon.stop()
        for path in Path(folder, "daemon/cache").rglob("*.split"):
            place = CACHE / path.relative_to(Path(folder, "daemon/cache"))
            if not place.exists():
                place.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, place)
        if not GROUPS.exists():
            groups, sql = record_groups(
                folder_of_feeds(Path(folder) / "groups", cache=False), streams, GROUPED, feeds=FEEDS
            )
            for name, value in groups.items():
                add(hashes["groups"], name, value)
            GROUPS.write_text(sql)
    HASHES.write_text(json.dumps(hashes, indent=1) + "\n")
    lines = [json.dumps(saved) for saved in sorted(states, key=lambda saved: (saved["feed"], saved["epoch"]))]
    STATES.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
