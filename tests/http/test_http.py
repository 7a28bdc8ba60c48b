"""`penstock serve --http`: metrics, health checks and the status, for this host or for everyone who can reach the
address."""

from __future__ import annotations

import http.client
import itertools
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from aiohttp.http_exceptions import BadStatusLine
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

import penstock
from penstock_proto import distribution
from penstock_proto.status import status_parsing
from penstock_server.http.metrics import METRICS
from penstock_server.http.request_log import RequestLog
from penstock_server.logs.bugs import Bugs
from penstock_server.logs.rate_limited_log import MOST, RateLimitedLog
from penstock_server.to_daemon import control
from tests.commands.test_commands import penstock_command
from tests.conftest import Daemon, Serve

ROOT = Path(__file__).resolve().parents[2]

FEEDS = """
    import os, time
    import numpy as np
    from penstock_server import Feed

    def generate(split):
        for i in range(50):
            yield np.full(4, i, np.float32)

    def failing(split):
        yield np.zeros(1)
        if split == 1:
            raise RuntimeError("no such disk")

    def sleeping(split):
        for i in range(50):
            time.sleep(0.02)
            yield i

    def late(split):
        while not os.path.exists("go"):
            time.sleep(0.02)
        yield np.zeros(1)

    feed = Feed(generate, splits=range(8), batch_size=10)
    skipping = Feed(failing, splits=range(4), batch_size=1, on_error="skip")
    starting = Feed(late, splits=[0], batch_size=1)
    slow = Feed(sleeping, splits=range(1000), batch_size=1, turn=1)
    cached = Feed(generate, splits=range(8), batch_size=10, cache="cached")
    mix = Feed.mix({"mine": Feed(generate, splits=range(4), batch_size=10, cache="mixed"), "other": feed}, lanes=2)
"""


def address(daemon: Daemon) -> tuple[str, int]:
    """Return the host and port of the daemon's HTTP server, from its log."""
    until = time.monotonic() + 60
    while not (found := re.search(r"HTTP server: http://(\S+):(\d+)", daemon.stderr())):
        assert time.monotonic() < until, daemon.stderr()
        time.sleep(0.02)
    return found[1].strip("[]"), int(found[2])


