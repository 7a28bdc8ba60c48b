"""Previews of what is being fed: the answers of `/api/preview`."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

import penstock
from penstock_proto.status.status_shape import Status
from penstock_server.coordinator.model.commands import SendSlab
from penstock_server.http.previews import Previews
from penstock_server.http.watched import Watched
from penstock_server.logs.bugs import Bugs
from penstock_server.shared_memory.arena import Memfd
from penstock_server.status.waits import Waits
from penstock_server.workers.worker_memory import WorkerMemory
from tests.conftest import Daemon, Serve
from tests.fakes.statuses import of
from tests.http.test_http import get, wait_until


def preview(daemon: Daemon, feed: str, number: int = 0) -> dict[str, Any]:
    """Return the next preview of a feed after preview `number`."""

    def ask() -> Any:
        return json.loads(get(daemon, f"/api/preview?feed={quote(feed)}&number={number}")[2])

    found: dict[str, Any] = wait_until(ask)
    return found


@contextlib.contextmanager
def reader(url: str, pause: float = 0.0, transport: str = "local", spoil: bool = False) -> Iterator[list[Any]]:
    """Read epoch after epoch on a thread, and yield the list of the first batches. With `spoil`, write into each
    batch."""
    stop, kept = threading.Event(), []
    failed = []

    def read(connection: penstock.Connection) -> None:
        try:
            while not stop.is_set():
                for batch in connection.batches():
                    if spoil:
                        batch[:] = 0
                    if len(kept) < 100:
                        kept.append(batch)
                    if stop.wait(pause):
                        break
        except Exception as error:
            failed.append(error)

    with penstock.connect(url, transport=transport) as connection:
        thread = threading.Thread(target=read, args=(connection,))
        thread.start()
        try:
            yield kept
        finally:
            stop.set()
            thread.join()
    assert not failed, failed


KINDS = """
    import io
    import numpy as np
    from penstock_server import Feed, Leaf

    def rows(number):
        return np.arange(number, number + 3)

    def nested(split):
        for n in range(40):
            deep = np.float32([n, np.nan, np.inf]), n % 3 == 0
            yield {"b": {"deep": deep}, "a": np.full((130, 260), 100 + n, np.uint8)}

    def uneven(split):
        for n in range(40):
            yield np.arange(n + 1, dtype=np.int16), ["x" * n, "y"], b"\\x00\\xff" * n

    def ready(split):
        for n in range(40):
            yield np.arange(6 * n, 6 * n + 6).reshape(3, 2), ["first", "second", f"third {n}"]

    def scalars(split):
        for n in range(40):
            yield np.float64(n), np.arange(n + 1)

    def empty(split):
        for n in range(40):
            yield np.zeros((0, 3), np.float32), np.zeros(0, np.int64)

    def large(split):
        for n in range(4):
            yield np.full(300_000, n, np.uint8), n

    def encoded(split):
        from PIL import Image
        for n in range(40):
            file = io.BytesIO()
            Image.fromarray(np.full((8, 9, 3), 100 + n, np.uint8)).save(file, "png")
            yield file.getvalue(), np.complex64(n + 1j), np.int64(-(2**62)) * n

    def wide(split):
        for n in range(40):
            yield {f"{i:03d}": n + i for i in range(100)}

    wide = Feed(wide, splits=[0], batch_size=8)
    nested = Feed(nested, splits=[0], batch_size=8)
    uneven = Feed(uneven, splits=[0], batch_size=8, batching="ragged")
    def lists(split):
        for n in range(40):
            yield [np.arange(k) + n for k in range(n % 3)], [["a" * k, "b"] for k in range(n % 4)], ["t"] * (n % 2)

    LISTS = (
        Leaf("int64", (None, None), ragged=True),
        Leaf(str, (None, None), ragged=True),
        Leaf(str, (None,), ragged=True),
    )
    lists = Feed(lists, splits=[0], batch_size=8, batching="ragged", spec=LISTS)
    ready = Feed(ready, splits=[0], batch_size=None)
    scalars = Feed(scalars, splits=[0], batch_size=None)
    empty = Feed(empty, splits=[0], batch_size=None)
    large = Feed(large, splits=[0], batch_size=2)
    encoded = Feed(encoded, splits=[0], batch_size=8)
