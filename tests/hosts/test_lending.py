"""Consumers on a host's machine borrow the batches that it keeps: they map its memory, and nothing is copied."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import penstock
from penstock._transport.from_hosts import fetching as _fetching
from penstock._transport.from_hosts import host_here
from penstock_proto import messages as m
from penstock_proto.transport import seqpacket
from tests.conftest import Daemon, Join, Serve, StartTrainer, wait_until
from tests.hosts.test_fetching import NAMES, SLOW, SOURCE, fetched_from, streams
from tests.hosts.test_join import state_of
from tests.reference.one_stream import arrays, digests

LARGE = """
    import numpy as np
    from penstock_server import Feed

    def images(split, rng):
        for i in range(30):
            yield rng.integers(0, 256, (1 << 17,), np.uint8)

    feed = Feed(images, splits=list(range(8)), batch_size=8, turn=1)
"""
"""Batches of 1 MiB."""


@pytest.fixture(autouse=True)
def lent(monkeypatch: pytest.MonkeyPatch) -> list[m.HostAt]:
    """Return the hosts that clients of this process borrow from. The clients cannot fetch over the network."""
    found: list[m.HostAt] = []

    class Here(host_here.HostHere):
        def __init__(self, where: m.HostAt, trusted: frozenset[int] | None, timeout: float) -> None:
            super().__init__(where, trusted, timeout)
            found.append(where)

    def refused(*_: object) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(_fetching, "HostHere", Here)
    monkeypatch.setattr(_fetching, "HostOverTcp", refused)
    return found


def memfd_of(array: npt.NDArray[Any]) -> str:
    """Return the inode of the host's memory that holds the array, or an empty text if the array has its own memory."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(place, 16) for place in line.split()[0].split("-"))
        if start <= address < stop:
            return line.split()[4] if "memfd:penstock" in line else ""
    raise AssertionError("it lies nowhere")


def is_borrowed(array: npt.NDArray[Any]) -> bool:
    """Return whether the array lies in a host's memory."""
    return memfd_of(array) != ""


def share_borrowed(batches: Iterator[Any]) -> float:
    """Return how much of the batches lies in the memory of hosts, from 0 to 1."""
    return float(np.mean([is_borrowed(next(arrays(batch))) for batch in batches]))


def fetching(batches: Iterator[Any], head: Daemon) -> list[Any]:
    """Read until a batch is borrowed, and return the batches read."""
    read = []
    while True:
        read.append(next(batches))
        if is_borrowed(next(arrays(read[-1]))):
            return read


def test_batches_lie_in_the_hosts_memory_and_are_the_same(serve: Serve, join: Join, lent: list[m.HostAt]) -> None:
    expected = streams(serve, SOURCE, *NAMES)
    head = serve(SOURCE, *NAMES, workers=0)
    for _ in range(2):
        join(head, *NAMES)
    for name in NAMES:
        fetched = fetched_from(head)
        with penstock.connect(head.urls[name], transport="tcp") as connection:
            assert digests(connection.batches()) == expected[name], name
            if name == "pooled":  # the head mixes the rows
                continue
            # The batches of an epoch's start may pass the head while the client connects to the hosts.
            assert any(share_borrowed(connection.batches()) > 2 / 3 for _ in range(10)), name
            assert fetched_from(head) > fetched
    assert len({where.unix for where in lent}) == 2


@pytest.mark.parametrize(("memory", "least", "most"), [("5M", 1, 2), ("64M", 12, host_here.MOST_BORROWED)])
def test_what_is_held_stays_as_it_is_while_the_host_makes_more(
    serve: Serve, join: Join, memory: str, least: int, most: int
) -> None:
    """The reader holds 30 batches of 1 MiB. It borrows at most 24 of them, in half of the host's memory, and copies the
    others."""
    expected = streams(serve, LARGE, "feed")["feed"]
    head = serve(LARGE, workers=0)
    join(head, memory=memory)
    with penstock.connect(head.url, transport="tcp") as connection:
        held = list(connection.batches())
        borrowed = sum(is_borrowed(next(arrays(batch))) for batch in held)
        assert digests(held) == expected
        assert least <= borrowed <= most
        copies = connection.stats()["copies"]
        assert (1 if memory == "5M" else 0) <= copies <= 30 - borrowed
        del held
        gc.collect()
        wait_until(lambda: _mapped() <= (6 if memory == "5M" else 30))


