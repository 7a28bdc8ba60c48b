"""The workers of joined hosts are shown like the head's own: on the page, in the status, and in profiles."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from penstock_proto import ProtocolError
from penstock_proto import messages as m
from penstock_proto.transport import codec
from penstock_server.consumers import profiles
from penstock_server.hosts.host_view import HostView
from penstock_server.hosts.joined_host import JoinedHost
from penstock_server.join import shown_workers
from penstock_server.join.sampling import MOST_PROFILES, Sampling
from penstock_server.join.shown_workers import ShownWorkers
from penstock_server.logs.bugs import Bugs
from penstock_server.net.local import LocalPeer
from penstock_server.profiling import pieces, report
from penstock_server.profiling.folding import USER, Frame
from penstock_server.profiling.profile import Profile, Sampled
from penstock_server.workers.supervisor import Supervisor
from tests.commands.test_profile import hottest, read, sampled
from tests.conftest import Join, Serve, wait_until
from tests.hosts.test_join import state_of
from tests.hosts.test_membership import Link
from tests.http.test_http import values
from tests.http.test_page import TIMELINE, live, show
from tests.http.test_page_history import Worker
from tests.processes.browser import CHROMIUM, Page, browser

FIRST = 1_000_000

FEEDS = """
    import os
    import time
    from penstock_server import Feed

    def scenes(split):
        while True:
            time.sleep(0.001)
            if os.environ.get("ON_HOST") == "b":
                time.sleep(0.05)  # waits on host b
            yield split

    feed = Feed(scenes, splits=[f"scene-{n}.h5" for n in range(8)], batch_size=2, lanes=8)
