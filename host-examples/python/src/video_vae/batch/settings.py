"""What a worker is told. Plain values, so that it can travel to another process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .fingerprint import bit_settings
from .frames import FrameRule


@dataclass(frozen=True)
class Settings:
    """Of one encode run."""

    weights: str
    rule: FrameRule = FrameRule()
    dtype: str = "float16"
    logvar: bool = True
    parameters: dict[str, str] = field(default_factory=dict)

    def all_parameters(self) -> dict[str, str]:
        """Those given, and the factory's defaults. Tiles depend on the memory at hand, so none unless asked for."""
        return {"tiles": "never", **self.parameters}

    def identity(self) -> dict[str, Any]:
        """The part that the files depend on."""
        rule = self.rule
        return {
            "dtype": self.dtype,
            "logvar": self.logvar,
            "buckets": [f"{width}x{height}" for width, height in rule.buckets],
            "max_frames": rule.max_frames,
            "rate": rule.rate,
            "keep_damaged": rule.keep_damaged,
            "parameters": bit_settings("encode", self.all_parameters()),
        }


@dataclass(frozen=True)
class Resources:
    """Of one worker: how it is to run, which no result depends on."""

    readers: int
    slot_bytes: int = 1 << 30
    window: int = 0
    held_bytes: int = 4 << 30

    def items_ahead(self) -> int:
        """How many items may be under way beyond the oldest that is not written yet."""
        return self.window or max(8 * self.readers, 32)
