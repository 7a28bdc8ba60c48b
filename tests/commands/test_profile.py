"""`penstock profile` names the line that takes the workers' time, costs nothing when it is off, and is for the daemon's
user alone."""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import pytest

import penstock
import penstock_server
from penstock_proto import messages as m
from penstock_proto.transport import codec, seqpacket
from penstock_server.profiling import folding, page, report, speedscope
from penstock_server.profiling.folding import IDLE, LIBRARY, PENSTOCK, USER, Folding, Frame, fold
from penstock_server.profiling.profile import Profile, Sampled
from penstock_server.profiling.watching import profile
from penstock_server.profiling.worker import WatchedWorker, _unescaped
from penstock_server.to_daemon import control
from penstock_server.worker.process import stack_sampler
from penstock_server.worker_state import stacks
from tests.conftest import Serve

# Of speedscope 1.25.0 (MIT licence), https://www.speedscope.app/file-format-schema.json
SCHEMA = json.loads((Path(__file__).resolve().parents[1] / "data" / "speedscope-schema.json").read_text())

FEEDS = """
    import re
    import time
    import numpy as np
    from penstock_server import Feed

    def spin(n):
        total = 0
        for i in range(n):
            total += i * i  # computes
        return total

    def computing(split):
        while True:
            spin(20_000)
            yield split

    def sleeping(split):
        while True:
            spin(20_000)
            time.sleep(0.02)  # waits
            yield split

    def sorting(split):
        words = [str(i * 7919 % 100_003) for i in range(100_000)]
        while True:
            spin(2_000)
            sorted(words)  # holds the GIL
            yield split

    def stuck(split):
        yield split
        yield split
        re.match("(a+)+$", "a" * 60 + "b")  # one call in C that does not end

    computing = Feed(computing, splits=range(4), batch_size=4)
    sleeping = Feed(sleeping, splits=range(4), batch_size=4)
    sorting = Feed(sorting, splits=range(4), batch_size=4)
    stuck = Feed(stuck, splits=range(4), batch_size=1)
"""


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "penstock_command", "profile", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=100)


@contextmanager
def read(url: str) -> Iterator[None]:
    """Read a feed during the block."""

    def reads() -> None:
        try:
            while True:
                for _ in connection.batches():
                    pass
        except penstock.PenstockError:
            pass  # the connection was closed

    with penstock.connect(url, reconnect=0) as connection:
        thread = threading.Thread(target=reads)
        thread.start()
        try:
            yield
        finally:
            connection.close()
            thread.join()


def sampled(url: str, seconds: float, until: Callable[[], bool] = lambda: False) -> Profile:
    return profile(url, seconds, tell=lambda part: None, may_go_on=lambda: not until())


def until_true(check: Callable[[], bool], seconds: float = 50) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def source_line(words: str) -> str:
    number = next(at for at, line in enumerate(FEEDS.splitlines()) if words in line)
    return f"feeds.py:{number + 1}"


def hottest(seen: Profile) -> str:
    frame = seen.lines(1)[0].frame
    return f"{os.path.basename(frame.file)}:{frame.line}"