"""


def pixels(cell: dict[str, str]) -> Any:
    """Return the pixels of a picture."""
    image = pytest.importorskip("PIL.Image")
    return np.asarray(image.open(io.BytesIO(base64.b64decode(cell["picture"]))))


def test_previews_show_feeds_of_every_kind(serve: Serve) -> None:
    names = ("nested", "uneven", "lists", "ready", "scalars", "empty", "large", "encoded", "wide")
    daemon = serve(KINDS, *names, http=0, patched={"http.copied_rows._LARGEST": 200_000})
    seen = {}
    for name in names:
        with reader(daemon.urls[name], 0.2, "tcp" if name == "ready" else "local"):
            seen[name] = preview(daemon, name)
        assert seen[name]["feed"] == name

    found = seen["nested"]
    assert [leaf["path"] for leaf in found["leaves"]] == ["b['deep'][0]", "b['deep'][1]", "a"]
    assert found["leaves"][0]["strange"]
    assert "33 % NaN, 33 % infinite" in found["leaves"][0]["range"]
    assert sum(found["leaves"][0]["histogram"]["counts"]) == 8  # without NaN and infinity
    assert (found["rows"], len(found["samples"])) == (8, 8)
    for number, sample in enumerate(found["samples"]):
        n = 8 * found["index"] + number
        assert sample[0] == {"text": f"[{n}, nan, inf]"}
        assert sample[1] == {"text": str(n % 3 == 0)}
        assert (pixels(sample[2]) == 100 + n).all()
        assert pixels(sample[2]).shape == (43, 87, 3)  # made smaller

    found = seen["uneven"]
    for number, sample in enumerate(found["samples"]):
        n = 8 * found["index"] + number
        assert sample[0]["text"].startswith("[0" if n == 0 else "[0, 1")
        assert sample[1]["text"] == f"{'x' * n!r}, 'y'"
        assert sample[2]["text"] == (
            f"{2 * n} bytes: {(bytes([0, 255]) * n)[:12].hex(' ')}" + " ..." * (n > 6) if n else "''"
        )
    assert found["leaves"][1]["histogram"]["lengths"]

    found = seen["lists"]
    assert [leaf["kind"] for leaf in found["leaves"]] == ["int64[0..2, 0..1]", "text[0..3, 2]", "text[0..1]"]
    for number, sample in enumerate(found["samples"]):
        n = 8 * found["index"] + number
        assert sample[0]["text"] == ("[]", "[[]]", f"[[], [{n}]]")[n % 3]
        assert (
            sample[1]["text"]
            == ("[]", "[['', 'b']]", "[['', 'b'], ['a', 'b']]", "[['', 'b'], ['a', 'b'], ['aa', 'b']]")[n % 4]
        )
        assert sample[2]["text"] == ("[]", "['t']")[n % 2]
    assert [leaf["histogram"]["lengths"] for leaf in found["leaves"][:2]] == [False, True]

    found = seen["ready"]
    n = found["index"]
    assert (found["rows"], found["one"]) == (3, False)
    assert [sample[0]["text"] for sample in found["samples"]] == [
        f"[{6 * n + 2 * i}, {6 * n + 2 * i + 1}]" for i in range(3)
    ]
    assert [sample[1]["text"] for sample in found["samples"]] == ["'first'", "'second'", f"'third {n}'"]

    found = seen["scalars"]
    assert (found["one"], len(found["samples"])) == (True, 1)
    assert found["samples"][0][0]["text"] == str(found["index"])

    found = seen["empty"]
    assert (found["rows"], found["samples"]) == (0, [])
    assert [leaf["kind"] for leaf in found["leaves"]] == ["empty", "empty"]

    found = seen["large"]
    assert found["samples"][0][0] == {"text": "too large to show"}
    assert found["samples"][1][1] == {"text": str(2 * found["index"] + 1)}

    found = seen["wide"]
    assert (len(found["leaves"]), found["more_leaves"]) == (64, 36)
    assert found["samples"][1][63] == {"text": str(8 * found["index"] + 1 + 63)}

    found = seen["encoded"]
    for number, sample in enumerate(found["samples"]):
        assert (pixels(sample[0]) == 100 + 8 * found["index"] + number).all()
    assert found["leaves"][1]["range"].startswith("magnitudes ")
    assert json.loads(get(daemon, "/api/status")[2])["internal_errors"] == 0


SPOILED = """
    import numpy as np
    from penstock_server import Feed

    def ones(split):
        for _ in range(1000):
            yield np.ones((100, 100), np.float32)

    feed = Feed(ones, splits=range(100), batch_size=10)
"""


def test_a_preview_is_copied_before_its_consumer_can_write_there(serve: Serve) -> None:
    daemon = serve(SPOILED, http=0)
    with reader(daemon.url, spoil=True):
        number = 0
        for _ in range(4):
            found = preview(daemon, "feed", number)
            number = found["number"]
            assert found["leaves"][0]["range"] == "always 1"


def test_a_preview_is_made_only_when_asked_for_and_at_most_once_a_second(serve: Serve) -> None:
    daemon = serve(SPOILED, http=0)
    assert get(daemon, "/api/preview?feed=feed")[2] == "null"  # nothing is sent yet
    assert get(daemon, "/api/preview?feed=nothing")[0] == 404
    with reader(daemon.url):
        first = preview(daemon, "feed")
        assert first["number"] == 1
        time.sleep(1.5)
        second = preview(daemon, "feed", 1)  # this is the first request since
        began = time.monotonic()
        third = preview(daemon, "feed", second["number"])
        assert (second["number"], third["number"]) == (2, 3)
        assert third["taken"] - second["taken"] >= 0.99  # the event loop counts in milliseconds
        assert time.monotonic() - began < 30


def test_a_look_that_fails_is_noted_and_harms_no_stream() -> None:
    looks: list[Any] = []
    bugs = Bugs()
    previews = Previews(
        Watched(
            status=lambda: of(Status),
            status_text=str,
            waits=lambda _: Waits(),
            seconds=float,
            feeds={},
            workers=list,
            hosts=(),
            memory=WorkerMemory(list, Bugs()),
            feed_of=str,
            look_at_slabs=looks.append,
            bugs=bugs,
        )
    )
    assert previews.ask("gone", 0) == "null"
    slab = SendSlab(1, 1, first=0, nbytes=0, seq=0, epoch=0, lane=0, index=0, batches=1, rows=1, shapes=(), record=b"")
    looks[-1]("another", slab, Memfd(1, 0, -1))
    assert len(looks) == 1
    looks[-1]("gone", slab, Memfd(1, 0, -1))
    assert (bugs.count, looks[1:]) == (1, [None])
    previews.ask("gone", 0)
    assert len(looks) == 2  # within a second no other look is wanted
