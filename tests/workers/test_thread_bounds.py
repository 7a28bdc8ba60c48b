"""Everything that the daemon's one thread does for others has a bound: in items, and so in milliseconds of its time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import penstock
from penstock_proto import messages as m
from penstock_proto.batches.columns import RAGGED, STACKED, TEXT, Column
from penstock_proto.batches.layout import LeafPlace
from penstock_proto.messages import WorkerActivity
from penstock_proto.spec import Leaf
from penstock_proto.status.host_status import Host, HostMemory
from penstock_proto.status.status_history import History
from penstock_proto.status.status_shape import Status
from penstock_proto.transport import codec
from penstock_server.cli.status_lines import status_lines
from penstock_server.coordinator.model.commands import SendSlab
from penstock_server.coordinator.model.feeds import ServedFeed
from penstock_server.http import copied_rows, metrics
from penstock_server.http.rates import FeedLook, Rates, _short
from penstock_server.http.timeline import Timeline
from penstock_server.shared_memory.arena import Memfd
from penstock_server.state_file.statefile import StateFile
from penstock_server.status import status
from penstock_server.status.json_text import json_text
from penstock_server.to_daemon import control
from tests.conftest import Serve
from tests.fakes.planted_state import KEEP
from tests.fakes.statuses import of

FEED = """
    import numpy as np
    from penstock_server import Feed

    feed = Feed(lambda: iter(np.arange(100000)), batch_size=2)
"""


def cpu_of(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread for some work: the least of five times."""
    times = []
    for _ in range(5):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times)


def milliseconds(work: Callable[[], object]) -> float:
    """Return how long some work takes, on a machine on which a certain loop takes a millisecond."""
    return cpu_of(work) / cpu_of(lambda: sum(number * number for number in range(20_000)))


@pytest.fixture
def large(serve: Serve) -> Status:
    """A status of a cluster with 4096 workers on 256 hosts, as the daemon describes it, and 200 streams."""
    daemon = serve(FEED)
    with penstock.connect(daemon.url) as connection:
        next(connection.batches())
        found = control.status(daemon.url, 60)
    worker = replace(found.workers[0], doing=m.Doing("ü" * 1024, "/" * 1024, 10, 0.5))
    stream = replace(found.streams[0], verdict="x" * 500)
    memory = HostMemory(used=1, allowed=2)
    return replace(
        found,
        workers=[replace(worker, number=number, pid=1000 + number) for number in range(4096)],
        streams=[replace(stream, stream=number) for number in range(200)],
        hosts=[of(Host, name=f"host{number}", address="10.0.0.1", memory=memory, cpus=16) for number in range(256)],
    )


def test_the_status_of_a_large_cluster_fits_a_message_and_names_how_many_are_left_out(large: Status) -> None:
    shown = History().described(status.shortened(large))
    assert (len(shown.workers), shown.more_workers) == (status.MOST_WORKERS, 4096 - status.MOST_WORKERS)
    assert (len(shown.hosts), shown.more_hosts) == (status.MOST_HOSTS, 256 - status.MOST_HOSTS)
    message = codec.encode(m.Status(json_text(shown)), codec.MAX_STATUS)
    assert codec.from_server(message) == m.Status(json_text(shown))
    lines = list(status_lines(shown))
    assert f"worker   {4096 - status.MOST_WORKERS} more" in lines
    assert f"host     {256 - status.MOST_HOSTS} more" in lines
    few = replace(large, workers=large.workers[: status.MOST_WORKERS], hosts=large.hosts[: status.MOST_HOSTS])
    assert (status.shortened(few).more_workers, status.shortened(few).more_hosts) == (0, 0)


def test_a_status_its_text_and_its_metrics_take_milliseconds(large: Status) -> None:
    shown = History().described(status.shortened(large))
    text = json_text(shown)
    took = {
        "shorten": milliseconds(lambda: status.shortened(large)),
        "text": milliseconds(lambda: json_text(shown)),
        "decode": milliseconds(lambda: msgspec.json.decode(text, type=Status)),
        "describe": milliseconds(lambda: History().described(status.shortened(large))),
        "metrics": milliseconds(lambda: metrics.render(shown)),
    }
    assert all(took[name] < 50 for name in ("shorten", "text", "decode", "describe")), took
    assert took["metrics"] < 250, took


