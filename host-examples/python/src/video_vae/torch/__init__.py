"""The autoencoders as modules of PyTorch, called the way those of diffusers are.

    from video_vae.torch import AutoencoderKL

    pipe.vae = AutoencoderKL.from_pretrained("FLUX.1-dev", subfolder="vae", torch_dtype=torch.bfloat16).to("cuda")

Needs PyTorch, which nothing else of this package imports. Needs nothing of diffusers.
"""

from .classes import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    AutoencoderKLSeedVR2,
    AutoencoderKLWan,
)
from .module import Autoencoder, Config, Convention
from .outputs import DecoderOutput, DiagonalGaussianDistribution, EncoderOutput

__all__ = [
    "Autoencoder",
    "AutoencoderKL",
    "AutoencoderKLFlux2",
    "AutoencoderKLQwenImage",
    "AutoencoderKLQwenImage21",
    "AutoencoderKLSeedVR2",
    "AutoencoderKLWan",
    "Config",
    "Convention",
    "DecoderOutput",
    "DiagonalGaussianDistribution",
    "EncoderOutput",
]
