"""Workers get feeds of notebook cells, of interactive sessions and of functions, which they cannot import."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock_proto import StartError
from penstock_server import Feed
from tests.processes.forked import children

KERNEL = """
import builtins, json, linecache, sys, types

main = sys.modules["__main__"] = types.ModuleType("__main__")
main.__builtins__ = builtins
number = 0

def cell(source):
    global number
    number += 1
    name = f"/tmp/ipykernel_77/{number}.py"
    lines = source.splitlines(keepends=True)
    linecache.cache[name] = len(source), None, lines, name
    exec(compile(source, name, "exec"), main.__dict__)

for source in json.load(sys.stdin):
    cell(source)
"""
"""A program that runs cells in `__main__`, and keeps their sources for tracebacks, as a notebook's kernel does."""

IPYTHON = """
import sys, types

class Compiler:
    def format_code_name(self, name):
        return ("Cell", f"In[{name.removesuffix('.py').rpartition('/')[2]}]") if "/ipykernel_" in name else None

shown = []  # the calls of display

def display(data, **options):
    shown.append([data, options])

shell = types.SimpleNamespace(compile=Compiler(), kernel="a kernel")
drawing = sys.modules["IPython.display"] = types.SimpleNamespace(display=display, shown=shown)
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell, display=drawing)
sys.ps1 = ">"
"""
"""What Penstock uses of IPython, if it runs in such a kernel."""

FIRST = """
    import json
    from dataclasses import dataclass

    import numpy as np
    import penstock
    from penstock import Feed

    SCALE = 10

    @dataclass
    class Item:
        number: int

    def scaled(number):
        return number * SCALE

    def rows(split):
        for i in range(3):
            yield np.int64(scaled(split.number) + i)

    def read(feed, workers=2):
        with penstock.connect(feed, workers=workers) as connection:
            return [batch.tolist() for batch in connection.batches()]

    feed = Feed(rows, splits=[Item(1), Item(2)], batch_size=3, transform=lambda x: x + 1)
    print(json.dumps(read(feed)))
"""


def run(folder: Path, *cells: str, notebook: bool = False) -> subprocess.CompletedProcess[str]:
    sources = json.dumps([textwrap.dedent(cell) for cell in cells])
    kernel = IPYTHON + KERNEL if notebook else KERNEL
    return subprocess.run(
        [sys.executable, "-c", kernel], cwd=folder, input=sources, capture_output=True, text=True, timeout=120
    )


def printed(ended: subprocess.CompletedProcess[str]) -> list[Any]:
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_a_feed_of_a_cell_is_served_and_edited_cells_take_effect(tmp_path: Path) -> None:
    edited = """
        def scaled(number):
            return number * 1000
        print(json.dumps(read(feed)))
        SCALE = -1
    """
    again = """
        def scaled(number):
            return number * SCALE
        print(json.dumps([read(feed), read(feed, workers=0)]))
    """
    one, two, three = printed(run(tmp_path, FIRST, edited, again))
    assert one == [[11, 12, 13], [21, 22, 23]]
    assert two == [[1001, 1002, 1003], [2001, 2002, 2003]]
    assert three == [[[0, 1, 2], [-1, 0, 1]]] * 2


def test_an_error_shows_the_line_of_the_cell(tmp_path: Path) -> None:
    raises = """
        def bad(split):
            yield 1
            raise ValueError("no pixels")

        try:
            read(Feed(bad, splits=[1], batch_size=1))
        except penstock.GeneratorError as error:
            print(json.dumps(str(error)))
    """
    error = printed(run(tmp_path, FIRST, raises))[1]
    assert 'File "/tmp/ipykernel_77/2.py", line 4, in bad\n    raise ValueError("no pixels")' in error


def test_in_a_notebook_the_error_has_the_number_of_the_cell_and_comes_once(tmp_path: Path) -> None:
    fails = """
        def bad(split):
            yield 1
            raise ValueError("no pixels")

        for options in ({}, {"on_error": "skip"}):
            try:
                read(Feed(bad, splits=[1], batch_size=1, **options))
            except penstock.GeneratorError as error:
                print(json.dumps(str(error)))
    """
    ended = run(tmp_path, FIRST, fails, notebook=True)
    _, error = printed(ended)
    assert 'File "Cell In[2]", line 4, in bad\n    raise ValueError("no pixels")' in error
    assert "ERROR" not in ended.stderr
    assert "no pixels" in ended.stderr  # of the feed that does not raise it
    assert "ipykernel" not in error + ended.stderr


def test_a_notebook_shows_a_bar_while_a_private_daemon_starts(tmp_path: Path) -> None:
    slow = """
        import os, time

        from IPython import display

        def slow(split):
            while not os.path.exists("shown"):
                time.sleep(0.01)
            yield 1

        def look(data, **options):
            shown(data, **options)
            if "reading a first sample" in data["text/plain"]:
                open("shown", "w")

        shown, display.display = display.display, look
        display.shown.clear()
        print(json.dumps(read(Feed(slow, splits=["<b>"], batch_size=1))))
        print(json.dumps(display.shown))
    """
    ended = run(tmp_path, FIRST, slow, notebook=True)
    _, batches, (*bars, (last, removed)) = printed(ended)
    assert batches == [[1]]
    data, options = bars[-1]
    assert re.fullmatch(r"the private daemon of the feed feed: reading a first sample: '<b>' .*", data["text/plain"])
    assert data["text/html"].startswith("<progress></progress> the private daemon of the feed feed: ")
    assert "&lt;b&gt;" in data["text/html"]
    assert options["raw"] is True
    assert len({options["display_id"] for _, options in (*bars, (last, removed))}) == 1
    assert [options["update"] for _, options in bars] == [False] + [True] * (len(bars) - 1)
    assert last == {"text/html": "", "text/plain": ""}
    assert removed["update"] is True
    assert "waiting for" not in ended.stderr


