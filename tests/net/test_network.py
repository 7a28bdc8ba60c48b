"""Faults of the network between a trainer and its loader do not change the stream.

The daemons are real. Between them and the trainer is a proxy that delays, throttles, stalls and cuts (fault_proxy.py),
or a cable between two network namespaces. Users have a patience of 30 s. Tests shorten it on both sides.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

import penstock
from penstock._stream import receiver, reconnecting
from penstock._transport import dialing, tcp_connection, tcp_transport
from penstock._transport.tcp_connection import TcpConnection
from penstock_proto.messages import ClientMessage, Open, ServerMessage
from penstock_proto.status.stream_status import Stream
from penstock_server.to_daemon import control
from tests.conftest import Daemon, DaemonLauncher, LayNetwork, stop_all
from tests.fakes.fault_proxy import DOWN, UP, FaultProxy
from tests.processes.free_ports import free_port
from tests.processes.namespaces import Network

SIZES = [33, 0, 61, 1, 46, 64, 35, 52, 23, 70, 12, 59]

FEEDS = f"""
    import os
    import time

    import numpy as np
    from penstock_server import Feed

    SIZES = {SIZES}

    def generate(split, rng):
        for i in range(SIZES[split]):
            time.sleep(0.0002)
            yield {{"x": rng.integers(0, 256, (64, 256), "uint8"), "id": np.int64(1000 * split + i)}}

    while os.path.exists("import"):  # until the test takes it away
        time.sleep(0.01)

    feed = Feed(generate, splits=range(12), batch_size=4, shuffle=64, lanes=4, turn=2, seed=11)
    ranked = Feed(generate, splits=range(12), batch_size=4, lanes=4, turn=1, seed=12)
    grouped = Feed(generate, splits=range(12), batch_size=4, lanes=4, turn=1, epochs=2)
"""
BATCHES, BATCH_BYTES = 114, 64 * 1024
"""Batches of an epoch, far more than are under way at once, and bytes of a batch. A slab has up to two batches."""
PATIENCE = 1.0
"""Seconds without a sign of life after which a connection is lost, instead of 30, on both sides."""

SERVE = f"""
import sys
from penstock_server.cli import main as cli
from penstock_server.consumers import sessions
sessions.PATIENCE, sessions.SILENT = float(sys.argv.pop(1)), {PATIENCE / 3}
cli.main(prog_name="penstock")
"""
"""`penstock serve` with a different patience."""

Hashes = list[str]
"""The SHA-256 of each consumed batch, and of all of them at the end."""
Faults = dict[int, Callable[[], None]]
"""Faults, by the number of the batch after which they occur."""


class Start(Protocol):
    def __call__(
        self, *feeds: str, patience: float = PATIENCE, network: str = "", at: str = "127.0.0.1:0"
    ) -> Daemon: ...


@pytest.fixture
def start(tmp_path: Path, daemon_launchers: list[DaemonLauncher]) -> Iterator[Start]:
    """`start("feed")` starts a daemon with two workers for these feeds, in a network namespace if one is given."""
    (tmp_path / "feeds.py").write_text(textwrap.dedent(FEEDS))
    daemons: list[Daemon] = []

    def started(*feeds: str, patience: float = PATIENCE, network: str = "", at: str = "127.0.0.1:0") -> Daemon:
        words = [SERVE, str(patience), "serve", *(f"feeds.py:{feed}" for feed in feeds)]
        words += ["--bind", f"tcp://{at}", "--insecure", "--workers", "2", "--memory", "256M"]
        log, launcher = tmp_path / f"log{len(daemons)}", daemon_launchers[len(daemons) % 2]
        daemon = Daemon(words, tmp_path, log, dict(os.environ), launcher=launcher, network=network)
        daemons.append(daemon)
        if not (tmp_path / "import").exists():
            daemon.wait_ready(len(feeds))
        return daemon

    yield started
    stop_all(daemons)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make clients as impatient as the daemon."""
    monkeypatch.setattr(tcp_transport, "LOST_AFTER", PATIENCE)
    monkeypatch.setattr(tcp_transport, "PING_AFTER", PATIENCE / 5)
    monkeypatch.setattr(receiver, "IDLE", PATIENCE / 15)


@contextlib.contextmanager
def between(daemon: Daemon, feed: str = "feed") -> Iterator[tuple[FaultProxy, str]]:
    """Yield a proxy before the daemon, and the feed's URL through it."""
    with FaultProxy(int(daemon.urls[feed].rpartition(":")[2].partition("/")[0])) as proxy:
        yield proxy, f"tcp://127.0.0.1:{proxy.port}/{feed}"


