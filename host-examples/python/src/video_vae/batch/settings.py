"""What a worker is told. Plain values, so that it can travel to another process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import BrokenInput
from .fingerprint import bit_settings
from .frames import FrameRule

if TYPE_CHECKING:
    from .. import VideoVae

# What says how latents relate to those of the network.
_LATENTS = ("latents", "latent_format", "scaling_factor")


def latents_of(vae: VideoVae) -> dict[str, Any]:
    """Which latents an object has: these settings, as a sample's JSON has them."""
    return {key: getattr(vae, key) for key in _LATENTS}


def said_latents(about: dict[str, Any]) -> dict[str, Any]:
    """The settings of a sample's latents that its JSON has. Raises BrokenInput."""
    said = {key: about[key] for key in _LATENTS if key in about}
    for key, value in said.items():
        if not isinstance(value, (str, int, float)):
            raise BrokenInput(f"its JSON: {key} is a {type(value).__name__}; it must be text or a number")
    return said


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
