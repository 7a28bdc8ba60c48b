"""`penstock serve --log-format json` writes a JSON object for each event, with fields that say what it concerns."""

from __future__ import annotations

import ast
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock_proto import GeneratorError
from penstock_server.logs import log_format
from penstock_server.logs.rate_limited_log import MOST, RateLimitedLog
from tests.conftest import Serve

ROOT = Path(__file__).resolve().parents[2]
SERVER = ROOT / "server" / "penstock_server"

FEEDS = """
    import os, signal
    from penstock_server import Feed

    def fails(split):
        yield from range(4)
        if split == 3:
            raise ValueError("no such\\nscene")

    def dies(split):
        yield from range(4)
        if split == 2 and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

    def raises(split):
        yield from range(4)
        if split == 1:
            raise OSError("the disk is on fire")

    skipped = Feed(fails, splits=range(5), lanes=5, batch_size=2, on_error="skip", epochs=1)
    dying = Feed(dies, splits=range(5), lanes=5, batch_size=2, epochs=1)
    failing = Feed(raises, splits=range(5), lanes=5, batch_size=2, epochs=1)
"""


def events(log: str, event: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, log.splitlines()) if line["event"] == event]


def test_each_line_of_a_run_with_failures_is_an_event_with_its_place(serve: Serve) -> None:
    daemon = serve(FEEDS, "skipped", "dying", "failing", log_format="json")
    for name in ("skipped", "dying", "failing"):
        with penstock.connect(daemon.urls[name]) as connection:
            try:
                assert len(list(connection.batches())) == 10
            except GeneratorError:
                assert name == "failing"
    until = time.monotonic() + 60
    while len(events(daemon.stderr(), "worker_ready")) < 3:  # the dead one was replaced
        assert time.monotonic() < until, daemon.stderr()
        time.sleep(0.1)
    daemon.stop()
    log = daemon.stderr()
    lines = [json.loads(line) for line in log.splitlines()]
    for line in lines:
        assert {"time", "level", "event", "message", "host"} <= line.keys()
        assert line.keys() <= {"time", "level", "message", "host", "traceback", *log_format.FIELDS}
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert line["event"] in documented()
    assert "log" not in {line["event"] for line in lines}, "each of our log calls names its event"

    assert {line["feed"] for line in events(log, "feed_ready")} == {"skipped", "dying", "failing"}
    (skipped,) = events(log, "split_skipped")
    place = {"feed": "skipped", "epoch": 0, "lane": 3, "split": "3"}
    assert place.items() <= skipped.items()
    assert skipped["message"].endswith("is left out after 4 samples: fails raised ValueError: no such\nscene")
    assert skipped["traceback"].startswith("Traceback (most recent call last):")
    (died,) = events(log, "worker_died")
    assert {"feed": "dying", "epoch": 0, "lane": 2, "split": "2"}.items() <= died.items()
    assert died["worker"] in (0, 1)
    (failed,) = events(log, "split_failed")
    assert {"level": "error", "feed": "failing", "epoch": 0, "lane": 1, "split": "1"}.items() <= failed.items()
    assert failed["message"] == "raises raised OSError: the disk is on fire"
    assert "OSError: the disk is on fire" in failed["traceback"]
    opened, closed = events(log, "stream_opened"), events(log, "stream_closed")
    assert [line["feed"] for line in opened] == ["skipped", "dying", "failing"]
    assert {line["consumer"] for line in opened} == {line["consumer"] for line in closed}
    assert lines[-1]["event"] == "stopped"


def test_the_text_is_as_readable_as_ever(serve: Serve) -> None:
    daemon = serve(FEEDS, "skipped")
    with penstock.connect(daemon.url) as connection:
        list(connection.batches())
    daemon.stop()
    log = daemon.stderr()
    assert re.search(r"^\S+ \S+ INFO    penstock: feed skipped: int64\[\], slots of", log, re.MULTILINE)
    left_out = r"WARNING penstock: feed skipped: the rest of split 3 is left out after 4 samples: .*\nscene\nTraceback"
    assert re.search(left_out, log)


