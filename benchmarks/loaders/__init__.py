"""The loaders that `pipelines.py` compares, each a function in a file here.

Every loader is a context manager

    batches(name: str) -> Iterator[Dataset | Iterator]

that starts the processes it needs to serve the pipeline of that name (see `pipelines_feeds.py`), yields either a
`tf.data.Dataset` or an iterator over batches of NumPy arrays, and on exit stops everything that it started. The trainer
turns NumPy batches into tensors, and the iterator into a dataset by `from_generator`, so it reads both kinds in both
ways. A loader that cannot do the work raises `Cannot` with the reason.

An epoch has `samples.EPOCH` batches, more than a run takes, so no stream ends while it is measured. If a loader keeps
an order, its first batch has the samples 0, 1, 2, ...

Each loader's docstring says how it is configured. Loaders import everything but NumPy inside the function, since
imports count for the time to the first batch.
"""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

WORKERS = 2


class Cannot(Exception):
    """A loader cannot run the pipeline; the text says why."""


@dataclass(frozen=True, slots=True)
class Loader:
    """A row of the table: its label, the module and function that run it, and the distribution that it needs."""

    label: str
    module: str
    function: str = "batches"
    distribution: str | None = None
    limit: bool = False  # not a loader, but a limit of the machine or TensorFlow; its batches are not checked
    tensors: bool = True  # False: its batches stay arrays
    required: bool = False  # the benchmark fails if it cannot run; others are listed with the reason


LOADERS = {
    "memcpy": Loader(
        "memcpy of a batch, one thread", "loaders.limits", "copies", limit=True, required=True, tensors=False
    ),
    "constant": Loader(
        "TensorFlow's loop alone, over one constant batch", "loaders.limits", "constant", limit=True, required=True
    ),
    "unit": Loader("the generator and np.stack, in process", "loaders.limits", "unit", tensors=False, required=True),
    "crowded": Loader(
        "the unit, while another process runs it too",
        "loaders.limits",
        "crowded",
        limit=True,
        tensors=False,
        required=True,
    ),
    "generator-samples": Loader("from_generator of samples, .batch", "loaders.tfdata", "of_samples"),
    "generator-batches": Loader("from_generator of batches", "loaders.tfdata", "of_batches"),
    "py-function": Loader("map(py_function), 2 calls", "loaders.tfdata", "py_function"),
    "service": Loader("tf.data service, 1 worker", "loaders.tfdata", "service"),
    "pydataset": Loader("Keras PyDataset, 2 processes", "loaders.keras_pydataset", distribution="keras"),
    "torch": Loader("torch DataLoader, 2 processes", "loaders.torch_dataloader", distribution="torch"),
    "grain": Loader("Grain, 2 processes", "loaders.grain_dataset", distribution="grain"),
    "tensorpack": Loader(
        "tensorpack over ZMQ, 2 processes, every sample twice", "loaders.tensorpack_zmq", distribution="tensorpack"
    ),
    "penstock-local": Loader("Penstock, shared memory, 2 processes", "loaders.penstock_daemon", "local", required=True),
    "penstock-tcp": Loader("Penstock, TCP, 2 processes", "loaders.penstock_daemon", "tcp", required=True),
}


def missing(loader: Loader) -> str | None:
    """Return why the loader cannot run here, or None if it can."""
    try:
        if loader.distribution is not None:
            version(loader.distribution)
    except PackageNotFoundError:
        return f"not installed: {loader.distribution}; see benchmarks/requirements.txt"
    return None
