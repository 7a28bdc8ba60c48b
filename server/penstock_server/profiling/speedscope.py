"""A profile as a file for https://www.speedscope.app, and for the editors and tools that read this format.

The first profile in it is that of all workers, with equal stacks merged; then comes each worker's, in order of time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .folding import Frame
from .profile import Profile, Stack, frames_of

SCHEMA = "https://www.speedscope.app/file-format-schema.json"

WAITS = Frame("", 0, "(waits)", "")
"""The innermost frame of stacks that were not on a CPU: for files, the network, a lock, or in a sleep."""


def document(profile: Profile, name: str, version: str) -> dict[str, Any]:
    """Return the profile as a value for JSON.

    Args:
        profile: what was sampled.
        name: for the title.
        version: of Penstock.
    """
    merged = sorted(profile.stacks().items(), key=lambda item: [_key(frame) for frame in _seen(*item[0])])
    frames = frames_of(iter([*(stack for (stack, _), _ in merged), (WAITS,)]))
    profiles = [_sampled("all workers", [(stack, ns, on_cpu) for (stack, on_cpu), ns in merged], frames)]
    profiles += [_sampled(f"worker {worker.name}, pid {worker.pid}", worker.runs, frames) for worker in profile.workers]
    return {
        "$schema": SCHEMA,
        "name": name,
        "exporter": f"penstock@{version}",
        "activeProfileIndex": 0,
        "shared": {"frames": [_frame(frame) for frame in frames]},
        "profiles": profiles,
    }


def _sampled(name: str, runs: Iterable[tuple[Stack, int, bool]], frames: dict[Frame, int]) -> dict[str, Any]:
    samples, weights = [], []
    for stack, ns, on_cpu in runs:
        samples.append([frames[frame] for frame in _seen(stack, on_cpu)])
        weights.append(ns / 1e9)
    return {
        "type": "sampled",
        "name": name,
        "unit": "seconds",
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }


def _seen(stack: Stack, on_cpu: bool) -> Stack:
    return stack if on_cpu else (*stack, WAITS)


def _frame(frame: Frame) -> dict[str, Any]:
    if not frame.file:
        return {"name": frame.name}
    where = {"file": frame.file, **({"line": frame.line} if frame.line else {})}
    return {"name": f"{frame.name}:{frame.line}", **where}


def _key(frame: Frame) -> tuple[str, int, str]:
    return frame.file, frame.line, frame.name