def _mapped() -> int:
    """Return how many pieces of hosts' memory this process has mapped."""
    return sum("memfd:penstock " in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_memory_that_is_given_back_is_used_again(serve: Serve, join: Join) -> None:
    head = serve(LARGE, workers=0)
    join(head, workers=1)
    with penstock.connect(head.url, transport="tcp") as connection:
        memory = [memfd_of(next(arrays(batch))) for _ in range(3) for batch in connection.batches()]
        assert len(memory) == 90
        assert len(set(memory)) < 30
        wait_until(lambda: state_of(head).hosts[0].memory.used < 12 << 20)


def test_a_consumer_may_write_into_what_it_borrowed(serve: Serve, join: Join) -> None:
    expected = streams(serve, SLOW, "feed")["feed"]
    head = serve(SLOW, workers=0)
    join(head)
    seen = []
    with penstock.connect(head.url, transport="tcp") as connection:
        for batch in connection.batches():
            seen += digests([batch])
            for array in arrays(batch):
                array[...] = 0
    assert seen == expected


def test_arrays_outlive_their_host_and_the_stream(serve: Serve, join: Join) -> None:
    expected = streams(serve, SLOW, "feed")["feed"]
    head = serve(SLOW, workers=0)
    hosts = [join(head) for _ in range(2)]
    with penstock.connect(head.url, transport="tcp") as connection:
        batches = connection.batches()
        held = fetching(batches, head) + list(islice(batches, 10))
        hosts[0].process.kill()
        held += batches
        assert connection.stats()["reconnects"] == 0
    assert sum(is_borrowed(next(arrays(batch))) for batch in held) > 3
    for host in hosts:
        host.process.kill()
    gc.collect()
    assert digests(held) == expected


READ = """
import sys, time
import penstock
held = []
with penstock.connect(sys.argv[1], transport="tcp") as connection:
    for batch in connection.batches():
        held.append(batch)
        if len(held) > 20 and "memfd:penstock" in open("/proc/self/maps").read():
            print("holds", flush=True)
            time.sleep(600)
"""


def test_what_a_dead_consumer_had_borrowed_comes_back(serve: Serve, join: Join) -> None:
    expected = streams(serve, SLOW, "feed")["feed"]
    head = serve(SLOW, workers=0)
    join(head)
    for _ in range(3):
        reader = subprocess.Popen([sys.executable, "-c", READ, head.url], stdout=subprocess.PIPE)
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"holds\n"
        finally:
            reader.kill()
            reader.communicate()
    wait_until(lambda: state_of(head).hosts[0].memory.used == 0, 60, lambda: str(state_of(head).hosts))
    with penstock.connect(head.url, transport="tcp") as connection:
        assert digests(connection.batches()) == expected


def test_a_stopped_host_is_left_and_what_it_lent_stays(serve: Serve, join: Join) -> None:
    expected = streams(serve, SLOW, "feed")["feed"]
    head = serve(SLOW, workers=0)
    hosts = [join(head) for _ in range(2)]
    with penstock.connect(head.url, transport="tcp") as connection:
        batches = connection.batches()
        held = fetching(batches, head) + list(islice(batches, 10))
        hosts[0].process.send_signal(signal.SIGSTOP)
        try:
            held += batches
        finally:
            hosts[0].process.send_signal(signal.SIGCONT)
        assert connection.stats()["reconnects"] == 0
    assert digests(held) == expected


def test_programs_that_say_nonsense_at_the_hosts_address_do_no_harm(
    serve: Serve, join: Join, lent: list[m.HostAt]
) -> None:
    expected = streams(serve, SLOW, "feed")["feed"]
    head = serve(SLOW, workers=0)
    host = join(head)
    dice = random.Random(1)
    with penstock.connect(head.url, transport="tcp") as connection:
        batches = connection.batches()
        seen = digests(fetching(batches, head))
        for _ in range(20):
            for _ in range(10):
                _say_nonsense(lent[0].unix, dice)
            seen += digests(islice(batches, 4))
        seen += digests(batches)
    assert seen == expected
    assert "Traceback" not in host.log()
    assert "a connection of a program on this machine, which borrows batches, is closed: malformed" in host.log()
    assert host.process.poll() is None


def _say_nonsense(name: str, dice: random.Random) -> None:
    from penstock_proto.transport.codec import encode

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with connection:
        connection.settimeout(5)
        connection.connect("\0" + name)
        said = (
            m.Fetch(dice.randrange(9), dice.randrange(9), dice.randbytes(16), 0, 1),
            m.GivenBack(dice.randrange(9)),
            m.Ping(),
            m.Begin(0),
            m.Lent(1, 1),
        )
        for _ in range(dice.randrange(9)):
            data = bytearray(encode(dice.choice(said)))
            if dice.random() < 0.4:
                data[dice.randrange(len(data))] = dice.randrange(256)
            try:
                seqpacket.send(connection, bytes(data), 0 if dice.random() < 0.1 else None)
            except OSError:
                return


READ_TENSORS = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import penstock
from tests.reference.one_stream import digests

def is_borrowed(tensor):
    address = np.asarray(memoryview(tensor)).__array_interface__["data"][0]
    for line in open("/proc/self/maps"):
        start, stop = (int(place, 16) for place in line.split()[0].split("-"))
        if start <= address < stop:
            return "memfd:penstock" in line

with penstock.connect(sys.argv[2], transport="tcp") as connection:
    seen = [digest for tensor in connection.dataset() for digest in digests([tensor.numpy()])]
    borrowed = [bool(is_borrowed(tensor)) for tensor in connection.dataset()]  # it is connected to the host by now
print(sum(borrowed), *seen)
"""


def test_tensors_lie_in_the_hosts_memory(serve: Serve, join: Join, start_trainer: StartTrainer) -> None:
    expected = streams(serve, LARGE, "feed")["feed"]
    head = serve(LARGE, workers=0)
    join(head)
    trainer = start_trainer(READ_TENSORS, str(Path(__file__).resolve().parents[2]), head.url)
    out, err = trainer.communicate(100)
    assert trainer.returncode == 0, err
    borrowed, *seen = out.split()
    assert seen == expected
    assert int(borrowed) > len(seen) / 2


READ_AS_NOBODY = """
import encodings.idna, os, sys
import penstock
from tests.reference.one_stream import digests
os.setuid(65534)
with penstock.connect(sys.argv[1], transport="tcp") as connection:
    print(*digests(connection.batches()), "memfd:penstock" in open("/proc/self/maps").read())
"""


def test_another_user_borrows_only_if_allowed(serve: Serve, join: Join) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    expected = streams(serve, SLOW, "feed")["feed"]
    head = serve(SLOW, workers=0)
    for allowed in (False, True):
        host = join(head, **({"allow_uid": 65534} if allowed else {}))
        before = fetched_from(head)
        said = subprocess.run(
            [sys.executable, "-c", READ_AS_NOBODY, head.url],
            capture_output=True,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
            check=False,
        )
        assert said.stdout.split() == [*expected, str(allowed)], said.stderr
        assert fetched_from(head) > before, "otherwise it fetches"
        host.process.send_signal(signal.SIGTERM)
        assert host.wait_ended() == 0
        wait_until(lambda: not state_of(head).hosts)


def test_numpy_sees_the_memory_as_writable_and_aligned(serve: Serve, join: Join) -> None:
    head = serve(LARGE, workers=0)
    join(head)
    with penstock.connect(head.url, transport="tcp") as connection:
        (array,) = arrays(fetching(connection.batches(), head)[-1])
        assert array.flags.writeable
        assert array.__array_interface__["data"][0] % 64 == 0
        assert array.dtype == np.uint8
