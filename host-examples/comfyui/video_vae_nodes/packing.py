"""The latents of FLUX.2 as ComfyUI's own VAE gives them. Imported only for these, as it needs PyTorch."""

from __future__ import annotations

import torch
from video_vae.checkpoint import Header
from video_vae.torch.files import tensor

# Added to the variance, as in comfy/ldm/models/autoencoder.py.
EPSILON = 1e-4


class Packing:
    """2 x 2 pixels [B, C, h, w] become channels [B, C * 4, h / 2, w / 2], which are standardised."""

    def __init__(self, header: Header) -> None:
        self._mean = tensor(header, "bn.running_mean").view(1, -1, 1, 1)
        self._deviation = torch.sqrt(tensor(header, "bn.running_var").view(1, -1, 1, 1) + EPSILON)

    def pack(self, latent: torch.Tensor) -> torch.Tensor:
        mean, deviation = self._statistics(latent)
        return (torch.nn.functional.pixel_unshuffle(latent, 2) - mean) / deviation

    def unpack(self, samples: torch.Tensor) -> torch.Tensor:
        mean, deviation = self._statistics(samples)
        return torch.nn.functional.pixel_shuffle(samples * deviation + mean, 2)

    def _statistics(self, like: torch.Tensor) -> list[torch.Tensor]:
        return [numbers.to(like) for numbers in (self._mean, self._deviation)]
