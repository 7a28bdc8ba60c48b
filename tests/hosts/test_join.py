"""Hosts that join a daemon (`penstock join`), as real processes on this host."""

from __future__ import annotations

import asyncio
import io
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

import penstock
from penstock.commands.top_history import Looks
from penstock.commands.top_screen import as_json, screen
from penstock_proto import DaemonStopped, FeedError, ProtocolError
from penstock_proto import messages as m
from penstock_proto.status.status_shape import HostEngine, Status
from penstock_proto.transport import codec as proto_codec
from penstock_proto.transport import libzmq
from penstock_server.cli import keygen
from penstock_server.cli.status_lines import status_lines
from penstock_server.hosts import agreement
from penstock_server.http import metrics
from penstock_server.http.metrics import METRICS
from penstock_server.join import to_head
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Join, Serve, wait_until
from tests.fakes.fault_proxy import FaultProxy
from tests.http.test_http import values
from tests.reference.every_way import read_every_way
from tests.reference.one_stream import digests

KINDS = """
    import numpy as np
    from penstock_server import Feed

    def images(split, rng):
        for i in range(40 + 7 * split):
            yield rng.normal(size=(9, 5)).astype(np.float32), np.int64(1000 * split + i)

    def sentences(split, rng):
        for i in range(23 + 5 * split):
            n = int(rng.integers(0, 30))
            yield {"ids": np.arange(n, dtype=np.int32), "text": "ab" * n, "at": rng.random(3), "label": np.int8(i % 5)}

    def batches(split, rng):
        for _ in range(6 + split):
            n = int(rng.integers(1, 9 + 20 * split))  # later ones need larger slots
            yield rng.random((n, 3)), np.full(n, split)

    def fails(split, rng):
        for i in range(20):
            if split == 3 and i == 7:
                raise ValueError("a bad row")
            yield np.int64(100 * split + i)

    def mixup(batch, rng):
        image, label = batch
        image = image.astype("float64")
        return rng.random() * image + image[rng.permutation(len(image))], label

    def hidden(batch, rng):
        return {"ids": batch["ids"][:, 1:], "hidden": rng.random(batch["ids"].shape) < 0.5, "label": batch["label"]}

    def without_text(sample):
        return {"ids": sample["ids"], "label": sample["label"]}

    class Items:
        def __len__(self):
            return 333

        def __getitem__(self, i):
            return np.full(4, i), np.int64(np.random.randint(1000))

    SPLITS = list(range(9))
    plain = Feed(images, splits=SPLITS, batch_size=8)
    dropped = Feed(images, splits=SPLITS, batch_size=8, drop_remainder=True, order="exact", turn=1)
    pooled = Feed(images, splits=SPLITS, batch_size=8, shuffle=150)
    ragged = Feed(sentences, splits=SPLITS, batch_size=6, batching="ragged")
    padded = Feed(sentences, splits=SPLITS, batch_size=6, batching="pad", shuffle=40)
    whole = Feed(batches, splits=SPLITS, batch_size=None)
    skips = Feed(fails, splits=SPLITS, batch_size=4, on_error="skip")
    items = Feed(Items(), batch_size=10, shuffle=1000)
    epochs = Feed(images, splits=lambda: SPLITS[::-1], batch_size=8)
    mixed = Feed(images, splits=SPLITS, batch_size=8, shuffle=150, batch_transform=mixup)
    hides = Feed(
        sentences, splits=SPLITS, batch_size=6, batching="pad", transform=without_text, batch_transform=hidden
    )
"""
NAMES = ["plain", "dropped", "pooled", "ragged", "padded", "whole", "skips", "items", "epochs", "mixed", "hides"]

SLOW = """
    import time
    import numpy as np
    from penstock_server import Feed

    def slow(split, rng):
        for i in range(60):
            time.sleep(0.002)
            yield rng.random(100), np.int64(1000 * split + i)

    feed = Feed(slow, splits=list(range(12)), batch_size=5, turn=2)
"""


def stream(daemon: Daemon) -> list[str]:
    """Return the digests of an epoch."""
    with penstock.connect(daemon.url) as connection:
        return digests(connection.batches())


