"""What encode and decode return."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch


class _Output:
    """A result that can be read by name, by key and by index."""

    def __getitem__(self, key: str | int | slice) -> Any:
        return getattr(self, key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]


@dataclass
class EncoderOutput(_Output):
    latent_dist: DiagonalGaussianDistribution


@dataclass
class DecoderOutput(_Output):
    sample: torch.Tensor


class DiagonalGaussianDistribution:
    """The distribution of a latent: a mean and a variance for each of its numbers."""

    def __init__(self, mean: torch.Tensor, logvar: torch.Tensor) -> None:
        self.mean = mean
        self.logvar = logvar.clamp(-30.0, 20.0)

    @property
    def parameters(self) -> torch.Tensor:
        return torch.cat([self.mean, self.logvar], dim=1)

    @property
    def std(self) -> torch.Tensor:
        return torch.exp(0.5 * self.logvar)

    @property
    def var(self) -> torch.Tensor:
        return torch.exp(self.logvar)

    def mode(self) -> torch.Tensor:
        return self.mean

    def sample(self, generator: torch.Generator | list[torch.Generator] | None = None) -> torch.Tensor:
        """Draws with PyTorch's noise, the same that diffusers draws. A list has a generator for each of the batch."""
        return self.mean + self.std * _noise(self.mean, generator)

    def kl(self, other: DiagonalGaussianDistribution | None = None) -> torch.Tensor:
        """The divergence from another distribution, or from the normal one; one number for each of the batch."""
        axes = list(range(1, self.mean.ndim))
        if other is None:
            return 0.5 * torch.sum(self.mean.square() + self.var - 1.0 - self.logvar, dim=axes)
        apart = (self.mean - other.mean).square() / other.var
        return 0.5 * torch.sum(apart + self.var / other.var - 1.0 - self.logvar + other.logvar, dim=axes)


def _noise(like: torch.Tensor, generator: torch.Generator | list[torch.Generator] | None) -> torch.Tensor:
    if isinstance(generator, (list, tuple)):
        if len(generator) != like.shape[0]:
            raise ValueError(f"generator has {len(generator)} entries; the batch has {like.shape[0]}")
        return torch.cat([_noise(part, one) for part, one in zip(like.split(1), generator)])
    # A generator of the CPU draws there, so that a seed means the same on every device.
    place = like.device if generator is None else generator.device
    return torch.randn(like.shape, generator=generator, device=place, dtype=like.dtype).to(like.device)
