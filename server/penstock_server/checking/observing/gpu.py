"""The GPUs that this process has opened or can see. A worker should have none: the GPU belongs to the trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from .imports import open_paths
from .messages import Gpu

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render")

_COUNTS: dict[str, Callable[[Any], int]] = {
    "torch": lambda torch: torch.cuda.device_count(),
    "tensorflow": lambda tensorflow: len(tensorflow.config.list_physical_devices("GPU")),
    "jax": lambda jax: sum(device.platform != "cpu" for device in jax.devices()),
    "cupy": lambda cupy: cupy.cuda.runtime.getDeviceCount(),
}
"""How to count the devices that a loaded library can use."""


def used() -> Gpu:
    """Return the open device files and, unless variables hide all GPUs, how many GPUs each loaded library sees."""
    files = tuple(sorted({path for path in open_paths().values() if path.startswith(_DEVICES)}))
    visible = []
    if not _hidden():
        for name, count in _COUNTS.items():
            if name in sys.modules:
                try:
                    number = int(count(sys.modules[name]))
                except Exception:  # it cannot use a GPU
                    continue
                if number:
                    visible.append((name, number))
    return Gpu(files, tuple(visible))


def _hidden() -> bool:
    """Return whether the environment hides all GPUs, as workers' environment does unless the feed says otherwise."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") and os.environ.get("HIP_VISIBLE_DEVICES") in ("", "-1")
