"""Checkpoints of random weights, and ComfyUI's own VAE of each model beside ours, with the same two calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy.model_management as management
import comfy.model_patcher
import comfy.sd
import comfy.utils
import nodes
import torch
from safetensors.torch import save_file

WORKFLOWS = Path(__file__).resolve().parents[2] / "host-examples" / "comfyui" / "workflows"
SEEDVR2_SCALE = 0.9152


def wan21_network() -> torch.nn.Module:
    from comfy.ldm.wan.vae import WanVAE

    sizes = {"dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "temperal_downsample": [False, True, True]}
    return WanVAE(**sizes, image_channels=3, conv_out_channels=3)


def flux_network() -> torch.nn.Module:
    from comfy.ldm.models.autoencoder import AutoencoderKL

    config = {"double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128}
    config.update(ch_mult=[1, 2, 4, 4], num_res_blocks=2, attn_resolutions=[], dropout=0.0)
    network = AutoencoderKL(ddconfig=config, embed_dim=16)
    # FLUX.1 has no 1x1 convolutions beside the latent.
    del network.quant_conv, network.post_quant_conv
    return network


def seedvr2_network() -> torch.nn.Module:
    from comfy.ldm.seedvr.vae import VideoAutoencoderKLWrapper

    return VideoAutoencoderKLWrapper()


NETWORKS = {"wan21": wan21_network, "flux": flux_network, "seedvr2": seedvr2_network}


def write(model: str, path: Path, device: torch.device) -> None:
    """Random weights that keep activations near 1, in f16."""
    with torch.device("meta"):
        network = NETWORKS[model]()
    save_random(network, path, device)


def save_random(network: torch.nn.Module, path: Path, device: torch.device) -> None:
    generator, tensors = torch.Generator(device).manual_seed(0), {}
    for name, value in network.state_dict().items():
        noise = torch.randn(value.shape, generator=generator, device=device)
        if value.ndim > 1:
            noise *= value[0].numel() ** -0.5
        else:
            noise = 0.05 * noise + (1.0 if name.endswith("weight") else 0.0)
        tensors[name] = noise.half().cpu().contiguous()
    # Without this ComfyUI takes SeedVR2's names for those of an image model in diffusers.
    save_file(tensors, path, metadata={"keep_diffusers_format": "true"})


class Core:
    """ComfyUI's own VAE object. Its type is the one that ComfyUI chooses, or `dtype`."""

    def __init__(self, path: Path, dtype: torch.dtype | None = None) -> None:
        weights, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
        self.vae = comfy.sd.VAE(sd=weights, dtype=dtype, metadata=metadata)

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return self.vae.encode(images)

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        return self.vae.decode(latent)

    def release(self) -> None:
        management.unload_all_models()
        management.soft_empty_cache()


class CoreSeedVr2(Core):
    """As ComfyUI's node SeedVR2InputProcessing calls the network, without its resizing and its colour transfer."""

    def __init__(self, path: Path, dtype: torch.dtype | None = None) -> None:
        # This network asks its own weights where they are, which weights that come on demand cannot say.
        usual = getattr(comfy.model_patcher, "CoreModelPatcher", None)
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcher
        try:
            super().__init__(path, dtype)
        finally:
            comfy.model_patcher.CoreModelPatcher = usual

    def _network(self, memory: float) -> torch.nn.Module:
        management.load_models_gpu([self.vae.patcher], memory_required=memory)
        network = self.vae.first_stage_model
        network.device = self.vae.device
        return network

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        video = images.movedim(-1, 0)[None] * 2 - 1
        network = self._network(self.vae.memory_used_encode(video.shape, self.vae.vae_dtype))
        latent = network.encode(video.to(self.vae.device, self.vae.vae_dtype))[0]
        latent = latent if torch.is_tensor(latent) else latent[0]
        latent = latent if latent.ndim == 5 else latent[:, :, None]
        return (latent.float() * SEEDVR2_SCALE).cpu()

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        network = self._network(self.vae.memory_used_decode(latent.shape, self.vae.vae_dtype))
        moved = (latent / SEEDVR2_SCALE).to(self.vae.device, self.vae.vae_dtype)
        return self.vae.process_output(network.slicing_decode(moved).float().cpu()).movedim(1, -1)


class Ours:
    """The VAE that the node Load VAE (video-vae) puts out."""

    def __init__(self, file: str, **settings: Any) -> None:
        workflow = json.loads((WORKFLOWS / "wan21.json").read_text(encoding="utf-8"))
        self.widgets = {**workflow["2"]["inputs"], "vae_name": file, **settings}
        (self.vae, _) = nodes.NODE_CLASS_MAPPINGS["VideoVaeLoad"]().load(**self.widgets)

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return self.vae.encode(images)

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        return self.vae.decode(latent)

    def release(self) -> None:
        self.vae.video_vae.trim(weights=True)


def core(model: str, path: Path, dtype: torch.dtype | None = None) -> Core:
    return (CoreSeedVr2 if model == "seedvr2" else Core)(path, dtype)