def refused(join: Join, daemon: Daemon, *feeds: str, **options: object) -> str:
    """Start a host that the daemon refuses, and return the host's log."""
    host = join(daemon, *feeds, working=False, **options)
    assert host.wait_ended() == 1, host.log()
    return host.log()


def test_every_kind_of_feed_is_the_same_with_workers_of_other_hosts(serve: Serve, join: Join) -> None:
    read_every_way(serve, join, KINDS, NAMES)


def test_hosts_come_leave_die_stand_still_and_come_back_and_the_stream_stays_the_same(serve: Serve, join: Join) -> None:
    expected = stream(serve(SLOW))
    head = serve(SLOW, workers=1, patched={"hosts.hosts.SILENT": 1.5})
    killed, stopped, leaves = (join(head, working=False) for _ in range(3))
    for host in (killed, stopped, leaves):
        host.wait_working()
    assert "12 splits), so 7 workers run no faster than 6" in head.stderr()
    with penstock.connect(head.url) as connection:
        batches = connection.batches()
        seen = digests(islice(batches, 20))
        stopped.process.send_signal(signal.SIGSTOP)
        seen += digests(islice(batches, 10))
        killed.process.kill()
        seen += digests(islice(batches, 10))
        leaves.process.send_signal(signal.SIGTERM)
        seen += digests(batches)
        assert seen == expected
        assert leaves.wait_ended() == 0, leaves.log()
        wait_until(lambda: f"host {stopped.name} was silent for" in head.stderr())
        assert f"host {killed.name} has ended, or its connection has; other workers take over its work" in head.stderr()
        assert f"host {leaves.name} has left" in head.stderr()
        stopped.process.send_signal(signal.SIGCONT)
        stopped.wait_working(2)
        again = join(head)
        assert again.name != killed.name
        assert len(digests(connection.batches())) == len(expected)
    states = {host.name: host for host in state_of(head).hosts}
    assert {name: (host.state, host.workers, host.ready) for name, host in states.items()} == {
        stopped.name: ("working", 2, 2),
        again.name: ("working", 2, 2),
    }


def test_a_host_gets_more_and_fewer_workers_and_keeps_their_number_when_it_joins_again(
    serve: Serve, join: Join
) -> None:
    long = SLOW.replace("range(12)", "range(10_000)")
    head = serve(long, workers=1, patched={"hosts.hosts.SILENT": 1.5})
    host, other = join(head, host_name="b"), join(head, workers=1, host_name="c")
    seen: list[str] = []

    def read_while(condition: Callable[[], bool]) -> None:
        while condition():
            seen.extend(digests(islice(batches, 5)))

    def work() -> set[str]:
        """Return the host's workers that read splits."""
        return {one.name for one in state_of(head).workers if one.host == "b" and one.doing}

    with penstock.connect(head.url) as connection:
        batches = connection.batches()
        read_while(lambda: not work())
        assert head.scale("4", "--host", "b") == "workers of host b: 2 -> 4\n"
        read_while(lambda: len(work()) < 4)
        assert head.scale("1", "--host", "b") == "workers of host b: 4 -> 1\n"
        read_while(lambda: len(host.workers()) != 1)
        assert head.scale("5", "--host", "b") == "workers of host b: 1 -> 5\n"
        assert head.scale("2", "--host", "b", "--now") == "workers of host b: 5 -> 2\n"
        assert head.scale("2") == "workers: 1 -> 2\n", "the daemon's own workers"
        read_while(lambda: len(work()) < 2 or len(host.workers()) != 2)
        seen += digests(islice(batches, 50))
    with penstock.connect(serve(long, workers=8).url) as connection:
        assert digests(islice(connection.batches(), len(seen))) == seen
    assert "host b: workers: 4, now 1" in head.stderr()
    assert "workers: 4, now 1" in host.log()

    assert head.scale("3", "--host", "b") == "workers of host b: 2 -> 3\n"
    host.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: "host b was silent for" in head.stderr())
    assert "no host 'b' has joined this daemon; there are: c\n" in head.scale("4", "--host", "b")
    host.process.send_signal(signal.SIGCONT)
    host.wait_working(2)
    wait_until(lambda: [one.ready for one in state_of(head).hosts if one.name == "b"] == [3])
    named = {worker.name for worker in state_of(head).workers if worker.host == "b"}
    assert named == {"b/0", "b/1", "b/2"}
    assert len(host.workers()) == 3

    for leaves in (host, other):
        leaves.process.send_signal(signal.SIGTERM)
        assert leaves.wait_ended() == 0, leaves.log()
    wait_until(lambda: "host b has left" in head.stderr())
    assert "no host has joined: `penstock join` on a host lets it join" in head.scale("4", "--host", "b")
    again = join(head, working=False, host_name="b")
    again.wait_working(3)
    assert [one.workers for one in state_of(head).hosts] == [2], "its own --workers counts again"