"""


def line(words: str) -> str:
    number = next(at for at, line in enumerate(FEEDS.splitlines()) if words in line)
    return f"feeds.py:{number + 1}"


def elsewhere(folder: Path) -> Path:
    """Make the folder of another host, with the same module."""
    folder.mkdir()
    (folder / "feeds.py").write_text(textwrap.dedent(FEEDS))
    return folder


def test_workers_of_hosts_are_in_the_status_on_the_page_and_in_profiles(
    serve: Serve, join: Join, tmp_path: Path
) -> None:
    head = serve(FEEDS, workers=1, http=0)
    a = join(head, host_name="a", working=False)
    b = join(head, host_name="b", folder=elsewhere(tmp_path / "there"), env={"ON_HOST": "b"}, working=False)
    a.wait_working()
    b.wait_working()
    with read(head.url):
        wait_until(lambda: all(worker.pid and worker.ready for worker in state_of(head).workers))
        state = state_of(head)
        pids = {worker.name: worker.pid for worker in state.workers if worker.host}
        assert {pids[f"a/{n}"] for n in range(2)} == {process.pid for process in a.workers()}
        assert all(worker.memory > 1 << 20 for worker in state.workers)
        memory = {name for name in values(head) if name.startswith("penstock_worker_memory_bytes")}
        assert memory == {f"penstock_worker_memory_bytes,worker={name}" for name in ("0", *pids)}

        numbers = {worker.number: worker.name for worker in state.workers}
        seen: dict[str, set[str]] = {name: set() for name in numbers.values()}

        def all_read() -> bool:
            news = live(head, looks=had[0])["timeline"]
            had[0] = news["count"]
            for _, cells in news["looks"]:
                for number, _, generating, _, text in cells:
                    if generating:
                        seen[numbers[number]].add(news["texts"][text])
            return all(seen.values())

        had = [0]
        wait_until(all_read)
        assert all(re.fullmatch(r"'scene-\d.h5'", text) for texts in seen.values() for text in texts)

        found = sampled(head.url, 3)
        assert hottest(found) == line("# waits on host b")
        first = found.lines(1)[0]
        assert Path(first.frame.file).parent == head.folder, "the module has the head's path"
        assert first.on_cpu < 0.5
        assert {(worker.name, worker.pid) for worker in found.workers if worker.name != "0"} == set(pids.items())
        assert all(worker.samples for worker in found.workers)
        assert found.hosts == {"a": "", "b": ""}
        assert "5 workers on 3 hosts for 3" in next(report.lines(found, head.url, reads=False))

        killed = threading.Timer(1, b.process.kill)
        killed.start()
        began = time.monotonic()
        found = sampled(head.url, 4)
        assert time.monotonic() < began + 30
        assert found.hosts == {"a": "", "b": "has ended, or its connection has"}
        assert "Host b has ended, or its connection has: samples of its workers are missing." in " ".join(
            report.remarks(found, reads=False)
        )
    wait_until(lambda: all(process.num_threads() == 1 for process in a.workers()))  # it costs nothing when off


def test_a_host_that_stands_still_keeps_nobody_waiting(
    serve: Serve, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_server.profiling.of_hosts.PATIENCE", 0.3)
    head = serve(FEEDS, workers=1, patched={"hosts.hosts.SILENT": 600.0})
    host = join(head, host_name="b")
    wait_until(lambda: len(state_of(head).workers) == 3)
    host.process.send_signal(signal.SIGSTOP)
    found = sampled(head.url, 0.5)
    assert found.hosts == {"b": "has not sent all of its samples within 0.3 s of the end"}
    assert {worker.name for worker in found.workers} == {"0"}
    assert len(state_of(head).workers) == 3
    host.process.send_signal(signal.SIGCONT)
    wait_until(lambda: all(worker.memory for worker in state_of(head).workers))
    assert sampled(head.url, 0.5).hosts == {"b": ""}


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: apt-get install chromium)")
def test_the_page_has_the_workers_of_each_host_below_its_name(serve: Serve, join: Join, tmp_path: Path) -> None:
    head = serve(FEEDS, workers=0, http=0)
    for name in ("a", "b"):
        join(head, host_name=name, workers=1)
    with read(head.url), browser(tmp_path / "browser") as found:
        page = Page(found)
        show(page, head, rows=6)
        rows = "[...document.querySelectorAll('#worker-rows tr')].map((row) => row.children[0].innerText)"
        head_row, *others = page.run(rows)
        assert re.fullmatch(r"head \d+ CPUs?", head_row)
        assert re.match(r"host a working, 127.0.0.1:\d+, \d+ CPUs?\b", others[1])
        assert [text.partition(" working")[0] for text in others] == ["0", "host a", "0", "host b", "0"]
        blue = page.until(f"({TIMELINE})('generating')")
        page.move_to(blue["x"], blue["y"])
        tip = page.until("!document.getElementById('tip').hidden && document.getElementById('tip').innerText")
        assert re.match(r"worker a/0: 'scene-\d.h5'\n.*\ngenerating \d+ %", tip), tip
        page.run("import('/static/workers.js').then((module) => void (window.workers = module))")
        ray = "{name: 'ray-1', state: 'working', lanes: 4, rates: {bytes: 12.3e6}, awaited: 0.4567}"
        engine = f"{{workers: [], cpus: 2, hosts: [{ray}], engine: {{name: 'ray', hosts: 3}}}}"
        rows = page.run(f"(workers.show({{now: 1, status: {engine}, timeline: {{looks: []}}}}), {rows})")
        assert rows[-2].endswith("4 lanes, 12.3 MB/s, 46 % of the waiting is for it")
        assert rows[-1] == "ray 2 more hosts of 3 to come"
        assert not page.said


# --- at the head ---


@contextlib.contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(ProtocolError, match="not its own, or twice"):
        yield


def activity(worker: int, text: str = "'a.h5'") -> m.WorkerActivity:
    return m.WorkerActivity(worker, 0, 900, 100, 7, text)


def test_what_a_host_shows_is_taken_as_a_whole_or_not_at_all() -> None:
    sent: list[m.Message] = []
    view = HostView(range(FIRST, FIRST + 2), sent.append)
    view.measure_memory()
    assert view.measuring
    with refused():
        view.take(m.MemoryMeasured((m.ProcessMemory(FIRST, 5), m.ProcessMemory(FIRST + 2, 5))))
    assert view.measuring
    assert not view.memory
    view.take(m.MemoryMeasured((m.ProcessMemory(FIRST, 5),)))
    assert (view.measuring, view.memory) == (False, {FIRST: 5})
    view.ask_activity(3.0)
    for wrong in ((activity(3),), (activity(FIRST), activity(FIRST))):
        with refused():
            view.take(m.ActivityShown(1.0, wrong))
    assert view.activity(9.0) == []
    view.take(m.ActivityShown(1.0, (activity(FIRST),)))
    view.take(m.ActivityShown(9.5, (activity(FIRST),)))
    assert [at for at, _ in view.activity(9.0)] == [1.0, 9.0], "no look is in the future"
    assert view.activity(9.0) == []
    for _ in range(1000):
        view.take(m.ActivityShown(1.0, (activity(FIRST),)))
    assert len(view.activity(9.0)) < 100
    assert sent == [m.MeasureMemory(), m.ShowActivity(3.0)]


@pytest.mark.parametrize(
    "message",
    [
        m.ActivityShown(float("nan"), ()),
        m.ActivityShown(float("inf"), ()),
        m.ActivityShown(1.0, (m.WorkerActivity(1, 4, 0, 0, 0, ""),)),
        m.ActivityShown(1.0, (m.WorkerActivity(1, 0, 1001, 0, 0, ""),)),
        m.ActivityShown(1.0, (activity(1, "x" * 300),)),
        m.ActivityShown(1.0, tuple(activity(n) for n in range(m.MOST_SHOWN + 1))),
        m.MemoryMeasured((m.ProcessMemory(1, -1),)),
    ],
)
def test_figures_of_a_host_that_make_no_sense_are_malformed(message: m.Message) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        codec.from_host(codec.encode(message))


def test_samples_that_name_what_is_not_there_are_malformed() -> None:
    frame = m.SampledFrame("a.py", 3, "scenes", "user")
    good = {"pid": 1, "count": 1, "frames": (frame,), "stacks": ((0, 0),), "runs": (m.SampledRun(0, 5, True),)}
    sent = codec.encode(m.StacksSampled(0, FIRST, m.Samples(**good)))  # type: ignore[arg-type]
    assert codec.from_host(sent) == m.StacksSampled(0, FIRST, m.Samples(**good))  # type: ignore[arg-type]
    for wrong in ({"frames": ()}, {"stacks": ((1,),)}, {"stacks": ()}, {"runs": (m.SampledRun(1, 5, True),)}):
        with pytest.raises(ValueError, match="not among them"):
            m.Samples(**{**good, **wrong})  # type: ignore[arg-type]
    forged = sent.replace(b"\x93\x00\x05\xc3", b"\x93\x09\x05\xc3")  # the number of the run
    assert forged != sent
    with pytest.raises(ProtocolError, match="not among them"):
        codec.from_host(forged)


class Asker:
    """Stands in for the connection of a user who profiles."""

    def __init__(self) -> None:
        self.sent: list[m.Message] = []

    def send(self, message: m.Message, fd: int | None = None) -> None:
        codec.encode(message)
        self.sent.append(message)

    def opened(self) -> None: ...


class Host:
    """Stands in for a joined host."""

    working = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[m.SampleStacks] = []

    def sample(self, message: m.SampleStacks) -> None:
        self.asked.append(message)

    def name_of(self, worker: int) -> str:
        return f"{self.name}/{worker - FIRST}"


def test_profiles_go_to_who_asked_until_the_connection_or_the_host_ends() -> None:
    a, b, late = Host("a"), Host("b"), Host("late")
    hosts = cast(list[JoinedHost], [a, b])
    served = profiles.Profiles(list, hosts, "/head/")
    one, other = Asker(), Asker()
    for asker in (one, other):
        served.begin(cast(LocalPeer, asker), m.ProfileHosts(60, 100))
    with pytest.raises(ProtocolError, match="a second ProfileHosts"):
        served.begin(cast(LocalPeer, one), m.ProfileHosts(60, 100))
    served.host_works(cast(JoinedHost, late))
    assert one.sent == other.sent == [m.HostSampled(host.name) for host in (a, b, late)]
    assert [len(host.asked) for host in (a, b, late)] == [2, 2, 2]
    first, second = (asked.profile for asked in a.asked)
    one.sent.clear()
    other.sent.clear()

    frames = (m.SampledFrame("feeds.py", 3, "f", "user", True), m.SampledFrame("/lib/x.py", 3, "g", "library"))
    samples = m.Samples(7, 1, frames, ((0, 1),), (m.SampledRun(0, 5, True),))
    served.sampled(hosts[0], m.StacksSampled(first, FIRST + 1, samples))
    (message,) = one.sent
    assert isinstance(message, m.WorkerSampled)
    assert (message.name, [frame.file for frame in message.samples.frames]) == ("a/1", ["/head/feeds.py", "/lib/x.py"])
    assert not other.sent
    served.sampled(hosts[0], m.SamplingEnded(first))
    served.sampled(hosts[0], m.StacksSampled(first, FIRST + 1, samples))  # after the profile's end
    served.sampled(hosts[0], m.StacksSampled(99, FIRST + 1, samples))  # for an unknown profile
    served.host_lost(hosts[1], "was silent for 15 s")
    assert one.sent[1:] == [m.HostSampled("a", True), m.HostSampled("b", True, "was silent for 15 s")]
    served.peer_ended(cast(LocalPeer, one))
    assert [asked.profile for asked in late.asked if not asked.seconds] == [first]
    served.peer_ended(cast(LocalPeer, other))
    assert [asked.profile for asked in a.asked if not asked.seconds] == [second]
    assert not [asked for asked in b.asked if not asked.seconds], "host b is gone"


# --- at the host ---


class Workers:
    """Stands in for the supervisor."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = {worker.number: worker for worker in workers}

    def stacks(self) -> list[tuple[int, int, int]]:
        return []

    def pids(self) -> list[int]:
        return [worker.pid for worker in self.workers.values()]


