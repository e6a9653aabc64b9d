"""When frames are shown. Times are those of the file that was read; a rate stands for them where a file has none."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

# Of latents that nobody gave a rate.
_DEFAULT = Fraction(24)
# Numbers of containers and codecs have 32 bits, times 64.
_MOST, _LAST = 2**31 - 1, 2**62
# Without exponents: 1e999999999 would be computed for hours.
_RATE = re.compile(r"\d{1,10}(\.\d{1,9}|/\d{1,10})?", re.ASCII)


def parse_rate(value: Any) -> Fraction:
    """Frames a second: a number, or a text such as 24, 23.976 or 30000/1001. Raises ValueError."""
    text = str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""
    if len(text) < 40 and _RATE.fullmatch(text) and not re.search("/0+$", text):
        rate = Fraction(text)
        if 0 < rate.numerator <= _MOST and rate.denominator <= _MOST:
            return rate
    raise ValueError(f"{_short(value)} is not a rate such as 24 or 30000/1001")


@dataclass(frozen=True)
class Timing:
    """Frame n is shown at `times[n]` times `base` seconds. `rate` is what a container says beside it."""

    rate: Fraction
    base: Fraction
    times: Sequence[int]

    @classmethod
    def of(cls, about: Mapping[str, Any], frames: int) -> Timing:
        """As a sample of `frames` frames says. Raises ValueError."""
        rate = _DEFAULT if about.get("rate") is None else parse_rate(about["rate"])
        times = about.get("times")
        if times is None:
            return cls(rate, 1 / rate, range(frames))
        if not isinstance(times, list) or len(times) != frames or any(type(time) is not int for time in times):
            raise ValueError(f"times must be {frames} integers, one for each frame")
        for frame, (before, time) in enumerate(zip(times, times[1:]), 1):
            if time <= before:
                raise ValueError(f"times must rise; that of frame {frame} is {time} after {before}")
        if max(abs(times[0]), abs(times[-1])) > _LAST:
            raise ValueError(f"times must be within 2^62; they are {times[0]} to {times[-1]}")
        return cls(rate, 1 / parse_rate(_inverse(about.get("time_base"))), times)

    def part(self, first: int, count: int) -> Timing:
        """Of frames [first, first + count)."""
        return Timing(self.rate, self.base, self.times[first : first + count])


class Times:
    """Collects when frames are shown, counted from the start of the file."""

    def __init__(self, start: int | None) -> None:
        """`start` is in microseconds, as containers have it."""
        self._start = Fraction(start or 0, 1_000_000)
        self._base: Fraction | None = None
        self._times: list[int | None] = []

    def add(self, frame: Any) -> None:
        self._base = frame.time_base
        self._times.append(frame.pts)

    def info(self) -> dict[str, Any]:
        """What a sample says of them. A single frame has no time, and times that do not rise are none."""
        times, base = self._times, self._base
        if len(times) < 2:
            return {}
        for frame, time in enumerate(times):
            if base is None or time is None:
                return {"untimed": f"frame {frame} has no time; the rate stands for it"}
            if frame and time <= times[frame - 1]:
                return {"untimed": f"frame {frame} is not after frame {frame - 1}; the rate stands for their times"}
        shift = round(self._start / base)
        return {"time_base": str(base), "times": [time - shift for time in times]}


def said_by_rate(about: Mapping[str, Any]) -> bool:
    """Whether the times of a sample are those that its rate gives, but for the rounding of the container."""
    times, rate = about.get("times"), about.get("rate")
    if times is None or rate is None:
        return times is None
    base, step = Fraction(about["time_base"]), 1 / Fraction(rate)
    return all(abs(time * base - n * step) < base for n, time in enumerate(times))


def without_times(about: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in about.items() if key not in ("times", "time_base")}


def _inverse(base: Any) -> str:
    """1/90000 as 90000/1."""
    upper, _, lower = base.partition("/") if isinstance(base, str) else ("", "", "")
    if not upper or not lower:
        raise ValueError(f"time_base is {_short(base)}; it must be a text such as 1/90000")
    return f"{lower}/{upper}"


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:60]}..."