def test_the_metrics_have_each_host(serve: Serve, join: Join) -> None:
    head = serve(SLOW, workers=1, http=0)
    host = join(head)
    stream(head)
    state_of(head)
    own = {name: value for name, value in values(head).items() if name.endswith(f",host={host.name}")}
    assert {name.partition(",")[0] for name in own} == {name for name in METRICS if name.startswith("penstock_host_")}
    assert own[f"penstock_host_ready_workers,host={host.name}"] == 2
    assert own[f"penstock_host_received_bytes_total,host={host.name}"] > 0


WAITS_AT_ONE = """
    import os
    import time
    import numpy as np
    from penstock_server import Feed

    def numbered(split, rng):
        for i in range(1000):
            time.sleep(float(os.environ.get("PAUSE", 0)))
            yield np.full(10_000, i)

    feed = Feed(numbered, splits=list(range(12)), batch_size=2, turn=2, lanes=12)
"""


def test_the_status_says_of_each_host_what_it_makes_and_how_much_of_the_waiting_is_for_it(
    serve: Serve, join: Join
) -> None:
    head = serve(WAITS_AT_ONE, workers=1, http=0)
    quick = join(head, workers=1)
    slow = join(head, workers=1, env={"PAUSE": "0.05"})
    with penstock.connect(head.url) as connection:
        batches = connection.batches()

        def told() -> bool:
            for _ in islice(batches, 5):
                pass
            seen.append(state_of(head))
            awaited = {host.name: host.awaited for host in seen[-1].hosts}
            return awaited[slow.name] is not None and sum(awaited.values()) > 0.8

        seen: list[Status] = []
        wait_until(told)
        state = seen[-1]
        hosts = {host.name: host for host in state.hosts}
        assert hosts[slow.name].awaited > 3 * hosts[quick.name].awaited
        assert [hosts[host.name].lanes for host in (quick, slow)] == [4, 4]
        assert all(host.rates.bytes > 0 for host in hosts.values())
    (line,) = (line for line in status_lines(state) if f" {slow.name}: " in line)
    looks, shown = Looks(), io.StringIO()
    looks.add(state)
    Console(file=shown, width=80).print(screen(looks))
    assert re.search(rf"^{slow.name} +1 +4 +[\d.]+ +\d+ %", shown.getvalue(), re.MULTILINE), shown.getvalue()
    assert [host["lanes"] for host in as_json(looks)["hosts"]] == [4, 4]
    assert re.search(r", 4 lanes, \d+ slots, \d+\.\d MB/s, \d+ % of the waiting is for it, ", line)


def test_the_status_has_how_many_hosts_an_engine_is_to_run(serve: Serve, join: Join) -> None:
    head = serve(SLOW, workers=1, http=0)
    join(head, host_name="ray-1")
    state = state_of(head)
    assert state.engine is None
    state = replace(state, engine=HostEngine(name="ray", hosts=3, adjusts=(1, 4)))
    assert "hosts    3 on Ray, adjusted to the load from 1 to 4" in status_lines(state)
    assert 'penstock_engine_hosts{engine="ray"} 3.0' in metrics.render(state)[0].decode()
    looks = Looks()
    looks.add(state)
    shown = io.StringIO()
    Console(file=shown, width=120).print(screen(looks))
    assert "1 of 3 hosts on Ray joined" in shown.getvalue()


def state_of(daemon: Daemon) -> Status:
    """Return the daemon's status, once all hosts have reported."""

    def reported() -> bool:
        seen.append(control.status(next(iter(daemon.urls.values())), 10))
        return all(host.memory is not None for host in seen[-1].hosts)

    seen: list[Status] = []
    wait_until(reported)
    return seen[-1]


