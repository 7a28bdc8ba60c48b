"""What the command asks of a process that runs user code, and what that reports.

A task is JSON on the command line. Reports are datagrams on a socket; samples are in a file (recording.py), as they
may be many.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from penstock_proto.messages import Environment, ErrorReport, FeedPlan
from penstock_proto.spec import Spec

IN_LANES = "in lanes"
BACKWARDS = "backwards"
ALONE = "alone"


class Source(Struct, frozen=True):
    """A source of values that differ from run to run.

    Attributes:
        kind: "system", "clock", "pid", or the name of a library that keeps a random state.
        site: the user's line that asks for them, such as "scenes.py:12 in rows"; empty for a library's state.
        library: the installed package between that line and the source, or empty.
    """

    kind: str
    site: str = ""
    library: str = ""


class Task(Struct, frozen=True):
    """What a process does.

    Attributes:
        target: MODULE:ATTR, or a target of data files.
        folder: where the recording goes.
        name: of the recording.
        order: IN_LANES reads as one worker does, for `seconds`. BACKWARDS reads the samples of another recording, lane
            by lane, the last first. ALONE reads the first `count` samples of `place` (None: all), and nothing before.
        seconds: to read at most.
        repeats: name of the recording to repeat.
        place: index of a split, or number of a batch of items.
        count: see ALONE.
        spies: watch sources of values that differ from run to run.
        fixes: sources that give the same values in every run; needs `spies`.
        debugs: start a debugger in user code that fails.
        spec: of a sample, as another process has found it; None to read a first sample for it.
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
    """An installed package that user code imports: in `seconds`, with `nbytes` of memory. `chain` is how it came to
    that: the lines that import one another, the user's first."""

    name: str
    seconds: float
    nbytes: int
    chain: tuple[str, ...] = ()


class OpenFile(Struct, frozen=True):
    """A file that is open behind the imports, and the names in the user's modules that hold it."""

    path: str
    holders: tuple[str, ...] = ()
    hdf5: bool = False


class Wanted(Struct, frozen=True, tag=True):
    """The feed wants other environment variables. The process ends, to be started again."""

    variables: Environment


class Imported(Struct, frozen=True, tag=True):
    """The feed is imported, in `seconds`, and the process has `nbytes` of memory more."""

    plan: FeedPlan
    seconds: float
    nbytes: int
    libraries: tuple[Library, ...]
    files: tuple[OpenFile, ...]
    keras: bool
    takes_rng: bool


class Looked(Struct, frozen=True, tag=True):
    """The splits are listed, and the first sample was read."""

    spec: Spec
    sample_nbytes: int
    splits: int
    digest: bytes
    warnings: tuple[str, ...]


class Progress(Struct, frozen=True, tag=True):
    """So many samples were read."""

    samples: int


class Failed(Struct, frozen=True, tag=True):
    """User code failed, or yields what cannot be served. `doing` is "importing", "listing", "looking" or "reading"."""

    doing: str
    error: ErrorReport
    site: str = ""


class Skipped(Struct, frozen=True, tag=True):
    """User code raised in a split, and the feed has on_error="skip"."""

    split: str
    samples: int
    why: str


class Debugging(Struct, frozen=True, tag=True):
    """A debugger begins, or ends."""

    begins: bool


class Gpu(Struct, frozen=True):
    """What a process has of GPUs: device files that it has open, and how many devices each loaded library can see."""

    files: tuple[str, ...] = ()
    visible: tuple[tuple[str, int], ...] = ()


class Done(Struct, frozen=True, tag=True):
    """All that was to be read is read, or user code failed.

    Attributes:
        samples: (or ready batches) that were read.
        seconds: that reading and collating them took.
        cpu_seconds: of these, on a CPU, in all threads.
        whole: whether the epoch ended.
        gpu: see Gpu.
        late: libraries that were imported while samples were made.
        used: sources that user code has used.
        changed: names in user modules, and attributes of objects there, that changed while samples were made.
    """

    samples: int
    seconds: float
    cpu_seconds: float
    whole: bool
    gpu: Gpu
    late: tuple[Library, ...]
    used: tuple[Source, ...] = ()
    changed: tuple[str, ...] = ()


Report = Wanted | Imported | Looked | Progress | Failed | Skipped | Debugging | Done

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Report).decode