def test_what_cannot_be_sent_is_an_error_that_names_it(tmp_path: Path) -> None:
    locks = """
        import threading
        lock = threading.Lock()

        def locks(split):
            with lock:
                yield 1

        for options in ({}, {"cache": "cache"}):
            try:
                read(Feed(locks, splits=[1], batch_size=1, **options))
            except penstock.StartError as error:
                print(json.dumps(str(error)))
    """
    for error in printed(run(tmp_path, FIRST, locks))[1:]:
        assert "locks (2.py:5) uses lock = <unlocked _thread.lock" in error
        assert "Make or open this in the generator" in error


def test_a_cell_that_is_edited_has_other_cached_splits_and_one_that_is_run_again_has_the_same(tmp_path: Path) -> None:
    counted = """
        import os

        def noted(split):
            with open("runs", "a") as runs:
                print(split.number, file=runs)
            yield from rows(split)

        def cached(workers=2):
            open("runs", "w").close()
            batches = read(Feed(noted, splits=[Item(1), Item(2)], batch_size=3, cache="cache"), workers)
            print(json.dumps([batches, bool(open("runs").read())]))

        cached(); cached(); cached(workers=0)
    """
    edited = """
        def scaled(number):
            return number * SCALE + 1
        cached(); cached(workers=0)
    """
    again = """
        def scaled(number):
            return number * SCALE
        cached()
        SCALE = 2
        cached()
    """
    plain = [[10, 11, 12], [20, 21, 22]]
    first = printed(run(tmp_path, FIRST, counted, edited))[1:]
    more = [[11, 12, 13], [21, 22, 23]]
    assert first == [[plain, True], [plain, False], [plain, False], [more, True], [more, False]]
    second = printed(run(tmp_path, FIRST, counted, again))[1:]  # in another process
    assert second == [*[[plain, False]] * 4, [[[2, 3, 4], [4, 5, 6]], True]]


def test_a_notebook_shows_no_lines_of_the_daemon_but_warnings_and_a_short_feed(tmp_path: Path) -> None:
    ended = run(tmp_path, FIRST, "print(json.dumps(repr(feed)))", notebook=True)
    assert printed(ended)[1] == "Feed(rows, splits=[Item(number=1), Item(number=2)], transform=<lambda>, batch_size=3)"
    assert " INFO " not in ended.stderr
    assert " INFO " in run(tmp_path, FIRST).stderr


def feed_of(numbers: list[int], **options: Any) -> Feed:
    def rows(split: int) -> Iterator[int]:
        yield from (split * number for number in numbers)

    return Feed(rows, splits=[1, 2, 3], batch_size=1, lanes=1, **options)


@pytest.mark.parametrize("env", [{}, {"OMP_NUM_THREADS": "2"}])
def test_a_feed_that_a_function_returns_is_the_same_for_any_number_of_workers(env: dict[str, str]) -> None:
    feed, seen = feed_of([1, 10], env=env, seed=7, shuffle=3), []
    for workers in (0, 1, 3):
        with penstock.connect(feed, workers=workers) as connection:
            assert connection.info.name == "feed"
            seen.append([int(batch[0]) for batch in connection.batches()])
    assert sorted(seen[0]) == [1, 2, 3, 10, 20, 30]
    assert seen[0] == seen[1] == seen[2]


def test_a_pickled_feed_survives_its_workers_and_its_daemon() -> None:
    numbers = [*range(200)]
    with penstock.connect(feed_of(numbers), workers=2) as connection:
        batches = connection.batches()
        seen = [int(next(batches)[0])]
        (daemon,) = children()
        for process in daemon.children(recursive=True):
            if "penstock-w" in process.name():
                process.kill()
        seen += [int(next(batches)[0]) for _ in range(200)]
        daemon.kill()
        seen += [int(batch[0]) for batch in batches]
    assert seen == [split * number for split in (1, 2, 3) for number in numbers]


def test_a_pickle_that_a_worker_cannot_load_is_an_error_at_the_start(tmp_path: Path) -> None:
    class Gone:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.stat, (f"{tmp_path}/gone",)

    with pytest.raises(StartError, match=r"cannot build the trainer's feed again.*No such file"):
        penstock.connect(Feed([Gone(), Gone()], batch_size=1), workers=1)


def test_a_feed_that_a_script_makes_only_when_it_runs_is_sent(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import penstock

        def rows(split):
            yield split

        def other(feed):
            feed = None

        if __name__ == "__main__":
            feed = penstock.Feed(rows, splits=[1, 2], batch_size=1)
            with penstock.connect(feed, workers=2) as connection:
                print([int(batch[0]) for batch in connection.batches()])
        """)
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "[1, 2]\n", ended.stderr
