"""Published hashes of whole streams: what users read today, they read tomorrow, also from the states that they saved.

**A changed hash means that the streams of users change**: a resumed run reads other samples than the interrupted run
would have read, and a result can no longer be reproduced. No test can allow that. If the change is wanted, it is a new
version of the stream. Raise `VERSION` in penstock_proto/messages/base.py, the version of states in the client and
`SCHEMA` of state files, so that old states are refused. Say so in CHANGELOG.md. Only then delete the files in
tests/data that `python -m tests.proto.test_stream_hashes` writes, and run it. The script records what is missing. It
changes nothing that is recorded, and refuses if today's code reads another stream.

PROTOCOL.md defines the hash ("A test for clients") and offers these hashes as a test of clients. Two epochs are read,
or the first 60 batches of an endless feed.

Fast order with several lanes is not covered, because its order depends on timing.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_proto.spec import flatten
from tests.conftest import UNCHECKED, Daemon, Serve, command

DATA = Path(__file__).resolve().parents[1] / "data"
FEEDS = (DATA / "stream_feeds.py").read_text()
HASHES = DATA / "stream_hashes.json"
STATES = DATA / "stream_states.json"
GROUPS = DATA / "stream_groups.sql"

NAMES = [line.split(" = ")[0] for line in FEEDS.splitlines() if " = Feed" in line and line[0] != "_"]
EPOCHS = 2
ENDLESS_BATCHES = 60
WORLD = 5
RANKS = [("five_lanes", "drop"), ("five_lanes", "pad"), ("shuffled_rng", "drop"), ("shuffled_rng", "pad")]
"""Feeds that ranks read, and their `last_round`."""
GROUPED = {"shuffled_global": 11, "with_global_randomness": 34}
"""Feeds that a group reads, and how many batches it had read when its daemon was killed. A slab is one batch."""

WHY = "the stream that users read has changed (the head of this file says what that means)"

Batches = list[bytes]


def encoded(connection: penstock.Connection, epoch: int, batch: Any) -> bytes:
    """Return a batch as it enters the hash."""
    arrays = [array for leaf in flatten(connection.info.spec, batch) for array in stored(leaf)]
    shapes = " ".join(f"{array.dtype}[{','.join(map(str, array.shape))}]" for array in arrays)
    return f"{epoch} {shapes}\n".encode() + b"".join(array.tobytes() for array in arrays)


def stored(leaf: Any) -> list[Any]:
    """Return the arrays that hold a leaf in a slot: for ragged leaves and text the values and their offsets."""
    if isinstance(leaf, penstock.Ragged):
        return [*stored(leaf.flat_values), *leaf.nested_row_splits]
    if leaf.dtype == object:
        texts = leaf.reshape(-1).tolist()
        return [np.frombuffer(b"".join(texts), np.uint8), np.cumsum([0, *map(len, texts)], dtype=np.int64)]
    return [leaf]


def sha256(batches: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(batch)
    return digest.hexdigest()


def read(connection: penstock.Connection, consumed: int = 0, epoch: int = 0) -> Batches:
    """Return the rest of the first two epochs, from batch `consumed` on, which is in `epoch`."""
    if connection.info.endless:
        batches = islice(connection.batches(), ENDLESS_BATCHES - consumed)
        return [encoded(connection, 0, batch) for batch in batches]
    return [encoded(connection, number, batch) for number in range(epoch, EPOCHS) for batch in connection.batches()]


def read_ranks(
    url: str, transport: str, last_round: str, states: Sequence[dict[str, Any] | None] = WORLD * (None,), epoch: int = 0
) -> list[str]:
    """Return the hash of what each rank reads, or of what it reads from its state on, which is in `epoch`."""
    found: dict[int, str] = {}

    def rank(number: int) -> None:
        state = states[number]
        with penstock.connect(
            url, transport=transport, rank=number, world_size=WORLD, last_round=last_round, state=state
        ) as connection:
            found[number] = sha256(read(connection, state["consumed"] if state else 0, epoch))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(WORLD)]


WAYS = pytest.mark.parametrize(("workers", "transport"), [(1, "local"), (3, "tcp")])


@WAYS
def test_a_stream_has_its_published_hash_whatever_the_workers_and_the_transport(
    serve: Serve, workers: int, transport: str
) -> None:
    published = json.loads(HASHES.read_text())["streams"]
    assert set(published) == set(NAMES)
    daemon = serve(FEEDS, *NAMES, workers=workers)
    found = {}
    for name in NAMES:
        with penstock.connect(daemon.urls[name], transport=transport) as connection:
            found[name] = sha256(read(connection))
    assert found == published, WHY


@WAYS
def test_ranks_read_their_published_parts(serve: Serve, workers: int, transport: str) -> None:
    published = json.loads(HASHES.read_text())["ranks"]
    daemon = serve(FEEDS, *sorted({name for name, _ in RANKS}), workers=workers)
    found = {f"{name} {last}": read_ranks(daemon.urls[name], transport, last) for name, last in RANKS}
    assert found == published, WHY


@WAYS
def test_a_state_that_was_saved_long_ago_gives_the_rest_of_its_stream(
    serve: Serve, workers: int, transport: str
) -> None:
    states = json.loads(STATES.read_text())
    assert {saved["feed"] for saved in states} == set(NAMES)
    daemon = serve(FEEDS, *NAMES, workers=workers, patched=UNCHECKED)
    for saved in states:
        name, state = saved["feed"], saved["state"]
        with penstock.connect(daemon.urls[name], transport=transport, state=state) as connection:
            rest = sha256(read(connection, state["consumed"], saved["epoch"]))
        assert rest == saved["rest"], f"{name} from batch {state['consumed']}: {WHY}"


def test_a_group_goes_on_from_a_state_file_that_was_written_long_ago(serve: Serve, tmp_path: Path) -> None:
    published = json.loads(HASHES.read_text())["groups"]
    state = state_file(GROUPS, tmp_path / "state")
    daemon = serve(FEEDS, *GROUPED, state=state, patched=PATIENCE)
    assert read_groups(daemon, published) == published, WHY


PATIENCE: dict[str, object] = {"coordinator.admission.groups.PATIENCE": 4.0}
"""With consumers that had read when the daemon was killed, and do not come back."""


def state_file(sql: Path, path: Path) -> Path:
    """Write the state file that is recorded as `sql`, and return its path."""
    with closing(sqlite3.connect(path)) as file:
        file.executescript(sql.read_text())
    return path


def read_groups(daemon: Daemon, published: dict[str, Any]) -> dict[str, Any]:
    """Return what the groups of the published feeds read from their epochs on."""
    with ExitStack() as open_together:
        found = {}
        connections = {
            name: open_together.enter_context(penstock.connect(daemon.urls[name], group="g")) for name in published
        }
        for name, connection in connections.items():
            epoch = int(published[name]["epoch"])
            found[name] = {"epoch": epoch, "rest": sha256(read(connection, epoch=epoch))}
    return found


# --- record what is missing ---


def serving(folder: Path, names: Iterable[str], *options: str, feeds: str = FEEDS) -> Daemon:
    folder.mkdir(exist_ok=True)
    (folder / "feeds.py").write_text(feeds)
    names = list(names)
    words = [*command({}), "serve", "--bind", "tcp://127.0.0.1:0", *options, *(f"feeds.py:{name}" for name in names)]
    daemon = Daemon(words, folder, folder / "log", dict(os.environ))
    daemon.wait_ready(len(names))
    return daemon


def add(recorded: dict[str, Any], name: str, value: Any) -> None:
    """Record a value, or refuse to replace another one."""
    if recorded.setdefault(name, value) != value:
        sys.exit(f"{name}: {recorded[name]} is recorded, and today's code gives {value}.\n{WHY}\n\n{__doc__}")


def whole_streams(daemon: Daemon) -> dict[str, Batches]:
    found = {}
    for name in daemon.urls:
        with penstock.connect(daemon.urls[name]) as connection:
            found[name] = read(connection)
    return found


def states_of(url: str, name: str, stream: Batches) -> list[dict[str, Any]]:
    """Return a state in each epoch, after two thirds of its batches, and the hash of the rest."""
    found, consumed = [], 0
    with penstock.connect(url) as connection:
        for epoch in range(1 if connection.info.endless else EPOCHS):
            batches = connection.batches()
            length = len([batch for batch in stream if batch.startswith(b"%d " % epoch)])
            consumed += len(list(islice(batches, 2 * length // 3)))
            state = connection.state_dict()
            assert state["consumed"] == consumed
            found.append({"feed": name, "epoch": epoch, "state": state, "rest": sha256(stream[consumed:])})
            if not connection.info.endless:
                consumed += len(list(batches))
    return found


def record_groups(
    folder: Path, streams: dict[str, Batches], grouped: dict[str, int] = GROUPED, feeds: str = FEEDS
) -> tuple[dict[str, Any], str]:
    """Return what groups read after their daemon was killed, and its state file as SQL."""
    daemon = serving(folder, grouped, "--state", "state", feeds=feeds)
    published, reading = {}, []
    for name, count in grouped.items():
        connection = penstock.connect(daemon.urls[name], group="g", reconnect=0)
        batches = connection.batches()
        while rest := count - len(list(islice(batches, count))):
            count, batches = rest, connection.batches()
        reading.append((connection, batches))
        stream = streams[name][grouped[name] :]
        published[name] = {"epoch": int(stream[0].split()[0]), "rest": sha256(stream)}
    time.sleep(1)  # until the daemon has heard and written what was handed over
    daemon.stop(signal.SIGKILL)
    for connection, _ in reading:
        connection.close()
    with closing(sqlite3.connect(folder / "state")) as file:
        pragmas = [f"PRAGMA {name} = {file.execute(f'PRAGMA {name}').fetchone()[0]};" for name in PRAGMAS]
        return published, "\n".join([*pragmas, *file.iterdump(), ""])


PRAGMAS = ("application_id", "user_version")


def main() -> None:
    """Record the missing hashes and states."""
    hashes = json.loads(HASHES.read_text()) if HASHES.exists() else {"streams": {}, "ranks": {}, "groups": {}}
    states = json.loads(STATES.read_text()) if STATES.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        daemon = serving(Path(folder) / "daemon", NAMES)
        try:
            streams = whole_streams(daemon)
            for name, stream in streams.items():
                add(hashes["streams"], name, sha256(stream))
            for name, last_round in RANKS:
                add(hashes["ranks"], f"{name} {last_round}", read_ranks(daemon.urls[name], "auto", last_round))
            for name in set(NAMES) - {saved["feed"] for saved in states}:
                states += states_of(daemon.urls[name], name, streams[name])
        finally:
            daemon.stop()
        if not GROUPS.exists():
            groups, sql = record_groups(Path(folder) / "groups", streams)
            for name, value in groups.items():
                add(hashes["groups"], name, value)
            GROUPS.write_text(sql)
    HASHES.write_text(json.dumps(hashes, indent=1) + "\n")
    lines = [json.dumps(saved) for saved in sorted(states, key=lambda saved: (saved["feed"], saved["epoch"]))]
    STATES.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