def digest(batch: Any) -> str:
    return hashlib.sha256(b"".join(batch[key].tobytes() for key in sorted(batch))).hexdigest()


def consume(connection: penstock.Connection, epochs: int = 2, meet: Callable[[int], None] = lambda _: None) -> Hashes:
    """Return the hashes of `epochs` epochs. Call `meet` after each batch, with the number of hashes so far."""
    hashes: Hashes = []
    for _ in range(epochs):
        for batch in connection.batches():
            hashes.append(digest(batch))
            meet(len(hashes))
        hashes.append("end")
    return [*hashes, hashlib.sha256("".join(hashes).encode()).hexdigest()]


def quiet(daemon: Daemon, feed: str = "feed", epochs: int = 2) -> Hashes:
    with penstock.connect(daemon.urls[feed], transport="tcp") as connection:
        hashes = consume(connection, epochs)
        assert connection.stats()["reconnects"] == 0
        assert connection.stats()["transport"] == "tcp"
    assert len(set(hashes)) == epochs * BATCHES + 2
    return hashes


def streams(daemon: Daemon) -> list[Stream]:
    """Return the daemon's streams, as its status shows them."""
    return control.status(next(iter(daemon.urls.values())), 30).streams


def until(condition: Callable[[], bool]) -> None:
    """Wait without a limit. Pytest's timeout ends a test in which the event never comes."""
    while not condition():
        time.sleep(0.02)


# --- the proxy ---


def test_a_first_connection_that_breaks_while_the_daemon_is_starting_is_made_anew(start: Start, tmp_path: Path) -> None:
    (tmp_path / "import").touch()
    port = free_port()
    daemon = start("feed", at=f"127.0.0.1:{port}")
    with FaultProxy(port) as proxy:

        def cut() -> None:
            until(lambda: proxy.accepted > 0)
            time.sleep(0.5)  # by now the daemon was asked, and answers when its modules are imported
            proxy.cut()
            time.sleep(0.5)
            (tmp_path / "import").unlink()

        cutter = threading.Thread(target=cut)
        cutter.start()
        began = time.monotonic()
        with penstock.connect(f"tcp://127.0.0.1:{proxy.port}/feed", transport="tcp") as connection:
            assert time.monotonic() - began < 25  # less than the 30 s that a daemon has for its answer
            next(connection.batches())
        cutter.join()
        daemon.wait_ready(1)


def test_faults_shorter_than_the_patience_are_waited_out_over_the_same_connection(start: Start) -> None:
    daemon = start("feed", patience=30)
    calm = quiet(daemon)
    with between(daemon) as (proxy, url), penstock.connect(url, transport="tcp") as connection:
        faults: dict[int, Callable[[], None]] = {
            3: lambda: proxy.delay(0.15, lasting=0.6),
            40: lambda: proxy.throttle(400_000, lasting=1),
            75: lambda: proxy.stall(1),
            110: lambda: proxy.stall(1, UP),
            150: lambda: proxy.stall(1, DOWN),
        }
        assert consume(connection, meet=lambda n: faults.pop(n, lambda: None)()) == calm
        assert not faults
        assert connection.stats()["reconnects"] == 0
        assert proxy.accepted == 1


def test_a_link_on_which_a_slab_takes_longer_than_the_patience_is_alive(start: Start, impatient: None) -> None:
    daemon = start("feed")
    calm = quiet(daemon)
    slow = 2 * BATCH_BYTES / (3 * PATIENCE)
    with between(daemon) as (proxy, url), penstock.connect(url, transport="tcp") as connection:

        def meet(n: int) -> None:
            if n == 9:
                proxy.throttle(slow, lasting=5 * PATIENCE)

        assert consume(connection, meet=meet) == calm
        assert connection.stats()["reconnects"] == 0


def test_a_link_that_is_cut_again_and_again_is_a_pause_and_nothing_else(start: Start) -> None:
    daemon = start("feed", patience=30)
    calm = quiet(daemon)
    cuts = {1: 0.0, 20: 0.3, 21: 0.0, 70: 1.0, BATCHES - 1: 0.0, BATCHES: 0.0, BATCHES + 1: 0.0, 2 * BATCHES - 1: 0.2}
    with between(daemon) as (proxy, url), penstock.connect(url, transport="tcp") as connection:

        def meet(n: int) -> None:
            if n in cuts:
                time.sleep(0.1)  # so some slabs are received but not handed over, and come again
                proxy.cut(refusing=cuts[n])
                time.sleep(0.1)

        assert consume(connection, meet=meet) == calm
        assert connection.stats()["reconnects"] >= 4  # a cut may hit a connection that is just being made
        assert connection.stats()["batches"] == 2 * BATCHES
        until(lambda: len(streams(daemon)) == 1)


