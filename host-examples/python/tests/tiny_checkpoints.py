"""Tiny random checkpoints of diffusers' classes, and its modules beside ours."""

import diffusers
import torch
from conftest import GOLDEN

import video_vae.torch as ours
from video_vae import VideoVae

WAN22 = VideoVae(GOLDEN / "families/wan22.safetensors", "cpu").model.latents

LEVELS = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
IMAGE = {**LEVELS, "block_out_channels": [32, 32, 64, 64], "layers_per_block": 1, "norm_num_groups": 32}

# Arguments of diffusers' classes by name.
TINY = {
    "sdxl": ("AutoencoderKL", {**IMAGE, "latent_channels": 4, "scaling_factor": 0.13025}),
    "flux": (
        "AutoencoderKL",
        {
            **IMAGE,
            "latent_channels": 16,
            "scaling_factor": 0.3611,
            "shift_factor": 0.1159,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
        },
    ),
    "wan21": ("AutoencoderKLWan", {"base_dim": 32, "num_res_blocks": 2}),
    "wan22": (
        "AutoencoderKLWan",
        {
            "base_dim": 32,
            "decoder_base_dim": 64,
            "z_dim": 48,
            "is_residual": True,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            "scale_factor_spatial": 16,
            "latents_mean": list(WAN22.means),
            "latents_std": list(WAN22.deviations),
        },
    ),
    "qwen_image_21": ("AutoencoderKLQwenImage21", {"base_dim": 32, "decoder_base_dim": 64}),
    "qwen_image": ("AutoencoderKLQwenImage", {"base_dim": 32, "num_res_blocks": 2}),
    "flux2": ("AutoencoderKLFlux2", {**IMAGE, "latent_channels": 8, "decoder_block_out_channels": [32, 64, 32, 32]}),
}


def randomise(module) -> None:
    """Weights that keep activations near 1."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            if not value.is_floating_point():
                continue
            noise = torch.randn(value.shape, generator=generator)
            if name.endswith("running_var"):
                value.copy_(1 + noise.abs())
            elif value.ndim > 1 and "gamma" not in name:
                value.copy_(noise * value[0].numel() ** -0.5)
            elif name.endswith(("weight", "gamma")):
                value.copy_(1 + 0.1 * noise)
            else:
                value.copy_(0.1 * noise)


def both(name, folder):
    """Diffusers' module and ours, of the same folder."""
    class_name, arguments = TINY[name]
    theirs = getattr(diffusers, class_name)(**arguments).eval()
    randomise(theirs)
    theirs.save_pretrained(folder)
    return theirs, getattr(ours, class_name).from_pretrained(folder)


def close(found, right) -> None:
    assert found.shape == right.shape and found.dtype == right.dtype
    assert (found - right).abs().max() <= 1e-4 * max(1.0, float(right.abs().max()))
