"""Images, latents and tile settings as ComfyUI has them, in the library's terms."""

from __future__ import annotations

from typing import Any


def expanded(samples: Any, latent_channels: int) -> Any:
    """Latents with a time axis: [B, C, h, w] are single frames, [B, C * t, h, w] clips as SeedVR2's sampler has."""
    if samples.ndim != 4:
        return samples
    b, channels, h, w = samples.shape
    if channels % latent_channels:
        raise ValueError(
            f"latents have shape {tuple(samples.shape)}; the second number must be {latent_channels}, or that times "
            "the number of latent frames"
        )
    return samples.reshape(b, latent_channels, channels // latent_channels, h, w)


def tiles(node: str, size: int | None, overlap: int | None, force: bool) -> dict:
    """Tiles as the library takes them: square, at least 64 pixels, overlapping by less than their size. As a hint, only
    the overlap counts: where tiles are needed, the plan takes the largest that fit."""
    settings: dict[str, Any] = {f"{node}_tiled": True} if force else {}
    if size is not None:
        size = max(64, size)
        if force:
            settings[f"{node}_tile_size"] = size
        if overlap is not None:
            settings[f"{node}_tile_overlap"] = min(overlap, size - 1)
    return settings


def with_channels(images: Any, channels: int, value: float) -> Any:
    """Images [..., C] with the number of channels that a model has. Further ones are dropped; missing ones, such as
    alpha, have one value."""
    missing = channels - images.shape[-1]
    if missing <= 0:
        return images[..., :channels]
    import torch

    return torch.nn.functional.pad(images, (0, missing), value=value)
