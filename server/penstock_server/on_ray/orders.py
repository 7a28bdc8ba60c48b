"""The messages between the head and its Ray driver, as lines of JSON: orders on the driver's stdin, news on its stdout.

The end of stdin ends the driver, and with it the hosts. So nothing is left when the head is gone, however it ended.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

WILDCARDS = {"0.0.0.0", "::", "*"}
"""Host parts of a listening address that stand for every address of the machine."""


class Plan(Struct, frozen=True):
    """The first line to the driver: what to start.

    Attributes:
        name: the hosts' names are this and a number.
        hosts: the number of hosts, each on its own node.
        workers: the number of workers of each host.
        code: a folder with the feeds' code, which each host gets as its working directory, or "".
        feeds: MODULE:ATTR of each feed, as a host finds it.
        options: further options of `penstock join`.
        keys: the files of a host's keys, by name; empty without keys.
    """

    name: str
    hosts: int
    workers: int
    code: str
    feeds: list[str]
    options: list[str]
    keys: dict[str, bytes]


class HeadAt(Struct, frozen=True, tag=True):
    """A later line to the driver, when the feeds are ready.

    Attributes:
        host: the address on which the head listens: a name, an IP address, or "*" for every address.
        port: its port.
        local: whether only programs on the head's machine can reach it.
    """

    host: str
    port: int
    local: bool


class Wanted(Struct, frozen=True, tag=True):
    """A later line to the driver: run `hosts` hosts from now on."""

    hosts: int


class News(Struct, frozen=True):
    """A line from the driver.

    Attributes:
        level: the level of a line for the head's log; "connected" once the driver has found the cluster; "failed" if it
            cannot do its work, and ends.
        text: the text for the log.
    """

    level: Literal["connected", "failed", "info", "warning", "error"]
    text: str = ""


class Ended(Struct, frozen=True):
    """How a host ended.

    Attributes:
        status: the exit code of `penstock join`.
        said: its last lines.
    """

    status: int
    said: str
