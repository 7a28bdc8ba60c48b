"""Does Penstock keep a GPU fed? Measures a ResNet-50 step that is fed in three ways, and the cost of copies to the GPU.

    python benchmarks/gpu.py --json benchmarks/results/gpu-$(date +%F).json
    python benchmarks/gpu.py --batch-size 256 --workers 8

A step is forward, backward and update of `tf.keras.applications.ResNet50(weights=None)` in mixed precision on 224x224
uint8 images, which are cast in the graph. It is fed

- from a tensor on the GPU: the most that any loader could give;
- by Penstock on the same host, with the defaults of `dataset()` and --workers workers;
- by `from_generator` with the same generator, `.batch(n).prefetch(AUTOTUNE)`.

In each round each way has a trial of some seconds, all in one process, and each round begins with another way. A
quarter as many steps run uncounted before each trial. A trial ends when the GPU has finished its last step. The first
round warms up and is dropped. Ratios are taken within a round. *Idle* is the share of time in which no kernel ran, as
NVML samples it.

Then the copy of one batch from a slot of Penstock's shared memory to the GPU is timed alone, alternately with the
slot's pages as they are and registered with CUDA (`cudaHostRegister`). That shows what pinning the arena could gain.

It needs tensorflow[and-cuda]. If TensorFlow sees no GPU, it says so and exits with 0.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contestants.penstock_service import daemon
from cuda import Idle, Missing, Nvml, runtime
from measure import Quartiles, digits, ratios
from transport import aligned, machine, progress, stop

FEED = Path(__file__).with_name("gpu_feed.py")
LABELS = {
    "tensor": "a tensor on the GPU",
    "penstock": "Penstock, shared memory",
    "generator": "from_generator, .batch, .prefetch",
}
LEAD_SHARE, LEAD_STEPS, LEAST_STEPS = 0.25, 4, 4
COPIES, COPY_ROUNDS = 20, 9


def step_of(side: int, *, tiny: bool) -> Callable[[Any, Any], Any]:
    """A training step: takes images and labels, returns the loss."""
    import tensorflow as tf

    keras = tf.keras
    keras.mixed_precision.set_global_policy("mixed_float16")
    if tiny:
        layers = [keras.layers.Conv2D(4, 3, strides=4), keras.layers.Flatten(), keras.layers.Dense(1000)]
        model = keras.Sequential([keras.Input((side, side, 3)), *layers])
    else:
        model = keras.applications.ResNet50(weights=None, input_shape=(side, side, 3), classifier_activation=None)
    optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = tf.cast(model(tf.cast(images, tf.float16) / 255, training=True), tf.float32)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            scaled = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        return loss

    return step


def on_device(device: str, first: tuple[Any, Any]) -> Any:
    """Return an iterator that repeats one batch on the device, without a dataset in between."""
    import tensorflow as tf

    with tf.device(device):
        batch = tuple(tf.identity(part) for part in first)

    def endless() -> Iterator[Any]:
        while True:
            yield batch

    return endless()


def from_generator(batch_size: int) -> Any:
    """Return a dataset as in TensorFlow's guide: the generator's samples, batched by tf.data."""
    import gpu_feed
    import tensorflow as tf

    specs = (tf.TensorSpec((gpu_feed.SIDE, gpu_feed.SIDE, 3), tf.uint8), tf.TensorSpec((), tf.int32))
    return (
        tf.data.Dataset.from_generator(gpu_feed.stream, output_signature=specs)
        .batch(batch_size)
        .prefetch(tf.data.AUTOTUNE)
    )


def steps(source: Iterator[Any], step: Callable[[Any, Any], Any], seconds: float, least: int) -> float:
    """Return steps a second, over `seconds` but at least `least` steps, until the GPU has finished the last."""
    count, loss = 0, None
    start = now = time.perf_counter()
    while count < least or now < start + seconds:
        images, labels = next(source)
        loss = step(images, labels)
        count += 1
        now = time.perf_counter()
    float(loss)  # waits for the GPU
    return count / (time.perf_counter() - start)


def trial(source: Iterable[Any], step: Callable[[Any, Any], Any], seconds: float, nvml: Nvml | None) -> dict[str, Any]:
    iterator = iter(source)
    steps(iterator, step, seconds * LEAD_SHARE, LEAD_STEPS)
    with Idle(nvml) as idle:
        rate = steps(iterator, step, seconds, LEAST_STEPS)
    return {"per_second": rate, "idle": idle.share}


def measured(
    sources: dict[str, Iterable[Any]], step: Callable[[Any, Any], Any], repeats: int, seconds: float, nvml: Nvml | None
) -> dict[str, list[dict[str, Any]]]:
    """Run and return the trials of each way of feeding, by name."""
    trials: dict[str, list[dict[str, Any]]] = {name: [] for name in sources}
    for round_ in range(repeats + 1):
        first = round_ % len(sources)
        for name in [*sources][first:] + [*sources][:first]:
            progress(f"round {round_} of {repeats}: {LABELS[name]}")
            one = trial(sources[name], step, seconds, nvml)
            if round_ > 0:
                trials[name].append(one)
    progress("")
    return trials


def pinning(url: str) -> dict[str, Any]:
    """Return the seconds of a batch's copy from a slot to the GPU in each round, or why they cannot be measured."""
    import penstock

    try:
        cuda = runtime()
        with penstock.connect(url, transport="local") as connection:
            images, _ = next(iter(connection.batches()))
            return {"bytes": images.nbytes, **cuda.copy_times(images, COPIES, COPY_ROUNDS)}
    except Missing as reason:
        return {"reason": str(reason)}


