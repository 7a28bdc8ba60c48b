"""The rows and columns of the table, and the description of a cell."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    group: str


SOURCES, STRUCTURES, BEHAVIOUR = "Sources", "Structures", "Behaviour"
ROWS = {
    "files": Row("a plain generator over a list of files", SOURCES),
    "scenes": Row("a class with an endless generator method that draws from `numpy.random`", SOURCES),
    "undivided": Row("a generator that cannot be divided, with an expensive transform", SOURCES),
    "indexed": Row("an object with `__len__` and `__getitem__`", SOURCES),
    "torch_map": Row("a torch `Dataset` (map-style)", SOURCES),
    "torch_iterable": Row("a torch `IterableDataset` that knows no workers", SOURCES),
    "keras_shuffled": Row("a Keras `PyDataset` that shuffles in `on_epoch_end`", SOURCES),
    "keras_endless": Row("a Keras `PyDataset` without a length", SOURCES),
    "hdf5": Row("an object whose constructor opens an HDF5 file", SOURCES),
    "tfrecord": Row("TFRecord files with GZIP", SOURCES),
    "parquet": Row("Parquet files", SOURCES),
    "tar": Row("tar shards (WebDataset)", SOURCES),
    "notebook": Row("a generator in a notebook cell, with a lambda", SOURCES),
    "nested": Row("nested dicts and tuples, in the order of their keys", STRUCTURES),
    "text": Row("text with NULs", STRUCTURES),
    "ragged": Row("rows of different lengths, ragged", STRUCTURES),
    "buckets": Row("rows of different lengths, padded to buckets", STRUCTURES),
    "rare": Row("bfloat16, complex64 and bool", STRUCTURES),
    "weights": Row("inputs, targets and sample weights", STRUCTURES),
    "rebatch": Row("a generator of batches of 12, read in batches of 8", STRUCTURES),
    "same": Row("the same batches with 1 and 3 workers", BEHAVIOUR),
    "same_random": Row("the same, with random augmentation", BEHAVIOUR),
    "resume": Row("resume in the middle of an epoch", BEHAVIOUR),
    "killed": Row("a worker process is killed", BEHAVIOUR),
}


@dataclass(frozen=True, slots=True)
class Column:
    label: str
    module: str
    distribution: str


COLUMNS = {
    "tfdata": Column("tf.data", "by_tfdata", "tensorflow"),
    "service": Column("tf.data service", "by_service", "tensorflow"),
    "keras": Column("Keras `PyDataset`", "by_keras", "keras"),
    "torch": Column("torch `DataLoader`", "by_torch", "torch"),
    "grain": Column("Grain", "by_grain", "grain"),
    "penstock": Column("Penstock", "by_penstock", "penstock-loader"),
}

WORKS, ADAPTED, ONE, OTHER = "works", "with an adapter", "one thread", "other data"
REWRITE, ERROR, HANG, NONE = "must be rewritten", "error", "hang", "-"


@dataclass(frozen=True, slots=True)
class Cell:
    """How a loader reads a row's source.

    `read()` gives batches, or `read(workers)` in the rows about numbers of workers. Without `read`, `note` says why the
    cell was not tried.
    """

    read: Callable[..., Iterable[Any]] | None
    note: str = ""
    adapter: str = ""  # code around the source that the loader's documentation asks for
    native: bool = False  # read in C++ threads, so that no process can be noted
    outcome: str = NONE  # the outcome of a cell that is not tried


class Cells(dict[str, Cell]):
    """The cells of one loader by the names of their rows."""

    def __call__(self, *names: str, **about: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(read: Callable[..., Any]) -> Callable[..., Any]:
            for name in names or [read.__name__]:
                self[name] = Cell(read, **about)
            return read

        return add

    def untried(self, name: str, outcome: str, note: str) -> None:
        self[name] = Cell(None, note, outcome=outcome)
