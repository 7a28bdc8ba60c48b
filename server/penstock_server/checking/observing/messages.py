"""The messages between the command and a process that runs user code: its task, and its reports.

A task is JSON on the command line. Reports are datagrams on a socket. Samples go into a file (recording.py), since
there may be many.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from penstock_proto.messages import Environment, ErrorReport, FeedPlan
from penstock_proto.spec import Spec

IN_LANES = "in lanes"
BACKWARDS = "backwards"
ALONE = "alone"
PLAIN = "plain"


class Source(Struct, frozen=True):
    """A source of values that differ from run to run.

    Attributes:
        kind: "system", "clock", "pid", "thread", "fork", or the name of a library that keeps a random state.
        site: the user's line that asks for the values, such as "scenes.py:12 in rows"; empty for a library's state.
        library: the installed package between that line and the source, or empty.
    """

    kind: str
    site: str = ""
    library: str = ""


class Task(Struct, frozen=True):
    """The task of a process.

    Attributes:
        target: MODULE:ATTR, or a target of data files.
        folder: where the process writes its recording.
        name: the name of the recording.
        order: IN_LANES reads as one worker does, for `seconds`. BACKWARDS reads the samples of another recording, lane
            by lane, the last lane first. ALONE reads the first `count` samples of `place`, and nothing before. PLAIN
            compares with a plain loop over the generator, and records nothing.
        seconds: how long to read, at most.
        repeats: name of the recording to repeat; needed for BACKWARDS.
        place: index of a split, or number of a batch of items; for ALONE.
        count: samples to read, or None for all of the place; for ALONE.
        spies: watch sources of values that differ from run to run.
        fixes: sources to fix, so that they give the same values in every run; needs `spies`.
        debugs: start a debugger where user code fails.
        spec: the spec of a sample, as another process found it; None to find it from a first sample.
    """

    target: str
    folder: str
    name: str
    order: str = IN_LANES
    seconds: float = 0.0
    repeats: str = ""
    place: int = 0
    count: int | None = 0
    spies: bool = False
    fixes: tuple[Source, ...] = ()
    debugs: bool = False
    spec: Spec | None = None


class Library(Struct, frozen=True):
    """An installed package that user code imports, and the seconds and the bytes of memory that this takes.

    `chain` holds the lines that import one another, from the user's line to this package.
    """

    name: str
    seconds: float
    nbytes: int
    chain: tuple[str, ...] = ()


class OpenFile(Struct, frozen=True):
    """A file that is still open after the imports, and the names in the user's modules that hold it."""

    path: str
    holders: tuple[str, ...] = ()
    hdf5: bool = False


class Wanted(Struct, frozen=True, tag=True):
    """The feed asks for other environment variables. The process ends, and the command starts it again."""

    variables: Environment


class Imported(Struct, frozen=True, tag=True):
    """The feed is imported, which took `seconds` and `nbytes` of memory."""

    plan: FeedPlan
    seconds: float
    nbytes: int
    libraries: tuple[Library, ...]
    files: tuple[OpenFile, ...]
    keras: bool
    takes_rng: bool


class Looked(Struct, frozen=True, tag=True):
    """The splits are listed and, unless the task has a spec, a first sample was read."""

    spec: Spec
    sample_nbytes: int
    splits: int
    digest: bytes
    warnings: tuple[str, ...]


class Progress(Struct, frozen=True, tag=True):
    """The number of samples that were read so far."""

    samples: int


class Failed(Struct, frozen=True, tag=True):
    """User code failed, or yielded a sample that cannot be served.

    `doing` is "importing", "listing", "looking" or "reading".
    """

    doing: str
    error: ErrorReport
    site: str = ""


class Skipped(Struct, frozen=True, tag=True):
    """The rest of a split was skipped: user code raised, or a part of a zipped feed has fewer samples than another."""

    split: str
    samples: int
    why: str


class Debugging(Struct, frozen=True, tag=True):
    """A debugger begins or ends."""

    begins: bool


