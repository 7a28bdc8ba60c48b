"""What the web page shows of the past: rates, the timeline of workers, warnings and errors of the log."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from penstock_proto import GeneratorError
from penstock_proto.messages import WorkerActivity
from penstock_proto.status.status_history import History
from penstock_proto.status.status_shape import Status
from penstock_server.coordinator.model.feeds import SentTotals
from penstock_server.http.live import Live
from penstock_server.http.notices import MOST, Notices
from penstock_server.http.rates import FeedLook, Rates
from penstock_server.http.timeline import KEPT, Timeline
from penstock_server.http.watched import Watched
from penstock_server.logs.bugs import Bugs
from penstock_server.status.waits import Waits
from penstock_server.worker_state.activity import ActivityPage, Spent, read, spent
from penstock_server.workers.worker_looks import RUNS, STARTS, WorkerLooks, shares
from penstock_server.workers.worker_memory import WorkerMemory
from tests.proto.test_status_history import status

MIB = 1 << 20


def test_rates_are_noted_from_the_start_and_readiness_is_that_of_the_last_looks() -> None:
    rates = Rates()
    for second in range(2000):
        waited = max(0, second - 1989)  # by one of two consumers
        rates.look(second + 0.5, {"feed": FeedLook(3 * second, 30 * second, 300 * second, 2 * second, waited)})
    found = rates.since(0, 0)
    seconds, minutes = found["seconds"], found["minutes"]
    assert (seconds["count"], len(seconds["at"]), seconds["at"][-1]) == (1999, 900, 1999.5)
    assert set(seconds["feeds"]["feed"]["batches"]) == {3}
    assert set(seconds["feeds"]["feed"]["bytes"]) == {300}
    late = [1 - waited / 20 for waited in range(11)]
    assert seconds["feeds"]["feed"]["ready"][-11:] == late
    assert len(minutes["at"]) == 33
    assert set(minutes["feeds"]["feed"]["samples"]) == {30}
    later = rates.since(1998, 33)
    assert later["seconds"]["at"] == [1999.5]
    assert (later["minutes"]["count"], later["minutes"]["at"]) == (33, [])
    assert later["minutes"]["feeds"]["feed"]["ready"] == []
    assert rates.since(5000, 5000)["seconds"]["at"] == []


def test_a_rate_is_an_average_because_batches_come_in_slabs() -> None:
    rates = Rates()
    for second in range(60):
        sent = 100 * (second // 5)  # 100 batches in one slab, every five seconds
        rates.look(float(second), {"feed": FeedLook(sent, sent, sent, second, 0)})
    assert set(rates.since(0, 0)["seconds"]["feeds"]["feed"]["batches"][10:]) == {20}


def test_a_feed_that_becomes_ready_late_has_no_rates_before() -> None:
    rates = Rates()
    rates.look(0.0, {})
    rates.look(1.0, {})
    rates.look(2.0, {"late": FeedLook(0, 0, 0, 0, 0)})
    rates.look(3.0, {"late": FeedLook(5, 50, 500, 0, 0)})
    assert rates.since(0, 0)["seconds"]["feeds"]["late"] == {
        "batches": [None, None, 5],
        "samples": [None, None, 50],
        "bytes": [None, None, 500],
        "ready": [None] * 3,
    }


class Worker:
    """As much of a worker's handle as the timeline looks at."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pid = 100 + number
        self.ready = True
        self.given_up = False
        self.memory = bytearray(4096)
        self.page = ActivityPage(self.memory)
        self.page.ready()

    def look(self) -> Any:
        return read(self.memory)

    def time_spent(self) -> Spent | None:
        return spent(self.memory)


def test_the_timeline_tells_generating_from_idle_and_notes_another_process() -> None:
    timeline, looks = Timeline(lambda run: "feed" if run == 7 else ""), WorkerLooks()
    worker = Worker(3)

    def look(at: float) -> None:
        timeline.add(at, looks.look([worker]))  # type: ignore[list-item]

    look(0.0)
    worker.page.enter(7, 0, "'a.h5'")
    time.sleep(0.05)
    look(0.2)
    worker.page.leave()
    look(0.4)
    worker.page.idle(lambda: time.sleep(1.0))  # long beside the time that this process may have to wait for a CPU
    look(0.6)
    worker.pid += 1
    look(0.8)
    found = timeline.since(1)
    assert found["count"] == 5
    assert [at for at, _ in found["looks"]] == [0.2, 0.4, 0.6, 0.8]
    made, _, idle, replaced = (cells[0] for _, cells in found["looks"])
    assert made[:2] == [3, RUNS]
    assert made[2] > 900
    assert found["texts"][made[4]] == "feed: 'a.h5'"
    assert idle[2] + idle[3] < 100
    assert replaced[:4] == [3, STARTS, 0, 0]
    assert timeline.since(5)["looks"] == timeline.since(99)["looks"] == []
    timeline.forget()
    assert timeline.since(0)["looks"] == []


