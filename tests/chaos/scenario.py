"""A scenario: feeds, their daemon, their consumers, and the faults. Plain frozen data, drawn from a seed.

The `repr` of a scenario is a literal that makes the same scenario. Nothing here runs anything.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from . import held, leaving


@dataclass(frozen=True)
class Failure:
    """User code fails when it reaches sample `number` of `split`, the first `times` times (0: always).

    `epoch` -1: in each epoch. `split` -1: in the function that lists the splits. `what`: "raise", "die" (it sends
    itself SIGKILL) or "hang".
    """

    split: int
    number: int
    epoch: int = -1
    what: str = "raise"
    times: int = 1


@dataclass(frozen=True)
class FeedCase:
    """A feed. `sizes` has the number of samples of each split. The kind "function" has several such lists.

    `kind`: "list" (of splits), "function" (which picks one of several lists), "shard", "plain" (one generator), "whole"
    (one generator, whose samples lanes transform), "segment" (with samples=), "endless", "index" (an object with
    __getitem__), "items" (a list of samples) or "file" (a file for each split, of `format`: "h5", "npz" or "parquet").

    `holds`: the settings that its generator holds while it yields (held.py).
    `leaves`: how its generator starts a process that it leaves behind (leaving.py); "" if it starts none.
    `transforms`: what its `batch_transform` (for ready batches, `transform`) does: "reverse" the rows, "draw" numbers
    as well, or "" if it has none.
    `cache`: whether its splits are cached.
    `rebatches`: whether its generator yields batches of several rows, which become batches of `batch_size`.
    `weights`: if there are any, it is a mix of as many feeds, which have these weights and take turns at its splits.
    """

    kind: str
    tag: int
    sizes: tuple[tuple[int, ...], ...] = ((),)
    batch_size: int | None = 4
    shuffle: int = 0
    interleave: int | None = None
    seed: int = 0
    lanes: int = 4
    turn: int | None = None
    order: str = "exact"
    epochs: int | None = None
    tells_samples: int | None = None
    segment: int | None = None
    drop_remainder: bool = False
    on_error: str = "raise"
    attempts: int = 3
    takes_epoch: bool = True
    draws: str = "none"
    structure: str = "tuple"
    width: int = 16
    pause: float = 0.0
    failures: tuple[Failure, ...] = ()
    holds: tuple[str, ...] = ()
    leaves: str = ""
    transforms: str = ""
    cache: bool = False
    format: str = ""
    rebatches: bool = False
    weights: tuple[int, ...] = ()

    @property
    def indexable(self) -> bool:
        return self.kind in ("index", "items")

    @property
    def order_is_known(self) -> bool:
        """Whether the model knows the order of the samples: nothing is drawn, and each file is one split."""
        return not (self.shuffle or self.weights or self.kind == "file")

    @property
    def labels_epochs(self) -> bool:
        """Whether samples carry the number of their epoch."""
        return self.takes_epoch and not self.indexable


@dataclass(frozen=True)
class Step:
    """Read `batches` batches (None: to the end of the epoch), then do something.

    `then`: "go" on; "break" out of the epoch; "resume" from a state in another connection; "load" a state into another
    connection; or "close" for good.
    """

    batches: int | None
    then: str = "go"


@dataclass(frozen=True)
class Consumer:
    """A consumer: how many epochs it reads, how, and after how many batches of the first consumer it joins.

    `how`: "numpy", "hoard" (keeps all batches), "scribble" (overwrites all batches), "process" (NumPy, in its own
    process, which saves a state with each batch), or "eager" and "mapped" (tf.data). A `private` consumer has its own
    daemon. `start`: where it begins if others read the feed: "beginning", "latest" or "next_epoch".
    """

    how: str = "numpy"
    epochs: int = 2
    steps: tuple[Step, ...] = ()
    transport: str = "local"
    proxied: bool = False
    pause: float = 0.0
    joins: int = 0
    private: bool = False
    start: str = "beginning"


@dataclass(frozen=True)
class Job:
    """A feed and its consumers. `together`: "" (each gets the whole stream), "drop" or "pad" (ranks), or "group".

    `of`: the number of the job whose feed it reads too; None: it has its own feed.
    """

    feed: FeedCase
    consumers: tuple[Consumer, ...]
    together: str = ""
    of: int | None = None


@dataclass(frozen=True)
class Fault:
    """A fault, which comes after `after` batches in total. `which` is the number of its target.

    `what`: "kill worker", "kill workers", "stop worker" (SIGSTOP, for `value` seconds; 0: for good), "kill forks",
    "stop forks", "kill daemon" (and start it with `value` workers), "stop daemon", "drain" (and start it with
    `value` workers), "end" (two SIGTERMs, and start it with `value` workers), "scale" and "scale now" (to `value`
    workers), "cut", "stall", "throttle", "kill consumer", "stop consumer", "kill host" (and start it again), "stop
    host", "end host" (SIGTERM, and start it again), "scale host" (to `value` workers), "cut host" and "stall host"
    (its connection), or, in a consumer's private daemon, "kill private daemon" and "kill private worker".
    """

    after: int
    what: str
    which: int = 0
    value: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """A scenario. `memory`: None is ample, 1.0 the least that the daemon asks for, other values a multiple of it.

    `hosts`: how many hosts have joined the daemon, with a worker each. `host_slots`: their --memory, as a
    number of the largest slots; None: it is ample. `keys`: whether the daemon has --keys.
    """

    seed: int
    jobs: tuple[Job, ...]
    workers: int = 2
    memory: float | None = None
    hang_timeout: float | None = None
    state: bool = False
    faults: tuple[Fault, ...] = ()
    hosts: int = 0
    keys: bool = False
    host_slots: int | None = None

    @property
    def command(self) -> str:
        """The shell command that runs the scenario again."""
        if self != scenario(self.seed):  # somebody has reduced it
            return f'python -m tests.chaos --scenario "{self!r}"'
        return f"make chaos ARGS='--seed {self.seed} --scenarios 1'"


def scenario(seed: int) -> Scenario:
    """Return the scenario of this seed."""
    chance = random.Random(seed)
    mode = chance.choices(["single", "ranks", "group"], [12, 3, 5])[0]
    kept = mode == "group" and chance.random() < 0.4
    jobs = [_job(chance, mode, 0, kept)]
    if mode == "single" and chance.random() < 0.25:
        jobs.append(_job(chance, "single", 1, kept))
    hang_timeout = chance.choice([None, None, 1.5])
    if hang_timeout is None:
        jobs = [replace(job, feed=_without(job.feed, "hang")) for job in jobs]
    workers = chance.randint(1, 4)
    memory = None
    if mode == "single" and all(_lives_on_the_least(job) for job in jobs):
        memory = chance.choice([None, None, 1.0, 1.0, 1.5, 3.0])
    faults = _faults(chance, jobs, mode, kept, hang_timeout)
    if any(fault.what.startswith("kill") or fault.what.startswith("stop") for fault in faults):
        jobs = [replace(job, feed=replace(job.feed, attempts=1000)) for job in jobs]
    if mode == "single" and memory is None:
        jobs[-1] = _with_others(random.Random(~seed), jobs[-1])  # older seeds keep the rest of their scenarios
    if mode == "ranks":
        jobs += _beside_ranks(random.Random(~seed), jobs[0].feed)
    hosts, theirs = _hosts(random.Random(~seed - 2**40))
    if theirs:
        faults = sorted([*faults, *theirs], key=lambda fault: fault.after)
        jobs = [replace(job, feed=replace(job.feed, attempts=1000)) for job in jobs]
    more = random.Random(~seed - 2**41)
    keys = more.random() < 0.1
    fixed = all(job.feed.batch_size is not None for job in jobs)
    host_slots = more.choice([None, None, 1, 2, 4]) if hosts and fixed else None
    return Scenario(seed, tuple(jobs), workers, memory, hang_timeout, kept, tuple(faults), hosts, keys, host_slots)


def _beside_ranks(chance: random.Random, feed: FeedCase) -> list[Job]:
    """In half of the cases, add one or two jobs that read the feed of ranks too: other ranks, or a single consumer."""
    jobs = []
    for _ in range(chance.choice([0, 0, 1, 2])):
        joins = chance.choice([0, 0, chance.randint(0, 40)])
        if chance.random() < 0.5:
            job = _ranks(chance, feed, [chance.choice(["local", "local", "tcp"]) for _ in range(4)], [1, 2, 3, 4])
        else:
            job = Job(feed, (_public(_reader(chance, feed, chance.randint(1, 3))),))
        readers = tuple(replace(reader, joins=joins) for reader in job.consumers)
        if not job.together:
            readers = (_late(chance, feed, readers[0]),)
        jobs.append(replace(job, consumers=readers, of=0))
    return jobs


def _hosts(chance: random.Random) -> tuple[int, list[Fault]]:
    """In a sixth of the cases, add hosts, and what happens to them."""
    if chance.random() > 1 / 6:
        return 0, []
    hosts, faults = chance.choice([1, 1, 2]), []
    for _ in range(chance.choice([0, 1, 1, 2, 3])):
        what = chance.choice(
            ["kill host", "kill host", "stop host", "end host", "scale host", "cut host", "stall host"]
        )
        value = {
            "stop host": chance.choice([0.2, 1.0]),
            "scale host": chance.randint(1, 3),
            "cut host": chance.choice([0.0, 0.3]),
            "stall host": chance.choice([0.2, 1.0]),
        }.get(what, 0.0)
        faults.append(Fault(chance.randint(0, chance.choice([10, 60, 150])), what, chance.randrange(hosts), value))
    return hosts, faults


def _with_others(chance: random.Random, job: Job) -> Job:
    """In half of the cases, add up to three other consumers of the same feed. They share its batches."""
    (first,) = job.consumers
    if first.private or chance.random() < 0.5:
        return job
    others = []
    for _ in range(chance.choice([1, 1, 2, 3])):
        reader = _public(_reader(chance, job.feed, first.epochs))
        others.append(_late(chance, job.feed, replace(reader, joins=chance.choice([0, 0, chance.randint(0, 40)]))))
    return replace(job, consumers=(first, *others))


def _late(chance: random.Random, feed: FeedCase, reader: Consumer) -> Consumer:
    """Let some of the consumers that come late begin where the others are."""
    starts = ["beginning", "latest", "next_epoch"] if feed.kind != "endless" else ["beginning", "latest"]
    return replace(reader, start=chance.choice(starts)) if reader.joins else reader


def _public(reader: Consumer) -> Consumer:
    return replace(reader, private=False, transport="local") if reader.private else reader


def _lives_on_the_least(job: Job) -> bool:
    """Return whether the least memory is enough: batches have one size, and no tensor outlives its connection."""
    holds = {"hoard", "eager", "mapped"} & {consumer.how for consumer in job.consumers}
    again = job.feed.on_error == "raise" or any(step.then in ("resume", "load") for step in job.consumers[0].steps)
    return job.feed.batch_size is not None and not (holds and again)


def _without(feed: FeedCase, what: str) -> FeedCase:
    return replace(feed, failures=tuple(failure for failure in feed.failures if failure.what != what))


def _sizes(chance: random.Random, least: int) -> tuple[int, ...]:
    """Return the samples of each split: uneven numbers, some of them 0, at least `least` in total."""
    count = chance.choice([1, 2, 3, 5, 8, 12, 17])
    most = max(3, chance.choice([80, 200, 400]) // count)
    sizes = [chance.choice([0, 1, most, chance.randint(0, most), chance.randint(0, most)]) for _ in range(count)]
    while sum(sizes) < least:
        sizes[chance.randrange(count)] += least
    return tuple(sizes)


def _feed(chance: random.Random, mode: str, number: int) -> FeedCase:
    kinds = ["list", "function", "shard", "plain", "segment", "endless", "index", "items"]
    weights = [10, 4, 2, 1, 3, 3, 3, 1]
    if mode != "single":  # their epochs must be told apart, and have an end
        kinds, weights = ["list", "function", "shard", "segment"], [8, 3, 2, 2]
    kind = chance.choices(kinds, weights)[0]
    indexable = kind in ("index", "items")
    ready = kind not in ("items",) and chance.random() < 0.15
    batch_size = None if ready else chance.choice([1, 2, 3, 4, 7, 8, 16])
    least = 6 * (batch_size or 1)
    order = "fast" if not indexable and mode == "single" and chance.random() < 0.12 else "exact"
    turn = None if ready else chance.choice([None, 1, 2, 3, 5, 8])
    lanes = chance.choice([1, 2, 3, 4, 6, 16])
    sizes: tuple[tuple[int, ...], ...] = (_sizes(chance, least),)
    segment = tells = None
    if kind == "function":
        sizes = tuple(_sizes(chance, least) for _ in range(chance.randint(1, 3)))
    elif kind == "shard":
        sizes = ((*(chance.choice([0, 1, chance.randint(1, 60)]) for _ in range(lanes - 1)), least + 30),)
    elif kind in ("plain", "index", "items"):
        sizes = ((chance.randint(least, 250),),)
    elif kind == "segment":
        tells = chance.randint(least, 300)
        segment = chance.choice([5, 13, 40, 100])
    elif kind == "endless":
        segment = chance.choice([5, 13, 40])
    shuffle = chance.choice([0, 0, 0, 0, 20, 60, 1000])
    draws = chance.choice(["none", "none", "rng", "numpy", "random"])
    if indexable and draws == "rng":
        draws = "numpy"
    if kind == "items":
        draws = "none"
    on_error = chance.choice(["raise", "raise", "retry", "retry", "skip"])
    if mode != "single" and on_error == "raise":
        on_error = "retry"
    if on_error == "skip" and (indexable or tells):
        on_error = "retry"
    if on_error == "raise" and order == "fast" and not ready and turn != 1:  # there is no state after each batch there
        on_error = "retry"
    case = FeedCase(
        kind=kind,
        tag=chance.randrange(10**6) * 2 + number,
        sizes=sizes,
        batch_size=batch_size,
        shuffle=shuffle,
        interleave=chance.choice([None, 1, 2, 5]) if shuffle and not indexable else None,
        seed=chance.choice([0, 7, 2**40]),
        lanes=lanes,
        turn=turn,
        order=order,
        tells_samples=tells,
        segment=segment,
        drop_remainder=not ready and chance.random() < 0.2,
        on_error=on_error,
        takes_epoch=mode != "single" or chance.random() < 0.85,
        draws=draws,
        structure=chance.choice(["tuple", "dict", "nested"]),
        width=chance.choice([8, 64, 100, 1000, 20_000 if kind != "items" else 8]),
        pause=chance.choice([0.0, 0.0, 0.001, 0.001, 0.003]),
    )
    if kind == "list" and on_error != "skip" and not ready and chance.random() < 0.2:
        case = replace(case, tells_samples=sum(sizes[0]))
    if not indexable:  # not drawn from `chance`: older seeds keep their scenarios
        case = replace(case, holds=held.drawn(case.tag, draws), leaves=leaving.drawn(case.tag))
    case = _with_more(random.Random(~case.tag), case, mode)
    return replace(case, failures=_failures(chance, case))


def _with_more(chance: random.Random, case: FeedCase, mode: str) -> FeedCase:
    """Let some feeds transform their batches, cache their splits, read files, or be a mix."""
    if chance.random() < 0.2:
        draws = case.order == "exact" and case.on_error != "skip"  # otherwise batches may be made of other rows
        case = replace(case, transforms=chance.choice(["reverse", "draw"]) if draws else "reverse")
    if mode == "single" and case.kind in ("list", "plain") and case.batch_size and chance.random() < 0.2:
        structure = "tuple" if case.structure == "tuple" else "dict"
        case = replace(case, kind="file", format=chance.choice(["h5", "npz", "parquet"]), structure=structure)
        case = replace(case, takes_epoch=False, tells_samples=None, draws="none", pause=0.0, holds=(), leaves="")
    elif case.kind in ("list", "function", "shard", "plain") and case.batch_size and chance.random() < 0.15:
        case = replace(case, rebatches=True, tells_samples=None)
    elif case.kind == "list" and len(case.sizes[0]) > 1 and case.batch_size and chance.random() < 0.2:
        count = chance.randint(2, min(3, len(case.sizes[0])))
        weights = tuple(chance.choice([1, 1, 2, 5]) for _ in range(count))
        if all(any(case.sizes[0][part::count]) for part in range(count)):  # a feed without samples is refused
            case = replace(case, weights=weights, tells_samples=None, transforms="")
    if mode == "single" and case.kind in ("list", "function", "shard", "plain") and chance.random() < 0.2:
        case = replace(case, cache=True, takes_epoch=False, draws="none" if case.draws == "rng" else case.draws)
    return _undivided(random.Random(f"whole {case.tag}"), case, mode)


def _undivided(chance: random.Random, case: FeedCase, mode: str) -> FeedCase:
    """Let some generators be undivided, although lanes transform their samples."""
    fits = mode == "single" and case.kind in ("list", "plain") and case.batch_size is not None
    if not fits or case.rebatches or case.weights or chance.random() > 0.3:
        return case
    on_error = "retry" if case.on_error == "skip" else case.on_error
    return replace(case, kind="whole", sizes=((sum(case.sizes[0]),),), tells_samples=None, on_error=on_error)


def _failures(chance: random.Random, case: FeedCase) -> tuple[Failure, ...]:
    if case.kind in ("items", "file") or chance.random() < 0.4:
        return ()
    found = []
    for _ in range(chance.randint(1, 2)):
        variant = chance.randrange(len(case.sizes)) if case.kind == "function" else 0
        if case.kind in ("segment", "endless"):
            assert case.segment is not None
            split, most = chance.randrange(6), case.segment
        elif case.indexable:
            split, most = 0, case.sizes[0][0] - 1
        else:
            split = chance.randrange(len(case.sizes[variant]))
            most = case.sizes[variant][split]
        number = chance.choice([0, most, chance.randint(0, most)])
        what = chance.choices(["raise", "die", "hang"], [8, 2, 1])[0]
        epoch = chance.choice([-1, 0, 1]) if case.labels_epochs else -1
        times = chance.choice([1, 1, 2])
        if case.on_error == "skip" and what == "raise" and chance.random() < 0.6:
            times = 0
        if case.on_error == "raise" and what == "raise" and chance.random() < 0.15:
            times = 0
        if what == "hang":
            times = 1
        found.append(Failure(1000 * variant + split, number, epoch, what, times))
    if case.kind == "function" and case.on_error == "retry" and chance.random() < 0.3:
        found.append(Failure(-1, 0, times=1))
    found = list({(f.split, f.number): f for f in found if _may(case, f)}.values())
    return tuple(found) if case.on_error != "skip" or _leaves_enough(case, found) else ()


def _leaves_enough(case: FeedCase, failures: list[Failure]) -> bool:
    """Return whether an epoch still has batches if all of these splits are left out."""
    for variant, sizes in enumerate(case.sizes):
        ends = {f.split - 1000 * variant: 0 for f in failures}
        if sum(ends.get(split, size) for split, size in enumerate(sizes)) < (case.batch_size or 1):
            return case.segment is not None
    return True


def _may(case: FeedCase, failure: Failure) -> bool:
    """Return whether a daemon can start in spite of this failure. At its start it reads a first sample."""
    if failure.what == "raise" and case.on_error == "retry":
        return True
    if failure.what == "raise" and case.on_error == "skip":
        return True
    if case.indexable:
        return failure.number > 0
    return failure.split % 1000 >= max(1, len(case.weights)) and failure.number > 0


def _job(chance: random.Random, mode: str, number: int, kept: bool) -> Job:
    feed = _feed(chance, mode, number)
    if mode == "single":
        epochs = chance.randint(1, 3)
        if feed.kind != "endless" and chance.random() < 0.2:
            feed = replace(feed, epochs=epochs)
        return Job(feed, (_reader(chance, feed, epochs),))
    transports = [chance.choice(["local", "local", "tcp"]) for _ in range(3)]
    if mode == "ranks":
        return _ranks(chance, feed, transports, [2, 2, 3])
    epochs = chance.randint(1, 3)
    members = [Consumer("numpy", epochs, (), transports[0], False, chance.choice([0, 0.002]))]
    for member in range(1, chance.choice([2, 2, 3])):
        steps = ()
        if chance.random() < 0.6:
            steps = (Step(chance.randint(1, 9), chance.choice(["break", "close", "close"])),)
        how = chance.choice(["numpy", "numpy", "hoard", "scribble", "process"])
        joins = chance.choice([0, 0, chance.randint(0, 30)])
        proxied = transports[member] == "tcp" and chance.random() < 0.5
        members.append(Consumer(how, epochs, steps, transports[member], proxied, chance.choice([0, 0.004]), joins))
    return Job(feed, tuple(members), "group")


def _ranks(chance: random.Random, feed: FeedCase, transports: list[str], worlds: list[int]) -> Job:
    world, epochs = chance.choice(worlds), chance.randint(1, 3)
    steps: tuple[Step, ...] = ()
    if chance.random() < 0.5:
        steps = (Step(chance.randint(1, 8), "resume"),)
    breaks = [Step(chance.randint(1, 12), "break") if chance.random() < 0.2 else None for _ in range(world)]
    if epochs == 1:  # a rank that leaves its last epoch closes, which ends the job of the others
        breaks = [None] * world
    readers = [
        Consumer(
            chance.choice(["numpy", "numpy", "hoard", "scribble"]),
            epochs,
            steps if steps else tuple([step] if step else []),
            transports[rank],
            transports[rank] == "tcp" and chance.random() < 0.6,
            chance.choice([0, 0, 0.003]),
        )
        for rank, step in zip(range(world), breaks, strict=True)
    ]
    return Job(feed, tuple(readers), chance.choice(["drop", "pad"]))


def _reader(chance: random.Random, feed: FeedCase, epochs: int) -> Consumer:
    how = chance.choices(["numpy", "hoard", "scribble", "process", "eager", "mapped"], [8, 2, 2, 3, 1, 1])[0]
    transport = chance.choice(["local", "local", "tcp", "tcp"])
    actions = ["go", "break", "resume", "load"]
    if how in ("eager", "mapped"):  # if an epoch is left, all batches that TensorFlow took count
        actions = [chance.choice(["break", "resume"])]
    if feed.order == "fast" and feed.turn != 1 and feed.batch_size is not None:
        actions = ["break"]
    if feed.order == "fast" and how == "process":
        how = "numpy"
    steps = [Step(chance.randint(1, 30), chance.choice(actions)) for _ in range(chance.choice([0, 0, 1, 2, 3]))]
    if feed.kind == "endless":
        steps = [*steps, *(Step(chance.randint(5, 60), "break") for _ in range(epochs))]
    private = how == "process" and chance.random() < 0.3
    transport = "auto" if private else transport
    proxied = transport == "tcp" and chance.random() < 0.7
    pause = chance.choice([0, 0, 0, 0.002, 0.01])
    return Consumer(how, epochs, tuple(steps), transport, proxied, pause, private=private)


def _faults(chance: random.Random, jobs: list[Job], mode: str, kept: bool, hang_timeout: float | None) -> list[Fault]:
    consumers = [consumer for job in jobs for consumer in job.consumers]
    processes = [number for number, consumer in enumerate(consumers) if consumer.how == "process"]
    kinds = {"kill worker": 6, "kill workers": 1, "stop worker": 2, "kill forks": 1, "stop forks": 0.5, "scale": 3}
    kinds |= {"scale now": 2, "stop daemon": 1}
    if mode != "group" or kept:
        kinds |= {"kill daemon": 3, "drain": 1, "end": 1}
    if any(consumer.proxied for consumer in consumers):
        kinds |= {"cut": 6, "stall": 2, "throttle": 1}
    if processes and not kept:
        kinds |= {"kill consumer": 5, "stop consumer": 2}
    private = [number for number, consumer in enumerate(consumers) if consumer.private]
    if private:
        kinds |= {"kill private daemon": 5, "kill private worker": 10}
    faults = []
    for _ in range(chance.choice([0, 1, 1, 2, 3, 5])):
        what = chance.choices(list(kinds), list(kinds.values()))[0]
        value = {
            "stop worker": chance.choice([0.2, 1.0, 2.0, 0.0 if hang_timeout is not None else 0.5]),
            "stop forks": chance.choice([0.2, 1.0]),
            "stop daemon": chance.choice([0.2, 1.0]),
            "stop consumer": chance.choice([0.2, 1.0]),
            "stall": chance.choice([0.2, 1.0]),
            "throttle": chance.choice([0.2, 1.0]),
            "cut": chance.choice([0.0, 0.0, 0.3]),
            "scale": chance.randint(1, 4),
            "scale now": chance.randint(1, 4),
            "kill daemon": chance.randint(1, 4),
            "drain": chance.randint(1, 4),
            "end": chance.randint(1, 4),
        }.get(what, 0.0)
        which = chance.randrange(4)
        if "consumer" in what:
            which = chance.choice(processes)
        elif "private" in what:
            which = chance.choice(private)
        faults.append(Fault(chance.randint(0, chance.choice([10, 60, 150])), what, which, value))
    return sorted(faults, key=lambda fault: fault.after)
