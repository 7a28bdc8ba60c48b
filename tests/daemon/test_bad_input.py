"""Each mistake that a user can make gets a message that says what happened, where, and what to do."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

import penstock
from penstock_proto import messages as m
from penstock_proto.transport import codec
from penstock_server.to_daemon import control
from tests.conftest import PATCHED, Daemon, DaemonLauncher, Serve
from tests.processes.free_ports import free_port

HEAD = "import numpy as np\nfrom penstock_server import Feed\n"


Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, daemon_launchers: list[DaemonLauncher]) -> Refused:
    """`refused(source, "feeds.py:feed", ...)`: the stderr of a `penstock serve` that refuses to start."""

    def start(source: str, *arguments: str) -> str:
        (tmp_path / "feeds.py").write_text(HEAD + source)
        words = [PATCHED.format(patched={}), "serve", *(arguments or ("feeds.py:feed",)), "--workers", "2"]
        if "--bind" not in arguments:
            words += ["--bind", "tcp://127.0.0.1:0"]
        daemon = Daemon(words, tmp_path, tmp_path / "log", {**os.environ}, launcher=daemon_launchers[0])
        try:
            assert daemon.process.wait(60) != 0, daemon.stderr()
            assert daemon.process.stdout is not None
            assert daemon.process.stdout.read() == "", "no feed was ready"
        finally:
            daemon.stop()
        return daemon.stderr()

    return start


GOOD = "feed = Feed(lambda s: iter([1]), splits=[1], batch_size=1)\n"


@pytest.mark.parametrize(
    ("source", "arguments", "words"),
    [
        (GOOD, ["feeds.py"], r"which feed in it\? Write feeds.py:feed; its only feed is feed"),
        (GOOD, ["nowhere.py:feed"], r"nowhere\.py"),
        (GOOD, ["no_such_module:feed"], r"no_such_module"),
        (GOOD, ["feeds.py:fed"], r"fed.*feed"),
        ("feed = 42\n", [], r"42|int.*Feed"),
        ("def feed(): yield 1\n", [], r"Feed\("),
        ("import no_such_package\n" + GOOD, [], r"no_such_package"),
        ("feed = Feed(lambda s: iter([1]), splits=[], batch_size=1)\n", [], r"no splits|empty|split"),
        ("feed = Feed(lambda s: iter([1]), splits=lambda: [], batch_size=1)\n", [], r"split"),
        ("feed = Feed(lambda s: iter([]), splits=[1, 2], batch_size=1)\n", [], r"yield(s|ed) nothing|no sample"),
        ("feed = Feed(lambda s: None, splits=[1], batch_size=1)\n", [], r"yield"),
        (
            "feed = Feed(lambda s: iter([object()]), splits=[1], batch_size=1)\n",
            [],
            r"yield numbers, text and ar",
        ),
        ("feed = Feed(lambda s: iter([1]), splits=[1], batch_size=0)\n", [], r"batch_size"),
        ("feed = Feed(lambda s: iter([1]), splits=[1])\n", [], r"batch_size"),
        ("feed = Feed(lambda: iter([1]), splits=[1], batch_size=1)\n", [], r"takes no split"),
        ("feed = Feed(lambda s: iter([1]), batch_size=1)\n", [], r"splits="),
        ("feed = Feed([], batch_size=1)\n", [], r"0|empty|nothing"),
        (
            "def bad(s):\n    raise KeyError('the cause')\n    yield\nfeed = Feed(bad, splits=[1], batch_size=1)\n",
            [],
            r"the cause",
        ),
        (
            "a = Feed([1], batch_size=1, name='x')\nb = Feed([1], batch_size=1, name='x')\n",
            ["feeds.py:a", "feeds.py:b"],
            r"'x'",
        ),
        (GOOD, ["feeds.py:feed", "--bind", "tcp://256.0.0.1:5"], r"cannot listen on tcp://256"),
        (GOOD, ["feeds.py:feed", "--bind", "nonsense"], r"cannot listen on nonsense.*tcp://"),
        (GOOD, ["feeds.py:feed", "--memory", "lots"], r"must be a size such as 4G or 512M, got 'lots'"),
        (GOOD, ["feeds.py:feed", "--advertise", "tcp://loader"], r"must be HOST or HOST:PORT.*got 'tcp://loader'"),
        (GOOD, ["feeds.py:feed", "--advertise", "loader:99999"], r"must be HOST or HOST:PORT.*got 'loader:99999'"),
    ],
    ids=range(24),
)
def test_serve_refuses_to_start_and_says_why(refused: Refused, source: str, arguments: list[str], words: str) -> None:
    assert re.search(words, refused(source, *arguments), re.DOTALL)


HOSTILE = """
class Raises:
    def __array__(self, *args, **kwargs):
        raise RuntimeError("no pixels")

