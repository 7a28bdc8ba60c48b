"""Judges a connection to a daemon: which transport it uses and why, how fast it is, what is wrong, and what to do."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from statistics import median
from typing import Any

from penstock_proto import UnknownFeed, Unreachable
from penstock_proto.messages import VERSION
from penstock_proto.status.figures import size

from .connection import OTHER_HOST, OTHER_USER, WORKS, Connection
from .findings import ERROR, NOTE, WARNING, Finding, by_severity

SLOW_NAME = 0.5
"""Seconds of a name lookup above which it counts as slow."""

SLOW_TRIP = 0.02
"""Seconds of a round trip above which it counts as slow."""

WAITS = 0.1
"""A consumer that waits for less than this share of the time is itself the limit."""


def judged(seen: Connection) -> list[Finding]:
    """Return the findings, the most severe first."""
    return by_severity(
        [*_names(seen), *_reached(seen), *_answered(seen), *_daemon(seen), *_detours(seen), *_speed(seen)]
    )


def rows(seen: Connection) -> Iterator[tuple[str, str]]:
    """Yield the facts as pairs of a name and a text."""
    yield "url", seen.url
    if seen.addresses:
        yield "address", f"{', '.join(seen.addresses)}, port {seen.port}; looked up in {_ms(seen.resolved)}"
    if seen.reached:
        where = "this host" if seen.same_host else "another host"
        yield "tcp", f"{seen.reached} ({where}) answers in {_ms(seen.connected)}"
    state = seen.state
    if state is not None:
        feeds = ", ".join(feed.name for feed in state.feeds) or "none yet"
        yield (
            "daemon",
            f"process {state.pid}, up {state.seconds:,.0f} s, protocol version {state.version} (here: "
            f"{VERSION}), {len(state.workers)} worker{'s' * (len(state.workers) != 1)}, feeds: {feeds}",
        )
        if seen.encrypted:
            yield "keys", "the daemon accepts them, and TCP is encrypted"
        yield "transport", _transport_in_words(seen)
    if seen.trips:
        yield (
            "messages",
            f"{_ms(median(seen.trips))} there and back (median of {len(seen.trips)}; {_ms(min(seen.trips))} to "
            f"{_ms(max(seen.trips))})",
        )
    if seen.read is not None and seen.read.seconds:
        read = seen.read
        yield (
            "batches",
            f"{read.batches / read.seconds:,.3g} a second, {size(int(read.nbytes / read.seconds))}/s for "
            f"{read.seconds:.1f} s: {_limit(seen)}",
        )


def as_json(seen: Connection) -> dict[str, Any]:
    """Return the facts as a value for JSON."""
    state = seen.state
    return {
        "url": seen.url,
        "addresses": seen.addresses,
        "lookup_seconds": seen.resolved,
        "reached": seen.reached or None,
        "same_host": seen.same_host,
        "connect_seconds": seen.connected,
        "daemon": None
        if state is None
        else {"pid": state.pid, "version": state.version, "seconds": state.seconds, "ready": state.ready}
        | {"feeds": [feed.name for feed in state.feeds], "workers": len(state.workers)},
        "transport": _transport(seen) if state is not None else None,
        "why": _transport_in_words(seen) if state is not None else None,
        "trip_seconds": seen.trips,
        "read": None if seen.read is None else dataclasses.asdict(seen.read),
    }


def _transport(seen: Connection) -> str:
    return seen.read.transport if seen.read is not None else "local" if seen.unix == WORKS else "tcp"


def _transport_in_words(seen: Connection) -> str:
    if _transport(seen) == "local":
        return "shared memory: the daemon is on this host, and its user is the same or you are root"
    if seen.unix == WORKS:
        return "TCP, though the daemon's unix address can be reached"
    if seen.unix.startswith(OTHER_USER):
        return "TCP: the daemon is on this host, and belongs to another user"
    if seen.unix != OTHER_HOST:
        return f"TCP: the daemon's unix address gives an error: {seen.unix}"
    if seen.same_host:
        return "TCP: the daemon's unix address does not exist here, so it runs in another network namespace"
    return "TCP: the daemon is on another host"


def _limit(seen: Connection) -> str:
    """Say what limited the reading of batches."""
    read = seen.read
    assert read is not None
    if read.waiting < WAITS:
        return "this process is the limit, not the connection"
    if read.transport == "tcp" and read.unsent:
        return "the network is the limit, as the daemon has more to send"
    return "the workers are the limit, not the connection"


def _names(seen: Connection) -> Iterator[Finding]:
    if seen.unresolved:
        yield Finding(
            ERROR,
            "name",
            f"the name {seen.host!r} has no address: {seen.unresolved}",
            fix="use a name that DNS or /etc/hosts knows here, or an address; `penstock serve --advertise` sets the "
            "name that the daemon prints",
        )
    elif seen.resolved > SLOW_NAME:
        yield Finding(
            WARNING,
            "name",
            f"looking up {seen.host!r} took {seen.resolved:.1f} s; each connection and reconnection does it",
            fix="look for a name server that does not answer (/etc/resolv.conf), or use the address",
        )


def _reached(seen: Connection) -> Iterator[Finding]:
    for address, error in seen.refused.items():
        refused = error.errno == errno.ECONNREFUSED
        if seen.reached:
            yield Finding(
                NOTE,
                "tcp",
                f"the name also has the address {address}, which does not answer: {_why(error)}",
                fix="serve with --bind 'tcp://[::]:PORT', which takes both kinds of addresses, or use the address",
            )
        elif refused:
            yield Finding(
                ERROR,
                "tcp",
                f"nothing listens at {address}, port {seen.port}",
                fix="start `penstock serve` there; without --bind tcp://0.0.0.0:PORT it listens for its own host only",
            )
        else:
            yield Finding(
                ERROR,
                "tcp",
                f"{address}, port {seen.port}, cannot be reached: {_why(error)}",
                fix="look for a firewall, a security group, or a route that is missing between the two hosts",
            )


def _why(error: OSError) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)


def _answered(seen: Connection) -> Iterator[Finding]:
    error = seen.error
    if isinstance(error, Unreachable):
        yield Finding(
            ERROR,
            "daemon",
            f"something listens at {seen.reached}, port {seen.port}, and does not answer as a daemon",
            fix="look at what listens there (ss -ltnp); a daemon answers at once, unless a signal has stopped it",
        )
    elif error is not None:
        fix = "" if isinstance(error, UnknownFeed) else "install the same version of penstock on both hosts"
        yield Finding(ERROR, "daemon", error.message, fix=fix)


def _daemon(seen: Connection) -> Iterator[Finding]:
    state = seen.state
    if state is None:
        return
    for failing in state.failing:
        yield Finding(
            WARNING, "daemon", f"feed {failing.feed} cannot be started; the daemon tries again: {failing.error}"
        )
    if not state.ready and not state.failing:
        yield Finding(
            WARNING,
            "daemon",
            f"its feeds are not ready yet: {state.phase}",
            fix=f"trainers wait meanwhile, and so does `penstock wait {state.endpoint}`",
        )
    if state.draining:
        yield Finding(WARNING, "daemon", "it stops when the current epochs have ended, and begins no new ones")
    if state.internal_errors:
        yield Finding(
            WARNING,
            "daemon",
            f"it has counted {state.internal_errors} internal errors",
            fix="report them; their tracebacks are in its log",
        )
    lost = [worker for worker in state.workers if worker.given_up]
    if lost:
        yield Finding(
            WARNING,
            "daemon",
            f"{len(lost)} of its workers cannot be started",
            fix="its log says why: see `penstock status`",
        )
    if seen.unread:
        yield Finding(ERROR, "batches", f"no batch could be read: {seen.unread}")


def _detours(seen: Connection) -> Iterator[Finding]:
    if seen.state is None or seen.unix == WORKS:
        return
    if seen.unix.startswith(OTHER_USER):
        yield Finding(
            WARNING,
            "transport",
            "batches go over TCP, though the daemon is on this host: it belongs to another user than this process, "
            f"which runs as {os.geteuid()}",
            fix="for shared memory without a copy run both as one user (--user in docker), or admit this user "
            "(`penstock serve --allow-uid`) and name the daemon's (PENSTOCK_DAEMON_USER)",
        )
    elif seen.unix == OTHER_HOST and seen.same_host:
        yield Finding(
            WARNING,
            "transport",
            "batches go over TCP, though the daemon's address is one of this host: it runs in another network "
            "namespace",
            fix="let both containers share one (--network host, or --network container:NAME), for shared memory",
        )
    elif seen.unix != OTHER_HOST:
        yield Finding(
            WARNING, "transport", f"shared memory does not work: {seen.unix}", fix="run `penstock check` alone"
        )


def _speed(seen: Connection) -> Iterator[Finding]:
    if seen.trips and median(seen.trips) > SLOW_TRIP:
        yield Finding(
            WARNING,
            "messages",
            f"a message takes {_ms(median(seen.trips))} there and back; up to 16 slabs are under way at once, so small "
            "batches may wait for that",
            fix="run the daemon closer to the trainer, or make batches larger",
        )
    if seen.read is not None and not seen.read.batches:
        yield Finding(WARNING, "batches", "no batch came in time", fix="`penstock top` shows what the workers do")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