def test_the_line_that_takes_the_time_comes_first_and_is_told_computing_from_waiting(serve: Serve) -> None:
    daemon = serve(FEEDS, "computing", "sleeping", "sorting", workers=2)
    found = {}
    for feed, words in (("computing", "# computes"), ("sleeping", "# waits"), ("sorting", "# holds the GIL")):
        with read(daemon.urls[feed]):
            found[feed] = seen = sampled(daemon.urls[feed], 1.5)
        assert hottest(seen) == source_line(words), feed
        assert {worker.number for worker in seen.workers} == {0, 1}
        times = seen.times()
        assert 0.4 < times.seconds / (2 * seen.seconds) < 1.1, "the time of two workers is accounted for"
    assert found["computing"].lines(1)[0].on_cpu > 0.7
    assert found["sleeping"].lines(1)[0].on_cpu < 0.8 * found["computing"].lines(1)[0].on_cpu
    assert found["sorting"].lines(1)[0].on_cpu > 0.7
    seen = found["sleeping"]
    with read(daemon.urls["sleeping"]):
        for _ in range(10):  # a millisecond of work in much sleep may be in no sample at all
            if (short := {line.frame.name: line.share for line in seen.lines(10)}).get("spin", 0) > 0.002:
                break
            seen = sampled(daemon.urls["sleeping"], 1.5)
    assert short.get("spin", 0) > 0.002, "work of a millisecond is not mistaken for the sleep after it"
    for seen in found.values():
        for stack, _ in seen.stacks():
            assert stack, "no stack is empty"
            assert stack[0].kind in (USER, PENSTOCK), "a stack begins with the generator or with a word"
    workers = daemon.workers()
    until_true(lambda: all(process.num_threads() == 1 for process in workers))  # profiling costs nothing when it is off
    idle = sampled(daemon.urls["computing"], 1.5)
    assert idle.times().idle > 0.8 * idle.times().seconds
    assert "nobody reads" in " ".join(report.remarks(idle, reads=False))


def test_the_files_of_penstock_that_have_a_word_exist() -> None:
    ours = Path(penstock_server.__file__).parent
    assert [path for path in (*folding.WORDS, folding.ACTIVITY) if not (ours / path).is_file()] == []


def test_a_long_call_in_c_shows_its_line(serve: Serve) -> None:
    daemon = serve(FEEDS, "stuck", workers=1)
    with read(daemon.url):
        seen = sampled(daemon.url, 3.5)
    assert hottest(seen) == source_line("# one call in C")


def test_several_may_profile_at_once_and_a_worker_may_die_meanwhile(serve: Serve) -> None:
    daemon = serve(FEEDS, "computing", workers=2)
    others: list[Profile] = []
    victim = daemon.workers()[0]
    with read(daemon.url):
        asker = subprocess.Popen(
            [sys.executable, "-m", "penstock_command", "profile", daemon.url, "--seconds", "60"],
            stdout=subprocess.DEVNULL,
        )
        thread = threading.Thread(target=lambda: others.append(sampled(daemon.url, 3)))
        thread.start()
        killed = threading.Timer(0.7, victim.kill)
        killed.start()
        began = time.monotonic()

        def replaced() -> bool:
            return time.monotonic() > began + 2.5 and len(daemon.workers()) == 2

        seen = sampled(daemon.url, 30, until=replaced)
        thread.join()
        asker.kill()  # it cannot tell the workers to stop
        asker.wait()
        workers = daemon.workers()
        until_true(lambda: all(process.num_threads() == 1 for process in workers))
    assert [(worker.pid, worker.ended) for worker in seen.workers if worker.ended] == [(victim.pid, True)]
    assert len({worker.pid for worker in seen.workers}) == 3, "its successor is part of the profile"
    assert all(worker.samples for worker in seen.workers if worker.ended or worker.pid in {w.pid for w in workers})
    assert hottest(seen) == hottest(others[0]) == source_line("# computes")
    assert f"(pid {victim.pid}) ended meanwhile" in " ".join(report.remarks(seen, reads=False))


def test_only_the_user_who_runs_a_daemon_may_profile_it(serve: Serve) -> None:
    daemon = serve(FEEDS, "computing")
    state = control.status(daemon.url, 60)
    if os.geteuid() == 0:
        # That user may not be able to read this Python, so import everything that is needed first.
        imports = (
            "import os, encodings.idna, penstock_command, penstock_server.profiling.show, "
            "penstock_server.profiling.watching"
        )
        code = f"{imports}; os.setuid(65534); penstock_command.main(['profile', '{daemon.url}'])"
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert said.returncode == 1
        assert f"cannot profile the daemon at {daemon.url} from here (it belongs to another user)" in said.stderr
    # A connection that asks again and again without reading gets no more descriptors.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(50)
        connection.connect("\0" + state.unix)
        for _ in range(40):
            seqpacket.send(connection, codec.encode(m.StacksRequest()))
        seqpacket.send(connection, codec.encode(m.Ping()))
        control.status(daemon.url, 60)  # by now the daemon has answered some of them
        files, refused = 0, 0
        while True:
            data, fd = seqpacket.receive(connection)
            if fd is not None:
                os.close(fd)
            message = codec.from_server(data)
            files += isinstance(message, m.WorkerStacks)
            refused += isinstance(message, m.Failed)
            if isinstance(message, m.Pong):
                break
    assert refused
    assert files <= 2 * (40 - refused)
    assert sampled(daemon.url, 0.3).workers