class Wordless(Exception):
    def __str__(self):
        raise KeyboardInterrupt

class HostileDict(dict):
    def keys(self):
        raise RuntimeError("no keys")
    __iter__ = keys

def raises(error):
    raise error
    yield

def nested(depth):
    sample = 1
    for _ in range(depth):
        sample = (sample,)
    return sample

"""


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ("Raises()", r"first sample raised RuntimeError: no pixels.*split 1.*in __array__"),
        ("{'x': (1, Raises())}", r"first sample raised RuntimeError: no pixels.*split 1"),
        ("HostileDict(x=1)", r"first sample raised RuntimeError: no keys"),
        ("{'k' * 257: 1}", r"a key of 257 characters, 'kkk.*\n +in feed feed, worker \d, split 1"),
        ("{'\\ud800': 1}", r"a key that is not valid Unicode.*in feed feed"),
        ("{f'{i:0200}': i for i in range(1000)}", r"the spec of a sample takes 2\d{5} bytes.*in feed feed"),
        ("tuple(range(2000))", r"has 2000 items; up to 1024.*in feed feed"),
        ("nested(100)", r"nested more than 32 deep.*in feed feed"),
        ("nested(10000)", r"nested more than 32 deep.*in feed feed"),
        ("np.broadcast_to(0.0, (2**40, 2**15))", r"more than any machine has.*in feed feed"),
        ("'\\ud800'", r"'\\ud800' is not valid Unicode.*yield bytes.*in feed feed"),
        ("np.zeros(2, [('k' * 100000, 'i4')])", r"cannot be served.*in feed feed"),
        ("([np.zeros(3), np.zeros(3)], 1)", r"sample\[0\] is a list of 2 arrays: yield a tuple.*in feed feed"),
        ("next(raises(Wordless()))", r"raised Wordless\n +in feed feed, worker \d, split 1"),
        (
            "next(raises(ValueError('x' * 10**6)))",
            r"raised ValueError: x{4000,} \[.* left out .*\] x{4000,}.*in feed feed",
        ),
        ("next(raises(ValueError('\\udcff')))", r"raised ValueError: \\udcff\n +in feed feed"),
        ("next(raises(BaseException('the end')))", r"raised BaseException: the end.*in feed feed"),
        ("next(raises(RecursionError()))", r"raised RecursionError.*in feed feed"),
    ],
    ids=range(18),
)
def test_whatever_the_first_sample_is_or_raises_the_error_names_feed_and_split(
    refused: Refused, sample: str, words: str
) -> None:
    source = HOSTILE + f"def samples(split):\n    yield {sample}\nfeed = Feed(samples, splits=[1], batch_size=1)\n"
    said = refused(source)
    assert re.search(words, said, re.DOTALL), said
    assert not re.search("please report|its output above|penstock_server", said), said


@pytest.mark.parametrize(
    "later", ["Raises()", "{'\\ud800' * 300: 1}", "next(raises(Wordless('\\udcff')))", "nested(100)"]
)
def test_a_later_sample_fails_its_stream_and_nothing_else(serve: Serve, later: str) -> None:
    source = f"def samples(split):\n    yield 1\n    yield {later}\nfeed = Feed(samples, splits=[1], batch_size=1)\n"
    daemon = serve(HEAD + HOSTILE + source + "good = Feed([1, 2], batch_size=1)\n", "feed", "good")
    with penstock.connect(daemon.urls["feed"]) as connection:
        with pytest.raises((penstock.GeneratorError, penstock.SpecError), match=r"in feed feed, worker [01], split 1"):
            list(connection.batches())
    with penstock.connect(daemon.urls["good"]) as connection:
        assert len(list(connection.batches())) == 2
    assert "was killed" not in daemon.stderr()
    assert "exited" not in daemon.stderr()


def test_feeds_whose_specs_do_not_fit_one_message_are_refused(refused: Refused) -> None:
    source = """