def get(daemon: Daemon, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Return the status, the content type and the text of an answer."""
    connection = http.client.HTTPConnection(*address(daemon), timeout=30)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def values(daemon: Daemon) -> dict[str, float]:
    """Return the value of each metric, by its name and its labels as Prometheus writes them."""
    _, _, text = get(daemon, "/metrics")
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in prometheus(text)
        for sample in family.samples
    }


def wait_until(true: Callable[[], Any]) -> Any:
    until = time.monotonic() + 60
    while not (value := true()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return value


def test_the_metrics_are_those_that_are_documented_in_both_formats(serve: Serve) -> None:
    daemon = serve(FEEDS, "cached", http=0)
    with penstock.connect(daemon.url) as connection:
        list(connection.batches())
        wait_until(lambda: "penstock_worker_memory_bytes,worker=1" in values(daemon))
        for accept, parse in (("", prometheus), ("application/openmetrics-text; version=1.0.0", open_metrics)):
            status, content_type, text = get(daemon, "/metrics", Accept=accept)
            assert status == 200
            assert content_type.startswith(accept.partition(";")[0] or "text/plain")
            names = {re.sub(r"_info$", "", sample.name) for family in parse(text) for sample in family.samples}
            assert names == {name for name in METRICS if not name.startswith(("penstock_host_", "penstock_engine_"))}
            assert {line.split(" ", 3)[3] for line in text.splitlines() if line.startswith("# HELP")} == {
                *(metric.means for metric in METRICS.values())
            }


def test_the_metrics_count_what_consumers_got_and_what_user_code_did(serve: Serve) -> None:
    daemon = serve(FEEDS, "feed", "skipping", http=0)
    assert values(daemon)["penstock_feed_sent_batches_total,feed=feed"] == 0
    with penstock.connect(daemon.urls["feed"]) as one, penstock.connect(daemon.urls["feed"], transport="tcp") as other:
        assert len(list(one.batches())) == len(list(other.batches())) == 40
        seen = values(daemon)
        assert seen["penstock_feed_consumers,feed=feed"] == 2
        assert seen["penstock_feed_slots,feed=feed"] > 0
    assert seen["penstock_feed_sent_batches_total,feed=feed"] >= 80  # the next epoch may be under way
    assert seen["penstock_feed_sent_samples_total,feed=feed"] >= 800
    assert seen["penstock_feed_sent_bytes_total,feed=feed"] >= 800 * 16
    with penstock.connect(daemon.urls["skipping"]) as connection:
        list(connection.batches())
        assert connection.stats()["batches"] == 4
    seen = values(daemon)
    assert seen["penstock_feed_skipped_splits_total,feed=skipping"] >= 1
    assert seen["penstock_daemon_ready"] == 1
    assert seen["penstock_workers"] == 2
    for state in ("generating", "collating", "idle"):
        assert seen[f"penstock_worker_time_seconds_total,state={state},worker=0"] >= 0

    daemon.workers()[0].kill()
    wait_until(lambda: values(daemon)["penstock_worker_restarts_total,worker=0"] == 1)


def test_the_metrics_tell_what_each_consumer_waits_for(serve: Serve) -> None:
    daemon = serve(FEEDS, "slow", http=0)

    def read_until(connection: penstock.Connection, metric: str) -> dict[str, float]:
        batches = connection.batches()  # the consumer lives as long as this iterator
        while found(seen := values(daemon), metric) < 1:
            for _ in itertools.islice(batches, 5):
                pass
        return seen

    def read_slowly(connection: penstock.Connection) -> None:
        for _ in connection.batches():
            if ends.wait(0.1):
                return

    consumer = f",consumer={socket.gethostname()}:{os.getpid()},feed=slow,rank=%d,stream=\\d+"
    with (
        penstock.connect(daemon.url, rank=0, world_size=2) as quick,
        penstock.connect(daemon.url, rank=1, world_size=2) as slow,
    ):
        ends = threading.Event()
        thread = threading.Thread(target=read_slowly, args=(slow,))
        thread.start()
        try:
            seen = read_until(quick, "penstock_feed_waiting_seconds_total,cause=ranks,feed=slow")
        finally:
            ends.set()
            thread.join()
    waited, held_up = (
        [found(seen, f"penstock_consumer_{name}" + consumer % rank) for rank in (0, 1)]
        for name in ("waiting_seconds_total,cause=ranks", "holding_up_seconds_total")
    )
    assert waited[0] > waited[1], "rank 1 may have waited at the start"
    assert held_up[1] > held_up[0]
    assert found(seen, "penstock_consumer_reading_seconds_total" + consumer % 0) >= waited[0]
    wait_until(lambda: not any(name.startswith("penstock_consumer") for name in values(daemon)))

    with penstock.connect(daemon.url) as alone:
        seen = read_until(alone, "penstock_feed_waiting_seconds_total,cause=production,feed=slow")
    assert found(seen, "penstock_feed_waiting_seconds_total,cause=ranks,feed=slow") >= 1, "of consumers that are gone"
    assert found(seen, "penstock_feed_reading_seconds_total,feed=slow") >= 2


def found(seen: dict[str, float], pattern: str) -> float:
    """Return the value of the one metric whose name and labels match."""
    (value,) = (value for name, value in seen.items() if re.fullmatch(pattern, name))
    return value


def test_the_metrics_count_cached_splits_of_feeds_and_of_the_feeds_of_a_mix(serve: Serve) -> None:
    daemon = serve(FEEDS, "cached", "mix", http=0)
    for name in ("cached", "mix"):
        with penstock.connect(daemon.urls[name]) as connection:
            list(connection.batches())
            list(connection.batches())
    feed, part = "feed=cached,part=", "feed=mix,part=mine"
    wait_until(lambda: values(daemon)[f"penstock_cache_hit_splits_total,{feed}"] >= 8)
    seen = wait_until(lambda: (now := values(daemon))[f"penstock_cache_hit_splits_total,{part}"] >= 4 and now)
    for key, splits in ((feed, 8), (part, 4)):
        assert seen[f"penstock_cache_missed_splits_total,{key}"] >= splits
        assert seen[f"penstock_cache_bytes,{key}"] > splits * 50 * 16
    assert {name.partition("part=")[2] for name in seen if "penstock_cache_bytes" in name} == {"", "mine"}

    status = penstock_command("status", daemon.urls["mix"]).stdout
    assert re.search(r"^cache    mix, mine: .* in \S+/mixed/\S+, \d+ of \d+ splits read from it", status, re.MULTILINE)


def test_the_status_has_the_memory_of_each_worker_however_it_is_asked(serve: Serve) -> None:
    daemon = serve(FEEDS, http=0)
    processes = {process.pid: process.memory_full_info().pss for process in daemon.workers()}
    for status in (control.status(daemon.url, 60), status_parsing.parse(get(daemon, "/api/status")[2])):
        workers = status.workers
        assert {worker.pid for worker in workers} == set(processes)
        for worker in workers:
            assert 0.5 * processes[worker.pid] < worker.memory < 2 * processes[worker.pid]
    said = penstock_command("status", daemon.url).stdout
    assert len(re.findall(r"^worker   \d: pid \d+, restarted 0 times, \d+.* MiB, ", said, re.MULTILINE)) == 2


def test_requests_that_cannot_be_read_do_not_fill_the_log(serve: Serve) -> None:
    daemon = serve(FEEDS, http=0)
    for number in range(200):
        with socket.create_connection(address(daemon), timeout=30) as connection:
            bad = (b"GET / HTTP/9.9\r\n\r\n", b"GET /\xff\0 HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"x" * 9000)
            connection.sendall(bad[number % 3])
            assert connection.recv(4096).startswith(b"HTTP/1.0 400 ")
    log = daemon.stderr()
    lines = [line for line in log.splitlines() if "refused a request over HTTP: " in line and "left out" not in line]
    assert 1 <= len(lines) <= 2 * MOST, "a minute may end meanwhile"
    assert "Traceback" not in log
    assert json.loads(get(daemon, "/api/status")[2])["internal_errors"] == 0


def test_a_bug_while_a_request_is_answered_is_counted_and_a_peer_that_is_gone_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bugs = Bugs()
    log = RequestLog(RateLimitedLog(logging.getLogger("test")), bugs)
    log.exception("Unhandled exception", exc_info=ConnectionResetError())
    log.exception("Error handling request from %s", "10.0.0.1", exc_info=BadStatusLine())
    assert bugs.count == 0
    log.exception("Error handling request from %s", "10.0.0.1", exc_info=KeyError("feeds"))
    log.exception("Missing return statement on request handler")
    assert bugs.count == 2
    assert caplog.text.count("refused a request over HTTP: BadStatusLine") == 1


def test_health_and_readiness_tell_a_start_a_service_and_an_end_apart(serve: Serve) -> None:
    daemon = serve(FEEDS, "starting", ready=False, http=0)
    assert get(daemon, "/healthz")[0] == 200
    status, _, text = wait_until(lambda: (found := get(daemon, "/readyz")) and "first sample" in found[2] and found)
    assert status == 503
    assert re.fullmatch(r"reading a first sample: 0 \(\d+ s\)\n", text)
    (daemon.folder / "go").touch()
    daemon.wait_ready(1)
    assert get(daemon, "/readyz")[::2] == (200, "ready\n")
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()  # the daemon ends as soon as nobody reads
        next(batches)
        daemon.process.terminate()
        wait_until(lambda: get(daemon, "/readyz")[::2] == (503, "the daemon is stopping\n"))
        assert get(daemon, "/healthz")[0] == 200
        del batches
    assert daemon.process.wait(30) == 0


def test_a_daemon_is_not_alive_if_no_worker_can_start_again(serve: Serve) -> None:
    source = """
    import os
    from penstock_server import Feed

    while os.path.exists("gone"):
        os._exit(3)

    feed = Feed(lambda: iter([1]), batch_size=1)
    """
    daemon = serve(source, workers=1, http=0)
    assert get(daemon, "/healthz")[::2] == (200, "ok\n")
    (daemon.folder / "gone").touch()
    daemon.workers()[0].kill()
    wait_until(lambda: get(daemon, "/healthz")[0] == 503)
    for path in ("/healthz", "/readyz"):
        assert get(daemon, path)[2] == "no worker process is left, and none can start: see the daemon's log\n"


def test_a_feed_that_cannot_start_yet_is_named(serve: Serve) -> None:
    source = """
    from penstock_server import Feed

    def files():
        raise OSError("disk away")

    def generate(file):
        yield 1

    feed = Feed(generate, splits=files, batch_size=1, on_error="retry")
    """
    daemon = serve(source, ready=False, http=0)
    status, _, text = wait_until(lambda: (found := get(daemon, "/readyz")) and "disk away" in found[2] and found)
    assert status == 503
    assert re.match(r"feed feed failed \d+ times? and is tried again: ", text)


def test_the_status_is_that_of_the_command_and_other_requests_change_nothing(serve: Serve) -> None:
    daemon = serve(FEEDS, http=0)
    state = json.loads(get(daemon, "/api/status")[2])
    assert state["pid"] == daemon.process.pid
    assert state["feeds"][0]["sent"] == {"batches": 0, "samples": 0, "bytes": 0}
    assert "/metrics" in get(daemon, "/")[2]
    assert get(daemon, "/nothing")[0] == 404
    assert get(daemon, "/metrics", "POST")[0] == 405
    assert get(daemon, "/api/status", "DELETE")[0] == 405


def test_a_page_of_another_site_cannot_read_it_from_a_browser_on_this_host(serve: Serve) -> None:
    daemon = serve(FEEDS, http="127.0.0.1:0")
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::ffff:8.8.8.8]:80", "8.8.8.8"):
        status, _, text = get(daemon, "/api/status", Host=host)
        assert (status, "for this host alone" in text) == (403, True), host
    for host in ("localhost", "localhost:8090", "127.0.0.1", "127.0.0.9:1", "[::1]:8090"):
        assert get(daemon, "/api/status", Host=host)[0] == 200, host


def test_connections_and_rubbish_there_disturb_no_consumer(serve: Serve) -> None:
    daemon = serve(FEEDS, http=0)
    place = address(daemon)
    sockets = []
    with penstock.connect(daemon.url) as connection:
        batches = connection.batches()
        for number in range(200):
            sockets.append(one := socket.create_connection(place))
            if number % 4 == 0:
                one.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * number * 100)
            elif number % 4 == 1:
                one.sendall(bytes(range(256)) * number)
        assert len(list(batches)) == 40
        ours = psutil.Process(daemon.process.pid).net_connections()
        open_here = [one for one in ours if one.laddr[1] == place[1]]
        assert len(open_here) <= 64 + 1 + 2  # one listens, and two may be closing
    for one in sockets:
        one.close()
    wait_until(lambda: _answers(daemon))
    assert "report this as a bug" not in daemon.stderr()


def _answers(daemon: Daemon) -> bool:
    try:
        return get(daemon, "/healthz")[0] == 200
    except OSError:
        return False


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("loader", "must be HOST:PORT or PORT, such as 127.0.0.1:8090 or 8090, got 'loader'"),
        ("99999", "must be HOST:PORT"),
        ("203.0.113.1:80", "--http: cannot listen on 203.0.113.1:80"),
    ],
)
def test_an_address_that_cannot_work_is_refused_with_what_to_do(serve: Serve, value: str, said: str) -> None:
    daemon = serve(FEEDS, ready=False, http=value)
    assert daemon.process.wait(60) != 0
    assert said in re.sub(r"\s*[│\n]\s*", " ", daemon.stderr())


def test_an_address_that_others_reach_is_warned_of(serve: Serve) -> None:
    daemon = serve(FEEDS, http="0.0.0.0:0")
    assert "the HTTP server listens on 0.0.0.0: anyone who reaches it can read" in daemon.stderr()
    assert get(daemon, "/healthz", Host="loader.lan")[0] == 200


def test_its_packages_are_imported_only_if_it_is_asked_for() -> None:
    code = """
import sys
import penstock_server.daemon.daemon, penstock_server.cli.main
assert not {"aiohttp", "prometheus_client"} & {*sys.modules}
sys.modules["aiohttp"] = None
from penstock_server import http
try:
    http.server("127.0.0.1", 0, None)
except Exception as error:
    print(type(error).__name__, error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "StartError --http needs further packages" in said
    assert distribution.pip_install("http") in said


# --- documents ---


def test_the_dashboard_and_the_compose_file_use_what_the_daemon_serves() -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/penstock.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for expression in asked for name in re.findall(r"penstock_\w+", expression)}
    assert used <= set(METRICS)
    assert len(used) > 15
    for expression in asked:
        for name in re.findall(r"(?:rate|increase)\((penstock_\w+)", expression):
            assert name.endswith("_total"), f"{name} is not a counter"
        if "_total{" in expression:
            assert re.search(r"(rate|increase)\(", expression), f"a counter alone only grows: {expression}"

    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    (target,) = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0][
        "static_configs"
    ][0]["targets"]
    service, port = target.split(":")
    assert f"--http=0.0.0.0:{port}" in services[service]["command"]
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            assert (ROOT / volume.split(":")[0]).exists(), volume
