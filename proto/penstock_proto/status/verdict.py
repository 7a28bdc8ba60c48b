"""The verdict on a measured feed: says what limits it, and what would help. No I/O.

`verdict` judges one set of figures, measured by `penstock bench`, the daemon, or a trainer. If its consumer waits, the
rules of `RULES` are tried in turn, and the first that fits names the limit. advice.py and production_advice.py have the
words.

The order of the rules follows what the figures can prove. First comes what is no matter of speed: there are no workers,
or they start, end or changed. Then come the ways between worker and trainer, whose waits the daemon tells apart. Then
come the CPUs, because without them no other figure means much. At last comes what workers do while the consumer waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import advice, production_advice
from .advice import Cause
from .figures import CpuUse, Figures, percent

WAITS = 0.1
"""A consumer that waits for less than this share of its time counts as not waiting."""

BUSY = 0.8
"""A worker or daemon that is busy for at least this share of the time counts as always busy. Short pauses are
normal."""

IDLE = 0.2
"""Workers that are idle for at least this share of the consumer's waits could make the batches that it waits for."""

SCARCE = 0.15
"""CPUs are scarce if the feed could use less than this share of them in addition."""

OTHERS = 0.2
"""Reports mention other work if it uses at least this share of a host's CPUs."""

MOSTLY = 0.5
"""A cause that makes up at least this share of a consumer's waits is the limit."""

AHEAD = 1.5
"""If workers make this many batches for each that is sent, batches wait for their place in the order."""

LONG_TURN = 1.0
"""Seconds of work of a turn from which on it counts as long."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits the speed of a consumer.

    Attributes:
        limit: a key of `NAMES`.
        headline: the verdict in half a sentence, such as "the trainer waits 31 % of the time: ...".
        cause: its last part, which does not say how long the consumer waits.
        text: some sentences, with advice.
        gain: how many times as fast the consumer could be, at most, if it took the advice; None if unknown.
    """

    limit: str
    headline: str
    cause: str
    text: str
    gain: float | None = None


def verdict(seen: Figures) -> Verdict:
    """Return the limit of the speed according to these figures, and what that means."""
    if seen.waiting < WAITS:
        cause = advice.bottleneck(seen, spare=_spare(seen), held_up=seen.holding_up >= WAITS)
        return Verdict("consumer", cause, cause, advice.keeps_up(seen, held_up=seen.holding_up >= WAITS))
    found = next(found for rule in RULES if (found := rule(seen)) is not None)
    gain = None if found.most is None else min(found.most, 1 / max(0.01, 1 - seen.waiting))
    few, text = f"{found.few}, {found.fix}" if found.fix else found.few, found.text
    if gain is not None and gain >= 1 + WAITS:
        few += f" for up to {gain:.1f}x"
        text += f" The consumer could be up to {gain:.1f} times as fast."
    return Verdict(found.limit, f"the trainer waits {percent(seen.waiting)} of the time: {few}", few, text, gain)


# --- there are no workers, or not the same ones ---


def _no_makers(seen: Figures) -> Cause | None:
    return advice.no_makers() if seen.without_makers else None


def _start(seen: Figures) -> Cause | None:
    if seen.interrupted >= MOSTLY:
        return None
    new = len(seen.starting) - seen.ended  # those that ended and start again are not there to be waited for
    if not seen.began or 2 * new >= max(1, seen.workers_after):
        return advice.start(seen)
    return None


def _workers_end(seen: Figures) -> Cause | None:
    if seen.stopped:
        return advice.stopped(seen)
    if not seen.workers or (seen.ended and seen.interrupted >= IDLE):
        return advice.workers_end()
    return advice.retries() if seen.interrupted >= MOSTLY else None


def _workers_changed(seen: Figures) -> Cause | None:
    return advice.workers_changed(seen) if seen.workers_before != seen.workers_after else None


# --- between workers and trainer ---


def _slow_rank(seen: Figures) -> Cause | None:
    return advice.slow_rank(seen) if seen.slow_rank is not None and seen.ranks_share >= MOSTLY else None


def _network(seen: Figures) -> Cause | None:
    return advice.network(seen) if seen.transport == "tcp" and seen.sending_share >= MOSTLY else None


def _taking(seen: Figures) -> Cause | None:
    return advice.taking(seen) if seen.handing_share >= MOSTLY else None


# --- the CPUs ---


def _cpus(seen: Figures) -> Cause | None:
    if seen.hosts:
        return advice.no_cpus_on_hosts(seen) if _all_scarce(seen) else None
    machine = seen.machine
    if machine is None or not _scarce(machine):
        return None
    if seen.waits_for_io and seen.cpus_used < (1 - SCARCE) * machine.allowed:
        return None  # workers hardly need CPUs, whoever uses them
    if seen.other_cpu > max(OTHERS * machine.allowed, seen.cpus_used):
        return advice.other_work(seen)
    within_quota = machine.idle - machine.free >= SCARCE * machine.allowed
    return advice.no_cpus(seen, quota=within_quota, others=is_busy_with_others(seen))