def test_a_host_shows_its_workers_while_it_is_asked_with_times_of_the_heads_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shown_workers, "EVERY", 0.02)
    monkeypatch.setattr(shown_workers, "SHOWN", 0.3)
    link, worker = Link(), Worker(1)

    async def play() -> None:
        shown = ShownWorkers(link.send, {0: FIRST, 1: FIRST + 1}, cast(Supervisor, Workers(worker)), Bugs())
        began = time.monotonic()
        clock = began - 1000  # the head's clock is behind ours
        shown.show_activity(m.ShowActivity(time.monotonic() - clock))
        shown.show_activity(m.ShowActivity(time.monotonic() - clock - 0.5))  # this one was on its way for longer
        worker.page.enter(7, 0, "'a.h5'")
        while time.monotonic() < began + 0.1 or len(link.sent) < 3:
            await asyncio.sleep(0.01)
        looks = [one for one in link.sent if isinstance(one, m.ActivityShown)]
        times = [look.at for look in looks]
        assert 1000 - 0.01 <= times[0] <= times[-1] <= 1000 + time.monotonic() - began
        assert looks[-1].workers[0].what == "'a.h5'"
        assert looks[-1].workers[0].worker == FIRST + 1
        while time.monotonic() < began + 0.6:
            await asyncio.sleep(0.01)
        count = len(link.sent)
        await asyncio.sleep(0.2)
        assert len(link.sent) == count, "nobody has asked again"
        shown.end()

    asyncio.run(play())