def table(result: dict[str, Any]) -> str:
    gpu, units = result["gpu"], result["trials"]["tensor"]
    rows = [["", "steps/s", "images/s", "of the tensor", "idle, %"]]
    for name, trials in result["trials"].items():
        rates = [one["per_second"] for one in trials]
        idle = [one["idle"] * 100 for one in trials if one["idle"] is not None]
        rows.append(
            [
                LABELS[name],
                str(Quartiles.of(rates)),
                str(Quartiles.of([rate * result["batch_size"] for rate in rates])),
                str(Quartiles.of(ratios(trials, units))),
                str(Quartiles.of(idle)) if idle else "-",
            ]
        )
    where = f"{gpu['name']}, driver {gpu['driver']}"
    head = f"{result['model']}, batches of {result['batch_size']}, {result['workers']} workers, {where}"
    return "\n".join([f"{head}; median (quartiles)", *aligned(rows)])


def pinning_table(found: dict[str, Any]) -> str:
    if "reason" in found:
        return f"Copies to the GPU were not timed: {found['reason']}"
    rows = [["", "ms", "GB/s"]]
    for name, label in {"pageable": "as the pages are", "registered": "registered with CUDA"}.items():
        rates = [found["bytes"] / seconds / 1e9 for seconds in found[name]]
        rows.append([label, str(Quartiles.of([seconds * 1e3 for seconds in found[name]])), str(Quartiles.of(rates))])
    size, registering = f"{found['bytes'] / 1e6:.1f} MB", digits(statistics.median(found["registering"]) * 1e3)
    head = f"The copy of a batch of {size} from a slot to the GPU; registering it took {registering} ms"
    return "\n".join([f"{head}; median (quartiles)", *aligned(rows)])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--batch-size", type=int, default=128, help="images in a batch (%(default)s)")
    parser.add_argument("--workers", type=int, default=min(8, max(1, cores - 2)), help="worker processes (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a trial (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help=argparse.SUPPRESS)  # to try the script
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # likewise: a small model and images
    return parser.parse_args()


def main() -> int:
    chosen = options()
    signal.signal(signal.SIGTERM, stop)  # so that `kill` ends the daemon as well
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if chosen.device == "gpu" and not gpus:
        print("skipped: TensorFlow sees no GPU here. It needs the driver and tensorflow[and-cuda].")
        return 0
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)  # leaves memory for the timed copies
    try:
        nvml = Nvml()
        gpu = {"name": nvml.name(), "driver": nvml.driver()}
    except Missing as reason:
        print(f"{reason}; how idle the GPU was is not measured", file=sys.stderr)
        nvml, gpu = None, {"name": chosen.device, "driver": "unknown"}

    side = 32 if chosen.tiny else 224
    variables = {"GPU_SIDE": str(side), "GPU_BATCH": str(chosen.batch_size)}
    os.environ.update(variables)  # this process imports gpu_feed, too
    with ExitStack() as stack:
        url = stack.enter_context(daemon(FEED, variables, "--workers", str(chosen.workers)))
        import penstock

        connection = stack.enter_context(penstock.connect(url, transport="local"))
        served = connection.dataset()
        sources = {
            "tensor": on_device(f"/{chosen.device.upper()}:0", next(iter(served))),
            "penstock": served,
            "generator": from_generator(chosen.batch_size),
        }
        step = step_of(side, tiny=chosen.tiny)
        trials = measured(sources, step, chosen.repeats, chosen.seconds, nvml)
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "gpu": gpu,
            "model": "a tiny model" if chosen.tiny else "ResNet-50, mixed precision",
            "batch_size": chosen.batch_size,
            "workers": chosen.workers,
            "trial_seconds": chosen.seconds,
            "trials": trials,
            "ratios": {name: asdict(Quartiles.of(ratios(trials[name], trials["tensor"]))) for name in trials},
            "pinning": pinning(url),
        }
        del sources, served
    print(table(result), pinning_table(result["pinning"]), sep="\n\n")
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
