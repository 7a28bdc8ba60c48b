"""The ways of moving a batch that `transport.py` compares, one file each.

Every contestant has one common shape, a context manager

    batches(load: Load) -> Iterator[Iterable]

which starts what it needs in processes of its own, gives what the trainer iterates over (batches
without end, see `prebuilt.py`), and on leaving stops all that it started. What comes out is a
`tf.data.Dataset`; the two yardsticks, memcpy and raw TCP, give NumPy arrays of one leaf instead,
since they say what the machine can do and not what a trainer gets. The two limits that TensorFlow's
loops have by themselves run in the trainer's process, with batches that lie there. `shared` says what the least is
that a loader in another process can cost.

All producers begin with finished batches in their own memory, so a contestant's figure is the cost
of moving them, in whatever number of copies its way of moving needs.

The modules import TensorFlow, and whatever else is heavy, inside `batches`: their producer
processes import the same modules and need none of it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contestant:
    """A row of the table: the module and function that run it, and what the row is called."""

    label: str
    module: str
    function: str = "batches"
    tensors: bool = True  # False: its batches stay arrays, of one leaf; there is no dataset
    paced: bool = True  # False: its batches cannot say when they were sent
    required: bool = False  # the benchmark fails if it cannot run; others are skipped with a reason


CONTESTANTS = {
    "memcpy": Contestant("memcpy, one thread", "contestants.memcpy", tensors=False, required=True),
    "loopback": Contestant("raw loopback TCP", "contestants.loopback", tensors=False, required=True),
    "constant": Contestant(
        "the loop alone, a constant batch", "contestants.in_process", "constant", paced=False, required=True
    ),
    "generator": Contestant("bare from_generator", "contestants.in_process", "generator", required=True),
    "shared": Contestant("bare from_generator, shared memory", "contestants.shared_memory", required=True),
    "penstock-local": Contestant(
        "Penstock, shared memory", "contestants.penstock_service", "batches_local", required=True
    ),
    "penstock-tcp": Contestant("Penstock, TCP", "contestants.penstock_service", "batches_tcp", required=True),
    "msgpack-zmq": Contestant("msgpack-numpy over ZMQ", "contestants.msgpack_zmq"),
    "tfdata-service": Contestant("tf.data service, gRPC", "contestants.tfdata_service", paced=False),
}
