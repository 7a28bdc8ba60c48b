"""What strangers send to the HTTP port takes little of the daemon's one thread, and probes are always answered."""

from __future__ import annotations

import gzip
import http.client
import json
import random
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

import penstock
from penstock_server.http import budget as budgets
from penstock_server.http import connections
from penstock_server.http.budget import Budget
from penstock_server.http.connections import MOST_CONNECTIONS, RESERVE
from penstock_server.http.request_head import MOST_FIELDS, MOST_HEAD, MOST_LINE, is_probe, refusal, refusal_of_part
from penstock_server.status import status
from penstock_server.status.json_text import json_text
from tests.conftest import Daemon, Serve, wait_until
from tests.http.test_http import address, get

FEED = """
    import numpy as np
    from penstock_server import Feed

    def generate(split):
        for i in range(50):
            yield np.full(4, i, np.float32)

    feed = Feed(generate, splits=range(8), batch_size=10)
"""


def head(first: bytes = b"GET / HTTP/1.1", *fields: bytes) -> bytes:
    return b"\r\n".join((first, b"Host: localhost", *fields)) + b"\r\n\r\n"


# --- what is decided from the head ---

REFUSED = {
    413: [
        (b"GET / HTTP/1.1", b"Content-Length: 1"),
        (b"GET / HTTP/1.1", b"Content-Length: 0", b"content-length:\t5"),
        (b"GET / HTTP/1.1", b"Content-Length: x"),
        (b"POST / HTTP/1.1", b"Transfer-Encoding: chunked"),
        (b"GET / HTTP/1.1", b"transfer-encoding: identity"),
        (b"GET / HTTP/1.0", b"Content-Encoding: gzip"),
    ],
    417: [(b"GET / HTTP/1.1", b"Expect: 100-continue")],
    405: [
        (b"POST / HTTP/1.1",),
        (b"PRI * HTTP/2.0",),
        (b"CONNECT localhost:80 HTTP/1.1",),
        (b"X" * 100 + b" / HTTP/1.1",),
    ],
    400: [
        (b"",),
        (b"G\0T / HTTP/1.1",),
        (b"GET / HTTP/1.1\nTransfer-Encoding: chunked",),
        (b"GET / HTTP/1.1", b"X: 1\nTransfer-Encoding: chunked"),
        (b"GET / HTTP/1.1", b"X: 1", b" Transfer-Encoding: chunked"),
        (b"GET / HTTP/1.1", b"Transfer-Encoding : chunked"),
        (b"GET / HTTP/1.1", b"no colon"),
        (b"GET / HTTP/1.1", b"X: " + b"x" * (MOST_LINE - 2)),
        (b"GET /" + b"x" * MOST_LINE + b" HTTP/1.1",),
    ],
    431: [
        (b"GET / HTTP/1.1", *[b"X: 1"] * MOST_FIELDS),
        (b"GET / HTTP/1.1", *[b"X: " + b"x" * 8000] * 4, b"Y: " + b"y" * 1000),
    ],
}
ANSWERED = [
    (b"GET / HTTP/1.1",),
    (b"HEAD /metrics?x=y HTTP/1.0", b"Content-Length: 0"),
    (b"GET / HTTP/1.1", b"Upgrade: websocket", b"Connection: Upgrade", b"X:"),
    (b"GET / HTTP/1.1", *[b"X: 1"] * (MOST_FIELDS - 1)),
    (b"GET / HTTP/1.1", b"X: " + b"x" * (MOST_LINE - 3)),
]


@pytest.mark.parametrize(("wanted", "lines"), [(wanted, lines) for wanted in REFUSED for lines in REFUSED[wanted]])
def test_a_request_with_a_body_or_a_head_that_is_no_request_is_refused(wanted: int, lines: tuple[bytes, ...]) -> None:
    found = refusal(head(*lines))
    assert found is not None
    assert found.status == wanted


@pytest.mark.parametrize("lines", ANSWERED)
def test_other_requests_are_answered_and_their_parts_are_waited_for(lines: tuple[bytes, ...]) -> None:
    whole = head(*lines)
    assert refusal(whole) is None
    assert all(refusal_of_part(whole[:length]) is None for length in range(1, len(whole), 7))


