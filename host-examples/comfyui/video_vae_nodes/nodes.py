"""The nodes. Their widgets are the library's parameters."""

from __future__ import annotations

from typing import Any

import folder_paths
import video_vae

from . import seedvr2
from .conventions import SEEDVR2
from .vae import ComfyVae
from .widgets import FIXED, own_parameters, shared_parameters, widgets

# Without the library this import fails, which ComfyUI shows. Nodes that fail later vanish without a word.
video_vae.version()

CATEGORY = "video-vae"

# Where encode notes how large the clip was, so that decode can drop what encode padded. Samplers pass it on.
SIZE = "video_vae_size"


FORCE_TILES = (
    "BOOLEAN",
    {
        "default": False,
        "tooltip": "Off: tile sizes of other nodes are only a hint, and what fits is computed whole, which is exact. "
        "On: tile as they say, which is never exact.",
    },
)


def _places() -> dict[str, tuple]:
    devices = ["auto", *(device.id for device in video_vae.devices())]
    offload = {
        "default": "none",
        "tooltip": "After a run, none keeps the weights on the GPU, so that the next run starts sooner; cpu frees all "
        "of its memory.",
    }
    return {
        "device": (devices, {"default": "auto", "tooltip": "Where to compute. auto: the first GPU, or the CPU."}),
        "offload_device": (["none", "cpu"], offload),
    }


class VideoVaeLoad:
    """A checkpoint of any model on a device, for ComfyUI's own nodes and for those here."""

    CATEGORY = CATEGORY
    FUNCTION = "load"
    RETURN_TYPES = ("VAE", "VIDEO_VAE")
    RETURN_NAMES = ("vae", "video_vae")
    DESCRIPTION = "Loads a VAE, in place of Load VAE: of SD, SDXL, SD3, FLUX, Wan, Qwen-Image or SeedVR2."

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        files = (folder_paths.get_filename_list("vae"), {"tooltip": "A safetensors file in models/vae."})
        # The scaling is that of ComfyUI's own VAE for the model.
        settings = [parameter for parameter in shared_parameters() if parameter.key != "scaling_factor"]
        return {"required": {"vae_name": files, **_places(), "force_tiles": FORCE_TILES, **widgets(settings)}}

    def load(self, vae_name: str, device: str, offload_device: str, force_tiles: bool, **parameters: Any) -> tuple:
        path = folder_paths.get_full_path_or_raise("vae", vae_name)
        opened = video_vae.VideoVae(path, device, **parameters, **FIXED)
        vae = ComfyVae(opened, path, offload_device == "cpu", force_tiles)
        opened.scaling_factor = vae.convention.scaling_factor
        return (vae, vae)


class VideoVaeLoader:
    """SeedVR2's checkpoint on a device, both for the nodes here and for ComfyUI's own."""

    CATEGORY = CATEGORY
    FUNCTION = "load"
    RETURN_TYPES = ("VIDEO_VAE", "VAE")
    RETURN_NAMES = ("video_vae", "vae")
    DESCRIPTION = "Loads a VAE of SeedVR2, with a choice of the scaling. `vae` plugs into ComfyUI's own VAE sockets."

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        files = (folder_paths.get_filename_list("vae"), {"tooltip": "A file in models/vae: ema_vae_fp16.safetensors."})
        # Optional, as workflows of earlier versions do not have it.
        optional = {"force_tiles": FORCE_TILES}
        return {"required": {"vae_name": files, **_places(), **widgets(shared_parameters())}, "optional": optional}

    def load(
        self, vae_name: str, device: str, offload_device: str, force_tiles: bool = False, **parameters: Any
    ) -> tuple:
        path = folder_paths.get_full_path_or_raise("vae", vae_name)
        opened = video_vae.VideoVae(path, device, **parameters, **FIXED)
        vae = ComfyVae(opened, path, offload_device == "cpu", force_tiles)
        if vae.convention is not SEEDVR2:
            raise ValueError(f"{vae_name} is no VAE of SeedVR2, which this node is for; use Load VAE (video-vae)")
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


