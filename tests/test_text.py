"""Text of peers, files and user code cannot control the terminal of whoever reads it."""

from __future__ import annotations

import json
import logging

import pytest

from penstock_proto import GeneratorError, PenstockError, ProtocolError, codec, status_text
from penstock_proto import messages as m
from penstock_proto.text import is_unicode, one_line, printable
from penstock_server.log_format import TEXT, JsonFormatter, TextFormatter

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


def test_the_texts_of_an_error_are_safe_to_print_whoever_wrote_them() -> None:
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


def test_the_texts_of_a_status_are_safe_to_print() -> None:
    hostile = json.dumps({"endpoint": HOSTILE, HOSTILE: [{"deep": HOSTILE}, 1, None, 2.5, True]})
    assert status_text.parse(hostile) == {"endpoint": SAFE, SAFE: [{"deep": SAFE}, 1, None, 2.5, True]}


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


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
