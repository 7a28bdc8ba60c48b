"""The types of the fields that commands and clients read in a daemon's status, which may have others too.
docs/monitoring.md documents the fields, and penstock_server/status/status.py fills them in."""

from __future__ import annotations

from typing import TypedDict


class Numbers(TypedDict):
    """How much was sent, or is sent in a second."""

    batches: float
    samples: float
    bytes: float


class Skipped(TypedDict):
    """A split that was skipped."""

    epoch: int | None
    split: str | None
    samples: int
    why: str


class Cache(TypedDict):
    """The use of a cache."""

    directory: str
    bytes: int
    hits: int
    misses: int
    problem: str | None


class Feed(TypedDict):
    """A feed."""

    name: str
    url: str
    spec: str
    batch_size: int | None
    batches: int | None
    lanes: int
    splits: int | None
    segment: int | None
    indexable: bool
    consumers: int
    sent: Numbers
    rates: Numbers
    cache: Cache | None
    part_caches: dict[str, Cache | None]
    skipped_count: int
    skipped: list[Skipped]


class Doing(TypedDict):
    """A worker's work."""

    what: str
    split: str | None
    samples: int
    seconds: float


class Spent(TypedDict):
    """Where a worker's time went, in seconds."""

    seconds: float
    idle_seconds: float
    user_seconds: float
    cpu_seconds: float
    cpu_wait_seconds: float


class Shares(TypedDict):
    """The shares of a worker's time."""

    generating: float
    collating: float
    cpu_wait: float
    idle: float


class Worker(TypedDict):
    """A worker."""

    number: int
    name: str
    host: str | None
    makes_batches: bool
    pid: int | None
    restarts: int
    ready: bool
    leaving: bool
    given_up: bool
    stopped: bool
    doing: Doing | None
    memory: int | None
    spent: Spent | None
    shares: Shares | None


class Used(TypedDict):
    """Memory that is used and allowed."""

    used: int
    allowed: int


class InBytes(TypedDict):
    """Bytes a second."""

    bytes: float


class Host(TypedDict):
    """A joined host."""

    name: str
    address: str
    state: str
    workers: int
    ready: int
    lanes: int
    slots: int
    rates: InBytes
    awaited: float | None
    received_bytes: int
    fetched_bytes: int
    lent_bytes: int
    silent_seconds: float
    memory: Used | None
    unsent_bytes: int | None


class Production(TypedDict):
    """The slots that a stream has for production."""

    slots: int


class Waits(TypedDict):
    """Seconds for which a consumer read, and waited for each cause, and held up other ranks."""

    reading: float
    production: float
    ranks: float
    sending: float
    holding_up: float


class Stream(TypedDict):
    """A consumer, and the stream that it reads."""

    stream: int
    feed: str
    client: str
    key: str | None
    transport: str
    epoch: int | None
    reading: bool
    batches: int
    sent: int
    handed: int
    slots: int
    production: Production
    rank: int | None
    made_near: bool
    made_anywhere_because: str | None
    error: str | None
    unsent: bool
    waits: Waits
    waiting: float | None
    limit: str | None
    headline: str
    verdict: str


class Failing(TypedDict):
    """A feed that cannot start."""

    feed: str
    times: int
    error: str


class Memory(TypedDict):
    """Bytes of all streams."""

    allowed: int
    reserved: int
    arena: int


class Engine(TypedDict):
    """What runs hosts."""

    name: str
    hosts: int
    adjusts: tuple[int, int] | None


class Status(TypedDict):
    """A status."""

    id: str
    pid: int
    endpoint: str
    unix: str
    seconds: float
    window_seconds: float
    cpus: int
    cpu_seconds: float
    ready: bool
    draining: bool
    failing: list[Failing]
    adjusts_workers: bool
    engine: Engine | None
    memory: Memory
    feeds: list[Feed]
    workers: list[Worker]
    hosts: list[Host]
    streams: list[Stream]
    more_streams: int