def _scarce(machine: CpuUse) -> bool:
    return machine.free < SCARCE * machine.allowed


def _all_scarce(seen: Figures) -> bool:
    """Return whether CPUs are scarce on every host that has workers."""
    return not seen.waits_for_io and all(machine is not None and _scarce(machine) for machine in seen.places)


def _kept_from_cpus(seen: Figures) -> Cause | None:
    """Find workers that could run and do not, although CPUs are idle. Nothing else can be said about their speed."""
    lacked, busy = seen.cpus_lacked, sum(worker.busy for worker in seen.workers if worker.host is None)
    return advice.kept_from_cpus(seen) if seen.machine is not None and lacked >= MOSTLY * busy > 0 else None


def _daemon(seen: Figures) -> Cause | None:
    return advice.daemon(seen) if seen.daemon_cpu >= BUSY and seen.generating < BUSY * seen.usable else None


# --- what workers do while the consumer waits ---


def _hand_over(seen: Figures) -> Cause | None:
    """Find a consumer that waits although batches are on their way to it, as far as the daemon sees."""
    return advice.hand_over(seen) if seen.unmade < MOSTLY * seen.waiting else None


def _listing(seen: Figures) -> Cause | None:
    return production_advice.listing(seen) if seen.listing >= MOSTLY else None


def _lanes(seen: Figures) -> Cause | None:
    uneven = production_advice.uneven_lanes(seen) and (seen.ahead >= IDLE or seen.makes_ahead >= 1 + IDLE)
    return production_advice.lanes(seen) if uneven or seen.without_lane >= max(IDLE, seen.ahead) else None


def _memory(seen: Figures) -> Cause | None:
    return production_advice.memory(seen) if seen.ahead >= IDLE and seen.short_of_slots else None


def _order(seen: Figures) -> Cause | None:
    if seen.ahead < IDLE and seen.makes_ahead < AHEAD:
        return None
    if seen.turn > 1 and seen.stripe == 1 and seen.turn_seconds >= LONG_TURN:
        return production_advice.long_turns(seen)
    slow_host = max(seen.hosts, key=lambda host: host.awaited, default=None)
    if slow_host is not None and slow_host.awaited >= MOSTLY and any(one.host is None for one in seen.workers):
        return production_advice.slow_host(seen, slow_host)
    if seen.usable > 1 and seen.most_awaited.awaited >= max(MOSTLY, AHEAD / seen.usable):
        return production_advice.slow_lane(seen)
    return production_advice.order(seen)


def _making(seen: Figures) -> Cause | None:
    if seen.at_work < BUSY and not WAITS <= seen.idle_while_waiting < IDLE:
        return None
    return production_advice.generator(seen) if seen.generating >= seen.collating else production_advice.collating(seen)


def _pace(seen: Figures) -> Cause | None:
    return production_advice.pace(seen) if seen.idle_while_waiting < WAITS else None


def _unknown(seen: Figures) -> Cause:
    """Refuse to name a cause. A false one is worse."""
    return production_advice.unknown(seen)


RULES: tuple[Callable[[Figures], Cause | None], ...] = (
    _no_makers,
    _start,
    _workers_end,
    _workers_changed,
    _slow_rank,
    _network,
    _taking,
    _cpus,
    _kept_from_cpus,
    _daemon,
    _hand_over,
    _listing,
    _lanes,
    _memory,
    _order,
    _making,
    _pace,
    _unknown,
)


def is_busy_with_others(seen: Figures) -> bool:
    """Return whether other work uses much of the CPUs of the daemon's host."""
    return seen.machine is not None and seen.other_cpu >= OTHERS * seen.machine.allowed


def _spare(seen: Figures) -> float | None:
    """Return how many times as much the loader could give, or None if unknown."""
    if not seen.workers:
        return None
    ahead = seen.sent / seen.made if seen.made > seen.sent else 1.0  # they also make batches for later
    need = [ahead * sum(worker.busy for worker in seen.workers) / max(1, seen.usable), seen.daemon_cpu]
    if seen.free_cpus is not None:
        need.append(ahead * seen.cpus_used / max(0.01, seen.cpus_used + seen.free_cpus))
    return 1 / max(*need, 0.01)


NAMES = {
    "consumer": "the consumer",
    "start": "a start that is not over",
    "workers": "workers that end",
    "ranks": "a slow rank",
    "transport": "the connection to the consumer",
    "taking": "the trainer's own process",
    "cpus": "the CPUs",
    "contention": "other work on the daemon's host",
    "daemon": "the daemon's own process",
    "listing": "listing the splits",
    "lanes": "too few busy lanes",
    "memory": "the memory for batches",
    "turn": "long turns",
    "split": "a slow split or worker",
    "host": "a slow host",
    "order": "the order of batches",
    "generator": "the generator",
    "collating": "collating",
    "pace": "an uneven pace",
    "unknown": "something that the figures do not show",
}
"""What each limit is called in a sentence."""