def test_a_daemon_that_cannot_start_says_so_in_its_format(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "penstock_server", "serve", "nowhere.py:feed", "--log-format", "json"]
    done = subprocess.run([*words, "--bind", "tcp://127.0.0.1:0"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    (failed,) = events(done.stderr, "failed")
    assert failed["level"] == "critical"
    assert "nowhere.py" in failed["message"]


def formatted(level: int, text: str, *values: object, **options: Any) -> dict[str, Any]:
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(log_format.JsonFormatter().format(record))

    log = logging.Logger("elsewhere")
    log.addHandler(Kept())
    log.log(level, text, *values, **options)
    (line,) = lines
    assert "\n" not in line
    return dict(json.loads(line))


def test_lines_of_libraries_bugs_and_odd_texts_are_json_too() -> None:
    plain = formatted(logging.WARNING, "slow: %s", "\udc80 \n")
    assert (plain["event"], plain["level"], plain["message"]) == ("log", "warning", "slow: \udc80 \n")
    bug = formatted(logging.CRITICAL, "unexpected", exc_info=ValueError("x"), extra={"event": "internal_error"})
    assert bug["traceback"].endswith("ValueError: x")
    error = GeneratorError("it raised", feed="train", worker=3, split="a.h5", remote_traceback="Traceback\n  x\n")
    said = formatted(logging.ERROR, "failed: %s", error, extra={"event": "feed_failing", "error": error, "lane": 0})
    assert said["message"] == "failed: it raised"
    place = {"feed": "train", "worker": 3, "split": "a.h5", "lane": 0, "traceback": "Traceback\n  x\n"}
    assert place.items() <= said.items()


def test_the_same_traceback_is_written_once_a_minute() -> None:
    formatter = log_format.TextFormatter("%(message)s")
    trace, other = "Traceback\n  x\nValueError: x\n", "Traceback\n  y\nValueError: y\n"

    def line(at: float, text: str, **fields: object) -> str:
        values = (fields["error"],) if "error" in fields else ()
        record = logging.LogRecord("penstock", logging.ERROR, "x.py", 1, text, values, None)
        record.__dict__.update(fields)
        record.created = 1e9 + at
        return formatter.format(record)

    def raised(lane: int) -> GeneratorError:
        return GeneratorError("it raised", feed="train", split=f"share {lane} of 16", remote_traceback=trace)

    first = "it raised\n  in feed train, share 0 of 16\nTraceback\n  x\nValueError: x"
    assert line(0, "%s", error=raised(0)) == first
    same = r"it raised\n  in feed train, share 1 of 16 \(the traceback is the same as at \d\d:\d\d:\d\d\)"
    assert re.fullmatch(same, line(1, "%s", error=raised(1)))
    assert line(2, "left out", traceback=other) == f"left out\n{other.rstrip()}"
    assert re.fullmatch(r"left out \(the traceback is the same as at .*\)", line(3, "left out", traceback=trace))
    assert line(60, "%s", error=raised(0)) == first
    assert line(61, "it says %s, and more", error=raised(0)).endswith("ValueError: x, and more")
    for number in range(20):
        line(62, "left out", traceback=f"Traceback\n  {number}")
    assert line(63, "%s", error=raised(0)) == first


def test_a_failure_of_all_shares_of_a_generator_is_logged_with_one_traceback(serve: Serve) -> None:
    source = """
        from penstock_server import Feed

        def rows():
            for i in range(400):
                if i == 50:
                    raise ValueError("row 50")
                yield i

        def whole():
            yield from range(400)

        def checked(row):
            if row == 77:
                raise ValueError("row 77")
            return row

        shared = Feed(rows, transform=checked, batch_size=4, on_error="skip", epochs=1)
        transformed = Feed(whole, transform=checked, batch_size=4, on_error="skip", epochs=1)
    """
    daemon = serve(source, "shared", "transformed")
    for name, rows in (("shared", 50), ("transformed", 377)):
        with penstock.connect(daemon.urls[name]) as connection:
            assert sum(len(batch) for batch in connection.batches()) == rows
    daemon.stop()
    log = daemon.stderr()
    shared = [line for line in log.splitlines() if "feed shared: the rest of share" in line]
    assert len(shared) == 16
    assert sum("rows raised ValueError: row 50 (the traceback is the same" in line for line in shared) == 15
    assert log.count("Traceback (most recent call last):") == 2
    says = (
        "feed transformed: the rest of share 3 of 16 is left out after 5 samples: transform checked raised "
        "ValueError: row 77 (sample 77 of whole, from 0); a transform that returns penstock.DROP instead leaves out "
        "only that sample"
    )
    assert says in log


def test_a_flood_of_lines_is_cut_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    log = RateLimitedLog(logging.getLogger("flood"))
    with caplog.at_level(logging.INFO, "flood"):
        for _ in range(MOST + 5):
            log.info("%s came", "it", event="message_refused", consumer="host:1")
        log.look_at_the_clock(1e9)
    assert len(caplog.records) == MOST + 1
    assert caplog.records[0].__dict__["consumer"] == "host:1"
    assert caplog.records[-1].__dict__["event"] == "lines_left_out"


def documented() -> set[str]:
    """Return the events in the table of docs/monitoring.md."""
    table = (ROOT / "docs/monitoring.md").read_text().partition("| event | level | when |")[2].partition("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def in_code() -> Iterator[ast.expr]:
    """Yield the expressions that name an event in the server's code."""
    for path in SERVER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Dict():
                    yield from (v for k, v in zip(node.keys, node.values, strict=True) if is_event(k))
                case ast.keyword(arg="event"):
                    yield node.value
                case ast.Assign(targets=[ast.Name(id="event")], value=ast.IfExp(body=one, orelse=other)):
                    yield from (one, other)
                case ast.Call(func=ast.Name(id="_about"), args=[_, name]):
                    yield name


def is_event(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and key.value == "event"


def test_the_documented_events_are_those_of_the_code() -> None:
    assert documented() == {name.value for name in in_code() if isinstance(name, ast.Constant)}