@pytest.mark.parametrize("directions", [(UP, DOWN), (UP,), (DOWN,)], ids=["both", "up", "down"])
def test_a_stall_longer_than_the_patience_ends_in_another_connection_and_the_same_stream(
    start: Start, impatient: None, directions: tuple[str, ...]
) -> None:
    daemon = start("feed")
    calm = quiet(daemon)
    with between(daemon) as (proxy, url), penstock.connect(url, transport="tcp") as connection:

        def meet(n: int) -> None:
            if n == 9:
                proxy.stall(2.5 * PATIENCE, *directions)

        assert consume(connection, meet=meet) == calm
        assert connection.stats()["reconnects"] >= 1
        until(lambda: len(streams(daemon)) == 1)


def test_a_half_open_connection_is_replaced_and_the_daemon_lets_go_of_its_session(
    start: Start, impatient: None
) -> None:
    daemon = start("feed")
    calm = quiet(daemon)
    with between(daemon) as (proxy, url), penstock.connect(url, transport="tcp") as connection:

        def meet(n: int) -> None:
            if n in (5, 90, BATCHES + 60):
                proxy.freeze()
                time.sleep(1.2 * PATIENCE if n == 90 else 0)  # received slabs are too old by then to be handed over

        assert consume(connection, meet=meet) == calm
        assert connection.stats()["reconnects"] >= 3
        assert connection.stats()["batches"] == 2 * BATCHES
        until(lambda: len(streams(daemon)) == 1)
        reserved = control.status(daemon.url, 30).memory.reserved
    until(lambda: not streams(daemon))
    assert control.status(daemon.url, 30).memory.reserved <= reserved


def test_the_daemon_lets_go_of_a_consumer_that_is_never_heard_of_again(start: Start) -> None:
    daemon = start("feed")
    with between(daemon) as (proxy, url), penstock.connect(url, transport="tcp", reconnect=0) as connection:
        next(connection.batches())
        assert len(streams(daemon)) == 1
        proxy.freeze()
        until(lambda: not streams(daemon))
    assert "nothing heard of" in daemon.stderr()
    until(lambda: control.status(daemon.url, 30).memory.arena == 0)


def test_an_attempt_to_connect_again_that_stalls_does_not_take_the_time_of_the_next(
    start: Start, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_connection, "_CONNECT", 0.5)
    daemon = start("feed")
    calm = quiet(daemon)
    with between(daemon) as (proxy, url), penstock.connect(url, transport="tcp") as connection:

        def meet(n: int) -> None:
            if n == 30:
                before = proxy.accepted
                proxy.stall(3600)  # the next connection is accepted, but stays silent
                proxy.cut()
                until(lambda: proxy.accepted > before)
                time.sleep(0.3)
                proxy.freeze()
                proxy.mend()

        began = time.monotonic()
        assert consume(connection, meet=meet) == calm
        assert time.monotonic() - began < 25  # less than the 30 s that the daemon has for an answer


def test_an_attempt_to_connect_again_that_is_never_answered_does_not_take_the_time_of_the_next(
    start: Start, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnecting, "ANSWER", 0.5)
    daemon = start("feed")
    calm = quiet(daemon)
    with between(daemon) as (proxy, url), penstock.connect(url, transport="tcp") as connection:
        connected = dialing.connected
        frozen = 0

        def freezing(*args: Any) -> Any:
            nonlocal frozen
            dealer = connected(*args)  # ZeroMQ's handshake is done
            if frozen < 2:
                frozen += 1
                proxy.freeze()
            return dealer

        monkeypatch.setattr(dialing, "connected", freezing)
        began = time.monotonic()
        assert consume(connection, meet=lambda n: proxy.cut() if n == 30 else None) == calm
        assert time.monotonic() - began < 25  # less than the 30 s that the daemon has for an answer
        assert frozen == 2