def test_a_head_without_workers_waits_for_hosts_and_goes_on_when_all_are_lost(serve: Serve, join: Join) -> None:
    expected = stream(serve(SLOW))
    head = serve(SLOW, workers=0)
    seen: list[str] = []

    def read() -> None:
        with penstock.connect(head.url) as connection:
            for batch in connection.batches():
                seen.extend(digests([batch]))

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: "no worker makes batches" in "".join(one.headline for one in state_of(head).streams))
    first = join(head, working=False)
    wait_until(lambda: len(seen) > 10, said=first.log)
    first.process.kill()
    first.process.wait()
    second = join(head, working=False)
    reader.join()
    assert seen == expected
    assert head.stop() == 0
    assert second.wait_ended() == 0
    assert "the head was stopped" in second.log()


def test_a_head_that_is_stopped_without_hosts_says_so_and_ends_after_a_while(serve: Serve) -> None:
    head = serve(SLOW, workers=0, patched={"daemon.daemon.HOSTS_SECONDS": 11.5})
    failed: list[BaseException] = []

    def read() -> None:
        with penstock.connect(head.url, reconnect=0) as connection:
            try:
                next(connection.batches())
            except DaemonStopped as error:
                failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: any(stream.reading for stream in state_of(head).streams))
    stop = [sys.executable, "-m", "penstock_server", "stop", head.url]
    stopping = subprocess.run(stop, capture_output=True, text=True, timeout=60)
    reader.join()
    assert (stopping.returncode, stopping.stdout) == (0, "stopped\n")
    assert (
        "still waiting for 1 stream (no worker makes batches: run `penstock join`); `penstock stop" in stopping.stderr
    )
    assert head.stop() == 0
    assert "so the epochs that are being read cannot end: run `penstock join` on a host. If none joins" in head.stderr()
    assert "no host has joined for 12 s" in head.stderr()
    assert failed


def test_hosts_wait_for_a_head_that_comes_back_and_end_when_it_does_not(serve: Serve, join: Join) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        bind = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    head = serve(SLOW, workers=1, bind=bind)
    host = join(head, patience=20)
    expected = None
    with penstock.connect(head.url) as connection:
        batches = connection.batches()
        seen = digests(islice(batches, 10))
        head.process.kill()
        head.process.wait()
        head = serve(SLOW, workers=1, bind=bind)
        host.daemon = head
        host.wait_working()
        seen += digests(batches)
    expected = stream(head)
    assert seen == expected
    short = join(head, patience=0.1, working=False, host_name="short")
    short.wait_working()
    head.stop(signal.SIGKILL)
    assert short.wait_ended() == 1
    assert "is gone, and did not come back within 0 s" in short.log()
    host.process.send_signal(signal.SIGTERM)
    assert host.wait_ended() == 0, host.log()


@pytest.mark.parametrize(
    ("says", "error", "text"),
    [
        (b"", OSError, "it accepts connections, and closes them"),  # tried again
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(64), ProtocolError, "is not a Penstock daemon: "),
    ],
)
def test_who_only_closes_connections_may_be_a_proxy_whose_head_is_gone(
    says: bytes, error: type[Exception], text: str
) -> None:
    def nothing(*_: object) -> Any:
        return None

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(says)
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await to_head.connect("127.0.0.1", port, None, on_message=nothing, place=nothing, on_end=nothing)

    with pytest.raises(error, match=text):
        asyncio.run(run())


def test_a_host_behind_a_proxy_waits_for_a_head_that_comes_back(serve: Serve, join: Join) -> None:
    """Such a proxy accepts connections while the head is gone, and closes them."""
    head = serve(SLOW, workers=1)
    bind = head.url.rpartition("/")[0]
    with FaultProxy(int(bind.rpartition(":")[2])) as proxy:
        host = join(head, url=f"tcp://127.0.0.1:{proxy.port}")
        head.process.kill()
        head.process.wait()
        before = proxy.tried
        wait_until(lambda: proxy.tried > before + 1)
        host.daemon = serve(SLOW, workers=1, bind=bind)
        host.wait_working()
        host.process.send_signal(signal.SIGTERM)
        assert host.wait_ended() == 0, host.log()


