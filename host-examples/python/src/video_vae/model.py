"""The sizes of a model: from the shape of a video to that of its latent, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

from . import _abi
from ._calls import c_int64
from .errors import ArgumentError

# A number of frames, rows and columns; None: as many as the latent stands for.
Size = Sequence[Optional[int]]


@dataclass(frozen=True)
class LatentScaling:
    """How a diffusion model reads raw latents z: `(z - shift) * scale`, or `(z - mean) / deviation` of each channel.

    `format` is the published model, or "" where a config.json beside the checkpoint has numbers of its own. `packing`
    rows, and columns, are one before that, and their pixels are `channels`; 1: none are."""

    format: str
    packing: int
    channels: int
    scale: float
    shift: float
    means: tuple[float, ...]
    deviations: tuple[float, ...]


@dataclass(frozen=True)
class Model:
    """The sizes of a model, which make the shapes of its arrays, and what is known of its latents."""

    pixel_channels: int
    latent_channels: int
    spatial_scale: int
    time_scale: int
    decoded_channels: int
    """Of video that is decoded."""
    family: str
    latent_formats: tuple[str, ...]
    """The published models whose latents these may be: values of `latent_format`, if there are several."""
    latents: LatentScaling | None
    """None if they are not known: no published model has such latents, or `latent_format` has to say which one."""

    @classmethod
    def of(cls, desc: _abi.vvae_model_desc) -> Model:
        latents = None
        if desc.latents_known:
            count = desc.statistics_count
            statistics = (tuple(values[:count]) for values in (desc.latent_means, desc.latent_deviations))
            sizes = (desc.packing, desc.packed_channels, desc.latent_scale, desc.latent_shift)
            latents = LatentScaling(desc.latent_format.decode(), *sizes, *statistics)
        formats = tuple(name for name in desc.latent_formats.decode().split(",") if name)
        sizes = (desc.pixel_channels, desc.latent_channels, desc.spatial_scale, desc.time_scale, desc.decoded_channels)
        return cls(*sizes, desc.family.decode(), formats, latents)

    def scaled(self) -> Model:
        """The same model with the latents of the diffusion model."""
        if self.latents is None:
            raise ArgumentError("the latents of the diffusion model are not known; set latents to raw")
        scale = self.spatial_scale * self.latents.packing
        return replace(self, latent_channels=self.latents.channels, spatial_scale=scale)

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
            return (b, self.decoded_channels, *whole)
        if len(size) != 3:
            raise ArgumentError(f"size is {tuple(size)}; it must be (frames, height, width)")
        cut = [full if part is None else c_int64(part, "size") for full, part in zip(whole, size)]
        if min(cut) < 0:
            raise ArgumentError(f"size is {tuple(size)}; no part of it may be negative")
        return (b, self.decoded_channels, *cut)
