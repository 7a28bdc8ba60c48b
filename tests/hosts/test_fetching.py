"""Consumers over the network fetch batches from the hosts that made them, and not through the head.

All processes are on one machine here, so these tests keep their clients from borrowing (test_lending.py).
"""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest

import penstock
from penstock._transport.from_hosts import fetching, host_here
from penstock_proto import KeyRefused
from penstock_proto import messages as m
from penstock_proto.security.keys import ClientKeys, client_keys, host_keys
from penstock_proto.transport import codec, libzmq
from penstock_server.cli import keygen
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Join, Serve, wait_until
from tests.fakes.fault_proxy import DOWN, FaultProxy
from tests.hosts.test_join import state_of
from tests.http.test_preview import preview
from tests.net.fuzzer import Fuzzer
from tests.processes.free_ports import free_port
from tests.reference.one_stream import arrays, digests

SOURCE = """
    import numpy as np
    from penstock_server import Feed

    def images(split, rng):
        for i in range(40 + split):
            yield rng.integers(0, 256, (64, 256), np.uint8), np.int64(1000 * split + i)

    def sentences(split, rng):
        for i in range(40 + split):
            yield {"ids": rng.integers(0, 9, int(rng.integers(2_000, 6_000))), "at": rng.random(3)}

    class Items:
        def __len__(self):
            return 500

        def __getitem__(self, i):
            return np.random.randint(0, 256, (64, 256), np.uint8), np.int64(i)

    plain = Feed(images, splits=list(range(10)), batch_size=8, turn=3)
    ragged = Feed(sentences, splits=list(range(10)), batch_size=8, batching="ragged")
    items = Feed(Items(), batch_size=8, shuffle=1000)
    pooled = Feed(images, splits=list(range(10)), batch_size=8, shuffle=150)
"""
NAMES = ["plain", "ragged", "items", "pooled"]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all hosts look remote to the clients of this process."""

    class Refused(host_here.HostHere):
        def __init__(self, *_: object) -> None:
            raise ConnectionRefusedError

    monkeypatch.setattr(fetching, "HostHere", Refused)


def through(proxy: FaultProxy, daemon: Daemon, feed: str = "") -> str:
    """Return the URL of a feed through a proxy."""
    url = daemon.urls[feed] if feed else daemon.url
    return f"tcp://127.0.0.1:{proxy.port}/{url.rpartition('/')[2]}"


def port_of(daemon: Daemon) -> int:
    return int(next(iter(daemon.urls.values())).split(":")[2].split("/")[0])


def streams(serve: Serve, source: str, *names: str) -> dict[str, list[str]]:
    """Return the digests of an epoch of each feed, from a daemon without hosts."""
    daemon = serve(source, *names)
    found = {}
    for name in names:
        with penstock.connect(daemon.urls[name]) as connection:
            found[name] = digests(connection.batches())
    return found


def test_batches_do_not_pass_the_head_and_are_the_same(serve: Serve, join: Join) -> None:
    expected = streams(serve, SOURCE, *NAMES)
    head = serve(SOURCE, *NAMES, workers=0)
    for _ in range(2):
        join(head, *NAMES)
    with FaultProxy(port_of(head)) as proxy:
        for name in NAMES:
            fetched = fetched_from(head)
            with penstock.connect(through(proxy, head, name), transport="tcp") as connection:
                assert digests(connection.batches()) == expected[name], name  # by its end it is connected to both hosts
                carried = proxy.carried[DOWN]
                another = list(connection.batches())
            if name == "pooled":  # the head mixes the rows
                assert fetched_from(head) == fetched
            else:
                nbytes = sum(leaf.nbytes for batch in another for leaf in arrays(batch))
                assert proxy.carried[DOWN] - carried < nbytes / 2, name
                assert fetched_from(head) >= fetched + nbytes / 2, name


def fetched_from(head: Daemon, keys: ClientKeys | None = None, field: str = "fetched_bytes") -> int:
    """Return the bytes that consumers have fetched from hosts or will fetch; or the sum of another field of the
    hosts."""
    status = control.status(next(iter(head.urls.values())), 60, keys)
    return sum(getattr(host, field) for host in status.hosts)


SLOW = """
    import time
    import numpy as np
    from penstock_server import Feed

    def images(split, rng):
        for i in range(60):
            time.sleep(0.002)
            yield rng.integers(0, 256, (64, 64), np.uint8), np.int64(1000 * split + i)

    feed = Feed(images, splits=list(range(12)), batch_size=5, turn=2)