def test_user_code_that_fails_on_another_host_is_raised_with_the_host_and_its_death_blames_the_split(
    serve: Serve, join: Join
) -> None:
    head = serve(
        """
        import os, signal
        import numpy as np
        from penstock_server import Feed, OnError

        def numbers(split, rng):
            for i in range(30):
                if split == 5 and i == 11:
                    raise ValueError("a bad row")
                yield np.int64(i)

        def deadly(split, rng):
            for i in range(30):
                if split == 5 and i == 11:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield np.int64(100 * split + i)

        bad = Feed(numbers, splits=list(range(8)), batch_size=5)
        dies = Feed(deadly, splits=list(range(8)), batch_size=5, on_error=OnError("skip", crashes=2))
        """,
        "bad",
        "dies",
        workers=0,
    )
    host = join(head, "bad", "dies")
    with penstock.connect(head.urls["bad"]) as connection, pytest.raises(FeedError, match="a bad row") as raised:
        list(connection.batches())
    assert f"(on host {host.name})" in str(raised.value)
    assert "split 5" in str(raised.value)
    with penstock.connect(head.urls["dies"]) as connection:
        rows = [row for batch in connection.batches() for row in batch.tolist()]
    assert sorted(rows) == [100 * split + i for split in range(8) for i in range(30) if split != 5 or i < 10]
    assert f"of host {host.name} was killed by SIGKILL (" in head.stderr()


def test_a_host_has_its_machines_name_and_may_end_with_the_program_that_started_it(serve: Serve) -> None:
    head = serve(SLOW, workers=0)
    command = [sys.executable, "-m", "penstock_server", "join", head.url, "feeds.py:feed", "--workers", "1"]
    with (head.folder / "log of the host").open("wb") as log:
        host = subprocess.Popen(
            [*command, "--until-stdin-closes"], cwd=head.folder, stdin=subprocess.PIPE, stdout=log, stderr=log
        )
    assert host.stdin is not None
    try:
        wait_until(lambda: f"host {socket.gethostname()} works" in head.stderr())
        host.stdin.close()
        assert host.wait(60) == 0
        wait_until(lambda: f"host {socket.gethostname()} has ended" in head.stderr())
    finally:
        host.kill()
        host.wait()


def test_a_host_that_does_not_fit_is_refused_and_both_sides_are_named(serve: Serve, join: Join, tmp_path: Path) -> None:
    source = """
        import numpy as np
        from penstock_server import Feed

        def rows(split, rng):
            yield from np.loadtxt(split)

        feed = Feed(rows, splits=["data.txt"], batch_size=2)
        other = Feed(rows, splits=["data.txt"], batch_size=2)
    """
    (tmp_path / "daemon0").mkdir()
    (tmp_path / "daemon0/data.txt").write_text("1\n2\n3\n")
    head = serve(source, "feed", "other", workers=1)
    module = (head.folder / "feeds.py").read_text()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def said(text: str, data: str | None, *feeds: str, **options: object) -> str:
        (elsewhere / "feeds.py").write_text(text)
        (elsewhere / "data.txt").unlink(missing_ok=True)
        if data is not None:
            (elsewhere / "data.txt").write_text(data)
        return refused(join, head, *(feeds or ("feed", "other")), folder=elsewhere, **options)

    log = said(module + "\n# changed", "1\n2\n3\n")
    assert "its file of feeds.py:feed (SHA-256 " in log
    assert "is not that of feeds.py:feed at the head" in log
    wait_until(lambda: "cannot join: its file of feeds.py:feed (SHA-256 " in head.stderr())
    log = said(module, None)
    assert (
        "it cannot make the samples of the head: feed feed, split 'data.txt': rows raised FileNotFoundError: data"
        in log
    )
    log = said(module, "7\n8\n9\n")
    assert "gave a different first sample there, each time that it was made" in log
    log = said(module, "1\n2\n3\n", "other", "feed")
    assert "it serves feeds.py:other, feeds.py:feed, and the head serves feeds.py:feed, feeds.py:other" in log
    log = said(module, "1\n2\n3\n", "feed")
    assert "it serves feeds.py:feed, and the head serves feeds.py:feed, feeds.py:other" in log
    log = said(module, "1\n2\n3\n", memory="1K")
    assert "it allows 1.0 KiB for batches, and a slot of feed feed takes 80.0 KiB: give --memory 320K" in log
    joins = refused(join, head, "feed", "other", folder=tmp_path / "daemon0", words=("--keys", str(tmp_path)))
    assert "is not a host's folder: it has no host.key_secret" in joins
    assert stream_of(head, "feed") == stream_of(head, "other")


