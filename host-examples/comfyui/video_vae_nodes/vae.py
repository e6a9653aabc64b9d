"""The autoencoder as ComfyUI knows it: what VAEEncode, VAEDecode and their tiled sisters ask of a VAE."""

from __future__ import annotations

import functools
from typing import Any

from video_vae import VideoVae

from . import host
from .latents import expanded, tiles


class ComfyVae:
    """Images [T, H, W, 3] in 0..1 to latents [B, C, t, h, w] and back, with the calls of ComfyUI's own VAE class."""

    def __init__(self, vae: VideoVae, weights: str, offload: bool = False, force_tiles: bool = False) -> None:
        self.video_vae = vae
        self._weights, self._offload, self._force_tiles = weights, offload, force_tiles
        model = vae.model
        # Attributes that nodes look at.
        self.latent_channels = model.latent_channels
        self.latent_dim = 3
        self.output_channels = model.pixel_channels
        self.not_video = False
        self.crop_input = False
        self.disable_offload = False
        self.handles_tiling = True
        # A number of frames is a function, as in ComfyUI's video VAEs: 4n + 1 make n + 1.
        time, space = model.time_scale, model.spatial_scale
        self.upscale_ratio = (lambda t: max(0, t * time - time + 1), space, space)
        self.upscale_index_formula = (time, space, space)
        self.downscale_ratio = (lambda t: max(0, (t + time - 1) // time), space, space)
        self.downscale_index_formula = (time, space, space)

    # ---- What our own nodes call ----

    def encode_clip(self, images: Any, **parameters: Any) -> Any:
        """One clip [T, H, W, C], or several [B, T, H, W, C]."""
        images = images[..., : self.output_channels]
        layout = "THWC" if images.ndim == 4 else "BTHWC"
        b, t, h, w, c = images.shape if images.ndim == 5 else (1, *images.shape)
        with self.video_vae.configured(**parameters) as vae:
            host.make_room(vae, "encode", (b, c, t, h, w))
            latent = vae.encode(images, layout=layout, dtype="float32", progress=host.progress())
        self._give_back()
        return latent

    def decode_clip(self, samples: Any, size: Any = None, **parameters: Any) -> Any:
        """Latents to images [B, T, H, W, 3]."""
        samples = expanded(samples, self.latent_channels)
        with self.video_vae.configured(**parameters) as vae:
            host.make_room(vae, "decode", samples.shape)
            images = vae.decode(samples, size=size, layout="BTHWC", dtype="float32", progress=host.progress())
        self._give_back()
        return _clamp(images)

    def _give_back(self) -> None:
        # A workspace on the GPU would be missed by the models that come next; on the CPU it is worth keeping.
        if self._offload or self.video_vae.device.startswith("cuda"):
            self.video_vae.trim(weights=self._offload)

    # ---- What ComfyUI's nodes call ----

    def encode(self, pixel_samples: Any) -> Any:
        return self.encode_clip(pixel_samples)

    def decode(self, samples_in: Any, vae_options: Any = None) -> Any:
        return self.decode_clip(samples_in)

    def encode_tiled(
        self,
        pixel_samples: Any,
        tile_x: int | None = None,
        tile_y: int | None = None,
        overlap: int | None = None,
        tile_t: int | None = None,
        overlap_t: int | None = None,
    ) -> Any:
        """Tiles, counted in pixels, are a hint: they come if the whole image does not fit, or if they are forced. Time
        needs none: it is cut exactly, as the memory limit wants."""
        return self.encode_clip(pixel_samples, **self._tiles("encode", tile_x, tile_y, overlap, 1))

    def decode_tiled(
        self,
        samples: Any,
        tile_x: int | None = None,
        tile_y: int | None = None,
        overlap: int | None = None,
        tile_t: int | None = None,
        overlap_t: int | None = None,
    ) -> Any:
        """The same; ComfyUI counts latent pixels here."""
        scale = self.spacial_compression_decode()
        return self.decode_clip(samples, **self._tiles("decode", tile_x, tile_y, overlap, scale))

    def _tiles(self, node: str, tile_x: int | None, tile_y: int | None, overlap: int | None, scale: int) -> dict:
        sizes = [size * scale for size in (tile_x, tile_y) if size is not None]
        return tiles(node, max(sizes, default=None), overlap and overlap * scale, self._force_tiles)

    def spacial_compression_decode(self) -> int:
        return self.upscale_ratio[-1]

    def spacial_compression_encode(self) -> int:
        return self.downscale_ratio[-1]

    def temporal_compression_decode(self) -> int:
        return self.video_vae.model.time_scale

    def throw_exception_if_invalid(self) -> None:
        pass

    def model_size(self) -> int:
        """Bytes of the weights of both directions, loaded or not."""
        model = self.video_vae.model
        pixels = (1, model.pixel_channels, 1, 64, 64)
        encode, decode = self.video_vae.plan_encode(pixels), self.video_vae.plan_decode(model.latent_shape(pixels))
        return encode.weight_bytes + decode.weight_bytes

    def get_ram_usage(self) -> int:
        return self.video_vae.memory_info().host

    def get_sd(self) -> dict:
        raise RuntimeError("a VAE of video-vae cannot be saved: it is the file that it was loaded from")

    def memory_used_encode(self, shape: Any, dtype: Any = None) -> int:
        """Bytes that encoding [B, C, T, H, W] takes beside what is held already."""
        return max(0, host.wanted_bytes(self.video_vae, "encode", shape) - self.video_vae.memory_info().now)

    def memory_used_decode(self, shape: Any, dtype: Any = None) -> int:
        """Bytes that decoding [B, C, t, h, w] takes beside what is held already."""
        if len(shape) == 4:
            shape = (shape[0], self.latent_channels, shape[1] // self.latent_channels, *shape[2:])
        return max(0, host.wanted_bytes(self.video_vae, "decode", shape) - self.video_vae.memory_info().now)

    # ---- What other packs look at; these need PyTorch ----

    @property
    def device(self) -> Any:
        import torch

        return torch.device(self.video_vae.device)

    @property
    def output_device(self) -> Any:
        import torch

        return torch.device("cpu")

    @property
    def vae_dtype(self) -> Any:
        """The type of weights and activations."""
        import torch

        found = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        auto = "fp16" if self.video_vae.device.startswith("cuda") else "fp32"
        precision = self.video_vae.precision
        return found[auto if precision == "auto" else precision]

    @property
    def working_dtypes(self) -> list:
        return [self.vae_dtype]

    def vae_output_dtype(self) -> Any:
        import torch

        return torch.float32

    @staticmethod
    def process_input(images: Any) -> Any:
        """Images to what `first_stage_model` takes."""
        return images * 2.0 - 1.0

    @staticmethod
    def process_output(images: Any) -> Any:
        return images.add_(1.0).div_(2.0).clamp_(0.0, 1.0)

    @functools.cached_property
    def first_stage_model(self) -> Any:
        """A module that encodes and decodes tensors in -1..1. It shares the weights, and has settings of its own."""
        from .module import FirstStageModel

        vae = self.video_vae
        limits = {key: getattr(vae, key) for key in ("memory_limit", "host_memory_limit", "precision", "tiles")}
        return FirstStageModel(self._weights, "cpu", self.vae_dtype, scale=vae.scaling_factor, **limits)

    @functools.cached_property
    def patcher(self) -> Any:
        """ComfyUI's handle on a model. Loading it moves `first_stage_model`, and unloading gives its memory back."""
        import comfy.model_management
        import comfy.model_patcher
        import torch

        return comfy.model_patcher.ModelPatcher(
            self.first_stage_model, load_device=self.device, offload_device=torch.device("cpu"), size=self.model_size()
        )


def _clamp(images: Any) -> Any:
    """Images have values in 0..1; the network goes a little beyond."""
    if hasattr(images, "clamp_"):
        return images.clamp_(0, 1)
    return images.clip(0, 1, out=images)
