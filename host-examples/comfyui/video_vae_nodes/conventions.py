"""What ComfyUI's own VAE class (comfy/sd.py) does with the latents of a model. It knows models by names of tensors."""

from __future__ import annotations

from dataclasses import dataclass

from video_vae.checkpoint import Header


@dataclass(frozen=True)
class Convention:
    pads: bool = False
    """Whether any length and size is padded. Otherwise trailing frames are dropped, and sizes cropped at both ends."""
    scaling_factor: float = 1.0
    """What latents are multiplied by. Latents of most models are scaled elsewhere in ComfyUI."""
    packed: bool = False
    """Whether 2 x 2 pixels of a latent become channels, standardised with numbers of the checkpoint."""

    @staticmethod
    def of(header: Header) -> Convention:
        return next((rule for names, rule in CONVENTIONS.items() if header.matching(names)), DEFAULT)


# Of Stable Diffusion, FLUX.1, Wan, Qwen-Image and other models that the table does not have.
DEFAULT = Convention()
SEEDVR2 = Convention(pads=True, scaling_factor=0.9152)
FLUX2 = Convention(packed=True)

CONVENTIONS = {
    r"decoder\.up_blocks\.\d+\.upsamplers\.0\.upscale_conv\.weight": SEEDVR2,
    r"bn\.running_mean": FLUX2,
}