class Gpu(Struct, frozen=True):
    """The GPUs of a process: the device files that it has open, and how many devices each loaded library can see."""

    files: tuple[str, ...] = ()
    visible: tuple[tuple[str, int], ...] = ()


class Carried(Struct, frozen=True):
    """What a generator carries on that the feed loses (plain_loop.py).

    Attributes:
        kind: "segments" or "epochs": where the feed loses it. "uneven": segments end within a pass over the data.
            "endless": the generator goes through its data again and again, and the feed has no `segment=`. "pieces":
            segments are whole passes, but the stream is made of several at a time. "repeats": all segments of an epoch
            are the same. "restarts": the epochs have one segment, and are the same, while a plain loop goes on to other
            samples. "begins": segments of whole passes begin with the same one. "unknown": the comparison failed.
        compared: how many samples were compared, or rows of batches.
        different: how many of them came twice in the segments (or came again), or differed in a second pass of the
            plain loop.
        one_pass: the `segment=` that is one pass of the plain loop over its data; 0 if the loop did not come so far.
        unit: "samples" or "rows".
        alike: whether the generator yields the same samples each time that it starts.
        why: why the comparison failed.
    """

    kind: str
    compared: int
    different: int
    one_pass: int = 0
    unit: str = "samples"
    alike: bool = False
    why: str = ""


class Undivided(Struct, frozen=True):
    """A generator that cannot be divided: each worker runs all of it, or even each lane does.

    Attributes:
        seconds: how long it takes for a sample, or for a ready batch.
        uncopied: the type of a value in its samples that cannot be copied, so that each lane runs it; otherwise empty.
    """

    seconds: float
    uncopied: str = ""


class Done(Struct, frozen=True, tag=True):
    """The reading has ended: the task is done, its time is up, or user code failed.

    Attributes:
        samples: how many samples (or ready batches) were read.
        seconds: how long reading and collating them took.
        cpu_seconds: the CPU time of that, in all threads and in processes of user code.
        whole: whether all that the task names was read: for IN_LANES, the epoch.
        gpu: see Gpu.
        late: libraries that were imported while samples were made.
        used: sources that user code used.
        changed: names in user modules, and attributes of objects there, that changed while samples were made.
        processes: how many processes of generators still run although their generators have ended.
        started: the most processes of its own that one generator had at a time.
        others: how many CPUs other processes of the machine used meanwhile.
        empty: for how many splits the generator has yielded no sample.
        without_samples: the first of these splits.
        carried: what the generator carries on that the feed loses; None if nothing, or if the task was not PLAIN.
        undivided_seconds: how long of that a generator has run that cannot be divided. Each lane has run all of it.
        undivided: for PLAIN, what is known of a generator that cannot be divided; None if it can be.
    """

    samples: int
    seconds: float
    cpu_seconds: float
    whole: bool
    gpu: Gpu
    late: tuple[Library, ...]
    used: tuple[Source, ...] = ()
    changed: tuple[str, ...] = ()
    processes: int = 0
    started: int = 0
    others: float = 0.0
    empty: int = 0
    without_samples: tuple[str, ...] = ()
    carried: Carried | None = None
    undivided_seconds: float = 0.0
    undivided: Undivided | None = None


class CauseAsked(Struct, frozen=True):
    """Where two workers have made different samples.

    Attributes:
        target: MODULE:ATTR, or a target of data files.
        environment: workers' environment variables, from the command line.
        place: index of the split, or number of the batch of items in the order of the items.
        number: the number of the sample there.
        folder: an empty folder for the experiments.
    """

    target: str
    environment: Environment
    place: int
    number: int
    folder: str


class CauseFound(Struct, frozen=True):
    """Why they differ, the line of user code (or an empty text), and what to do."""

    why: str
    where: str
    fix: str


Report = Wanted | Imported | Looked | Progress | Failed | Skipped | Debugging | Done

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Report).decode