def test_the_command_profiles_a_feed_and_writes_a_page_and_a_file_for_speedscope(tmp_path: Path) -> None:
    (tmp_path / "feeds.py").write_text(textwrap.dedent(FEEDS))
    out = tmp_path / "profile.html", tmp_path / "profile.json"
    files = [word for path in out for word in ("--out", str(path))]
    said = command(f"{tmp_path}/feeds.py:sleeping", "--workers", "2", "--seconds", "1.5", *files)
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert re.search(r"2 workers for 1\.\d s, \d+ samples", lines[0])
    first = lines[lines.index("  time  on CPU  line") + 1]
    assert source_line("# waits") in first
    assert "time.sleep(0.02)  # waits" in said.stdout
    document = json.loads(out[1].read_text())
    jsonschema.validate(document, SCHEMA)
    assert [one["name"].split(",")[0] for one in document["profiles"]] == ["all workers", "worker 0", "worker 1"]
    assert "sleeping" in json.dumps(document["shared"])
    text = out[0].read_text()
    assert not re.search(r"(src|href)=", text), "the page needs no other file"
    if browser := shutil.which("chromium"):
        assert_drawn(browser, out[0], tmp_path)


def assert_drawn(browser: str, file: Path, folder: Path) -> None:
    """Check that the page draws its graph in a real browser, without an error."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr"]
    shown = subprocess.run(
        [
            browser,
            *options,
            f"--user-data-dir={folder}/browser",
            "--virtual-time-budget=3000",
            "--dump-dom",
            f"file://{file}",
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert re.search(r'<button type="button" class="user"[^>]*aria-label="sleeping ', shown.stdout), shown.stdout[
        -2000:
    ]
    assert "CONSOLE" not in shown.stderr, shown.stderr


def test_mistakes_on_the_command_line_are_told(tmp_path: Path) -> None:
    assert "--out writes a page (.html) or" in command("x.py:feed", "--out", "profile.svg").stderr
    assert "--workers is for MODULE:ATTR" in command("tcp://127.0.0.1:9", "--workers", "2").stderr
    (tmp_path / "bad.py").write_text(
        "from penstock_server import Feed\n"
        "def bad(split):\n    yield 1\n    raise ValueError('no such scene')\n"
        "feed = Feed(bad, splits=[0], batch_size=1)\n"
    )
    failed = command(f"{tmp_path}/bad.py:feed", "--seconds", "30", "--workers", "1")
    assert failed.returncode == 1
    assert "no such scene" in failed.stderr


# --- what becomes of stacks ---

OURS, LIBRARIES = "/venv/penstock_server/", "/venv/lib/"
PATHS = (OURS,), (LIBRARIES,)
START = [("<frozen runpy>", 1, "run"), (OURS + "worker/process/loop.py", 5, "serve")]
COLLATE = (OURS + "worker/batch/collate.py", 9, "Rows.fill")
SITE = LIBRARIES + "site-packages/"


def words(*frames: tuple[str, int, str]) -> list[str]:
    return [frame.name for frame in fold([*START, *frames], PATHS)]


def test_a_stack_begins_with_the_generator_and_penstock_is_a_word() -> None:
    images, decode = ("/home/scenes.py", 12, "images"), (SITE + "cv2/__init__.py", 3, "decode")
    assert words(COLLATE, images, decode) == ["images", "decode"]
    assert [frame.kind for frame in fold([*START, COLLATE, images, decode], PATHS)] == [USER, LIBRARY]
    assert words(COLLATE) == ["collating"]
    assert words(COLLATE, (SITE + "numpy/core.py", 3, "stack")) == ["collating"]
    assert words(COLLATE, (LIBRARIES + "inspect.py", 3, "signature")) == ["collating"]
    assert words((OURS + "worker_state/activity.py", 3, "ActivityPage.idle")) == [IDLE]
    assert words((OURS + "worker_state/activity.py", 3, "ActivityPage.leave")) == ["collating"]
    hdf5 = OURS + "sources/hdf5/reader.py", 9, "read"
    assert words(COLLATE, hdf5) == ["reading HDF5 files"]
    assert words(COLLATE, hdf5, (SITE + "h5py/dataset.py", 3, "get")) == ["reading HDF5 files", "get"]
    assert words(COLLATE, (OURS + "sources/tables/rows.py", 9, "read")) == ["reading CSV files"]
    assert words(COLLATE, (OURS + "sources/images/items.py", 9, "read")) == ["reading images"]
    assert words(COLLATE, (OURS + "sources/images/pixels.py", 9, "read")) == ["decoding images"]
    assert words(COLLATE, hdf5, images) == ["images"]
    assert words(COLLATE, (SITE + "their_feeds/scenes.py", 3, "scenes")) == ["scenes"], "the feed is installed"
    assert [frame.name for frame in fold([images], PATHS)] == ["images"], "its outer frames were cut off"


def test_a_full_log_begins_again_and_who_reads_it_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = stacks.create()
    watched = WatchedWorker.of(0, os.getpid(), os.dup(fd), Folding())
    assert watched is not None
    with mmap.mmap(fd, stacks.NBYTES) as file:
        monkeypatch.setattr(stacks, "NBYTES", stacks.START + 4000)
        log = stack_sampler.StackLog(file)
        for _ in range(200):
            stack = log.stack(sys._getframe())
            log.write([[stack, time.monotonic_ns(), 1000, True]])
            watched.read()
    watched.close()
    os.close(fd)
    assert watched.record.samples > 150
    assert {frame.name for stack, _, _ in watched.record.runs for frame in stack[-1:]} == {
        "test_a_full_log_begins_again_and_who_reads_it_follows"
    }


def test_what_faulthandler_writes_is_read_with_letters_of_all_languages() -> None:
    assert _unescaped(rb"/home/b\xfccher/\u65e5\u672c/\U0001f600.py") == "/home/b\u00fccher/\u65e5\u672c/\U0001f600.py"


def test_time_is_charged_to_the_innermost_line_of_user_code() -> None:
    worker = Sampled(0, 7)
    user, library = Frame("/home/scenes.py", 12, "images", USER), Frame(SITE + "cv2.py", 3, "decode", LIBRARY)
    stack, idle, collating = (user, library), (Frame("", 0, IDLE, PENSTOCK),), (Frame("", 0, "collating", PENSTOCK),)
    for one, ns, on_cpu in (
        (stack, 6, True),
        (stack, 1, False),
        ((user,), 1, True),
        (idle, 90, False),
        (collating, 2, True),
    ):
        worker.add(one, ns * 10**9, on_cpu)
    seen = Profile("tcp://127.0.0.1:5555", 100.0, [worker])
    first, second = seen.lines(10)
    assert (first.frame, first.share, first.on_cpu, first.seconds) == (user, 0.8, 7 / 8, 8.0)
    assert (second.frame.name, second.share) == ("collating", 0.2)
    found = seen.times()
    assert (found.idle, found.generating, found.words, found.on_cpu) == (90.0, 8.0, {"collating": 2.0}, 9.0)
    document = speedscope.document(seen, "name", "1.0")
    jsonschema.validate(document, SCHEMA)
    assert document["profiles"][0]["endValue"] == pytest.approx(100)


def test_a_page_shows_names_and_lines_of_code_as_text() -> None:
    evil = Frame("/home/</script><script>alert(1)</script>.py", 1, "<b>", USER)
    worker = Sampled(0, 7)
    worker.add((evil,), 10**9, True)
    text = page.profile_page(Profile("tcp://h:1", 1.0, [worker]), "<i>feed", "today", reads=True)
    assert "<script>alert" not in text
    assert "<i>feed" not in text
    assert "<b>" not in text