def test_a_change_of_the_state_file_takes_milliseconds(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state")
    changes = [
        replace(KEEP, batches=number, places=tuple((lane, number, bytes(1000)) for lane in range(64)))
        for number in range(10)
    ]

    def change() -> None:
        for one in changes:
            file.keep(one)

    took = milliseconds(change) / len(changes)
    file.close()
    assert took < 20


@pytest.mark.parametrize("kind", ["wide", "one large leaf", "many strings", "a first row that is larger"])
def test_a_preview_copies_a_bounded_part_of_a_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def array(nbytes: int, rows: int, dtype: str = "u1") -> LeafPlace:
        count = nbytes // np.dtype(dtype).itemsize
        return LeafPlace(0, np.dtype(dtype), (count,) if dtype != "u1" else (rows, count // rows), nbytes)

    text, stacked = Column(TEXT, Leaf("string", (None,))), Column(STACKED, Leaf("uint8", (None,)))
    ragged = Column(RAGGED, Leaf("uint8", (None,), ragged=True))
    columns, places = {
        "wide": ([stacked] * 100, [array(16 << 20, 2)] * 100),
        "one large leaf": ([stacked], [array(100 << 20, 2)]),
        "many strings": ([text], [array(1 << 20, 1), array((1 << 22) + 8, 1, "i8")]),
        "a first row that is larger": (
            [ragged],
            [LeafPlace(0, np.dtype("u1"), (1 << 30,), 1 << 30), array(8008, 1, "i8")],
        ),
    }[kind]
    feed = SimpleNamespace(
        layout=lambda _: SimpleNamespace(places=places),
        columns=SimpleNamespace(columns=columns),
        plan=SimpleNamespace(batch_size=2),
    )
    read, ends = [], 0

    def pread(fd: int, nbytes: int, offset: int) -> bytes:
        nonlocal ends
        read.append(nbytes)
        if len(places) == 2 and len(read) == 1:
            ends = nbytes // 8
            return np.full(ends, 900 << 20 if kind.startswith("a first") else 5, "i8").tobytes()
        return bytes(nbytes)

    monkeypatch.setattr(os, "pread", pread)
    rows = 1000 if kind.startswith("a first") else 1 if kind == "many strings" else 2
    slab = SendSlab(
        1, 1, first=0, nbytes=0, seq=0, epoch=0, lane=0, index=0, batches=1, rows=rows, shapes=(), record=b""
    )
    batch = copied_rows.copy_batch(cast(ServedFeed, feed), slab, Memfd(1, 0, -1))
    assert sum(read) <= 48 << 20
    assert ends <= 300_000
    copied = [leaf is not None for leaf in batch.leaves]
    wanted = {"wide": [True] * 4 + [False] * 60, "one large leaf": [False], "many strings": [False]}
    assert copied == wanted.get(kind, [False])


def test_the_whole_history_of_the_page_takes_milliseconds() -> None:
    rates, timeline = Rates(), Timeline(lambda _: "train")
    names = [f"feed{number}" for number in range(20)]
    for second in range(3000):
        rates.look(
            second, {name: FeedLook(second * 7, second * 70, second * 7001, second, second / 3) for name in names}
        )
    for look in range(600):
        timeline.add(look / 5, [WorkerActivity(worker, 1, 500, 100, 1, f"file {look}") for worker in range(64)])
    took = milliseconds(lambda: json_text({"rates": rates.since(0, 0), "timeline": timeline.since(0)}))
    assert took < 300, took


def test_the_figures_of_the_page_have_four_digits() -> None:
    dice = np.random.default_rng(1)
    values = np.concatenate([[0.0, np.nan, 1.0, 9.9999e9, 123456789.0, 0.00012345], 10.0 ** dice.uniform(-9, 15, 1000)])
    assert _short(values) == [None if value != value else float(f"{value:.4g}") for value in values.tolist()]
