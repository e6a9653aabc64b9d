"""The autoencoder as ComfyUI knows it: what VAEEncode, VAEDecode and their tiled sisters ask of a VAE."""

from __future__ import annotations

import functools
from typing import Any

from video_vae import VideoVae
from video_vae.checkpoint import Header

from . import host
from .conventions import Convention
from .latents import expanded, tiles, with_channels


class ComfyVae:
    """Images [N, H, W, 3] in 0..1 to latents and back, with the calls and rules of ComfyUI's own VAE class. A model of
    images has latents [N, C, h, w]. For a model of video the images are the frames of one clip, [1, C, t, h, w]."""

    def __init__(self, vae: VideoVae, weights: str, offload: bool = False, force_tiles: bool = False) -> None:
        self.video_vae = vae
        self._weights, self._offload, self._force_tiles = weights, offload, force_tiles
        header, model = Header(weights), vae.model
        self.convention = Convention.of(header)
        self.packing = self._packing(header) if self.convention.packed else None
        side = 1 if self.packing is None else 2
        self.is_video = model.time_scale > 1
        # Attributes that nodes look at.
        self.latent_channels = model.latent_channels * side * side
        self.latent_dim = 3 if self.is_video else 2
        self.output_channels = model.pixel_channels
        self.pad_channel_value = 1.0
        self.not_video = False
        self.crop_input = not self.convention.pads
        self.disable_offload = False
        self.handles_tiling = True
        self._set_ratios(model.time_scale, model.spatial_scale * side)

    @staticmethod
    def _packing(header: Header) -> Any:
        from .packing import Packing

        return Packing(header)

    def _set_ratios(self, time: int, space: int) -> None:
        if not self.is_video:
            self.upscale_ratio = self.downscale_ratio = space
            self.upscale_index_formula = self.downscale_index_formula = None
            return
        # A number of frames is a function, as in ComfyUI's video VAEs: 4n + 1 make n + 1.
        self.upscale_ratio = (lambda t: max(0, t * time - time + 1), space, space)
        self.downscale_ratio = (lambda t: max(0, (t + time - 1) // time), space, space)
        self.upscale_index_formula = self.downscale_index_formula = (time, space, space)

    # ---- What our own nodes call ----

    def encode_clip(self, images: Any, **parameters: Any) -> Any:
        """Images [N, H, W, C], or clips [B, T, H, W, C], padded where they do not fit."""
        images = with_channels(images, self.output_channels, self.pad_channel_value)
        if self.packing is not None:
            images = self._cropped(images)
        if self.is_video:
            clips = images if images.ndim == 5 else images[None]
        else:
            clips = images.reshape(-1, 1, *images.shape[-3:])
        b, t, h, w, c = clips.shape
        with self.video_vae.configured(**parameters) as vae:
            host.make_room(vae, "encode", (b, c, t, h, w))
            latent = vae.encode(clips, layout="BTHWC", dtype="float32", progress=host.progress())
        self._give_back()
        if not self.is_video:
            latent = latent[:, :, 0]
        return latent if self.packing is None else self.packing.pack(latent)

    def decode_clip(self, samples: Any, size: Any = None, **parameters: Any) -> Any:
        """Latents to images [B, T, H, W, C], or [N, H, W, C] for a model of images."""
        samples = self._unpacked(samples)
        with self.video_vae.configured(**parameters) as vae:
            host.make_room(vae, "decode", samples.shape)
            images = vae.decode(samples, size=size, layout="BTHWC", dtype="float32", progress=host.progress())
        self._give_back()
        return _clamp(images if self.is_video else images[:, 0])

    def _unpacked(self, samples: Any) -> Any:
        """Latents as the network has them, [B, C, t, h, w]."""
        if self.is_video:
            return expanded(samples, self.latent_channels)
        # ComfyUI takes the first frame of what has several.
        samples = samples[:, :, 0] if samples.ndim == 5 else samples
        return (samples if self.packing is None else self.packing.unpack(samples))[:, :, None]

    def _cropped(self, images: Any) -> Any:
        """What ComfyUI's own class encodes: the middle of each image, and the frames that make whole latent frames."""
        space = self.spacial_compression_encode()
        height, width = images.shape[-3:-1]
        top, left = height % space // 2, width % space // 2
        images = images[..., top : top + height // space * space, left : left + width // space * space, :]
        time = self.video_vae.model.time_scale
        frames = 1 + (images.shape[-4] - 1) // time * time
        return images[..., :frames, :, :, :] if self.is_video else images

    def _give_back(self) -> None:
        # A workspace on the GPU would be missed by the models that come next; on the CPU it is worth keeping.
        if self._offload or self.video_vae.device.startswith("cuda"):
            self.video_vae.trim(weights=self._offload)

    # ---- What ComfyUI's nodes call ----

    def encode(self, pixel_samples: Any) -> Any:
        return self.encode_clip(self._fitting(pixel_samples))

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
        settings = self._tiles("encode", tile_x, tile_y, overlap, 1)
        return self.encode_clip(self._fitting(pixel_samples), **settings)

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

    def _fitting(self, images: Any) -> Any:
        return self._cropped(images) if self.crop_input else images

    def spacial_compression_decode(self) -> int:
        return self.upscale_ratio[-1] if self.is_video else self.upscale_ratio

    def spacial_compression_encode(self) -> int:
        return self.downscale_ratio[-1] if self.is_video else self.downscale_ratio

    def temporal_compression_decode(self) -> int | None:
        return self.video_vae.model.time_scale if self.is_video else None

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
        """Bytes that encoding [B, C, T, H, W], or images [N, C, H, W], takes beside what is held already."""
        five = shape if len(shape) == 5 else (*shape[:2], 1, *shape[2:])
        return max(0, host.wanted_bytes(self.video_vae, "encode", five) - self.video_vae.memory_info().now)

    def memory_used_decode(self, shape: Any, dtype: Any = None) -> int:
        """Bytes that decoding latents takes beside what is held already."""
        channels, side = self.video_vae.model.latent_channels, 1 if self.packing is None else 2
        height, width = (length * side for length in shape[-2:])
        frames = shape[2] if len(shape) == 5 else shape[1] // self.latent_channels
        five = (shape[0], channels, frames if self.is_video else 1, height, width)
        return max(0, host.wanted_bytes(self.video_vae, "decode", five) - self.video_vae.memory_info().now)

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
        return FirstStageModel(self, self._weights, self.vae_dtype, **limits)

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
