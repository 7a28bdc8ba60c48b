"""One run of a scenario: start the service, let consumers read, cause the faults, compare."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from penstock_proto import PenstockError
from tests.fakes.fault_proxy import FaultProxy

from . import compare, leaving, service
from .reading import Reading
from .scenario import Consumer, Fault, Job, Scenario, Step
from .service import FEEDS, Service

STILL = 45.0
"""A run hangs if no consumer gets a batch for this many seconds."""
GONE = 60.0
"""Further seconds if a state file has a group: a new daemon waits this long for consumers that left while none ran."""
LIMIT = 300.0
"""A run hangs after this many seconds, even if it makes progress."""
TICK = 0.005


@dataclass
class Result:
    """The outcome of a run: its `differences` in words, a timeline, and `gap`, the longest time without any batch."""

    scenario: Scenario
    differences: list[str] = field(default_factory=list)
    timeline: list[str] = field(default_factory=list)
    log: str = ""
    seconds: float = 0.0
    gap: float = 0.0
    batches: int = 0
    faults: int = 0
    stuck: bool = False

    def report(self) -> str:
        """Return everything that is needed to look into the run."""
        lines = [f"scenario {self.scenario.seed}: {len(self.differences)} differences", *self.differences, ""]
        lines += [repr(self.scenario), "", *self.timeline, ""]
        lines += [self.log[-80_000:], "", f"again: {self.scenario.command}"]
        return "\n".join(lines)


class Reader:
    """A consumer of a run: its log, and the thread or the process that reads."""

    def __init__(self, job: Job, plan: Consumer, number: int, run: Run) -> None:
        self.job, self.plan, self.number, self._run = job, plan, number, run
        self.log: list[Any] = []
        self.killed = 0
        self.begun = False
        self.over = False
        self.barrier: threading.Barrier | None = None
        self.options: dict[str, Any] = {}
        self.feed = ""
        self.reading: Reading | None = None
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._file = run.folder / f"consumer{number}.log"
        self._read = 0
        self._rest = b""
        self._counted = 0, 0  # events of the log that were counted, and batches among them

    @property
    def batches(self) -> int:
        """The number of batches that it was handed."""
        for event in self.log[self._counted[0] :]:
            self._counted = self._counted[0] + 1, self._counted[1] + (event[0] == "batch")
        return self._counted[1]

    def begin(self, state: dict[str, Any] | None = None, epochs: int = 0) -> None:
        self.begun = True
        port = self._run.proxies[self.number].port if self.plan.proxied else self._run.service.port
        url = f"{FEEDS}:{self.feed}" if self.plan.private else f"tcp://127.0.0.1:{port}/{self.feed}"
        if self.plan.private:
            self.options = {"workers": self._run.scenario.workers}
        saves = self.plan.how == "process" and not self.job.together
        options = {**self.options, "state": state, "epochs": epochs, "batches": self.batches, "saves": saves}
        if self.plan.how == "process":
            said = {"case": repr(self.job.feed), "plan": repr(self.plan), "url": url, "options": options}
            given = self._run.folder / f"consumer{self.number}.json"
            given.write_text(json.dumps({**said, "log": str(self._file)}))
            with (self._run.folder / f"consumer{self.number}.err").open("ab") as err:
                self._process = subprocess.Popen(
                    [sys.executable, "-X", "faulthandler", "-m", "tests.chaos.reading", str(given)],
                    cwd=Path(__file__).parents[2],
                    stdin=subprocess.DEVNULL,
                    stdout=err,
                    stderr=err,
                    env={**os.environ, **self._run.service.environment},
                )
            return

        def meet() -> None:
            if self.barrier is not None:
                with contextlib.suppress(threading.BrokenBarrierError):  # another rank has failed
                    self.barrier.wait(LIMIT)

        def more() -> bool:
            return self.job.together == "group" and self._run.others_read(self)

        self.reading = Reading(self.job.feed, self.plan, url, self._emit, meet=meet, more=more, **options)
        self._thread = threading.Thread(target=self._in_thread, name=f"consumer {self.number}", daemon=True)
        self._thread.start()

    def _emit(self, event: list[Any]) -> None:
        self.log.append(event)

    def _in_thread(self) -> None:
        assert self.reading is not None
        try:
            self.reading.run()
        except BaseException as error:
            if self.reading.connection is not None:
                self.reading.connection.close()
            self.log.append(["failed", type(error).__name__, str(error)[:600]])
        finally:
            if self.barrier is not None:
                self.barrier.abort()  # the others must not wait for it

    def look(self) -> None:
        """Read the new events that its process has logged, and note its end."""
        if self._thread is not None and not self._thread.is_alive():
            self.over = True
        if self._process is None:
            return
        status = self._process.poll()
        if self._file.exists():
            with self._file.open("rb") as file:
                file.seek(self._read)
                found = file.read()
            self._read += len(found)
            *lines, self._rest = (self._rest + found).split(b"\n")
            self.log += [json.loads(line) for line in lines]
        if status is not None and not self.over:
            self.over = True
            if self.log and self.log[-1][0] == "closed":
                return
            if not self.killed:
                text = self._file.with_suffix(".err").read_text()[-1500:]
                self.log.append(["failed", "process", f"the consumer's process ended with {status}: {text}"])

    def kill(self) -> bool:
        """Kill its process. Restart it from its last state if it has its own stream. Return whether it was running."""
        if self._process is None or self._process.poll() is not None:
            return False
        self._process.kill()
        self._process.wait()
        self.killed += 1
        self.look()
        self.over = bool(self.job.together)
        if self.job.together:
            return True
        while self.log and self.log[-1][0] != "batch":
            self.log.pop()
        self._rest, self._counted = b"", (0, 0)
        state, epochs = None, 0
        if self.log:
            _, _, state, epochs = self.log[-1]
            self.log.append(["resumed"])
        self.begin(state, epochs)
        return True

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def private(self, workers: bool) -> list[psutil.Process]:
        """Return its private daemon, or the workers of that daemon."""
        if self._process is None or self._process.poll() is not None:
            return []
        daemons = psutil.Process(self._process.pid).children()
        return [worker for daemon in daemons for worker in service.workers_of(daemon)] if workers else daemons

    def end(self) -> bool:
        """Stop it, whatever it is doing. Return whether it has ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._thread is not None:
            if self._thread.is_alive() and self.reading is not None and self.reading.connection is not None:
                self.reading.connection.close()
            self._thread.join(10)
            return not self._thread.is_alive()
        return True

    @property
    def turn(self) -> int:
        return self.reading.turn if self.reading is not None else 0


class Heard(logging.Handler):
    """Puts the log of this process's clients into the timeline of a run."""

    def __init__(self, run: Run) -> None:
        super().__init__(logging.WARNING)
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        self._run.say(f"client: {record.getMessage()[:300]}")


class Run:
    """A run in progress."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder = scenario, folder
        self.proxies: dict[int, FaultProxy] = {}
        self.result = Result(scenario)
        self.readers: list[Reader] = []
        self._began = time.monotonic()
        self._later: list[tuple[float, Any]] = []
        self.ending = False
        self.service: Service | None = None

    def say(self, text: str) -> None:
        self.result.timeline.append(f"{time.monotonic() - self._began:7.3f} s  {text}")

    # --- the run ---

    def run(self) -> Result:
        scenario, result = self.scenario, self.result
        heard = Heard(self)
        logging.getLogger("penstock").addHandler(heard)
        try:
            self._run(scenario, result)
        except Exception:
            result.differences.append(f"the harness failed: {traceback.format_exc()[-3000:]}")
        finally:
            for reader in self.readers:
                reader.end()
            if self.service is not None:
                self.service.stop()
            result.seconds = time.monotonic() - self._began
            logging.getLogger("penstock").removeHandler(heard)
        return result

    def _run(self, scenario: Scenario, result: Result) -> None:
        try:
            self.service = Service(
                [job.feed for job in scenario.jobs if job.of is None],
                self.folder / "main",
                workers=scenario.workers,
                memory=scenario.memory,
                hang_timeout=scenario.hang_timeout,
                state=scenario.state,
                hosts=scenario.hosts,
                keys=scenario.keys,
                host_slots=scenario.host_slots,
            )
        except AssertionError as error:
            result.differences.append(f"the daemon did not start: {str(error)[-1500:]}")
            return
        with contextlib.ExitStack() as stack:
            self._people(stack)
            try:
                self._drive()
            except AssertionError as error:  # a daemon did not start again
                result.differences.append(str(error)[-1500:])
            finally:
                self.ending = True
                for _, undo in self._later:
                    undo()
            stuck = [reader for reader in self.readers if not reader.end()]
            if stuck:
                result.stuck = True
                result.differences.append(f"consumers {[reader.number for reader in stuck]} cannot be ended")
        self._check()
        self.readers.clear()
        gc.collect()
        self._end_service()

    def _people(self, stack: contextlib.ExitStack) -> None:
        number = 0
        for at, job in enumerate(self.scenario.jobs):
            barrier = threading.Barrier(len(job.consumers)) if job.together in ("drop", "pad") else None
            for place, plan in enumerate(job.consumers):
                reader = Reader(job, plan, number, self)
                reader.feed = f"feed{at if job.of is None else job.of}"
                if job.together == "group":
                    reader.options = {"group": "g"}
                elif job.together:
                    reader.options = {"rank": place, "world_size": len(job.consumers), "last_round": job.together}
                    reader.options["group"] = "" if job.of is None else f"job {at}"
                    reader.barrier = barrier
                if self.service.keys is not None and not plan.private:
                    reader.options["keys"] = str(self.service.keys)
                if plan.proxied:
                    self.proxies[number] = stack.enter_context(FaultProxy(self.service.port))
                self.readers.append(reader)
                number += 1

    def _drive(self) -> None:
        faults = list(self.scenario.faults)
        last = time.monotonic()
        before: tuple[int, ...] = ()
        kept = self.scenario.state and any(job.together == "group" for job in self.scenario.jobs)
        patience = STILL + GONE if kept else STILL
        while True:
            for reader in self.readers:
                if not reader.begun and self._may_join(reader):
                    reader.begin()
                    self.say(f"consumer {reader.number} begins")
                reader.look()
            now = time.monotonic()
            for at, undo in [entry for entry in self._later if entry[0] <= now]:
                self._later.remove((at, undo))
                undo()
            self.service.look()
            if all(reader.over for reader in self.readers):
                break
            progress = tuple(len(reader.log) for reader in self.readers)
            if progress != before:
                self.result.gap = max(self.result.gap, now - last)
                before, last = progress, now
            total = sum(reader.batches for reader in self.readers)
            if faults and total >= faults[0].after:
                self._fault(faults.pop(0))
                self.result.faults += 1
            if now - last > patience or now - self._began > LIMIT:
                self._hangs(now - last)
                break
            time.sleep(TICK)
        self.result.gap = max(self.result.gap, time.monotonic() - last)
        self.result.batches = sum(reader.batches for reader in self.readers)

    def _may_join(self, reader: Reader) -> bool:
        first = next(other for other in self.readers if other.feed == reader.feed)
        if reader.job.together == "group" and not first.turn:  # or the group may end too early
            return reader is first or first.over
        return reader is first or first.batches >= reader.plan.joins or first.over

    def others_read(self, reader: Reader) -> bool:
        """Return whether a group's first consumer has to read on, because others still read or have not come yet.

        A group ends with its last consumer, and a later one would begin another group. Besides, a consumer that has
        left an epoch waits for those that have not begun it.
        """
        group = [other for other in self.readers if other.feed == reader.feed]
        return reader is group[0] and not self.ending and not all(other.over for other in group[1:])

    def _hangs(self, seconds: float) -> None:
        waiting = [reader.number for reader in self.readers if not reader.over]
        self.result.differences.append(
            f"a hang: nothing came for {seconds:.0f} s, in a run of {time.monotonic() - self._began:.0f} s; consumers "
            f"{waiting} wait"
        )
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            self.result.log += file.read()[:40_000]  # the newest threads first
        for reader in self.readers:
            reader.signal(signal.SIGABRT)
        self.result.log += self.service.dump()
        for file in sorted(self.folder.glob("consumer*.err")):
            self.result.log += f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}"

    # --- faults ---

    def _fault(self, fault: Fault) -> None:
        """Cause a fault. Skip it if it is impossible now (there is no worker). The timeline tells."""
        done = f"{fault.what} {fault.which} {fault.value}"
        ours = self.service
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            workers = ours.workers()
            match fault.what:
                case "kill worker" | "kill workers" | "stop worker":
                    if fault.what != "kill workers" and workers:
                        workers = [workers[fault.which % len(workers)]]
                    done += f" (pids {[worker.pid for worker in workers]})"
                    for worker in workers:
                        if fault.what == "stop worker":
                            self._stop(worker, fault.value)
                        else:
                            worker.kill()
                case "kill forks" | "stop forks":
                    forks = ours.forks()
                    if forks is None:
                        done += " (there is none)"
                    elif fault.what == "kill forks":
                        forks.kill()
                    else:
                        self._stop(forks, fault.value)
                case "kill daemon":
                    ours.kill(int(fault.value))
                case "stop daemon":
                    assert ours.daemon is not None
                    self._stop(psutil.Process(ours.daemon.process.pid), fault.value)
                case "drain":
                    ours.drain(int(fault.value))
                case "end":
                    ours.drain(int(fault.value), signals=2)
                case "scale" | "scale now" | "scale host":
                    host = f"host{fault.which}" * (fault.what == "scale host")
                    try:
                        ours.scale(int(fault.value), now=fault.what == "scale now", host=host)
                    except (PenstockError, OSError) as error:
                        done += f" (refused: {error})"
                case "cut" | "stall" | "throttle":
                    proxies = list(self.proxies.values())
                    proxy = proxies[fault.which % len(proxies)]
                    if fault.what == "cut":
                        proxy.cut(fault.value)
                    elif fault.what == "stall":
                        proxy.stall(fault.value)
                    else:
                        proxy.throttle(200_000, fault.value)
                case "kill private daemon" | "kill private worker":
                    found = self.readers[fault.which].private(fault.what == "kill private worker")
                    done += f" (pids {[process.pid for process in found]})"
                    for process in found[:1]:
                        process.kill()
                case "kill host":
                    ours.kill_host(fault.which)
                case "stop host":
                    self._stop(ours.host(fault.which), fault.value)
                case "cut host":
                    ours.links[fault.which].cut(fault.value)
                case "stall host":
                    ours.links[fault.which].stall(fault.value)
                case "end host":
                    ours.end_host(fault.which)
                case "kill consumer":
                    self.readers[fault.which].kill()
                case "stop consumer":
                    reader = self.readers[fault.which]
                    reader.signal(signal.SIGSTOP)
                    self._in(fault.value, lambda: reader.signal(signal.SIGCONT))
        self.say(done)

    def _stop(self, process: psutil.Process, seconds: float) -> None:
        process.suspend()

        def resume() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

        if seconds:
            self._in(seconds, resume)

    def _in(self, seconds: float, undo: Any) -> None:
        self._later.append((time.monotonic() + seconds, undo))

    # --- the outcome ---

    def _check(self) -> None:
        found = self.result.differences
        at = 0
        hung = bool(found)
        for number, job in enumerate(self.scenario.jobs):
            readers = self.readers[at : at + len(job.consumers)]
            at += len(job.consumers)
            logs = [compare.without_refused(reader.log) for reader in readers]
            name = f"job {number}: " if len(self.scenario.jobs) > 1 else ""
            feed = number if job.of is None else job.of
            turn = job.feed.turn or max((reader.turn for reader in readers), default=0) or self._asked_turn(feed)
            if job.feed.batch_size is None:
                turn = 1
            for reader in readers:
                found += [
                    f"{name}consumer {reader.number} failed: {event[1]}: {event[2]}"
                    for event in reader.log
                    if event[0] == "failed" and not (hung or _may_fail(job, reader.plan, event, self.scenario.faults))
                ]
            if job.together == "group":
                killed = [place for place, reader in enumerate(readers) if reader.killed]
                differences = compare.group(job, turn, logs, killed, self._unheard(readers))
            elif job.together:
                differences = compare.ranks(job, turn, logs)
            else:
                differences = []
                for plan, log in zip(job.consumers, logs, strict=True):
                    differences += compare.single(job, turn, log, late=plan.start != "beginning")
            found += [name + text for text in differences]
            draws = job.feed.draws != "none" or job.feed.transforms == "draw"
            if not found and (draws or not job.feed.order_is_known) and any(map(len, logs)):
                found += [name + text for text in self._quiet(number, job, logs)]

    def _unheard(self, readers: list[Reader]) -> list[int]:
        """Return the members of a kept group that closed. If their daemon was killed then, the next one does not know
        all batches that they were handed."""
        if not (self.scenario.state and any(fault.what in ("kill daemon", "end") for fault in self.scenario.faults)):
            return []
        return [place for place, reader in enumerate(readers) if place and ["closed"] in reader.log]

    def _asked_turn(self, number: int) -> int:
        import penstock

        try:
            url = f"tcp://127.0.0.1:{self.service.port}/feed{number}"
            with penstock.connect(url, keys=self.service.keys) as connection:
                return connection.info.turn
        except PenstockError:
            return 1

    def _quiet(self, number: int, job: Job, logs: list[list[Any]]) -> list[str]:
        """Read the same batches of the same feed, with one worker and without faults, and compare."""
        if job.feed.order == "fast" and not job.feed.labels_epochs:
            return []
        passing = [failure for failure in job.feed.failures if failure.times]
        cuts = job.feed.on_error == "skip" and any(failure.what == "raise" for failure in passing)
        stays = tuple(failure for failure in job.feed.failures if not failure.times and failure.what == "raise")
        case = replace(job.feed, failures=stays, pause=0.0)
        world = len(job.consumers) if job.together else 1
        wanted: list[int | None] = [0]
        for log in logs:
            at = place = 0
            for event in log:
                if event[0] == "batch":
                    at = event[1][0][0] if job.feed.labels_epochs else at
                    wanted += [0] * (at + 1 - len(wanted))
                    place += 1
                    wanted[at] = max(wanted[at] or 0, place * world)
                elif event[0] in ("end", "break"):
                    at, place = at + 1, 0
                elif event[0] == "in" and event[1] > at:
                    at, place = event[1], 0
        steps = [Step(count, "break") if count else Step(1, "break") for count in wanted]
        plan = Consumer("numpy", len(steps), tuple(steps))
        quiet = Service([case], self.folder / f"quiet{number}", workers=1)
        log: list[Any] = []
        try:
            Reading(case, plan, f"tcp://127.0.0.1:{quiet.port}/feed0", log.append).run()
        finally:
            quiet.stop()
        in_order = not cuts and not job.together and job.feed.order == "exact"
        late = [number for number, plan in enumerate(job.consumers) if plan.start != "beginning"]
        return quiet.unwell + compare.quiet(job.feed, logs, log, in_order, late)

    def _end_service(self) -> None:
        killed = any(fault.what == "kill consumer" for fault in self.scenario.faults)
        if not self.result.differences and not killed:
            try:
                still = self.service.nothing_held()
            except PenstockError as error:
                still = f"the daemon does not answer a request for its status: {error}"
            if still:
                self.result.differences.append(still)
        self.service.stop()
        if not self.result.stuck:
            self.result.differences += [text for text in self.service.unwell if text not in self.result.differences]
        log = self.service.log()
        if "report this as a bug" in log:
            self.result.differences.append("the daemon's log asks to report a bug")
        self.result.log += log


def _may_fail(job: Job, plan: Consumer, event: list[Any], faults: tuple[Fault, ...]) -> bool:
    """Return whether the consumer may get this error.

    It may be a permanent failure that has to be raised, or come from a private daemon that was killed before it was
    ready.
    """
    if event[1] == "StartError":
        return plan.private and any(fault.what == "kill private daemon" for fault in faults)
    stays = any(not failure.times and failure.what == "raise" for failure in job.feed.failures)
    return bool(stays and job.feed.on_error == "raise" and event[1] == "GeneratorError")


@contextlib.contextmanager
def nothing_left(result: Result) -> Iterator[None]:
    """Report everything that the block leaves behind as a difference: processes, threads, descriptors, /dev/shm."""
    before = _present()
    yield
    deadline = time.monotonic() + 5
    while True:
        gc.collect()
        left = {key: text for key, text in _present().items() if key not in before}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    if left:
        result.differences.append(f"left behind: {'; '.join(sorted(left.values()))}")


def _present() -> dict[Any, str]:
    found: dict[Any, str] = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found["process", child.pid] = f"process {child.pid} {child.name()}"
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [""])[0] == os.environ[leaving.MARK]:
            found["process", process.pid] = f"process {process.pid}, which user code has started"
    for thread in threading.enumerate():
        found["thread", thread.ident] = f"thread {thread.name}"
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith(("/dev/", "/proc/")):
                found["fd", name] = f"fd {name} -> {target}"
    for name in os.listdir("/dev/shm"):
        if "penstock" in name:
            found["shm", name] = f"/dev/shm/{name}"
    return found


def run(scenario: Scenario) -> Result:
    """Run the scenario in its own folder."""
    if any(consumer.how in ("eager", "mapped") for job in scenario.jobs for consumer in job.consumers):
        _tensorflow()
    os.environ[leaving.MARK] = f"chaos-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        running = Run(scenario, Path(folder))
        with nothing_left(running.result):
            result = running.run()
            del running
        return result


def _tensorflow() -> None:
    """Import TensorFlow and start its thread pools before the run, because it keeps everything that it opens."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    import tensorflow as tf

    list(tf.data.Dataset.from_generator(lambda: iter([1]), output_signature=tf.TensorSpec([], "int64")))