spec = {f"{i:060}": Leaf("int64", ()) for i in range(800)}
feeds = [Feed(lambda s: iter([{}]), splits=[1], batch_size=1, name=f"feed{i}", spec=spec) for i in range(3)]
a, b, c = feeds
"""
    said = refused("from penstock_server import Leaf\n" + source, "feeds.py:a", "feeds.py:b", "feeds.py:c")
    assert re.search(r"the declared specs of these feeds take \d{6} bytes together", said), said


def test_an_object_with_too_large_a_length_is_refused(refused: Refused) -> None:
    source = """
class Long:
    def __len__(self):
        return 2**63 - 1
    def __getitem__(self, i):
        return i
feed = Feed(Long(), batch_size=1)
"""
    assert "got 9223372036854775807" in refused(source)


def test_an_epoch_of_less_than_a_batch_is_not_dropped_in_silence(serve: Serve) -> None:
    daemon = serve(HEAD + "feed = Feed(lambda s: iter([1, 2]), splits=[1, 2], batch_size=8, drop_remainder=True)\n")
    with penstock.connect(daemon.url) as connection:
        with pytest.raises(
            penstock.IncompleteEpoch,
            match="epoch 0 had 4 samples, less than a batch of 8, and drop_remainder=True drops them all: make",
        ):
            list(connection.batches())


def test_a_port_in_use_is_named(refused: Refused) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        said = refused(GOOD, "feeds.py:feed", "--bind", address)
    assert f"cannot listen on {address}: the port is in use" in said


def test_too_little_memory_is_refused_with_the_figure_that_is_needed_and_that_figure_works(
    refused: Refused, serve: Serve
) -> None:
    source = "feed = Feed(lambda s: iter([np.zeros(10**6, 'u1')] * 40), splits=[1, 2], batch_size=4)\n"
    said = refused(source, "feeds.py:feed", "--memory", "1M")
    needed = re.search(r"Give --memory (\d+[KM])", said)
    assert needed, said
    with penstock.connect(serve(HEAD + source, memory=needed[1]).url) as connection:
        assert sum(1 for _ in connection.batches()) == 20


@pytest.mark.parametrize(
    ("advertise", "place"),
    [
        ("localhost", "localhost:{port}"),
        ("loader.example.org:7000", "loader.example.org:7000"),
        ("[::1]", "[::1]:{port}"),
    ],
)
def test_urls_name_the_host_that_is_advertised(serve: Serve, advertise: str, place: str) -> None:
    daemon = serve(HEAD + GOOD, bind="tcp://127.0.0.1:0", advertise=advertise)
    found = re.search(r"tcp://127\.0\.0\.1:(\d+)", str(control.status(f"tcp://127.0.0.1:{port_of(daemon)}", 60)))
    assert found
    assert daemon.url == f"tcp://{place.format(port=found[1])}/feed"
    shown = control.status(found[0], 60)
    assert shown.feeds[0].url == daemon.url
    if advertise == "localhost":
        with penstock.connect(daemon.url) as connection:
            assert len(list(connection.batches())) == 1


def port_of(daemon: Daemon) -> int:
    """Return the TCP port that a daemon listens on."""
    (port,) = {one.laddr.port for one in psutil.Process(daemon.process.pid).net_connections("tcp") if not one.raddr}
    return int(port)


def test_an_unknown_feed_is_answered_with_those_there_are(serve: Serve) -> None:
    daemon = serve(HEAD + "train = Feed([1], batch_size=1)\nval = Feed([1], batch_size=1)\n", "train", "val")
    with pytest.raises(penstock.UnknownFeed, match=r"no feed 'tests'.*there are: train, val"):
        penstock.connect(daemon.urls["train"].replace("/train", "/tests"))


def test_a_daemon_that_is_not_there_is_reported_with_the_address_tried() -> None:
    port = free_port()
    with pytest.raises(penstock.Unreachable, match=rf"tcp://127\.0\.0\.1:{port}"):
        penstock.connect(f"tcp://127.0.0.1:{port}/train", timeout=0.5)


@pytest.mark.parametrize(
    "url", ["tcp://127.0.0.1/train", "tcp://127.0.0.1:5555", "http://127.0.0.1:5555/x", "scenes.py", ""]
)
def test_a_url_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(penstock.PenstockError, match=r"tcp://"):
        penstock.connect(url, timeout=0.5)


def test_another_protocol_version_is_refused_by_naming_both(serve: Serve) -> None:
    daemon = serve(HEAD + GOOD)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(daemon.url.rpartition("/")[0])
        dealer.send(codec.encode(m.Hello(99, "feed")))
        assert dealer.poll(5000)
        answer = codec.from_server(dealer.recv())
    finally:
        dealer.close(0)
        context.term()
    assert isinstance(answer, m.Failed)
    assert answer.error.kind == "ProtocolError"
    assert f"version 99, the daemon version {m.VERSION}" in answer.error.message


def test_a_client_says_so_when_the_daemon_speaks_another_version() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def answer() -> None:
        routing_id, _ = router.recv_multipart()
        error = penstock.ProtocolError("the client speaks protocol version 1, the daemon version 99")
        router.send_multipart([routing_id, codec.encode(m.Failed(m.ErrorReport.of(error)))])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with pytest.raises(penstock.ProtocolError, match="version 1, the daemon version 99"):
            penstock.connect(f"tcp://127.0.0.1:{port}/train", timeout=60)
    finally:
        thread.join()
        router.close(0)
        context.term()


CHANGING = (
    HEAD
    + """
