"""Notices settings that all generators of a process share, because it cannot keep them apart.

If a generator changes one of them and then yields, its neighbours see the change. So the daemon and `penstock check`
look at them when a feed yields its first sample. Settings that are kept apart are in `process_settings.py`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any


def shared(*, random: bool = False) -> dict[str, Any]:
    """Return the values of the settings by their names. Those of libraries that are not imported are missing.

    `random`: also the random states of libraries. A generator may change these if it seeds them for each sample.
    """
    found = {}
    for name, read in (_SETTINGS | _RANDOM if random else _SETTINGS).items():
        try:
            value = read()
        except Exception:  # a library is not imported, or another version keeps it elsewhere
            continue
        if value is not None:
            found[name] = value
    return found


def changed_since(before: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the settings that differ from `before`, which `shared` returned."""
    now = shared(random=any(name in before for name in _RANDOM))
    return tuple(name for name, value in now.items() if name in before and value != before[name])


def warning(feed: str, names: tuple[str, ...]) -> str:
    """Return the warning that the generator of this feed has changed the settings of these names when it yields."""
    return (
        f"feed {feed}: its generator changes {', '.join(names)}, and yields a sample before it restores that. All "
        f"generators that are open in a worker share it, so samples may depend on the number of workers: {FIX}"
    )


def is_setting(name: str) -> bool:
    """Return whether this is the name of one of the settings."""
    return name in _SETTINGS or name in _RANDOM


FIX = "set it for each sample, and restore it before `yield`"


def _umask() -> str:
    """Return the umask as Linux reports it: os.umask cannot read it without changing it for other threads."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next(line for line in file if line.startswith("Umask:"))


def _handlers() -> list[Any]:
    return [signal.getsignal(number) for number in signal.valid_signals()]


def _alarm() -> bool:
    return signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0)


def _torch_modes() -> tuple[Any, ...]:
    torch = sys.modules["torch"]
    return (
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._len_torch_function_stack(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _tensorflow_strategy() -> bool:
    return bool(sys.modules["tensorflow"].distribute.has_strategy())


def _tensorflow_seed() -> Any:
    context = sys.modules["tensorflow.python.eager.context"]._context
    return None if context is None else (context._seed,)


def _keras() -> tuple[Any, ...]:
    config = sys.modules["keras"].config
    return config.floatx(), config.image_data_format(), config.dtype_policy().name


def _imgaug() -> str:
    return str(sys.modules["imgaug.random"].get_global_rng().state)


_SETTINGS: dict[str, Callable[[], Any]] = {
    "os.umask": _umask,
    "a signal's handler": _handlers,
    "the alarm of signal.setitimer": _alarm,
    "torch's inference mode, autocast or default device": _torch_modes,
    "TensorFlow's strategy": _tensorflow_strategy,
    "the global settings of Keras": _keras,
}
_RANDOM: dict[str, Callable[[], Any]] = {
    "the seed of tf.random": _tensorflow_seed,
    "imgaug's random state": _imgaug,
}

_NUMBER = "int(np.random.randint(2**31))), or with int(rng.integers(2**31)) if the function takes `rng`"

SEED_FIXES = {
    "the seed of tf.random": f"begin each sample with tf.random.set_seed({_NUMBER}",
    "imgaug's random state": f"begin each sample with imgaug.seed({_NUMBER}",
}
"""What to do about each of these random states."""