def test_the_timeline_is_bounded_in_time_and_in_size() -> None:
    timeline = Timeline(lambda run: "")
    cells = [WorkerActivity(number, RUNS, 1000, 0, -1, "a") for number in range(128)]
    for number in range(1000):
        timeline.add(number / 5, cells[:1])
    first, _ = timeline.since(0)["looks"][0]
    assert abs(first - (199.8 - KEPT)) < 0.3
    for number in range(1000):
        timeline.add(200 + number / 5, cells)
    assert len(timeline.since(0)["looks"]) == 300
    assert timeline.since(1999)["count"] == 2000


def test_shares_of_a_time_are_never_more_than_all_of_it() -> None:
    assert shares(Spent(1.0, 0.0, 0.5), Spent(2.0, 0.5, 0.8)) == (300, 200)
    assert shares(Spent(1.0, 0.0, 0.0), Spent(2.0, 0.7, 0.9)) == (300, 0)
    assert shares(Spent(1.0, 0.0, 0.0), Spent(1.0, 0.0, 0.0)) == (0, 0)
    assert shares(Spent(5.0, 4.0, 1.0), Spent(0.1, 0.0, 0.0)) == (0, 0)


def test_notices_keep_the_latest_with_tracebacks_and_count_repeats() -> None:
    notices = Notices()
    log = logging.getLogger("penstock_server.test_page")
    notices.begin()
    try:
        log.info("nothing to worry about")
        assert notices.since(0)["kept"] is None
        error = GeneratorError("it failed", feed="train", split="'a'", remote_traceback='File "x.py", line 1\n')
        for _ in range(3):
            log.error("%s", error)
        log.warning("left out", extra={"event": "split_skipped", "traceback": "File y.py"})
        try:
            raise ValueError("a bug")
        except ValueError:
            log.critical("unexpected", exc_info=True)
        first, second, third = notices.since(0)["kept"]
        assert (first["times"], first["traceback"]) == (3, 'File "x.py", line 1')
        assert first["text"] == "it failed\n  in feed train, split 'a'"
        assert (second["level"], second["traceback"]) == ("WARNING", "File y.py")
        assert (first["event"], second["event"]) == ("", "split_skipped")
        assert third["traceback"].endswith("ValueError: a bug\n")
        for number in range(2 * MOST):
            log.warning("number %d", number)
        kept = notices.since(5)["kept"]
        assert (len(kept), kept[-1]["text"]) == (MOST, f"number {2 * MOST - 1}")
        assert notices.since(notices.changes)["kept"] is None
    finally:
        notices.end()
    log.warning("after the end")
    assert notices.since(0)["kept"][-1]["text"] == f"number {2 * MOST - 1}"


def test_readiness_and_the_verdicts_waits_come_from_the_same_counters() -> None:
    now = [0.0]
    kept = History()

    def waited() -> float:
        return max(0.0, now[0] - 7)

    def counts() -> Status:
        made = status(now[0], 5 * int(now[0]))
        (stream,) = made.streams
        return replace(made, streams=[replace(stream, waits=replace(stream.waits, production=waited()))])

    watched = Watched(
        status=lambda: kept.described(counts()),
        status_text=str,
        waits=lambda _: Waits(reading=now[0], production=waited()),
        seconds=lambda: now[0],
        feeds={"train": SimpleNamespace(sent=SentTotals(0, 0, 0))},  # type: ignore[dict-item]
        workers=list,
        hosts=(),
        memory=WorkerMemory(list, Bugs()),
        feed_of=str,
        look_at_slabs=lambda _: None,
        bugs=Bugs(),
    )

    async def watch() -> dict[str, Any]:
        live = Live(watched)
        for second in range(16):
            now[0] = second + 0.01 * (second % 3)
            kept.add(counts())
            if second == 3:
                live.ask(seconds=0, minutes=0, looks=0, changes=0)
            live.another_second()
        news: dict[str, Any] = json.loads(live.ask(seconds=0, minutes=0, looks=0, changes=0))
        await live.stop()
        return news

    news = asyncio.run(watch())
    (stream,) = news["status"]["streams"]
    ready = news["rates"]["seconds"]["feeds"]["train"]["ready"]
    assert len(ready) == 15
    assert ready[-1] == round(1 - stream["waiting"], 4) == round(1 - 8 / 9.98, 4)
    assert ready[3] == 1
