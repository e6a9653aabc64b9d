"""The sizes of a model: from the shape of a video to that of its latent, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from ._calls import c_int64
from .errors import ArgumentError

# A number of frames, rows and columns; None: as many as the latent stands for.
Size = Sequence[Optional[int]]


@dataclass(frozen=True)
class Model:
    """The sizes of a model, which make the shapes of its arrays."""

    pixel_channels: int
    latent_channels: int
    spatial_scale: int
    time_scale: int

    def latent_shape(self, video: Sequence[int]) -> tuple[int, ...]:
        """[B, C, T, H, W] of the latent of a video [B, C, T, H, W]."""
        b, _, t, h, w = video
        scale = self.spatial_scale
        return (b, self.latent_channels, 1 + -(-(t - 1) // self.time_scale), -(-h // scale), -(-w // scale))

    def video_shape(self, latent: Sequence[int], size: Size | None = None) -> tuple[int, ...]:
        """[B, C, T, H, W] of the video of a latent [B, C, T, H, W], cut to a size."""
        b, _, t, h, w = latent
        whole = (max(1 + (t - 1) * self.time_scale, 0), h * self.spatial_scale, w * self.spatial_scale)
        if size is None:
            return (b, self.pixel_channels, *whole)
        if len(size) != 3:
            raise ArgumentError(f"size is {tuple(size)}; it must be (frames, height, width)")
        cut = (full if part is None else c_int64(part, "size") for full, part in zip(whole, size))
        return (b, self.pixel_channels, *cut)