def changing(kind):
    for i in range(20):
        yield np.zeros(3, "f4"), i
    yield {
        "structure": (np.zeros(3, "f4"),),
        "dtype": (np.zeros(3, "f8"), 1),
        "shape": (np.zeros(4, "f4"), 1),
        "object": (np.array([None] * 3), 1),
        "text": ("a text", 1),
        "masked": (np.ma.masked_array(np.zeros(3, "f4"), [0, 1, 0]), 1),
        "nan for an int": (np.zeros(3, "f4"), float("nan")),
    }[kind]

def failing(split):
    for i in range(20):
        yield np.int64(i)
    deep(split)

def deep(split):
    raise RuntimeError(f"broken file {split}")

good = Feed([1, 2, 3], batch_size=2)
failing_feed = Feed(failing, splits=["a.h5", "b.h5"], batch_size=8, lanes=2, turn=1, name="failing")
"""
    + "\n".join(
        f"{kind.replace(' ', '_')} = Feed(changing, splits=[{kind!r}], batch_size=4)"
        for kind in ["structure", "dtype", "shape", "object", "text", "masked", "nan for an int"]
    )
)
KINDS = {
    "structure": "tuple of 2.*same structure",
    "dtype": r"sample\[0\].*float64.*float32",
    "shape": r"sample\[0\].*\(4,\).*float32\[3\].*pad",
    "object": r"sample\[0\].*object",
    "text": r"sample\[0\].*'a text'.*holds numbers",
    "masked": r"sample\[0\].*mask",
    "nan_for_an_int": r"sample\[1\].*nan.*int64",
}


def test_samples_that_change_arrive_as_a_spec_error_after_all_batches_before_them(serve: Serve) -> None:
    daemon = serve(CHANGING, *KINDS, "good")
    for kind, words in KINDS.items():
        with penstock.connect(daemon.urls[kind]) as connection:
            rows = 0
            with pytest.raises(penstock.SpecError) as caught:
                for batch in connection.batches():
                    rows += len(batch[0])
            assert rows == 20, kind
            assert re.search(words, str(caught.value), re.DOTALL), str(caught.value)
            assert caught.value.feed == kind
            assert caught.value.split is not None
            assert caught.value.worker is not None
            assert connection.error is caught.value
    with penstock.connect(daemon.urls["good"]) as connection:
        assert [batch.tolist() for batch in connection.batches()] == [[1, 2], [3]]


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_an_exception_in_user_code_arrives_with_its_traceback_and_the_stream_stays_failed(
    serve: Serve, transport: str
) -> None:
    daemon = serve(CHANGING, "failing_feed", "good")
    with (
        penstock.connect(daemon.urls["good"], transport=transport) as other,
        penstock.connect(daemon.urls["failing"], transport=transport) as connection,
    ):
        batches = connection.batches()
        first = [next(batches).tolist() for _ in range(4)]
        assert first == [list(range(8))] * 2 + [list(range(8, 16))] * 2
        with pytest.raises(penstock.GeneratorError) as caught:
            next(batches)
        error = caught.value
        assert error.message.startswith("failing raised RuntimeError: broken file")
        assert error.split in ("'a.h5'", "'b.h5'")
        assert error.worker in (0, 1)
        assert error.feed == "failing"
        trace = error.remote_traceback or ""
        assert re.search(r'feeds\.py", line \d+, in failing\n +deep\(split\)', trace), trace
        assert re.search(r'feeds\.py", line \d+, in deep', trace)
        assert "penstock_server" not in trace
        for _ in range(2):
            with pytest.raises(penstock.GeneratorError) as again:
                next(connection.batches())
            assert again.value is error
        assert connection.error is error
        assert sum(len(batch) for batch in other.batches()) == 3
    assert "broken file" in daemon.stderr()


LONG = """
import numpy as np
from penstock_server import Feed

