"""Text of peers, files and user code cannot control the reader's terminal."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from penstock_proto import GeneratorError, PenstockError, ProtocolError
from penstock_proto import messages as m
from penstock_proto.status import status_text
from penstock_proto.text import is_unicode, one_line, printable
from penstock_proto.transport import codec
from penstock_server.logs.log_format import TEXT, JsonFormatter, TextFormatter

HOSTILE = "a\x1b]0;owned\x07\x9b2J\u202eb\r\n\tc\ud800\x7f"
SAFE = "a\\x1b]0;owned\\x07\\x9b2J\\u202eb\\r\n\tc\\ud800\\x7f"


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        (HOSTILE, SAFE),
        ("Zoë, 例, שלום\n\tindented", "Zoë, 例, שלום\n\tindented"),
        ("".join(map(chr, [*range(0x20), *range(0x7F, 0xA0)])), None),
        ("\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069", None),
    ],
)
def test_only_what_a_terminal_obeys_or_cannot_show_is_escaped(text: str, safe: str | None) -> None:
    cleaned = printable(text)
    assert all(letter.isprintable() or letter in "\n\t" for letter in cleaned)
    assert cleaned == printable(cleaned)
    assert is_unicode(cleaned)
    if safe is not None:
        assert cleaned == safe
    assert one_line(text) == cleaned.replace("\n", " ").replace("\t", " ")


def test_the_texts_of_an_error_are_safe_to_print_even_those_of_a_peer() -> None:
    error = GeneratorError(HOSTILE, feed=HOSTILE, split=HOSTILE, remote_traceback=HOSTILE)
    assert [error.message, error.feed, error.split, error.remote_traceback] == [SAFE] * 4
    assert "\x1b" not in str(error)


def test_an_error_that_a_peer_reports_is_safe_to_print() -> None:
    hostile = HOSTILE.replace("\ud800", "")  # which no message can hold
    sent = m.Failed(m.ErrorReport("Own\x1b[31m", hostile, hostile, 1, hostile, hostile))
    message = codec.from_server(codec.encode(sent))
    assert isinstance(message, m.Failed)
    error = message.error.error()
    assert type(error) is PenstockError
    assert all(letter.isprintable() or letter in "\n\t" for letter in str(error))


@pytest.mark.parametrize("formatter", [TextFormatter(TEXT), JsonFormatter()])
def test_a_line_of_the_log_is_safe_to_print(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("penstock", logging.INFO, "x.py", 1, "host %s joined", (HOSTILE,), None)
    record.traceback = HOSTILE
    line = formatter.format(record)
    assert all(letter.isprintable() or letter in "\n\t" for letter in line)


WAITS = dict.fromkeys(("reading", "production", "ranks", "sending", "holding_up"), 0.5)
NUMBERS = {"batches": 1, "samples": 4, "bytes": 64.5}
STATUS = {
    "id": "ab",
    "pid": 7,
    "endpoint": "tcp://127.0.0.1:5555",
    "unix": "penstock-0-ab",
    "seconds": 1.5,
    "window_seconds": 1,
    "cpus": 2,
    "cpu_seconds": 0.5,
    "ready": True,
    "draining": False,
    "failing": [{"feed": "b", "times": 1, "error": "no"}],
    "adjusts_workers": False,
    "engine": {"name": "ray", "hosts": 1, "adjusts": [1, 2]},
    "memory": {"allowed": 1, "reserved": 1, "arena": 1},
    "feeds": [
        {
            "name": "train",
            "url": "tcp://127.0.0.1:5555/train",
            "spec": "int64[]",
            "batch_size": 4,
            "batches": 3,
            "lanes": 4,
            "splits": None,
            "segment": None,
            "indexable": False,
            "consumers": 1,
            "sent": NUMBERS,
            "rates": NUMBERS,
            "cache": None,
            "skipped_count": 1,
            "part_caches": {"b": {"directory": "/c", "bytes": 1, "hits": 1, "misses": 1, "problem": None}},
            "skipped": [{"epoch": 0, "split": "a", "samples": 1, "why": "no"}],
        }
    ],
    "workers": [
        {
            "number": 0,
            "name": "0",
            "host": None,
            "makes_batches": True,
            "pid": 8,
            "restarts": 0,
            "ready": True,
            "leaving": False,
            "given_up": False,
            "stopped": False,
            "memory": 1,
            "doing": {"what": "a", "split": "a", "samples": 1, "seconds": 0.5},
            "spent": {f"{name}seconds": 1 for name in ("", "idle_", "user_", "cpu_", "cpu_wait_")},
            "shares": dict.fromkeys(("generating", "collating", "cpu_wait", "idle"), 0.25),
        }
    ],
    "hosts": [
        {
            "name": "b",
            "address": "b:1",
            "state": "working",
            "workers": 1,
            "ready": 1,
            "lanes": 1,
            "slots": 1,
            "rates": {"bytes": 1},
            "awaited": 0.5,
            "received_bytes": 1,
            "fetched_bytes": 1,
            "lent_bytes": 1,
            "silent_seconds": 0.1,
            "memory": {"used": 1, "allowed": 1},
            "unsent_bytes": 1,
        }
    ],
    "streams": [
        {
            "stream": 1,
            "feed": "train",
            "client": "b:9",
            "key": None,
            "transport": "tcp",
            "epoch": 0,
            "reading": True,
            "batches": 1,
            "sent": 1,
            "handed": 1,
            "slots": 4,
            "production": {"slots": 2},
            "rank": None,
            "made_near": False,
            "made_anywhere_because": None,
            "error": None,
            "unsent": False,
            "waits": WAITS,
            "waiting": 0.5,
            "limit": "",
            "headline": "",
            "verdict": "",
        }
    ],
    "more_streams": 0,
}


def test_the_texts_of_a_status_are_safe_to_print() -> None:
    assert status_text.parse(json.dumps(STATUS)) == STATUS
    hostile = {**STATUS, "endpoint": HOSTILE, HOSTILE: [{"deep": HOSTILE}, 1, None, 2.5, True]}
    assert status_text.parse(json.dumps(hostile)) == {
        **STATUS,
        "endpoint": SAFE,
        SAFE: [{"deep": SAFE}, 1, None, 2.5, True],
    }


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each value in a status, except those of optional contents."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield (key,)
            yield from ((key, *path) for path in paths(item))


@pytest.mark.parametrize("path", [*paths(STATUS)], ids=lambda path: ".".join(map(str, path)))
def test_a_status_in_which_something_is_missing_or_of_another_type_is_refused_in_words(path: tuple[Any, ...]) -> None:
    *outer, last = path
    for wrong in (None, [[]], {"x": []}):
        state = copy.deepcopy(STATUS)
        place: Any = state
        for key in outer:
            place = place[key]
        if wrong is None and isinstance(place, dict) and path != ("feeds", 0, "part_caches", "b"):
            del place[last]
        else:
            place[last] = wrong or [[]]
        if isinstance(place, list) and wrong is None:
            continue
        with pytest.raises(ProtocolError, match="the daemon's status cannot be read"):
            status_text.parse(json.dumps(state))


def nested(depth: int) -> str:
    return json.dumps({**STATUS, "x": 0})[:-2] + '{"a":' * (depth - 1) + "1" + "}" * depth


def test_a_status_is_nested_up_to_its_bound() -> None:
    assert status_text.parse(nested(status_text.MAX_DEPTH))
    for text in (nested(status_text.MAX_DEPTH + 1), nested(400), "[" * 200_000, '{"a":' * 100_000):
        with pytest.raises(ProtocolError, match="the daemon's status cannot be read"):
            status_text.parse(text)


@pytest.mark.parametrize("text", ["", "[]", "1", '"x"', "null", "{", '{"a":' + "9" * 100_000 + "}", "\x1b[2J"])
def test_what_is_not_a_status_is_refused_in_words(text: str) -> None:
    with pytest.raises(ProtocolError, match="the daemon's status cannot be read") as refused:
        status_text.parse(text)
    assert len(str(refused.value)) < 300


LAST = m.LastActivity(1, 1, HOSTILE, 1, 0.5, True, False, False, False, 1)


@pytest.mark.parametrize(
    ("message", "texts"),
    [
        (m.Hello(11, "feed", HOSTILE), lambda it: [it.client]),
        (m.Join(11, HOSTILE, bytes(16), 1, 1, "", "", "", ()), lambda it: [it.host]),
        (m.WorkerEnded(1, HOSTILE, LAST), lambda it: [it.how, it.doing.split]),
        (m.GivenUp(1, HOSTILE), lambda it: [it.how]),
        (m.Doing(HOSTILE, HOSTILE, 1, 0.5), lambda it: [it.what, it.split]),
        (m.WorkerActivity(1, 0, 1, 1, 1, HOSTILE), lambda it: [it.what]),
        (m.SplitSkipped(1, 1, HOSTILE, 1), lambda it: [it.split]),
    ],
)
def test_what_peers_call_themselves_and_say_of_their_work_is_safe_to_print(
    message: msgspec.Struct, texts: Callable[[Any], list[str]]
) -> None:
    sent = msgspec.to_builtins(message)  # a peer need not clean its texts
    for text in texts(message):
        assert text == one_line(HOSTILE)
    raw = json.loads(json.dumps(sent).replace(json.dumps(one_line(HOSTILE))[1:-1], "\\u001b\\u202e\\n"))
    received = msgspec.convert(raw, type(message), strict=False)
    assert set(texts(received)) == {"\\x1b\\u202e "}


def test_a_text_that_grows_when_it_is_made_safe_still_fits_its_message() -> None:
    ended = m.WorkerEnded(1, "\x1b" * 1024, None)
    assert codec.from_host(codec.encode(ended)) == ended
    assert len(ended.how) == 1024
