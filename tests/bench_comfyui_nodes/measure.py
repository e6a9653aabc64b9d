"""Seconds of a call, and the most memory of the device that it takes."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable

import comfy.model_management as management
import torch

GIB = 1 << 30


def used(device: torch.device) -> int:
    """Bytes of the device that are not free, whoever has them."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class Peak:
    """The most bytes in use while it is open. The driver is asked every few milliseconds, because neither ComfyUI nor
    PyTorch counts the memory of others."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._done = device, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.bytes = 0

    def _watch(self) -> None:
        while not self._done.is_set():
            self.bytes = max(self.bytes, used(self._device))
            self._done.wait(0.003)

    def __enter__(self) -> Peak:
        if self._device.type == "cuda":
            self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._done.set()
        if self._device.type == "cuda":
            self._thread.join()


@dataclass
class Measured:
    out: torch.Tensor
    seconds: float
    first: float
    """Seconds of the first call, which loads weights."""
    peak: int


def clock(run: Callable[[], Any]) -> tuple[float, Any]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    out = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began, out


def measure(run: Callable[[], Any], device: torch.device, repeat: int) -> Measured:
    """The memory of the first call, without the watching thread the time of the others."""
    management.soft_empty_cache()
    before = used(device)
    with Peak(device) as peak:
        first, out = clock(run)
    times = [clock(run)[0] for _ in range(repeat)]
    return Measured(out, statistics.median(times or [first]), first, max(0, peak.bytes - before))


def relative_error(found: torch.Tensor, right: torch.Tensor) -> float:
    # In pieces, as a long clip in f64 takes much memory.
    difference = size = 0.0
    for a, b in zip(found.flatten().split(1 << 24), right.flatten().split(1 << 24)):
        difference += float((a.double() - b.double()).square().sum())
        size += float(b.double().square().sum())
    return (difference / size) ** 0.5 if size else float("nan")


def largest_difference(found: torch.Tensor, right: torch.Tensor) -> float:
    pieces = zip(found.flatten().split(1 << 24), right.flatten().split(1 << 24))
    return max(float((a - b).abs().max()) for a, b in pieces)
