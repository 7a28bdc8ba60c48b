"""The Ray driver: `python -m penstock_server.on_ray.driver`, a child of the head that places the hosts.

It is a separate process, so that the head does not depend on Ray: Ray ends a driver whose node is lost, and the head
then starts another. Everything that Ray holds for the hosts (actors, placement groups) belongs to this driver's job.
Ray removes it when the driver ends, however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from typing import Any

import msgspec

from .orders import HeadAt, News, Plan, Wanted
from .placed_hosts import HeadUnreachable, PlacedHosts

_REACH = 10.0
"""Seconds that the cluster has to accept a connection."""


def main() -> None:
    """Start the hosts that the first line of stdin describes, and run as many as later lines say, until stdin ends."""
    stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing else may print to the head

    def say(level: Any, text: str = "") -> None:
        with contextlib.suppress(OSError):  # the head is gone, and so is stdin
            stdout.write(msgspec.json.encode(News(level, text)).decode() + "\n")

    orders = Orders()
    try:
        ray = _connected(orders.plan)
    except _Failed as error:
        say("failed", str(error))
        sys.exit(1)
    say("connected")
    hosts = PlacedHosts(ray, orders.plan, say, orders.ended)
    try:
        while not orders.ended.is_set():
            hosts.look(orders.hosts, orders.head)
    except HeadUnreachable as error:
        say("failed", str(error))
        sys.exit(1)
    finally:
        hosts.end()
        ray.shutdown()


class _Failed(Exception):
    """The driver cannot do its work; the text says why and what to do."""


class Orders:
    """The head's orders, from stdin.

    Attributes:
        plan: the first line.
        head: where the head is, once its feeds are ready.
        hosts: how many hosts should run now.
        ended: set when stdin has ended.
    """

    def __init__(self) -> None:
        # Without a buffer, whose lock the thread would hold when the interpreter ends.
        self._stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
        self.plan = msgspec.json.decode(self._stdin.readline(), type=Plan)
        self.head: HeadAt | None = None
        self.hosts = self.plan.hosts
        self.ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while line := self._stdin.readline():
            order: HeadAt | Wanted = msgspec.json.decode(line, type=HeadAt | Wanted)
            if isinstance(order, HeadAt):
                self.head = order
            else:
                self.hosts = order.hosts
        self.ended.set()


def _connected(plan: Plan) -> Any:
    """Connect to the cluster of RAY_ADDRESS, or else of this machine, and return the module `ray`."""
    import ray
    import ray.util

    address = os.environ.get("RAY_ADDRESS") or "auto"
    if address.startswith("ray://"):
        raise _Failed(
            f"RAY_ADDRESS={address} is for Ray Client: run this on a machine of the cluster, and set RAY_ADDRESS to "
            "HOST:6379 or leave it out"
        )
    environment = {"working_dir": plan.code} if plan.code else {}
    try:
        if address != "auto":
            _reach(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=environment)
    except OSError as error:  # ConnectionError is one
        if address == "auto":
            raise _Failed(
                "no Ray cluster runs on this machine: `ray start --head` starts one, `ray start --address=HOST:6379` "
                "makes this machine a part of another, and RAY_ADDRESS=HOST:PORT names one that it is a part of"
            ) from None
        raise _Failed(
            f"there is no Ray cluster at RAY_ADDRESS={address} ({error}): `ray start --head` starts one on this machine"
        ) from None
    except Exception as error:  # Ray raises errors of many kinds
        raise _Failed(f"cannot connect to Ray at {address}: {type(error).__name__}: {error}") from error
    return ray


def _reach(address: str) -> None:
    """Connect to HOST:PORT and close again: Ray itself would try for many minutes.

    Raises:
        OSError: nobody listens there.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _REACH).close()


if __name__ == "__main__":
    main()