def test_a_head_is_refused_as_soon_as_it_is_too_large() -> None:
    line = b"X: " + b"x" * 7000 + b"\r\n"
    for part, status_ in (
        (b"\x16\x03\x01\x02", 400),  # TLS
        (b"\r\n", 400),
        (b"GET /" + b"x" * MOST_LINE, 400),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * MOST_LINE, 400),
        (b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * (MOST_FIELDS + 2), 431),
        (b"GET / HTTP/1.1\r\n" + line * 5, 431),
    ):
        found = refusal_of_part(part)
        assert found is not None
        assert found.status == status_
    assert len(line) * 5 > MOST_HEAD


def test_the_probes_are_told_from_other_requests() -> None:
    assert is_probe(head(b"GET /healthz HTTP/1.1"))
    assert is_probe(head(b"HEAD /readyz?verbose HTTP/1.0"))
    for first in (
        b"GET /metrics HTTP/1.1",
        b"GET /healthz/x HTTP/1.1",
        b"GET /healthz",
        b"GET / /healthz HTTP/1.1",
        b"",
    ):
        assert not is_probe(head(first))


# --- what the budget and the status bound ---


def test_answers_take_a_share_of_the_thread_and_what_one_takes_beyond_it_later_seconds_pay() -> None:
    now = [0.0]
    budget = Budget(lambda: now[0])

    def work(seconds: float) -> None:
        with budget:
            now[0] += seconds

    requests = 0
    while budget.admits():
        requests += 1
    assert requests == pytest.approx(budgets.SHARE / budgets.REQUEST, abs=1)
    budget.another_second()
    work(budgets.SHARE - 2 * budgets.REQUEST)
    assert budget.admits()
    work(budgets.REQUEST)
    assert not budget.admits()
    budget.another_second()
    assert budget.admits()
    work(3 * budgets.SHARE)
    for _ in range(3):
        assert not budget.admits()
        budget.another_second()
    assert budget.admits()


@pytest.mark.parametrize(("takes", "made"), [(0.001, range(14, 17)), (0.05, range(2)), (0.0051, range(5, 11))])
def test_a_status_that_takes_long_is_made_less_often(takes: float, made: range) -> None:
    now, cpu, times = [100.0], [0.0], []

    def described() -> dict[str, object]:
        cpu[0] += takes
        times.append(now[0])
        return {"now": now[0]}

    text = status.Text(described, lambda: now[0], lambda: cpu[0])
    text.get()
    for _ in range(4):
        times.clear()
        text.another_second()
        for _ in range(1000):
            now[0] += 0.001
            text.get()
    assert len(times) in made
    assert takes <= 0.005 or takes * len(times) <= status.SHARE + takes


def test_the_quick_json_is_that_of_pythons_json() -> None:
    value = {
        "text": 'é"\\\n\x01',
        "list": [1, -2.5, 0.1, None, True, {}],
        "nothing": [],
        "tuple": (1, "x"),
        "ü": {"a": 0},
    }
    assert json_text(value) == json.dumps(value, ensure_ascii=False)
    assert json_text({"a": "\ud800", "b": 2**70}) == '{"a": "?", "b": 1180591620717411303424}'


# --- a live daemon ---


