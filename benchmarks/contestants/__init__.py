"""The ways of moving a batch that `transport.py` compares, one file each.

Every contestant is a context manager

    batches(load: Load) -> Iterator[Iterable]

that starts its own processes, yields the iterable that the trainer reads (endless batches, see `prebuilt.py`), and on
exit stops everything that it started. Most yield a `tf.data.Dataset`. The limits of the machine, memcpy and raw TCP,
yield NumPy arrays of one leaf instead, since they show what the machine can do, not what a trainer gets. The limits of
TensorFlow's loops run in the trainer's process, with ready batches. `shared` is the minimum for a loader in another
process.

All producers begin with finished batches in their own memory. So a contestant's figure is the cost of moving them, with
as many copies as its way of moving needs.

The modules import TensorFlow and other large libraries inside `batches`, because their producer processes import the
same modules and need none of these libraries.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contestant:
    """A row of the table: its label, and the module and function that run it."""

    label: str
    module: str
    function: str = "batches"
    tensors: bool = True  # False: its batches stay arrays of one leaf, without a dataset
    paced: bool = True  # False: its batches do not carry the time of sending
    required: bool = False  # the benchmark fails if it cannot run; others are skipped with the reason


CONTESTANTS = {
    "memcpy": Contestant("memcpy, one thread", "contestants.memcpy", tensors=False, required=True),
    "loopback": Contestant("raw loopback TCP", "contestants.loopback", tensors=False, required=True),
    "constant": Contestant(
        "TensorFlow's loop, a constant batch", "contestants.in_process", "constant", paced=False, required=True
    ),
    "generator": Contestant("bare from_generator", "contestants.in_process", "generator", required=True),
    "shared": Contestant("bare from_generator, shared memory", "contestants.shared_memory", required=True),
    "penstock-local": Contestant(
        "Penstock, shared memory", "contestants.penstock_service", "batches_local", required=True
    ),
    "penstock-tcp": Contestant("Penstock, TCP", "contestants.penstock_service", "batches_tcp", required=True),
    "penstock-keys": Contestant("Penstock, TCP, encrypted", "contestants.penstock_service", "batches_encrypted"),
    "msgpack-zmq": Contestant("msgpack-numpy over ZMQ", "contestants.msgpack_zmq"),
    "tfdata-service": Contestant("tf.data service, gRPC", "contestants.tfdata_service", paced=False),
}
