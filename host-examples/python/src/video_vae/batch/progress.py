"""How far a run is, and what it was in figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, TextIO


@dataclass
class Figures:
    """What a worker has done so far."""

    clips: int = 0
    broken: int = 0
    damaged: int = 0
    megapixel_frames: float = 0.0
    bytes: int = 0
    device_seconds: float = 0.0
    feed_wait_seconds: float = 0.0


class ProgressBar:
    """A bar of tqdm's if it is there and the output is a terminal, otherwise a line now and then."""

    def __init__(
        self, total: int, done: int, stream: TextIO | None = None, every: float = 10.0, unit: str = "clip"
    ) -> None:
        self._unit = unit
        self._stream = stream or sys.stderr
        self._total, self._before, self._every = total, done, every
        self._start = self._told = time.monotonic()
        self._bar: Any = None
        if self._stream.isatty():
            try:
                from tqdm import tqdm

                self._bar = tqdm(total=total, initial=done, unit=unit, file=self._stream)
            except ImportError:
                pass

    def show(self, figures: dict[str, Any]) -> None:
        done = self._before + figures["clips"] + figures["broken"]
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            self._bar.set_postfix_str(f"{figures['broken']} broken")
            return
        now = time.monotonic()
        if now - self._told >= self._every:
            self._told = now
            rate = (done - self._before) / (now - self._start)
            text = f"{done} of {self._total} {self._unit}s, {rate:.2f} a second, {figures['broken']} broken"
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def total(figures: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sum over workers."""
    found = asdict(Figures())
    for one in figures:
        for key, value in one.items():
            found[key] += value
    return found


def summary(figures: dict[str, Any], seconds: float, workers: int) -> dict[str, Any]:
    """Rates of an invocation. Device use is the share of the time that the devices had a clip to work on."""
    spent = max(seconds, 1e-9)
    return {
        **figures,
        "seconds": seconds,
        "workers": workers,
        "clips_per_second": figures["clips"] / spent,
        "megapixel_frames_per_second": figures["megapixel_frames"] / spent,
        "device_use": figures["device_seconds"] / (spent * max(workers, 1)),
        "feed_wait": figures["feed_wait_seconds"] / (spent * max(workers, 1)),
    }


def words(figures: dict[str, Any], skipped: int, unit: str = "clip") -> str:
    """The summary for people. `unit` names what was counted."""
    text = (
        f"{figures['clips']} {unit}s in {figures['seconds']:.1f} s: {figures['clips_per_second']:.2f} {unit}s/s, "
        f"{figures['megapixel_frames_per_second']:.2f} megapixel-frames/s, "
        f"{figures['bytes'] / 2**20:.1f} MiB written\n"
        f"devices: {figures['workers']}, in use {100 * figures['device_use']:.0f} % of the time, "
        f"waiting for frames {100 * figures['feed_wait']:.0f} %"
    )
    if skipped:
        text += f"\n{skipped} {'inputs' if unit == 'clip' else unit + 's'} were complete before"
    if figures["broken"]:
        text += f"\n{figures['broken']} are broken; manifest.jsonl says why"
    if figures["damaged"]:
        text += f"\nwarning: {figures['damaged']} are damaged and were kept; manifest.jsonl says where"
    return text
