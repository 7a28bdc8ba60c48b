"""Text of peers, files and user code cannot control the reader's terminal."""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect
from msgspec.structs import fields, replace

from penstock_proto import GeneratorError, PenstockError, ProtocolError
from penstock_proto import messages as m
from penstock_proto.status import status_parsing
from penstock_proto.status.feed_status import Feed
from penstock_proto.status.host_status import Host
from penstock_proto.status.status_shape import Status
from penstock_proto.status.stream_status import Stream
from penstock_proto.status.worker_status import Worker
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


def value(kind: Any) -> Any:
    """Return a value of a type, as JSON types."""
    match kind:
        case inspect.Metadata():
            return value(kind.type)
        case inspect.UnionType():
            return value(next(one for one in kind.types if not isinstance(one, inspect.NoneType)))
        case inspect.StructType():
            return {one.name: value(one.type) for one in kind.fields}
        case inspect.ListType():
            return [value(kind.item_type)]
        case inspect.TupleType():
            return [value(one) for one in kind.item_types]
        case inspect.DictType():
            return {"b": value(kind.value_type)}
    return {inspect.StrType: "a", inspect.BoolType: True, inspect.IntType: 1, inspect.FloatType: 0.5}[type(kind)]


STATUS: dict[str, Any] = value(inspect.type_info(Status))
OPTIONAL = {one.name for kind in (Status, Feed, Worker, Host, Stream) for one in fields(kind) if not one.required}
"""Figures that a status may lack."""


def test_the_texts_of_a_status_are_safe_to_print() -> None:
    assert json.loads(msgspec.json.encode(status_parsing.parse(json.dumps(STATUS)))) == STATUS
    hostile = {**STATUS, "endpoint": HOSTILE, HOSTILE: [{"deep": HOSTILE}, 1, None, 2.5, True]}
    assert status_parsing.parse(json.dumps(hostile)) == replace(status_parsing.parse(json.dumps(STATUS)), endpoint=SAFE)


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
        if wrong is not None:
            place[last] = wrong
        elif isinstance(place, list) or last in OPTIONAL or path == ("feeds", 0, "part_caches", "b"):
            continue
        else:
            del place[last]
        with pytest.raises(ProtocolError, match="the daemon's status cannot be read"):
            status_parsing.parse(json.dumps(state))


PARSE = """
import sys, threading
from penstock_proto.status import status_parsing

def parse():
    barrier.wait()
    status_parsing.parse(sys.argv[1])

sys.setswitchinterval(1e-6)
barrier = threading.Barrier(8)
threads = [threading.Thread(target=parse) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_may_parse_their_first_status_at_the_same_time() -> None:
    for _ in range(5):
        subprocess.run([sys.executable, "-c", PARSE, json.dumps(STATUS)], check=True, timeout=60)


def nested(depth: int) -> str:
    return json.dumps({**STATUS, "x": 0})[:-2] + '{"a":' * (depth - 1) + "1" + "}" * depth


def test_a_status_is_nested_up_to_its_bound() -> None:
    status_parsing.parse(nested(status_parsing.MAX_DEPTH))
    for text in (nested(status_parsing.MAX_DEPTH + 1), nested(400), "[" * 200_000, '{"a":' * 100_000):
        with pytest.raises(ProtocolError, match="the daemon's status cannot be read"):
            status_parsing.parse(text)


@pytest.mark.parametrize("text", ["", "[]", "1", '"x"', "null", "{", '{"a":' + "9" * 100_000 + "}", "\x1b[2J"])
def test_what_is_not_a_status_is_refused_in_words(text: str) -> None:
    with pytest.raises(ProtocolError, match="the daemon's status cannot be read") as refused:
        status_parsing.parse(text)
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