def test_a_first_connection_that_breaks_before_it_is_open_is_made_anew(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start("feed")
    calm = quiet(daemon, epochs=1)
    with between(daemon) as (proxy, url):
        asking = TcpConnection.ask
        refusing = [0.0, 0.5]

        def cut(tcp: TcpConnection, message: ClientMessage, *args: Any) -> ServerMessage:
            if isinstance(message, Open) and refusing:
                proxy.cut(refusing.pop())  # the daemon has answered Hello
            return asking(tcp, message, *args)

        monkeypatch.setattr(TcpConnection, "ask", cut)
        with penstock.connect(url, transport="tcp") as connection:
            assert consume(connection, epochs=1) == calm
            assert connection.stats()["reconnects"] == 0
            until(lambda: len(streams(daemon)) == 1)
        refusing = [0.0] * 1000
        with pytest.raises(penstock.ConnectionLost, match="broke again"):
            penstock.connect(url, transport="tcp", timeout=0.5)


def read_by_a_group(daemon: Daemon, faults: Callable[[FaultProxy, FaultProxy], list[Faults]]) -> Counter[int]:
    """Return how often each sample was handed over in two epochs to three consumers, two of them behind proxies."""
    found: list[list[int]] = [[], [], []]
    errors: list[BaseException] = []
    together = threading.Barrier(3)

    def train(mine: list[int], url: str, mine_due: Faults) -> None:
        try:
            with penstock.connect(url, transport="tcp", group="g") as connection:
                together.wait(30)
                with contextlib.suppress(penstock.EndOfStream):
                    while True:
                        for n, batch in enumerate(connection.batches()):
                            mine += batch["id"].tolist()
                            mine_due.pop(n, lambda: None)()
                            while not mine_due and any(due):  # leave some batches to consumers that have faults to meet
                                time.sleep(0.02)
                together.wait(
                    60
                )  # a group's stream ends when all have left it, even for consumers that are cut off then
        except BaseException as error:
            errors.append(error)
            together.abort()

    with between(daemon, "grouped") as (one, one_url), between(daemon, "grouped") as (other, other_url):
        urls = one_url, other_url, daemon.urls["grouped"]
        due = [*faults(one, other), {}]
        threads = [threading.Thread(target=train, args=args) for args in zip(found, urls, due, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert not any(due), "all faults were met"
    return Counter(itertools.chain(*found))


TWICE = Counter({1000 * split + i: 2 for split, size in enumerate(SIZES) for i in range(size)})


def test_a_group_behind_slow_links_is_handed_each_batch_once(start: Start) -> None:
    daemon = start("grouped", patience=30)
    assert (
        read_by_a_group(
            daemon,
            lambda one, other: [
                {1: lambda: one.delay(0.1, lasting=0.4), 4: lambda: one.stall(0.4, UP)},
                {1: lambda: other.throttle(400_000, lasting=0.4), 4: lambda: other.stall(0.4)},
            ],
        )
        == TWICE
    )


def test_a_group_behind_links_that_break_misses_nothing_and_only_what_the_daemon_did_not_hear_of_comes_again(
    start: Start, impatient: None
) -> None:
    daemon = start("grouped")
    found = read_by_a_group(
        daemon,
        lambda one, other: [
            {1: one.cut, 4: lambda: one.cut(0.3)},
            {1: lambda: other.stall(2 * PATIENCE, UP), 4: other.freeze},
        ],
    )
    assert not TWICE - found, "nothing is missing"
    assert (found - TWICE).total() <= 4 * tcp_transport.CREDIT * 4, "each loss repeats at most what was under way"


def test_ranks_behind_bad_links_see_the_very_stream_of_one_trainer(start: Start, impatient: None) -> None:
    daemon = start("ranked")
    calm = quiet(daemon, "ranked", epochs=2)
    found: list[Hashes] = [[], []]

    def train(rank: int, url: str, meet: Callable[[int], None]) -> None:
        with penstock.connect(url, transport="tcp", rank=rank, world_size=2) as connection:
            found[rank] = consume(connection, 2, meet)
            while any(not hashes for hashes in found):  # until the other one is done
                time.sleep(0.02)

    with between(daemon, "ranked") as (proxy, url), between(daemon, "ranked") as (other, other_url):
        proxy_faults = {7: lambda: proxy.cut(0.3), 30: proxy.freeze, 80: proxy.cut}
        other_faults = {30: lambda: other.stall(3 * PATIENCE), 81: other.cut}
        trainers = [
            threading.Thread(target=train, args=(0, url, lambda n: proxy_faults.pop(n, lambda: None)())),
            threading.Thread(target=train, args=(1, other_url, lambda n: other_faults.pop(n, lambda: None)())),
        ]
        for trainer in trainers:
            trainer.start()
        for trainer in trainers:
            trainer.join()
    assert not proxy_faults
    assert not other_faults
    merged = [hash_ for pair in zip(found[0][:-1], found[1][:-1], strict=True) for hash_ in pair]
    ends = itertools.count()
    assert [hash_ for hash_ in merged if hash_ != "end" or next(ends) % 2] == calm[:-1]


def weather(seed: int, proxy: FaultProxy, every: int) -> Callable[[int], None]:
    """Return a function that causes random faults, about one in `every` batches."""
    rng = random.Random(seed)
    faults: list[Callable[[], None]] = [
        lambda: proxy.delay(rng.uniform(0.01, 0.2), rng.uniform(0.1, 1)),
        lambda: proxy.throttle(rng.uniform(2e5, 2e6), rng.uniform(0.1, 1)),
        lambda: proxy.stall(rng.uniform(0.05, 0.8)),
        lambda: proxy.stall(rng.choice([0.5, 2]) * PATIENCE, rng.choice([UP, DOWN])),
        lambda: proxy.cut(rng.choice([0, 0, 0.1, 0.6])),
        lambda: proxy.cut(),
        proxy.freeze,
        proxy.mend,
    ]

    def meet(_: int) -> None:
        if rng.random() < 2 / every:
            time.sleep(rng.uniform(0, 0.2))
        if rng.random() < 1 / every:
            rng.choice(faults)()

    return meet


def test_in_any_weather_the_stream_is_that_of_a_quiet_day(start: Start, impatient: None) -> None:
    seed = 2
    daemon = start("feed")
    calm = quiet(daemon)
    with between(daemon) as (proxy, url), penstock.connect(url, transport="tcp") as connection:
        assert consume(connection, meet=weather(seed, proxy, every=40)) == calm, f"seed {seed}"


@pytest.mark.soak
def test_in_any_weather_for_a_long_time(start: Start, impatient: None) -> None:
    daemon = start("feed")
    calm = quiet(daemon)
    reconnects = 0
    for seed in range(100, 100 + int(os.environ.get("SEEDS", 60))):
        with between(daemon) as (proxy, url), penstock.connect(url, transport="tcp") as connection:
            assert consume(connection, meet=weather(seed, proxy, every=12)) == calm, f"seed {seed}"
            reconnects += connection.stats()["reconnects"]
    print(f"{seed - 99} runs, {reconnects} reconnects, 0 violations")


@pytest.mark.soak
def test_a_stall_longer_than_the_patience_that_users_have(start: Start) -> None:
    daemon = start("feed", patience=30)
    calm = quiet(daemon)
    with between(daemon) as (proxy, url), penstock.connect(url, transport="tcp") as connection:
        faults = {9: lambda: proxy.stall(40), 90: proxy.freeze, BATCHES + 9: lambda: proxy.stall(20)}
        assert consume(connection, meet=lambda n: faults.pop(n, lambda: None)()) == calm
        assert connection.stats()["reconnects"] == 2


# --- two network namespaces ---

TRAINER = """
import sys, time
import penstock
from penstock._stream import receiver as _receiver
from penstock._transport import tcp_transport as _tcp_transport
from tests.net.test_network import consume

url, patience = sys.argv[1], float(sys.argv[2])
_tcp_transport.LOST_AFTER, _tcp_transport.PING_AFTER, _receiver.IDLE = patience, patience / 5, min(1.0, patience / 15)

def meet(n):
    time.sleep(0.01)
    if n == 30:
        print("30 batches", flush=True)

with penstock.connect(url) as connection:
    hashes = consume(connection, meet=meet)
    stats = connection.stats()
    print(hashes[-1], len(hashes), stats["transport"], stats["reconnects"], flush=True)
"""


def train(network: Network, daemon: Daemon, patience: float) -> subprocess.Popen[str]:
    """Start a trainer on the other machine."""
    return subprocess.Popen(
        [*network["trainer"].within, sys.executable, "-c", TRAINER, daemon.url, str(patience)],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_link_that_is_down_for_5_s_between_two_hosts_changes_nothing(start: Start, lay_network: LayNetwork) -> None:
    network = lay_network("loader", "trainer")
    loader = network["loader"]
    daemon = start("feed", patience=PATIENCE, network=loader.namespace, at=f"{loader.address}:0")
    patient = start("feed", patience=30, network=loader.namespace, at=f"{loader.address}:0")
    trainers = [train(network, daemon, PATIENCE), train(network, patient, 30)]
    try:
        for trainer in trainers:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "30 batches\n"
        loader.unplug()
        time.sleep(5)
        loader.plug()
        trainers.append(train(network, patient, 30))
        results = [trainer.communicate()[0].split() for trainer in trainers]
    finally:
        for trainer in trainers:
            with trainer:
                trainer.kill()
    calm = results.pop()[2:]
    assert calm[1:] == [str(2 * BATCHES + 3), "tcp", "0"]  # "auto" finds that there is no memory to share
    for hash_, count, transport, _ in results:
        assert [hash_, count, transport] == calm[:3]
    assert int(results[0][3]) >= 1  # 5 s of silence, with a patience of 1 s
    assert int(results[1][3]) == 0  # with a patience of 30 s nobody noticed
