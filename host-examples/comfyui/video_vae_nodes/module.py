"""Modules of PyTorch as two programs want them: ComfyUI's `first_stage_model`, and the VAE of numz's node pack.

Imported only where PyTorch is there. Both are modules of video_vae.torch with other results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from video_vae.checkpoint import Header
from video_vae.model import Model
from video_vae.torch import Autoencoder, AutoencoderKLSeedVR2, Config, Convention, DiagonalGaussianDistribution

from . import host
from .latents import expanded, tiles


class _InComfyUi:
    """Makes room in ComfyUI's books before a run, and gives the workspace back after it."""

    progress = staticmethod(host.interruptible)

    def _posterior(self, x: torch.Tensor) -> DiagonalGaussianDistribution:
        host.make_room(self.video_vae, "encode", _five(x.shape))
        return self._after(super().encode(x).latent_dist)

    def _pixels(self, z: torch.Tensor) -> torch.Tensor:
        host.make_room(self.video_vae, "decode", _five(z.shape))
        return self._after(super().decode(z).sample)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """There and back."""
        return self._pixels(self._posterior(x).mode())

    def _after(self, result: Any) -> Any:
        if self.device.type == "cuda":
            self.video_vae.trim()
        return result


class FirstStageModel(_InComfyUi, Autoencoder):
    """Tensors in -1..1 in, latents out, and back, as ComfyUI's VAE class asks of its network."""

    def __init__(self, vae: Any, weights: str, dtype: Any, **parameters: Any) -> None:
        self.convention = Convention(images=not vae.is_video, pads=vae.convention.pads, clamps=False)
        super().__init__(weights, "cpu", dtype, config={}, **parameters)
        self._scale, self._packing = vae.video_vae.scaling_factor, vae.packing

    @classmethod
    def _is_for(cls, model: Model) -> bool:
        return True

    def _config(self, model: Model, header: Header) -> Config:
        return Config({"latent_channels": model.latent_channels})

    @property
    def device(self) -> torch.device:
        return self.placeholder.device

    @device.setter
    def device(self, device: Any) -> None:
        """ComfyUI's patcher notes here where it has moved the module to, which the module knows."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        latent = self._posterior(x).mode() * self._scale
        return latent if self._packing is None else self._packing.pack(latent)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        latent = z if self._packing is None else self._packing.unpack(z)
        if not self.convention.images:
            latent = expanded(latent, self.config.latent_channels)
        return self._pixels(latent / self._scale)


class Encoded(NamedTuple):
    latent: torch.Tensor
    posterior: DiagonalGaussianDistribution


class Decoded(NamedTuple):
    sample: torch.Tensor


class SeedVr2Module(_InComfyUi, AutoencoderKLSeedVR2):
    """What numz's upscaler calls. Latents are unscaled, as that pack scales them itself. Single frames have no time
    axis in either direction. Tiles are a hint, unless they are forced."""

    def __init__(self, weights: str, device: Any, dtype: Any, force_tiles: bool, **parameters: Any) -> None:
        super().__init__(weights, device, dtype, **parameters)
        self.force_tiles = force_tiles

    def encode(
        self,
        x: torch.Tensor,
        return_dict: bool = True,
        tiled: bool = False,
        tile_size: tuple[int, int] = (512, 512),
        tile_overlap: tuple[int, int] = (64, 64),
    ) -> Encoded:
        with self._tiled("encode", tiled, tile_size, tile_overlap):
            posterior = self._posterior(x)
        return Encoded(posterior.mode().squeeze(2), posterior)

    def decode(
        self,
        z: torch.Tensor,
        return_dict: bool = True,
        tiled: bool = False,
        tile_size: tuple[int, int] = (512, 512),
        tile_overlap: tuple[int, int] = (64, 64),
    ) -> Decoded:
        with self._tiled("decode", tiled, tile_size, tile_overlap):
            return Decoded(self._pixels(z).squeeze(2))

    def _tiled(self, node: str, tiled: bool, size: tuple[int, int], overlap: tuple[int, int]) -> Any:
        settings = tiles(node, max(size), max(overlap), self.force_tiles) if tiled else {}
        return self.video_vae.configured(**settings)

    def preprocess(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def postprocess(self, x: torch.Tensor) -> torch.Tensor:
        return x


def _five(shape: Any) -> tuple[int, ...]:
    return tuple(shape) if len(shape) == 5 else (*shape[:2], 1, *shape[2:])