class Cpu:
    """CPU time of a daemon's process, in the time that this machine takes to inflate a megabyte."""

    def __init__(self, daemon: Daemon) -> None:
        self._process = psutil.Process(daemon.process.pid)
        data = zlib.compress(random.Random(1).randbytes(1 << 20), 1)
        began = time.process_time()
        for _ in range(10):
            zlib.decompress(data)
        self._unit = (time.process_time() - began) / 10
        self._before = self._used()

    def _used(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system

    def megabytes(self) -> float:
        """Return what was used since this object was made."""
        return (self._used() - self._before) / self._unit


def ask(daemon: Daemon, data: bytes, wait: float = 30.0) -> bytes:
    """Send bytes, and return everything that comes back until the connection is closed."""
    heard = b""
    with socket.create_connection(address(daemon), timeout=wait) as connection:
        with suppress(OSError):
            connection.sendall(data)
        with suppress(ConnectionResetError):
            while more := connection.recv(1 << 16):
                heard += more
    return heard


def internal_errors(daemon: Daemon) -> int:
    return int(json.loads(get(daemon, "/api/status")[2])["internal_errors"])


BODIES: dict[str, Callable[[], bytes]] = {
    "a bomb": lambda: (
        head(b"POST / HTTP/1.1", b"Content-Encoding: gzip", b"Content-Length: 260000")
        + gzip.compress(bytes(1 << 28), 1)[:260_000]
    ),
    "a broken one": lambda: (
        head(b"GET / HTTP/1.1", b"Content-Encoding: deflate", b"Content-Length: 260000")
        + random.Random(1).randbytes(260_000)
    ),
    "a chunked one": lambda: (
        head(b"PUT /metrics HTTP/1.1", b"Transfer-Encoding: chunked, gzip")
        + b"3f000\r\n"
        + bytes(0x3F000)
        + b"\r\n0\r\n\r\n"
    ),
    "one that never comes": lambda: head(b"GET /api/status HTTP/1.1", b"Content-Length: 99999999"),
    "one that waits": lambda: head(b"POST / HTTP/1.1", b"Content-Length: 5", b"Expect: 100-continue"),
}


def test_bodies_are_neither_read_nor_inflated_and_are_no_bug_of_ours(serve: Serve) -> None:
    daemon = serve(FEED, http=0)
    data = {name: make() for name, make in BODIES.items()}
    with penstock.connect(daemon.url, reconnect=0) as connection:
        batches = connection.batches()
        next(batches)
        cpu = Cpu(daemon)
        for name, request in data.items():
            for _ in range(6):
                assert ask(daemon, request).startswith((b"HTTP/1.0 413 ", b"HTTP/1.0 417 ")), name
        assert cpu.megabytes() < 500, "the bombs alone inflate to 1,536"
        assert len(list(batches)) == 39
    assert internal_errors(daemon) == 0
    assert "refused a request over HTTP: Content Too Large (requests have no body here)" in daemon.stderr()


def test_a_connection_carries_one_request_however_many_are_sent(serve: Serve) -> None:
    daemon = serve(FEED, http=0)
    for many in (head(b"GET /healthz HTTP/1.1") * 5000, head(b"GET /metrics HTTP/1.1", b"Connection: keep-alive") * 2):
        assert ask(daemon, many).count(b"HTTP/1.") <= 1, "a reset may overtake it"
    said = ask(daemon, head(b"GET /healthz HTTP/1.1", b"Connection: keep-alive"))
    assert said.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Connection: close\r\n" in said
    assert said.endswith(b"\r\n\r\nok\n")
    assert ask(daemon, b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n").endswith(b"\r\n\r\nok\n")
    said = ask(daemon, head(b"GET /healthz HTTP/1.1", b"Upgrade: websocket", b"Connection: Upgrade") + b"\x81\x05hello")
    assert said.startswith(b"HTTP/1.1 200 OK\r\n") or not said
    said = ask(daemon, head(b"HEAD /healthz HTTP/1.1"))
    assert said.startswith(b"HTTP/1.1 200 OK\r\n")
    assert said.endswith(b"\r\n\r\n")
    assert ask(daemon, b"\x16\x03\x01\x02\0\x01").startswith(b"HTTP/1.0 400 ")
    with socket.create_connection(address(daemon), timeout=30) as connection:
        connection.sendall(head(b"GET /healthz HTTP/1.1"))
        connection.shutdown(socket.SHUT_WR)  # as `nc -N` does
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
    assert internal_errors(daemon) == 0


@pytest.fixture
def sockets() -> Iterator[Callable[[Daemon], socket.socket]]:
    """Open connections to a daemon's HTTP server, which are closed after the test."""
    with ExitStack() as stack:

        def connect(daemon: Daemon) -> socket.socket:
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(30)
            connection.connect(address(daemon))
            return stack.enter_context(connection)

        yield connect


def test_probes_are_answered_while_others_hold_all_connections(
    serve: Serve, sockets: Callable[[Daemon], socket.socket]
) -> None:
    daemon = serve(FEED, http=0)
    for number in range(3 * MOST_CONNECTIONS):
        connection = sockets(daemon)
        with suppress(OSError):
            if number % 3 == 1:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
            elif number % 3 == 2:
                connection.sendall(head(b"GET /static/uplot/uplot.js HTTP/1.1"))  # and nothing is read
        if number % 16 == 0:
            assert get(daemon, "/healthz")[0] == 200
            assert get(daemon, "/readyz")[0] == 200
    assert get(daemon, "/metrics")[0] == 200, "slow ones make room for others too"
    ours = psutil.Process(daemon.process.pid).net_connections()
    assert sum(one.laddr[1] == address(daemon)[1] and one.status == "ESTABLISHED" for one in ours) <= MOST_CONNECTIONS
    assert internal_errors(daemon) == 0


def test_who_sends_or_reads_slowly_is_cut_off(serve: Serve, sockets: Callable[[Daemon], socket.socket]) -> None:
    patched = {
        "http.connections.HEAD_SECONDS": 1.0,
        "http.connections.ANSWER_SECONDS": 1.0,
        "http.connections.LINGER_SECONDS": 1.0,
    }
    daemon = serve(FEED, http=0, patched=patched)
    silent, dripping, refused, unread = (sockets(daemon) for _ in range(4))
    refused.sendall(head(b"POST / HTTP/1.1", b"Content-Length: 99999999"))
    unread.sendall(head(b"GET /static/page.js HTTP/1.1"))
    began = time.monotonic()
    with suppress(OSError):
        while True:
            dripping.sendall(b"G" if time.monotonic() - began < 0.1 else b"x")
            assert time.monotonic() - began < 30
            time.sleep(0.05)
    with suppress(ConnectionResetError):
        assert silent.recv(1) == b""
    with suppress(OSError):
        while True:
            refused.sendall(bytes(1000))
            assert time.monotonic() - began < 30
            time.sleep(0.05)
    port = address(daemon)[1]
    process = psutil.Process(daemon.process.pid)
    wait_until(lambda: not [one for one in process.net_connections() if one.laddr[1] == port and one.raddr])


def test_answers_beyond_the_share_of_the_thread_are_refused_and_probes_are_not(serve: Serve) -> None:
    daemon = serve(FEED, http=0, patched={"http.budget.SHARE": 0.0})
    assert get(daemon, "/healthz")[0] == 200
    assert get(daemon, "/readyz")[0] == 200
    status_, _, text = get(daemon, "/metrics")
    assert (status_, text) == (503, "too many requests at once: try again in a second\n")
    connection = http.client.HTTPConnection(*address(daemon), timeout=30)
    connection.request("GET", "/api/status")
    assert connection.getresponse().headers["Retry-After"] == "1"
    connection.close()


def test_a_flood_of_requests_takes_a_part_of_the_thread_and_readers_go_on(serve: Serve) -> None:
    daemon = serve(FEED, http=0)
    with penstock.connect(daemon.url, reconnect=0) as connection:
        batches = connection.batches()
        next(batches)
        seen = set()
        for number in range(400):
            path = ("/metrics", "/api/status", "/api/live", "/readyz")[number % 4]
            said = ask(daemon, head(b"GET %s HTTP/1.1" % path.encode()))
            seen.add(int(said.split(b" ")[1]))
        assert seen <= {200, 429, 503}
        assert len(list(batches)) == 39
    wait_until(lambda: get(daemon, "/metrics")[0] == 200)
    assert "report this as a bug" not in daemon.stderr()


def test_the_page_on_security_names_these_bounds() -> None:
    text = " ".join((Path(__file__).resolve().parents[2] / "docs/security.md").read_text().split())
    for said in (
        f"{MOST_CONNECTIONS} connections; {RESERVE} of them",
        f"{MOST_HEAD >> 10} KiB, {MOST_FIELDS} fields, {MOST_LINE} bytes a line",
        f"{connections.HEAD_SECONDS:.0f} s for the head",
        f"{connections.ANSWER_SECONDS:.0f} s for the answer",
        f"{connections.LINGER_SECONDS:.0f} s or {connections.MOST_DISCARDED >> 20} MiB",
        f"{100 * budgets.SHARE:.0f} % of the daemon's thread",
        f"{100 * status.SHARE:.0f} % of the thread",
        f"at most {status.MOST_WORKERS} workers, {status.MOST_HOSTS} hosts",
    ):
        assert said in text, said
