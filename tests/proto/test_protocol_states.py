"""PROTOCOL.md says how a state is written as JSON, so that other clients can exchange checkpoints with ours."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from typing import Any

import msgspec

from penstock._state import state_dict
from tests.conftest import Serve
from tests.proto.test_protocol_client import STREAMS, protocol, small_client

STATES = json.loads((STREAMS / "stream_states.json").read_text())
COUNTS = ("epoch", "batches", "rows", "merged", "skip")

EXCHANGE = """
import base64, json
from itertools import islice
import penstock

url, seen = sys.argv[1], []

def print(*_):
    seen.append(b"".join(array.tobytes() for array in sys._getframe(1).f_locals["arrays"]))

def leaves_of(batch):
    return b"".join(batch[key].tobytes() for key in sorted(batch))

def text(value):
    return base64.b64encode(value).decode()

def our_state(position, consumed):
    at = msgpack.unpackb(position.packed())
    at["digest"] = text(at["digest"])
    at["places"] = [[lane, index, text(record)] for lane, index, record in at["places"]]
    at["ended"] = [[*numbers, text(record)] for *numbers, record in at["ended"]]
    return json.loads(json.dumps({"penstock": 3, "consumed": consumed, "position": at}))

def their_position(state):
    at = state["position"]
    position = Position(at["feed"], at["epoch"])
    for name in ("batches", "rows", "merged", "skip"):
        position.at[name] = at[name]
    position.at["digest"] = base64.b64decode(at["digest"])
    for lane, index, record, ahead in at["places"]:
        position.places[lane] = [lane, index, base64.b64decode(record), base64.b64decode(ahead)]
    for number, (*numbers, record) in enumerate(at["ended"]):
        position.ended[number] = [*numbers, base64.b64decode(record)]
    return position

read(url, None, 0)
whole = list(seen)
for count in range(1, len(whole), 5):
    seen.clear()
    position, _ = read(url, None, 0, stop=count)
    with penstock.connect(url, state=our_state(position, count)) as connection:
        assert seen + [leaves_of(batch) for batch in connection.batches()] == whole, f"ours after {count} of theirs"
        assert connection.state_dict()["consumed"] == len(whole)
    with penstock.connect(url) as connection:
        seen[:] = [leaves_of(batch) for batch in islice(connection.batches(), count)]
        state = json.loads(json.dumps(connection.state_dict()))
    read(url, their_position(state), 0)
    assert seen == whole, f"theirs after {count} of ours"
"""


def is_base64(value: object) -> bool:
    return isinstance(value, str) and base64.b64encode(base64.b64decode(value, validate=True)).decode() == value


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= 2**62


def check(state: dict[str, Any]) -> None:
    """Check that a state is what the page says, and nothing else."""
    assert state.keys() == {"penstock", "consumed", "position"}
    assert state["penstock"] == 3
    position = state["position"]
    assert position.keys() == {"feed", "digest", "places", "ended", *COUNTS}
    assert all(map(is_count, [state["consumed"], *(position[name] for name in COUNTS)]))
    assert is_base64(position["digest"])
    for lane, index, record, ahead in position["places"]:
        assert is_count(lane)
        assert is_count(index)
        assert is_base64(record)
        assert is_base64(ahead)
    assert position["places"] == sorted(position["places"])
    for lane, index, leftover, record in position["ended"]:
        assert all(map(is_count, (lane, index, leftover)))
        assert is_base64(record)


def test_saved_states_are_what_the_protocol_says() -> None:
    assert len(STATES) > 60
    for saved in STATES:
        check(saved["state"])


def test_the_state_that_the_protocol_prints_is_the_one_of_its_resume() -> None:
    printed = json.loads(protocol().partition("### A state\n")[2].partition("```json\n")[2].partition("```")[0])
    check(printed)
    position, consumed = state_dict.load(printed)
    written = json.loads(json.dumps(state_dict.dump(position, consumed)))
    assert written == printed, "all fields, as state_dict() writes them"
    resume = protocol().partition("### A resume\n")[2]
    part = "".join(resume.partition('"data":"')[2].partition('"')[0].split())
    sent = msgspec.msgpack.decode(base64.b64decode(part))
    assert {name: printed["position"][name] for name in sent} == json.loads(msgspec.json.encode(sent))


def test_our_client_continues_from_states_of_the_small_client_and_the_other_way_round(serve: Serve) -> None:
    daemon = serve((STREAMS / "stream_feeds.py").read_text(), "shuffled_rng", "five_lanes")
    code = small_client().partition("\nurl = sys.argv[1]")[0] + EXCHANGE
    for url in daemon.urls.values():
        run = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr
