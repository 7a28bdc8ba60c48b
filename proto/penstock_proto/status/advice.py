"""The words of a verdict: what limits a feed, the evidence, and what to do. verdict.py decides which of them apply.

production_advice.py has those for the time in which workers have to make what the consumer waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

from .figures import Figures, count, number, percent

_HOST = "the daemon's host"

FEW = 10
"""With fewer batches than this, a connection's rate is unknown."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a consumer waits.

    Attributes:
        limit: a key of `verdict.NAMES`.
        few: the evidence in a few words.
        text: some sentences, with advice.
        fix: the advice in a few words; empty if there is none.
        most: how many times as fast the consumer could be, at most, if it took the advice; None if unknown.
    """

    limit: str
    few: str
    text: str
    fix: str = ""
    most: float | None = None


# --- the consumer does not wait ---


def bottleneck(seen: Figures, *, spare: float | None, held_up: bool) -> str:
    """Return a few words. `spare`: how many times as much the loader could give. `held_up`: whether ranks wait."""
    if held_up:
        return f"the trainer is the bottleneck: other ranks wait for it {percent(seen.holding_up)} of the time"
    if spare is None:
        return "the trainer is the bottleneck"
    if spare < 1.1:
        return "the trainer is the bottleneck, and the loader has little to spare"
    return f"the trainer is the bottleneck: the loader could give {spare:.{0 if spare >= 10 else 1}f}x"


def keeps_up(seen: Figures, *, held_up: bool) -> str:
    """Return some sentences. `held_up`: whether other ranks wait for this one."""
    if held_up:
        return (
            f"This rank is the limit: the other ranks wait for it {percent(seen.holding_up)} of the time, as all ranks "
            "get a round together. Look at its step, its host and its connection."
        )
    if seen.step >= seen.receiving:
        return (
            f"The loader keeps up: the consumer waits for {percent(seen.waiting)} of the time. A faster loader would "
            "save no more than that."
        )
    return (
        f"The loader is faster than the consumer can receive: with {seen.consumer} this process takes "
        f"{number(seen.rate)} batches/s. If that is too slow, make batches larger."
    )


# --- there are no workers, or not the same ones ---


def no_makers() -> Cause:
    """No worker makes batches."""
    return Cause(
        "workers",
        "no worker makes batches until a host joins",
        "No worker makes batches, as the daemon has none and no host has joined: run `penstock join` on a host, or "
        "give the daemon workers (penstock scale).",
    )


def start(seen: Figures) -> Cause:
    """Workers are not ready, or the consumer has had no batch yet."""
    doing = f": {seen.starting[0]}" if seen.starting else ""
    if seen.began:
        few = f"{len(seen.starting)} of {count(seen.workers_after, 'worker')} are not ready{doing}"
        return Cause("start", few, f"Workers start: {few}. Look again when they are ready.")
    at = "" if doing or not seen.awaited_at else f", and its worker is at split {seen.awaited_at}"
    few = f"its first batch is not made yet{doing}{at}"
    return Cause(
        "start",
        few,
        f"The stream starts: {few}. A first batch takes as long as one worker needs for a batch, after its start.",
    )


def workers_end() -> Cause:
    """Workers end by themselves."""
    return Cause(
        "workers",
        "workers end and are started again",
        "Workers end and are started again: the daemon's log says why. What they worked on is made again.",
    )


def stopped(seen: Figures) -> Cause:
    """A signal has stopped workers."""
    names = ", ".join(seen.stopped)
    few = f"worker {names} is stopped by a signal" if len(seen.stopped) == 1 else f"workers {names} are stopped"
    return Cause(
        "workers", few, f"{few[0].upper()}{few[1:]}: continue it with kill -CONT, or end it, and another one starts."
    )


def retries() -> Cause:
    """The next batch waits for another attempt."""
    return Cause(
        "workers",
        "the next batch waits for another attempt at it, after an error or the end of a worker",
        "The next batch waits for another attempt at it, after user code raised or a worker ended: the daemon's log "
        "says why.",
    )


def workers_changed(seen: Figures) -> Cause:
    """Workers came or went during the measurement."""
    change = f"the number of workers went from {seen.workers_before} to {seen.workers_after}"
    return Cause(
        "unknown",
        f"unknown, as {change} meanwhile",
        f"Nothing can be said yet: {change} during the measurement. Look again in a few seconds.",
    )


# --- between workers and trainer ---


def slow_rank(seen: Figures) -> Cause:
    """Another rank holds this one up."""
    return Cause(
        "ranks",
        f"rank {seen.slow_rank} is slower, and all ranks go on together",
        f"Rank {seen.slow_rank} is the limit: this rank waits for {percent(seen.waiting)} of the time, mostly for rank "
        f"{seen.slow_rank}, which has batches and does not take them. All ranks get a round together. Look at the step "
        "of that rank, its host and its connection.",
    )


def network(seen: Figures) -> Cause:
    """The connection takes no more."""
    # A few batches do not show a connection's rate, and other consumers may have received some of them.
    rate = f"{number(seen.megabytes)} MB/s" if seen.batches >= FEW and not seen.others else ""
    return Cause(
        "transport",
        f"the network{rate and ', which carries '}{rate}",
        f"The connection to the consumer is the limit{rate and ' at '}{rate}: it takes no more, or a batch is "
        f"coming, in {percent(seen.sending_share)} of the time for which the consumer waits. "
        f"{'' if seen.bytes_only else 'Send smaller dtypes (uint8, not float32), or '}"
        f"{'R' if seen.bytes_only else 'r'}un the daemon on the trainer's host, which reads shared memory"
        f"{_asked(seen)}.",
    )


def hand_over(seen: Figures) -> Cause:
    """Batches are on their way, and the consumer waits for them."""
    if seen.transport == "tcp":
        return Cause(
            "transport",
            "the hand-over over TCP, while batches are ready",
            f"The hand-over over TCP is the limit: batches are ready while the consumer waits, and the connection is "
            f"busy in {percent(seen.sending_share)} of the waits. Make batches larger, or run the daemon on the "
            f"trainer's host, which reads shared memory{_asked(seen)}.",
        )
    return Cause(
        "transport",
        "the hand-over, while batches are ready",
        "The hand-over is the limit: batches are ready while the consumer waits for them. "
        f"{'Give the daemon more --memory, so that workers get ahead, or m' if seen.memory_full else 'M'}ake "
        "batches larger.",
    )


def taking(seen: Figures) -> Cause:
    """Batches are in the trainer's process."""
    return Cause(
        "taking",
        "batches were there, and the trainer's process did not take them",
        f"Batches were in the trainer's process in {percent(seen.handing_share)} of the waits: its threads had no CPU "
        "to take them, or other Python code held the GIL. Look at callbacks and at code between steps.",
    )


# --- the CPUs ---


def no_cpus(seen: Figures, *, quota: bool, others: bool) -> Cause:
    """The feed uses the CPUs up. `quota`: a cgroup's quota is the limit. `others`: other work uses many of them."""
    assert seen.machine is not None
    cpus = _own_cpus(seen)
    used = f"of {cpus}, workers, daemon{' and trainer' if seen.consumer_cpu else ''} use {seen.cpus_used:.1f}"
    if quota:
        return Cause(
            "cpus",
            f"the quota of {count(seen.machine.allowed, 'CPU')} is used up",
            f"The CPU quota of the daemon's container (its cgroup) is the limit: {used}, while "
            f"{seen.machine.idle:.1f} CPUs of the host are idle. Raise the quota; more workers would not help.",
        )
    few = f"{cpus} {'is' if seen.machine.allowed == 1 else 'are'} busy"
    text = f"The CPUs are the limit: {used}"
    if others:
        return Cause("cpus", few, f"{text}, and other work {seen.other_cpu:.1f}. More workers would not help.")
    if seen.cpus_lacked < seen.generating + seen.collating:  # otherwise it is unclear where the rest of the time went
        heaviest = "in the generator" if seen.generating >= seen.collating else "collating"
        text += f", and workers spend most of their working time {heaviest}"
    return Cause(
        "cpus",
        few,
        f"{text}. More workers would not help: make the work cheaper, or serve the feed from a host with more CPUs.",
    )


def no_cpus_on_hosts(seen: Figures) -> Cause:
    """The CPUs of all hosts are used up."""
    return Cause(
        "cpus",
        f"{all_cpus(seen)} are busy",
        f"The CPUs are the limit: on no host with workers is one idle; of {all_cpus(seen)}, the feed uses "
        f"{seen.cpus_used:.1f}. More workers would not help: make the work cheaper, or let another host join.",
    )


def other_work(seen: Figures) -> Cause:
    """Other work uses the CPUs up."""
    assert seen.machine is not None
    few = f"other work uses {seen.other_cpu:.1f} of {_own_cpus(seen)}"
    return Cause(
        "contention",
        few,
        f"Other work on the daemon's host is the limit: {few[0].lower()}{few[1:]}, and the feed gets "
        f"{seen.cpus_used:.1f}. End it, or serve the feed from another host. More workers would not help.",
        "end it",
        min(seen.machine.allowed, seen.cpus_used + seen.cpus_lacked) / max(0.05, seen.cpus_used),
    )


def kept_from_cpus(seen: Figures) -> Cause:
    """Workers could run and do not, although CPUs are idle."""
    assert seen.machine is not None
    idle = f"{seen.machine.free:.1f} of {_own_cpus(seen)} are idle"
    return Cause(
        "unknown",
        f"workers wait for a CPU, although {idle}",
        f"Workers could run and have no CPU {percent(seen.cpus_lacked / len(seen.workers))} of the time, although "
        f"{idle}. Something keeps them from the idle ones: a CPU affinity that user code, taskset or a batch system "
        "sets, or a low priority. No more can be said before that is changed.",
    )


def daemon(seen: Figures) -> Cause:
    """The daemon's own process is always busy."""
    return Cause(
        "daemon",
        f"the daemon's own process is busy {percent(seen.daemon_cpu)}",
        f"The daemon's own process is the limit at {number(seen.rate)} batches/s: workers and consumer wait for "
        "it. Make batches larger.",
    )


# --- words ---


def _asked(seen: Figures) -> str:
    return " without --transport tcp" if seen.tcp_asked else ""


def all_cpus(seen: Figures) -> str:
    """Return how many CPUs there are, in words."""
    return f"the {count(seen.cpus, 'CPU')} of {'all hosts' if seen.hosts else _HOST}"


def _own_cpus(seen: Figures) -> str:
    assert seen.machine is not None
    return f"the {count(seen.machine.allowed, 'CPU')} of {_HOST}"
