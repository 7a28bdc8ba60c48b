"""PyTorch's global random generators: on that backend of Keras, layers without a seed (`Dropout(0.5)`) draw from them.
Imports PyTorch."""

from __future__ import annotations

import base64

import numpy as np
import torch
from torch.utils.data import DataLoader


def take_states() -> list[str]:
    """Return the states for JSON: that of the CPU, then those of the GPUs in use."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    return [base64.b64encode(state.numpy()).decode() for state in states]


def put_states(states: list[str]) -> None:
    """Restore what `take_states` returned, as far as this machine has these GPUs."""
    cpu, *gpus = (torch.from_numpy(np.frombuffer(base64.b64decode(state), np.uint8).copy()) for state in states)
    torch.set_rng_state(cpu)
    for device, state in enumerate(gpus[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)


def leave_alone(loader: DataLoader[object]) -> None:
    """Make the iterations of `loader` draw nothing from the global generators."""
    loader.generator = torch.Generator()
