"""The programs that hosts.py starts on the machines of its network, apart from `penstock` and `ray`.

    python benchmarks/hosts_programs.py PROGRAM ARGUMENTS

A trainer prints "warm" 3 s after its first batch. It then reads for the given seconds, and prints the time of each
batch as JSON. Samples and batches are those of hosts_feed.py, in the terms of each library. One of these programs runs
in Ray's environment, so this file imports only the standard library.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

WARM = 3.0
SAMPLE_BYTES, BATCH, SPLIT_SAMPLES = (int(os.environ[name]) for name in ("SAMPLE_BYTES", "BATCH", "SPLIT_SAMPLES"))
SPLITS = 4_000_000 // SPLIT_SAMPLES
RAY_BLOCKS, RAY_ROWS = 1000, 256
"""The number of blocks, and the rows of each. Samples of 64 KiB make blocks of 16 MiB; with blocks of 4 MiB Ray Data is
slower. All together they are more than a trainer reads."""


def read(batches: Iterable[Any], seconds: float, *, may_end: bool = False) -> None:
    """Take batches as fast as they come, and print the lines that the file's head describes.

    Raises:
        RuntimeError: the batches ended early, without `may_end`.
    """
    times: list[float] = []
    iterator = iter(batches)
    next(iterator)
    until = time.monotonic() + WARM
    while time.monotonic() < until:
        next(iterator)
    print("warm", flush=True)
    until = time.monotonic() + seconds
    for _ in iterator:
        times.append(time.monotonic())
        if times[-1] >= until:
            break
    else:
        if not may_end:
            raise RuntimeError("there are no more batches")
    print(json.dumps([round(one, 5) for one in times]), flush=True)


def a_sample() -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(0, 256, SAMPLE_BYTES, "uint8")


def penstock(seconds: str, url: str, keys: str | None = None) -> None:
    """Run a trainer of Penstock."""
    import penstock

    with penstock.connect(url, keys=keys) as connection:
        read(connection.batches(), float(seconds))


def penstock_rank(seconds: str, url: str, rank: str, ranks: str) -> None:
    """Run a trainer that is a rank. All ranks end when the first one has read for long enough."""
    import penstock

    def batches() -> Iterator[Any]:
        with suppress(penstock.StreamClosed):
            yield from connection.batches()

    with penstock.connect(url, rank=int(rank), world_size=int(ranks)) as connection:
        read(batches(), float(seconds), may_end=True)


def tfdata_dispatcher(port: str, workers: str) -> None:
    """Run a dispatcher until it is killed. Print "listens", and "complete" when `workers` workers are there."""
    import tensorflow as tf

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=int(port)))
    print("listens", flush=True)
    while dispatcher._num_workers() < int(workers):
        time.sleep(0.05)
    print("complete", flush=True)
    dispatcher.join()


def tfdata_worker(dispatcher: str, address: str, port: str) -> None:
    """Run a worker of tf.data service at this address and port until it is killed."""
    import tensorflow as tf

    service = tf.data.experimental.service
    config = service.WorkerConfig(dispatcher, worker_address=f"{address}:{port}", port=int(port))
    service.WorkerServer(config).join()


def tfdata(seconds: str, dispatcher: str) -> None:
    """Run a trainer of tf.data service. Each sample comes once, as from Penstock: workers get splits one by one."""
    import tensorflow as tf

    service = tf.data.experimental.service
    sample = tf.constant(a_sample())
    dataset = (
        tf.data.Dataset.range(SPLITS)
        .flat_map(lambda split: tf.data.Dataset.range(SPLIT_SAMPLES).map(lambda i: sample))
        .batch(BATCH, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
        .apply(
            service.distribute(
                service.ShardingPolicy.DYNAMIC, f"grpc://{dispatcher}", compression=None, data_transfer_protocol="grpc"
            )
        )
        .prefetch(tf.data.AUTOTUNE)
    )
    read(dataset, float(seconds))


def ray_data(seconds: str, head: str, cpus: str) -> None:
    """Run a trainer of Ray Data. It begins when the cluster has `cpus` CPUs."""
    import numpy as np
    import ray
    import ray.data

    ray.init(head, _node_ip_address=head.partition(":")[0], log_to_driver=False)
    while ray.cluster_resources().get("CPU", 0) < float(cpus):
        time.sleep(0.1)
    print("all nodes are there", file=sys.stderr)
    ray.data.DataContext.get_current().enable_progress_bars = False
    sample = a_sample()

    def samples(rows: dict[str, Any]) -> dict[str, Any]:
        return {"sample": np.repeat(sample[None], len(rows["id"]), axis=0)}

    dataset = ray.data.range(RAY_BLOCKS * RAY_ROWS, override_num_blocks=RAY_BLOCKS)
    dataset = dataset.map_batches(samples, batch_size=BATCH)
    ahead = int(cpus) * RAY_ROWS // BATCH  # a block for each CPU, so that all hosts send at once
    read(dataset.iter_batches(batch_size=BATCH, prefetch_batches=ahead, drop_last=True), float(seconds))


PROGRAMS: dict[str, Callable[..., None]] = {
    "penstock": penstock,
    "penstock-rank": penstock_rank,
    "tfdata": tfdata,
    "tfdata-dispatcher": tfdata_dispatcher,
    "tfdata-worker": tfdata_worker,
    "ray": ray_data,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
