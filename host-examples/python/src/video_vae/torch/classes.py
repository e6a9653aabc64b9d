"""One class for each of diffusers', under its name, and one for SeedVR2. What differs stands here."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..checkpoint import Header
from ..model import Model
from .files import tensor
from .module import Autoencoder, Config, Convention

IMAGES = Convention(images=True, pads=False, clamps=False)
LIKE_WAN = Convention(images=False, pads=False, clamps=True)


class AutoencoderKL(Autoencoder):
    """The autoencoder of SD 1.x and 2.x, SDXL, SD3 and FLUX.1.

    SD and SDXL have the same tensors, and so have SD3 and FLUX.1. A folder of diffusers says in config.json which it
    is; a single file needs latent_format="sdxl" or config=FOLDER, or its configuration has no scaling_factor.
    """

    convention = IMAGES
    families = ("kl2d",)

    def _config(self, model: Model, header: Header) -> Config:
        latents, scale, missing = model.latents, {}, ""
        if latents is None:
            words = " or ".join(f'"{name}"' for name in model.latent_formats)
            named = f"latent_format={words}, or " if words else ""
            missing = f"scaling_factor depends on the model: give {named}config=FOLDER"
        else:
            scale = {"scaling_factor": latents.scale, "shift_factor": latents.shift or None}
        fields = {"latents_mean": None, "latents_std": None, "force_upcast": True}
        return Config({**_image_sizes(model, header), **fields, **scale}, missing)

    @property
    def post_quant_conv(self) -> torch.nn.Module:
        """Something with the type of this module: SDXL's pipelines ask the layer of this name for it."""
        return self


class AutoencoderKLFlux2(Autoencoder):
    """The autoencoder of FLUX.2. `bn` has the statistics that its pipelines scale latents with."""

    convention = IMAGES
    families = ("kl2d",)
    packed = True

    def _config(self, model: Model, header: Header) -> Config:
        decoder = header.matching(r"decoder\.up\.(\d+)\.block\.0\.conv1\.weight")
        # diffusers counts levels from the lowest resolution here.
        running = header.matching(r"decoder\.up_blocks\.(\d+)\.resnets\.0\.conv1\.weight")
        channels = _first_dimensions(decoder) or _first_dimensions(running)[::-1]
        fields = {"batch_norm_eps": 1e-4, "batch_norm_momentum": 0.1, "patch_size": [2, 2], "force_upcast": True}
        return Config({**_image_sizes(model, header), "decoder_block_out_channels": channels, **fields})

    def _read(self, header: Header) -> None:
        channels = self.config.latent_channels * math.prod(self.config.patch_size)
        self.bn = torch.nn.BatchNorm2d(channels, eps=self.config.batch_norm_eps, affine=False).eval()
        place = {"device": self.device, "dtype": self.dtype}
        self.bn.running_mean = tensor(header, "bn.running_mean").to(**place)
        self.bn.running_var = tensor(header, "bn.running_var").to(**place)


class _AutoencoderLikeWan(Autoencoder):
    """Trailing frames that make no whole latent frame are dropped, and pixels are cut to -1..1, as in diffusers."""

    convention = LIKE_WAN

    def _config(self, model: Model, header: Header) -> Config:
        latents = model.latents
        mean, std = (None, None) if latents is None else (list(latents.means), list(latents.deviations))
        ((base, pixels, *_),) = header.matching(r"encoder\.conv(?:1|_in)()\.weight").values()
        patch = math.isqrt(pixels // model.pixel_channels)
        levels = int(math.log2(model.spatial_scale // patch))
        halvings = len(header.matching(r"encoder\.(.*\.)time_conv\.weight"))
        fields = {
            "base_dim": base,
            "z_dim": model.latent_channels,
            # The levels at which time is halved are the last ones.
            "temperal_downsample": [level >= levels - halvings for level in range(levels)],
            "latents_mean": mean,
            "latents_std": std,
            "in_channels": pixels,
            "out_channels": pixels,
            "patch_size": None if patch == 1 else patch,
            "scale_factor_temporal": 2**halvings,
            "scale_factor_spatial": model.spatial_scale,
            "is_residual": model.family != "wan21",
        }
        if fields["is_residual"]:
            ((fields["decoder_base_dim"], *_),) = header.matching(r"decoder\.(?:head\.0|norm_out)()\.gamma").values()
        return self._own_fields(Config(fields), header)

    def _own_fields(self, found: Config, header: Header) -> Config:
        """What the configuration of this class has of all."""
        return found

    @property
    def temperal_downsample(self) -> list[bool]:
        return self.config.temperal_downsample

    @property
    def z_dim(self) -> int:
        return self.config.z_dim


class AutoencoderKLWan(_AutoencoderLikeWan):
    """The autoencoder of Wan 2.1, or that of Wan 2.2's 5B model."""

    families = ("wan21", "wan22")


class AutoencoderKLQwenImage(_AutoencoderLikeWan):
    """The autoencoder of Qwen-Image, which is that of Wan 2.1 with other weights."""

    families = ("wan21",)

    def _own_fields(self, found: Config, header: Header) -> Config:
        fields = ("base_dim", "z_dim", "temperal_downsample", "latents_mean", "latents_std")
        return Config({**{key: found[key] for key in fields}, "input_channels": found.in_channels})


class AutoencoderKLQwenImage21(_AutoencoderLikeWan):
    """The autoencoder of Qwen-Image 2.1: images with alpha, with an axis of one frame as in diffusers."""

    convention = Convention(images=True, pads=False, clamps=True)
    families = ("qwen21",)


class AutoencoderKLSeedVR2(Autoencoder):
    """SeedVR2's autoencoder. Other lengths than 4n + 1, and sizes that are no multiples of 8, are padded by repeating
    the last frame, row and column."""

    convention = Convention(images=False, pads=True, clamps=False)
    families = ("seedvr2",)

    def _config(self, model: Model, header: Header) -> Config:
        fields = {
            "scaling_factor": None if model.latents is None else model.latents.scale,
            "in_channels": model.pixel_channels,
            "out_channels": model.pixel_channels,
            "latent_channels": model.latent_channels,
            "spatial_compression_ratio": model.spatial_scale,
            "temporal_compression_ratio": model.time_scale,
        }
        return Config(fields)


def _image_sizes(model: Model, header: Header) -> dict[str, Any]:
    """Sizes under diffusers' names. LDM and diffusers name the tensors differently."""
    levels = header.matching(r"encoder\.down(?:_blocks)?\.(\d+)\.(?:block|resnets)\.0\.conv1\.weight")
    blocks = header.matching(r"encoder\.down(?:_blocks)?\.0\.(?:block|resnets)\.(\d+)\.conv1\.weight")
    has_quant = bool(header.matching(r"quant_conv\.weight"))
    return {
        "in_channels": model.pixel_channels,
        "out_channels": model.pixel_channels,
        "block_out_channels": _first_dimensions(levels),
        "layers_per_block": len(blocks),
        "latent_channels": model.latent_channels,
        "use_quant_conv": has_quant,
        "use_post_quant_conv": has_quant,
    }


def _first_dimensions(shapes: dict[tuple[str, ...], list[int]]) -> list[int]:
    """The first number of each shape, in the order of the numbers in the names."""
    return [shapes[key][0] for key in sorted(shapes, key=lambda key: int(key[0] or 0))]