class VideoVaeForSeedVR2:
    """For the upscaler of numz's pack, in place of that pack's own VAE loader."""

    CATEGORY = CATEGORY
    FUNCTION = "configure"
    RETURN_TYPES = ("SEEDVR2_VAE",)
    RETURN_NAMES = ("vae",)
    DESCRIPTION = (
        "The VAE for SeedVR2 Video Upscaler, in place of SeedVR2 (Down)Load VAE Model: whole frames instead of tiles, "
        "within the memory that is free."
    )

    # The executed nodes by key, to notice when the pack has dropped one of its VAEs.
    _names: dict[str, str] = {}

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        tip = "A file in models/vae or models/SEEDVR2: ema_vae_fp16.safetensors."
        shared = [parameter for parameter in shared_parameters() if parameter.key != "scaling_factor"]
        tiling = [p for node in ("encode", "decode") for p in own_parameters(node) if "_tile" in p.key]
        hints = {
            key: (kind, {**options, "tooltip": f"{options['tooltip']} A hint, unless force_tiles is on."})
            for key, (kind, options) in widgets(tiling).items()
        }
        settings = {**_places(), **hints, "force_tiles": FORCE_TILES, **widgets(shared)}
        return {
            "required": {"vae_name": (sorted(_seedvr2_files()), {"tooltip": tip}), **settings},
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    @classmethod
    def IS_CHANGED(cls, unique_id: Any = None, **inputs: Any) -> Any:
        key = seedvr2.node_key(unique_id)
        name = cls._names.get(key)
        return float("nan") if name is not None and not seedvr2.is_there(key, name) else ""

    def configure(
        self,
        vae_name: str,
        device: str,
        offload_device: str,
        unique_id: Any,
        force_tiles: bool,
        **parameters: Any,
    ) -> tuple:
        from .module import SeedVr2Module

        key, name = seedvr2.node_key(unique_id), seedvr2.model_name(vae_name)
        tiling = {key: parameters.pop(key) for key in list(parameters) if "_tile" in key}
        path = _seedvr2_files().get(vae_name) or folder_paths.get_full_path_or_raise("vae", vae_name)
        place = video_vae.discovery.default_device() if device == "auto" else device
        # On the CPU until the upscaler moves it: until then it takes nothing of the GPU.
        module = SeedVr2Module(path, "cpu", seedvr2.compute_dtype(), force_tiles, **parameters)
        seedvr2.put(module, key, name)
        self._names[key] = name
        config = {
            "model": name,
            "device": place,
            "offload_device": offload_device,
            # How the upscaler takes the VAE from its cache.
            "cache_model": True,
            **tiling,
            "tile_debug": "false",
            "torch_compile_args": None,
            "node_id": key,
        }
        return (config,)


def _seedvr2_files() -> dict[str, str]:
    """Checkpoints by their names: of models/vae, and of the folder of numz's pack, which also has diffusion models."""
    found = {}
    for kind in ("seedvr2", "vae"):
        try:
            names = folder_paths.get_filename_list(kind)
        except KeyError:  # a kind of folder that nobody has registered
            continue
        for name in names:
            if name.endswith(".safetensors") and (kind == "vae" or "vae" in name):
                found[name] = folder_paths.get_full_path_or_raise(kind, name)
    return found


def original_size(vae: ComfyVae, samples: Any, size: tuple | None) -> tuple | None:
    """The size that was encoded, if the latents still are of that size: a node between may have scaled or cut them."""
    if size is None or samples.ndim != 2 + vae.latent_dim:
        return None
    # Images are clips of one frame.
    clip = size if vae.is_video else (1, *size[1:])
    expected = vae.video_vae.model.latent_shape((samples.shape[0], 3, *clip))
    return clip if tuple(expected[-vae.latent_dim :]) == tuple(samples.shape[2:]) else None
