"""The autoencoder as ComfyUI knows it: what VAEEncode, VAEDecode and their tiled sisters ask of a VAE."""

from __future__ import annotations

from typing import Any

from video_vae import VideoVae

from . import host


class ComfyVae:
    """Images [T, H, W, 3] in 0..1 to latents [B, C, t, h, w] and back, with the calls of ComfyUI's own VAE class."""

    def __init__(self, vae: VideoVae, device: str, offload: bool = False) -> None:
        self.video_vae = vae
        self._device, self._offload = device, offload
        model = vae.model
        # Attributes that nodes look at.
        self.latent_channels = model.latent_channels
        self.latent_dim = 3
        self.output_channels = model.pixel_channels
        self.not_video = False
        self.crop_input = False
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
        with self.video_vae.configured(**parameters) as vae:
            host.make_room(self._device, vae.plan_encode(images.shape, layout=layout).device_bytes)
            latent = vae.encode(images, layout=layout, dtype="float32", progress=host.progress())
        self._give_back()
        return latent

    def decode_clip(self, samples: Any, size: Any = None, **parameters: Any) -> Any:
        """Latents to images [B, T, H, W, 3]."""
        if samples.ndim == 4:  # latents of single images [B, C, h, w]
            samples = samples[:, :, None]
        with self.video_vae.configured(**parameters) as vae:
            host.make_room(self._device, vae.plan_decode(samples.shape).device_bytes)
            images = vae.decode(samples, size=size, layout="BTHWC", dtype="float32", progress=host.progress())
        self._give_back()
        return _clamp(images)

    def _give_back(self) -> None:
        # A workspace on the GPU would be missed by the models that come next; on the CPU it is worth keeping.
        if self._offload or self._device.startswith("cuda"):
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
        """In tiles of so many pixels. Time needs none: it is cut exactly, as the memory limit wants."""
        return self.encode_clip(pixel_samples, **_tiles("encode", tile_x, tile_y, overlap, 1))

    def decode_tiled(
        self,
        samples: Any,
        tile_x: int | None = None,
        tile_y: int | None = None,
        overlap: int | None = None,
        tile_t: int | None = None,
        overlap_t: int | None = None,
    ) -> Any:
        """In tiles of so many latent pixels, as ComfyUI counts here."""
        scale = self.spacial_compression_decode()
        return self.decode_clip(samples, **_tiles("decode", tile_x, tile_y, overlap, scale))

    def spacial_compression_decode(self) -> int:
        return self.upscale_ratio[-1]

    def spacial_compression_encode(self) -> int:
        return self.downscale_ratio[-1]

    def temporal_compression_decode(self) -> int:
        return self.video_vae.model.time_scale

    def throw_exception_if_invalid(self) -> None:
        pass

    def model_size(self) -> int:
        return self.video_vae.memory_info().now

    def get_ram_usage(self) -> int:
        return self.video_vae.memory_info().host

    def get_sd(self) -> dict:
        raise RuntimeError("a VAE of video-vae cannot be saved: it is the file that it was loaded from")


def _tiles(node: str, tile_x: int | None, tile_y: int | None, overlap: int | None, scale: int) -> dict:
    """Tiles as the library takes them: square, at least 64 pixels, overlapping by less than their size."""
    sizes = [size * scale for size in (tile_x, tile_y) if size is not None]
    settings = {f"{node}_tiled": True}
    if sizes:
        settings[f"{node}_tile_size"] = size = max(64, *sizes)
        if overlap is not None:
            settings[f"{node}_tile_overlap"] = min(overlap * scale, size - 1)
    return settings


def _clamp(images: Any) -> Any:
    """Images have values in 0..1; the network goes a little beyond."""
    if hasattr(images, "clamp_"):
        return images.clamp_(0, 1)
    return images.clip(0, 1, out=images)
