"""Does Penstock keep a GPU fed? Measures a ResNet-50 step that is fed in several ways, and copies to the GPU.

    python benchmarks/gpu.py --json benchmarks/results/gpu-$(date +%F).json
    python benchmarks/gpu.py --framework torch --batch-size 256 --workers 8

A step is forward, backward and update of ResNet-50 in mixed precision on 224x224 uint8 images, which are cast on the
GPU. With TensorFlow it is fed

- from a tensor on the GPU: the most that any loader could give;
- by Penstock on the same host, with the defaults of `dataset()` and --workers workers;
- by `from_generator` with the same generator, `.batch(n).prefetch(AUTOTUNE)`.

With PyTorch it is fed from a tensor on the GPU; by Penstock's `torch()`, as it is and pinned by a DataLoader; and by a
DataLoader over the same generator, with --workers workers of its own and with none.

There are two feeds. One only mirrors an image, so it shows what handing over costs. The other decodes a JPEG file of
500x375 pixels and crops it at random, as trainings on ImageNet do.

In each round each way has a trial of some seconds, all in one process, and each round begins with another way. A
quarter as many steps run uncounted before each trial. A trial ends when the GPU has finished its last step. The first
round warms up and is dropped. Ratios are taken within a round. *Idle* is the share of time in which no kernel ran, as
NVML samples it.

Then the copy of one batch from a slot of Penstock's shared memory to the GPU is timed alone, alternately with the
slot's pages as they are and registered with CUDA (`cudaHostRegister`). That shows what pinning the arena could gain.

It needs tensorflow[and-cuda], or PyTorch and torchvision. If the framework sees no GPU, it says so and exits with 0.
"""

import argparse
import importlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from contestants.penstock_service import daemon
from cuda import Idle, Missing, Nvml, runtime
from measure import Quartiles, digits, ratios
from transport import aligned, machine, progress, stop

FEED = Path(__file__).with_name("gpu_feed.py")
FRAMEWORKS = {"tensorflow": "TensorFlow", "torch": "PyTorch"}
WORKS = {"mirror": "samples are mirrored", "jpeg": "samples are decoded from JPEG and cropped"}
LEAD_SHARE, LEAD_STEPS, LEAST_STEPS = 0.25, 4, 4
COPIES, COPY_ROUNDS = 20, 9


def steps(source: Iterator[Any], step: Callable[[Any], Any], seconds: float, least: int) -> float:
    """Return steps a second, over `seconds` but at least `least` steps, until the GPU has finished the last."""
    count, loss = 0, None
    start = now = time.perf_counter()
    while count < least or now < start + seconds:
        loss = step(next(source))
        count += 1
        now = time.perf_counter()
    float(loss)  # waits for the GPU
    return count / (time.perf_counter() - start)


def trial(source: Iterator[Any], step: Callable[[Any], Any], seconds: float, nvml: Nvml | None) -> dict[str, Any]:
    steps(source, step, seconds * LEAD_SHARE, LEAD_STEPS)
    with Idle(nvml) as idle:
        rate = steps(source, step, seconds, LEAST_STEPS)
    return {"per_second": rate, "idle": idle.share}


def measured(
    sources: dict[str, Iterator[Any]], step: Callable[[Any], Any], repeats: int, seconds: float, nvml: Nvml | None
) -> dict[str, list[dict[str, Any]]]:
    """Run and return the trials of each way of feeding, by name."""
    trials: dict[str, list[dict[str, Any]]] = {name: [] for name in sources}
    for round_ in range(repeats + 1):
        first = round_ % len(sources)
        for name in [*sources][first:] + [*sources][:first]:
            progress(f"round {round_} of {repeats}: {name}")
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


def table(result: dict[str, Any], feed: dict[str, Any]) -> str:
    units = feed["trials"]["tensor"]
    rows = [["", "steps/s", "images/s", "of the tensor", "idle, %"]]
    for name, trials in feed["trials"].items():
        rates = [one["per_second"] for one in trials]
        idle = [one["idle"] * 100 for one in trials if one["idle"] is not None]
        rows.append(
            [
                result["labels"][name],
                str(Quartiles.of(rates)),
                str(Quartiles.of([rate * result["batch_size"] for rate in rates])),
                str(Quartiles.of(ratios(trials, units))),
                str(Quartiles.of(idle)) if idle else "-",
            ]
        )
    head = f"{WORKS[feed['work']]}; batches of {result['batch_size']}, {result['workers']} workers"
    return "\n".join([f"{head}; median (quartiles)", *aligned(rows)])


def tables(result: dict[str, Any]) -> list[str]:
    gpu = result["gpu"]
    where = f"{result['model']}, {FRAMEWORKS[result['framework']]}, {gpu['name']}, driver {gpu['driver']}"
    return [where, *(table(result, feed) for feed in result["feeds"]), pinning_table(result["feeds"][0]["pinning"])]


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
    parser.add_argument("--framework", choices=FRAMEWORKS, default="tensorflow", help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="images in a batch (%(default)s)")
    parser.add_argument("--workers", type=int, default=min(8, max(1, cores - 2)), help="worker processes (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a trial (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help=argparse.SUPPRESS)  # to try the script
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # likewise: a small model and images
    return parser.parse_args()


def feed_trials(work: str, chosen: argparse.Namespace, framework: ModuleType, nvml: Nvml | None) -> dict[str, Any]:
    """Return the trials of all ways with one feed, and the times of copies."""
    import penstock

    side = 32 if chosen.tiny else 224
    variables = {"GPU_SIDE": str(side), "GPU_BATCH": str(chosen.batch_size), "GPU_WORK": work}
    os.environ.update(variables)
    sys.modules.pop("gpu_feed", None)  # this process imports it, too, and it reads these variables
    with ExitStack() as stack:
        url = stack.enter_context(daemon(FEED, variables, "--workers", str(chosen.workers)))

        def connect() -> penstock.Connection:
            return stack.enter_context(penstock.connect(url, transport="local"))

        sources = framework.sources(connect, side, chosen.batch_size, chosen.workers, chosen.device)
        step = framework.step_of(side, chosen.device, tiny=chosen.tiny)
        trials = measured(sources, step, chosen.repeats, chosen.seconds, nvml)
        del sources
        quartiles = {name: asdict(Quartiles.of(ratios(trials[name], trials["tensor"]))) for name in trials}
        return {"work": work, "trials": trials, "ratios": quartiles, "pinning": pinning(url)}


def main() -> int:
    chosen = options()
    signal.signal(signal.SIGTERM, stop)  # so that `kill` ends the daemon as well
    framework = importlib.import_module(f"gpu_{chosen.framework}")
    if chosen.device == "gpu" and not framework.sees_gpu():
        print(f"skipped: {FRAMEWORKS[chosen.framework]} sees no GPU here. It needs {framework.NEEDS}.")
        return 0
    try:
        nvml = Nvml()
        gpu = {"name": nvml.name(), "driver": nvml.driver()}
    except Missing as reason:
        print(f"{reason}; how idle the GPU was is not measured", file=sys.stderr)
        nvml, gpu = None, {"name": chosen.device, "driver": "unknown"}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "gpu": gpu,
        "framework": chosen.framework,
        "labels": framework.LABELS,
        "model": "a tiny model" if chosen.tiny else "ResNet-50, mixed precision",
        "batch_size": chosen.batch_size,
        "workers": chosen.workers,
        "trial_seconds": chosen.seconds,
        "feeds": [feed_trials(work, chosen, framework, nvml) for work in WORKS],
    }
    print(*tables(result), sep="\n\n")
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