def stream_of(daemon: Daemon, feed: str) -> list[str]:
    """Return the digests of an epoch of a feed."""
    with penstock.connect(daemon.urls[feed]) as connection:
        return digests(connection.batches())


def test_versions_that_differ_are_named() -> None:
    here = {"penstock": "1.0", "python": "3.11", "numpy": "2.1.0"}
    source = m.Source("feeds.py:feed", bytes(32))

    def join_with(**differs: str) -> str:
        join = m.Join(m.VERSION, "b", bytes(16), 2, 0, sources=(source,), **{**here, **differs})
        return agreement.differences(join, here, (source,))

    assert not join_with()
    assert join_with(numpy="1.26.4") == "it has NumPy 1.26.4, and the head has 2.1.0: install the same version on both"
    assert "it has Python 3.12" in join_with(python="3.12")
    assert "it has Penstock 0.9" in join_with(penstock="0.9")


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_host_needs_a_hosts_key_and_what_no_host_says_costs_only_its_connection(
    encrypted: bool, serve: Serve, join: Join, tmp_path: Path
) -> None:
    """Also: with keys a host's messages are encrypted, and the stream is the same."""
    options: dict[str, object] = {"workers": 1}
    mine: dict[str, object] = {}
    if encrypted:
        keygen.generate(tmp_path / "keys", ["alice"], ["box"])
        options["keys"] = tmp_path / "keys"
        mine["keys"] = tmp_path / "keys/hosts/box"
    head = serve(SLOW, **options)
    if encrypted:
        assert "admits only clients with keys" in refused(join, head)
        assert "is a client's folder" in refused(join, head, keys=tmp_path / "keys/clients/alice")
    good = join(head, **mine)
    hostile(head, tmp_path / "keys" if encrypted else None)
    client = {"keys": tmp_path / "keys/clients/alice"} if encrypted else {}
    with penstock.connect(head.url, transport="tcp", **client) as connection:
        seen = digests(connection.batches())
    assert len(seen) == 144
    assert good.process.poll() is None


def hostile(head: Daemon, keys: Path | None) -> None:
    """Join as a host, and then send messages that no host sends."""
    from penstock_proto.security.keys import host_keys

    host, port = head.url.removeprefix("tcp://").split("/")[0].split(":")
    (source,) = agreement.sources([f"{head.folder}/feeds.py:feed"])
    join = m.Join(m.VERSION, "bad", bytes(16), 2, 1 << 30, sources=(source,), **agreement.versions())

    for number, (said, body) in enumerate(
        [
            (m.Payload(1_000_000, 5, 5, 0, 8), memoryview(bytes(8))),
            (m.Said(3, b"x"), None),
            (m.GivenUp(0, "mine"), None),
            (m.Beat(), None),
            (m.ActivityShown(1.0, (m.WorkerActivity(3, 0, 1000, 0, 5, "not its own"),)), None),
            (m.MemoryMeasured((m.ProcessMemory(0, 1 << 40),)), None),
            (m.StacksSampled(0, 3, m.Samples(1, 0, (), (), ())), None),
            (m.SplitsGone(1), memoryview(b"12")),
        ]
    ):
        dealer = libzmq.dealer(
            None if keys is None else host_keys(keys / "hosts/box"), host, int(port), 10, lambda: None
        )
        try:
            assert dealer.send(proto_codec.encode(join))
            assert isinstance(proto_codec.from_head(dealer.message(20) or b""), m.Joined)
            assert dealer.send(proto_codec.encode(said), body)
            with pytest.raises(ConnectionResetError):  # it may receive a Failed first
                while True:
                    assert dealer.message(20) is not None, number
        finally:
            dealer.close(0)
