"""The few CUDA and NVML calls that gpu.py needs, by ctypes from the libraries of the driver and of TensorFlow."""

import ctypes
import ctypes.util
import importlib.util
import threading
import time
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from types import TracebackType

import numpy as np

HOST_TO_DEVICE = 1  # cudaMemcpyKind
PAGE = 4096


class Missing(Exception):
    """A library cannot be loaded, or a call of it failed; the text says which and why."""


def runtimes() -> list[str]:
    """Return CUDA's runtimes: those of TensorFlow's pip packages first, that of the system last."""
    found = importlib.util.find_spec("nvidia")
    folders = found.submodule_search_locations or () if found else ()
    # nvidia/cuda_runtime is CUDA 12, nvidia/cu13 is 13, which another package may have installed.
    shipped = sorted((path for one in folders for path in Path(one).glob("*/lib/libcudart.so.*")), reverse=True)
    return [*map(str, shipped), ctypes.util.find_library("cudart") or "libcudart.so.12"]


def runtime() -> "Runtime":
    """Return the first runtime that works here.

    Raises:
        Missing: none works.
    """
    reasons = []
    for path in runtimes():
        try:
            return Runtime(path)
        except Missing as reason:
            reasons.append(f"{path}: {reason}")
    raise Missing("; ".join(reasons))


class Runtime:
    """Times copies from host memory to the GPU. The memory may be registered with CUDA or not."""

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise Missing(f"cannot be loaded ({error})") from error
        for name, arguments in {
            "cudaSetDevice": (c_int,),
            "cudaMalloc": (c_void_p, c_size_t),
            "cudaFree": (c_void_p,),
            "cudaMemcpy": (c_void_p, c_void_p, c_size_t, c_int),
            "cudaDeviceSynchronize": (),
            "cudaHostRegister": (c_void_p, c_size_t, c_uint),
            "cudaHostUnregister": (c_void_p,),
        }.items():
            getattr(self._library, name).argtypes = arguments
        self._library.cudaGetErrorString.restype = c_char_p
        self._call("cudaSetDevice", 0)

    def _call(self, name: str, *arguments: object) -> None:
        if error := getattr(self._library, name)(*arguments):
            text = self._library.cudaGetErrorString(error)
            raise Missing(f"{name}: {(text or b'unknown error').decode()} ({error})")

    def copy_times(self, array: np.ndarray, copies: int, rounds: int) -> dict[str, list[float]]:
        """Return for each round the seconds of a copy of this array's memory (the mean of `copies`) with pages as they
        are and with registered pages, and the seconds to register them."""
        times: dict[str, list[float]] = {"pageable": [], "registered": [], "registering": []}
        target = c_void_p()
        address, nbytes = array.ctypes.data, array.nbytes
        first = address // PAGE * PAGE
        length = -(-(address + nbytes - first) // PAGE) * PAGE
        self._call("cudaMalloc", byref(target), nbytes)
        try:
            for _ in range(rounds):
                times["pageable"].append(self._copy_time(target, address, nbytes, copies))
                begun = time.perf_counter()
                self._call("cudaHostRegister", first, length, 0)
                times["registering"].append(time.perf_counter() - begun)
                try:
                    times["registered"].append(self._copy_time(target, address, nbytes, copies))
                finally:
                    self._call("cudaHostUnregister", first)
        finally:
            self._call("cudaFree", target)
        return times

    def _copy_time(self, target: c_void_p, address: int, nbytes: int, copies: int) -> float:
        self._call("cudaMemcpy", target, address, nbytes, HOST_TO_DEVICE)  # the first copy may set things up
        self._call("cudaDeviceSynchronize")
        begun = time.perf_counter()
        for _ in range(copies):
            self._call("cudaMemcpy", target, address, nbytes, HOST_TO_DEVICE)
        self._call("cudaDeviceSynchronize")
        return (time.perf_counter() - begun) / copies


class Nvml:
    """The driver's information about the first GPU."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise Missing(f"NVML cannot be loaded: {error}") from error
        self._device = c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(0), byref(self._device))

    def _call(self, name: str, *arguments: object) -> None:
        if error := getattr(self._library, name)(*arguments):
            raise Missing(f"{name} failed ({error})")

    def driver(self) -> str:
        text = ctypes.create_string_buffer(96)
        self._call("nvmlSystemGetDriverVersion", text, c_uint(len(text)))
        return text.value.decode()

    def name(self) -> str:
        text = ctypes.create_string_buffer(96)
        self._call("nvmlDeviceGetName", self._device, text, c_uint(len(text)))
        return text.value.decode()

    def busy(self) -> float:
        """Return the share of the last sampling period, up to a second, in which a kernel ran."""
        shares = (c_uint * 2)()  # percent: of the GPU, and of its memory
        self._call("nvmlDeviceGetUtilizationRates", self._device, shares)
        return float(shares[0]) / 100


class Idle:
    """Samples how busy the GPU is while a block runs."""

    INTERVAL = 0.2

    def __init__(self, nvml: Nvml | None) -> None:
        self._nvml = nvml
        self._samples: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "Idle":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        with suppress(Missing):  # not every GPU reports it
            while self._nvml is not None and not self._stop.wait(self.INTERVAL):
                self._samples.append(self._nvml.busy())

    @property
    def share(self) -> float | None:
        """The share of time in which no kernel ran; None if unknown."""
        return 1 - sum(self._samples) / len(self._samples) if self._samples else None