"""


def test_what_a_host_kept_is_made_again_when_it_is_lost(
    serve: Serve, join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    expected = streams(serve, SLOW, "feed")["feed"]
    head = serve(SLOW, workers=0)
    hosts = [join(head) for _ in range(3)]
    with caplog.at_level(logging.WARNING), penstock.connect(head.url, transport="tcp") as connection:
        batches = connection.batches()
        seen = digests(islice(batches, 30))
        for host in hosts[:2]:
            host.process.kill()
            seen += digests(islice(batches, 20))
        seen += digests(batches)
    assert seen == expected
    assert not caplog.records, "the stream was not cut"


def test_a_host_that_leaves_sends_what_it_kept(serve: Serve, join: Join, caplog: pytest.LogCaptureFixture) -> None:
    expected = streams(serve, SLOW, "feed")["feed"]
    head = serve(SLOW, workers=0)
    leaves, _ = join(head), join(head)
    with caplog.at_level(logging.WARNING), penstock.connect(head.url, transport="tcp") as connection:
        batches = connection.batches()
        seen = digests(islice(batches, 30))
        leaves.process.send_signal(signal.SIGTERM)
        seen += digests(batches)
        assert leaves.wait_ended() == 0, leaves.log()
    assert seen == expected
    assert not caplog.records, "the stream was not cut"
    wait_until(lambda: f"host {leaves.name} has left" in head.stderr(), 5, lambda: head.stderr() + leaves.log())
    assert "other workers take over its work" not in head.stderr()


def test_a_host_with_little_memory_sends_what_it_kept_longest(serve: Serve, join: Join) -> None:
    expected = streams(serve, SOURCE, "plain", "items")
    head = serve(SOURCE, "plain", "items", workers=0)
    join(head, "plain", "items", workers=3, memory="3M")  # a slot takes 0.4 MB
    for name in ("plain", "items"):
        with penstock.connect(head.urls[name], transport="tcp") as connection:
            batches = connection.batches()
            seen = digests(islice(batches, 3))
            time.sleep(1)  # the host makes as much as its memory allows
            seen += digests(batches)
        assert seen == expected[name], name


def test_a_consumer_of_this_host_beside_one_of_another_gets_everything_from_the_head(serve: Serve, join: Join) -> None:
    expected = streams(serve, SLOW, "feed")["feed"]
    head = serve(SLOW, workers=0)
    for _ in range(2):
        join(head)
    options = [
        {"transport": transport, "rank": rank, "world_size": 2} for rank, transport in enumerate(("tcp", "local"))
    ]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda option: _read(head.url, **option), options)
    assert [one for pair in zip(first, second, strict=True) for one in pair] == expected[: 2 * len(first)]
    assert not any(host.fetched_bytes for host in state_of(head).hosts)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda option: _read(head.url, **{**option, "transport": "tcp"}), options)
    assert [one for pair in zip(first, second, strict=True) for one in pair] == expected[: 2 * len(first)]
    assert all(host.fetched_bytes for host in state_of(head).hosts)


def _read(url: str, **options: object) -> list[str]:
    with penstock.connect(url, **options) as connection:
        return digests(connection.batches())


def test_a_host_without_its_port_says_so_and_its_batches_pass_the_head(serve: Serve, join: Join) -> None:
    expected = streams(serve, SLOW, "feed")["feed"]
    head = serve(SLOW, workers=0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        host = join(head, fetch_port=port)
        assert "trainers cannot fetch batches from this host, so the head sends them all: " in host.log()
        assert f":{port}" in host.log()
        assert _read(head.url, transport="tcp") == expected
    (status,) = state_of(head).hosts
    assert status.received_bytes
    assert not status.fetched_bytes


def test_a_host_whose_port_is_attacked_goes_on(serve: Serve, join: Join) -> None:
    """The attacks are messages of the wrong kind, damaged messages, noise, and fetches of batches that nobody was
    sent."""
    expected = streams(serve, SLOW, "feed")["feed"]
    head = serve(SLOW, workers=0)
    port = free_port()
    host = join(head, fetch_port=port)
    fuzzer = Fuzzer({"tcp": ["127.0.0.1", port], "feeds": ["feed"]}, random.Random(1))
    with penstock.connect(head.url, transport="tcp") as connection:
        batches = connection.batches()
        seen = digests(islice(batches, 10))
        for _ in range(8):
            for _ in range(15):
                with contextlib.suppress(OSError):  # the host cut it off
                    fuzzer.tcp()
            seen += digests(islice(batches, 10))
        fuzzer.close()
        seen += digests(batches)
    assert seen == expected
    assert fetched_from(head) > 0
    assert "Traceback" not in host.log()
    assert host.process.poll() is None


def test_samples_of_what_is_fetched_can_be_looked_at(serve: Serve, join: Join) -> None:
    head = serve(SLOW.replace("range(12)", "range(1000)"), workers=0, http=0)
    join(head)
    with penstock.connect(head.url, transport="tcp") as connection:
        batches = connection.batches()
        wait_until(lambda: next(batches) and fetched_from(head))
        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(preview, head, "feed")
            wait_until(lambda: next(batches) and looking.done())
        shown = looking.result()
    assert shown["number"] == 1


def test_with_keys_batches_are_fetched_encrypted_and_only_by_clients_that_are_admitted(
    serve: Serve, join: Join, tmp_path: Path
) -> None:
    folder = tmp_path / "keys"
    keygen.generate(folder, ["alice", "bob"], ["box"])
    alice, bob = client_keys(folder / "clients/alice"), client_keys(folder / "clients/bob")
    assert alice is not None
    assert bob is not None
    expected = streams(serve, SLOW, "feed")["feed"]
    head = serve(SLOW, workers=0, keys=folder)
    ports = [free_port(), free_port()]
    hosts = [join(head, keys=folder / "hosts/box", fetch_port=port) for port in ports]
    box = host_keys(folder / "hosts/box")
    assert box is not None

    def fetches(keys: ClientKeys | None, server: bytes) -> bool:
        """Return whether a client reaches a host, which answers a guessed fetch with NotKept."""
        keys = None if keys is None else keys._replace(server=server)
        dealer = libzmq.dealer(keys, "127.0.0.1", ports[1], 10, lambda: None)
        try:
            dealer.send(codec.encode(m.Fetch(3, 1 << 40, bytes(16), 0, 1)))
            said = dealer.message(10)
            return said is not None and codec.from_keeper(said) == m.NotKept(3)
        finally:
            dealer.close(0)

    def is_refused(keys: ClientKeys | None, server: bytes) -> bool:
        try:
            return not fetches(keys, server)
        except (KeyRefused, OSError):
            return True

    with penstock.connect(head.url, transport="tcp", keys=folder / "clients/alice") as connection:
        batches = connection.batches()
        seen = digests(islice(batches, 30))
        while not fetched_from(head, alice):
            seen += digests(islice(batches, 1))
        before = [fetched_from(head, alice, field) for field in ("fetched_bytes", "received_bytes")]
        seen += digests(islice(batches, 30))
        after = [fetched_from(head, alice, field) for field in ("fetched_bytes", "received_bytes")]
        assert after[0] - before[0] > 4 * (after[1] - before[1]), "most batches do not pass through the head"
        assert fetches(bob, box.own.public)
        assert is_refused(None, b"")
        assert is_refused(bob, alice.own.public), "not the host that bob expects"
        assert is_refused(box, box.own.public), "a host may not fetch"
        (folder / "server/clients/bob.key").unlink()
        head.process.send_signal(signal.SIGHUP)
        wait_until(lambda: is_refused(bob, box.own.public))
        hosts[0].process.kill()
        seen += digests(batches)
        assert connection.stats()["reconnects"] == 0
    assert seen == expected