def failing():
    yield 0
    try:
        deep()
    except KeyError as error:
        raise RuntimeError("the beginning" + "x" * 40_000 + "the end") from error

def deep():
    raise KeyError("y" * 40_000)

feed = Feed(failing, batch_size=1)
"""


def test_a_very_long_exception_keeps_both_ends_and_every_frame_of_its_traceback(serve: Serve) -> None:
    daemon = serve(LONG, "feed")
    with pytest.raises(penstock.GeneratorError) as caught, penstock.connect(daemon.urls["feed"]) as connection:
        list(connection.batches())
    error = caught.value
    assert error.message.startswith("failing raised RuntimeError: the beginning")
    assert error.message.endswith("the end")
    assert "characters left out" in error.message
    trace = error.remote_traceback or ""
    assert re.findall(r"feeds\.py\", line \d+, in (\w+)", trace) == ["failing", "deep", "failing"]
    assert trace.rstrip().endswith("the end")
    assert "KeyError: 'yyy" in trace


def test_tensorflow_raises_the_workers_error_with_its_text(serve: Serve, tf: Any) -> None:
    daemon = serve(CHANGING, "failing_feed")
    with penstock.connect(daemon.url) as connection:
        rows = 0
        with pytest.raises(tf.errors.OpError) as caught:
            for batch in connection.dataset():
                rows += len(batch)
        assert rows == 32
        assert "RuntimeError: broken file" in str(caught.value)
        assert "feeds.py" in str(caught.value)
        assert isinstance(connection.error, penstock.GeneratorError)


def test_an_epoch_with_other_than_the_promised_samples_is_an_error_not_a_short_end(serve: Serve) -> None:
    source = """
less = Feed(lambda s: iter(range(5)), splits=[1, 2], batch_size=4, samples=12)
more = Feed(lambda s: iter(range(5)), splits=[1, 2], batch_size=4, samples=8)
"""
    daemon = serve(HEAD + source, "less", "more")
    for name, says in (("less", 12), ("more", 8)):
        with penstock.connect(daemon.urls[name]) as connection:
            with pytest.raises(penstock.IncompleteEpoch, match=f"had 10 samples, but the feed says samples={says}"):
                list(connection.batches())


def test_after_its_last_epoch_a_feed_raises(serve: Serve) -> None:
    daemon = serve(HEAD + "feed = Feed([1, 2, 3], batch_size=2, epochs=2)\n")
    with penstock.connect(daemon.url) as connection:
        for _ in range(2):
            assert len(list(connection.batches())) == 2
        with pytest.raises(penstock.EndOfStream, match="2 epochs"):
            list(connection.batches())


def test_malformed_messages_are_counted_and_do_no_harm(serve: Serve) -> None:
    daemon = serve(HEAD + GOOD)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(daemon.url.rpartition("/")[0])
    try:
        for data in (b"", b"nonsense", b"\x81\xa4type\xa5hello", b"\xc1" * 100, codec.encode(m.Begin(0))):
            dealer.send(data)
            dealer.send_multipart([data, data])
        with penstock.connect(daemon.url) as connection:
            assert [batch.tolist() for batch in connection.batches()] == [[1]]
    finally:
        dealer.close(0)
        context.term()
    assert daemon.stderr().count("refused a message over TCP") == 9
