"""The nodes. Their widgets are the library's parameters."""

from __future__ import annotations

from typing import Any

import folder_paths
import video_vae

from .vae import ComfyVae
from .widgets import FIXED, own_parameters, shared_parameters, widgets

CATEGORY = "video-vae"

# Where encode notes how large the clip was, so that decode can drop what encode padded. Samplers pass it on.
SIZE = "video_vae_size"


class VideoVaeLoader:
    """A checkpoint on a device, both for the nodes here and for ComfyUI's own."""

    CATEGORY = CATEGORY
    FUNCTION = "load"
    RETURN_TYPES = ("VIDEO_VAE", "VAE")
    RETURN_NAMES = ("video_vae", "vae")
    DESCRIPTION = "Loads a SeedVR2 autoencoder. `vae` plugs into ComfyUI's own VAE sockets."

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        files = (folder_paths.get_filename_list("vae"), {"tooltip": "A file in models/vae: ema_vae_fp16.safetensors."})
        devices = ["auto", *(device.id for device in video_vae.devices())]
        offload = {
            "default": "none",
            "tooltip": "cpu: the GPU's memory is given back after every run, weights too. none: weights stay.",
        }
        return {
            "required": {
                "vae_name": files,
                "device": (devices, {"default": "auto", "tooltip": "auto: the first GPU, or the CPU without one."}),
                "offload_device": (["none", "cpu"], offload),
                **widgets(shared_parameters()),
            }
        }

    def load(self, vae_name: str, device: str, offload_device: str, **parameters: Any) -> tuple:
        path = folder_paths.get_full_path_or_raise("vae", vae_name)
        opened = video_vae.VideoVae(path, device, **parameters, **FIXED)
        if device == "auto":
            # The library takes the first GPU; the CPU comes first in its list, and is the only entry without one.
            device = ([d.id for d in video_vae.devices() if d.id != "cpu"] or ["cpu"])[0]
        vae = ComfyVae(opened, device, offload_device == "cpu")
        return (vae, vae)


class VideoVaeEncode:
    CATEGORY = CATEGORY
    FUNCTION = "encode"
    RETURN_TYPES = ("LATENT",)
    DESCRIPTION = "Images, the frames of one clip, to latents. Any number and size: they are padded as needed."

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        sockets = {"video_vae": ("VIDEO_VAE",), "images": ("IMAGE",)}
        return {"required": {**sockets, **widgets(own_parameters("encode"))}}

    def encode(self, video_vae: ComfyVae, images: Any, **parameters: Any) -> tuple:
        latent = video_vae.encode_clip(images, **parameters)
        return ({"samples": latent, SIZE: tuple(images.shape[-4:-1])},)


class VideoVaeDecode:
    CATEGORY = CATEGORY
    FUNCTION = "decode"
    RETURN_TYPES = ("IMAGE",)
    DESCRIPTION = "Latents to images, in the number and size that was encoded."

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        sockets = {"video_vae": ("VIDEO_VAE",), "latent": ("LATENT",)}
        return {"required": {**sockets, **widgets(own_parameters("decode"))}}

    def decode(self, video_vae: ComfyVae, latent: dict, **parameters: Any) -> tuple:
        samples = latent["samples"]
        size = original_size(video_vae, samples, latent.get(SIZE))
        images = video_vae.decode_clip(samples, size, **parameters)
        return (images.reshape(-1, *images.shape[-3:]),)


def original_size(vae: ComfyVae, samples: Any, size: tuple | None) -> tuple | None:
    """The size that was encoded, if the latents still are of that size: a node between may have scaled or cut them."""
    if size is None or samples.ndim != 5:
        return None
    expected = vae.video_vae.model.latent_shape((samples.shape[0], 3, *size))
    return size if tuple(expected[2:]) == tuple(samples.shape[2:]) else None