def test_a_host_takes_part_in_some_profiles_at_a_time() -> None:
    link = Link()

    async def play() -> None:
        sampling = Sampling(link.send, {0: FIRST, 1: FIRST + 1}, cast(Supervisor, Workers()), "", Bugs())
        for number in range(MOST_PROFILES + 1):
            sampling.take(m.SampleStacks(number, 30, 100))
        assert link.sent == [m.SamplingEnded(MOST_PROFILES)]
        sampling.take(m.SampleStacks(3, 0, 100))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1 + MOST_PROFILES - 1, "that profile is over"
        sampling.take(m.SampleStacks(3, 0.01, 100))
        while len(link.sent) < 2:
            await asyncio.sleep(0.01)
        assert link.sent[1:] == [m.SamplingEnded(3)]
        sampling.end()
        await asyncio.sleep(0)

    asyncio.run(play())


def record(stacks: list[tuple[Frame, ...]], runs: int) -> Sampled:
    made = Sampled(3, 77)
    for number in range(runs):
        made.add(stacks[number % len(stacks)], 1000 + number, number % 2 == 0)
    made.samples += 5  # five that equal the sample before
    return made


def test_samples_of_any_size_cross_in_pieces_and_are_the_same_again() -> None:
    long = [
        tuple(Frame(f"/data/{'ü' * 300}{number}/{depth}.py", depth, "f" * 900, USER) for depth in range(200))
        for number in range(4)
    ]
    short = [(Frame("/home/feeds.py", number, "images", USER),) for number in range(700)]
    for stacks, runs in ((long, 10), (short, 9000), (short, 0)):
        sent = record(stacks, runs)
        before, count = sent.runs, sent.samples
        got, known = Sampled(FIRST, 77, "b/3"), {}
        for piece in pieces.pieces(sent, "/home/"):
            data = codec.encode(m.StacksSampled(0, FIRST, piece))
            message = cast(m.StacksSampled, codec.from_host(data))
            pieces.received(got, message.samples, known)
        assert (sent.runs, sent.samples, got.samples) == ([], 0, count)
        assert [run[1:] for run in got.runs] == [run[1:] for run in before]
        for (stack, *_), (same, *_) in zip(before, got.runs, strict=True):
            assert [(frame.line, frame.kind, frame.name[:100]) for frame in stack] == [
                (frame.line, frame.kind, frame.name) for frame in same
            ]
        if stacks is short and runs:
            assert got.runs[0][0][0].file == "feeds.py", "the file is below the folder"


def test_what_a_host_names_is_shown_as_text_and_opens_no_file(tmp_path: Path) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_text("secret\n")
    got, known = Sampled(FIRST, 77, "b/0"), {}
    frames = (m.SampledFrame(str(secret), 1, "\x1b[31mred", "user"),)
    pieces.received(got, m.Samples(77, 1, frames, ((0,),), (m.SampledRun(0, 10**9, True),)), known)
    said = "\n".join(report.lines(Profile("tcp://h:1", 1.0, [got], {"b": ""}), "x", reads=True))
    assert r"id_rsa:1 in \x1b[31mred" in said
    assert "secret" not in said
    assert "\x1b" not in said
