"""The autoencoder as a module of PyTorch, called the way diffusers' autoencoders are.

    from video_vae.torch import AutoencoderKLSeedVR2

    vae = AutoencoderKLSeedVR2.from_single_file("ema_vae_fp16.safetensors", torch_dtype=torch.float16).to("cuda")
    latents = vae.encode(video).latent_dist.sample(generator) * vae.config.scaling_factor
    video = vae.decode(latents / vae.config.scaling_factor).sample

Needs PyTorch, which nothing else of this package imports. Needs nothing of diffusers.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Callable

import torch

from ._progress import Progress
from .errors import CheckpointError
from .vae import VideoVae

# What the diffusion model multiplies latents by. Nothing here does.
SCALING_FACTOR = 0.9152

# What a folder's file is called: numz's, Comfy-Org's and diffusers' names.
FILES = (
    "ema_vae_fp16.safetensors",
    "seedvr2_ema_vae_fp16.safetensors",
    "ema_vae.safetensors",
    "diffusion_pytorch_model.safetensors",
)

# Parameters of the library that diffusers' calls have no place for.
FIXED = {
    "pixel_range": "pixels are in -1..1",
    "scaling_factor": "nothing is scaled inside; multiply by config.scaling_factor",
    "posterior": "encode gives the distribution",
    "seed": "latent_dist.sample takes a generator",
}

# Types that the library writes itself.
WRITTEN = (torch.float16, torch.bfloat16, torch.float32)


class Config(dict):
    """Settings that can be read as attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {name!r}; it has {', '.join(self)}") from None


class _Output:
    """A result that can be read by name, by key and by index."""

    def __getitem__(self, key: str | int | slice) -> Any:
        return getattr(self, key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]


@dataclass
class EncoderOutput(_Output):
    latent_dist: DiagonalGaussianDistribution


@dataclass
class DecoderOutput(_Output):
    sample: torch.Tensor


class DiagonalGaussianDistribution:
    """The distribution of a latent: a mean and a variance for each of its numbers."""

    def __init__(self, mean: torch.Tensor, logvar: torch.Tensor) -> None:
        self.mean = mean
        self.logvar = logvar.clamp(-30.0, 20.0)

    @property
    def parameters(self) -> torch.Tensor:
        return torch.cat([self.mean, self.logvar], dim=1)

    @property
    def std(self) -> torch.Tensor:
        return torch.exp(0.5 * self.logvar)

    @property
    def var(self) -> torch.Tensor:
        return torch.exp(self.logvar)

    def mode(self) -> torch.Tensor:
        return self.mean

    def sample(self, generator: torch.Generator | list[torch.Generator] | None = None) -> torch.Tensor:
        """Draws with PyTorch's noise, the same that diffusers draws. A list has a generator for each of the batch."""
        return self.mean + self.std * _noise(self.mean, generator)

    def kl(self, other: DiagonalGaussianDistribution | None = None) -> torch.Tensor:
        """The divergence from another distribution, or from the normal one; one number for each of the batch."""
        axes = list(range(1, self.mean.ndim))
        if other is None:
            return 0.5 * torch.sum(self.mean.square() + self.var - 1.0 - self.logvar, dim=axes)
        apart = (self.mean - other.mean).square() / other.var
        return 0.5 * torch.sum(apart + self.var / other.var - 1.0 - self.logvar + other.logvar, dim=axes)


def _noise(like: torch.Tensor, generator: torch.Generator | list[torch.Generator] | None) -> torch.Tensor:
    if isinstance(generator, (list, tuple)):
        if len(generator) != like.shape[0]:
            raise ValueError(f"generator has {len(generator)} entries; the batch has {like.shape[0]}")
        return torch.cat([_noise(part, one) for part, one in zip(like.split(1), generator)])
    # A generator of the CPU draws there, so that a seed means the same on every device.
    place = like.device if generator is None else generator.device
    return torch.randn(like.shape, generator=generator, device=place, dtype=like.dtype).to(like.device)


class _NoBackward(torch.autograd.Function):
    """A call whose results know that they depend on the inputs, so that backward() fails with words."""

    @staticmethod
    def forward(ctx: Any, run: Any, *inputs: torch.Tensor) -> Any:
        return run()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "video-vae computes no gradients: it cannot be trained or differentiated through. Call encode and decode "
            "under torch.no_grad(), or detach() what comes out"
        )


def _entry(call: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is called in place of `forward`: torch.compile leaves it as it is, with a graph before it and one
    after it, and accelerate's hooks move the module as they do around `forward`."""

    def hooked(self: AutoencoderKLSeedVR2, *arguments: Any, **keywords: Any) -> Any:
        hook = getattr(self, "_hf_hook", None)
        if hook is None:
            return call(self, *arguments, **keywords)
        arguments, keywords = hook.pre_forward(self, *arguments, **keywords)
        place = self._place
        try:
            return hook.post_forward(self, call(self, *arguments, **keywords))
        finally:
            self._left(place)

    @functools.wraps(call)
    def calling(*arguments: Any, **keywords: Any) -> Any:
        # Importing the compiler takes seconds. Who compiles has imported it.
        compiled = "torch._dynamo" in sys.modules
        return (torch.compiler.disable(hooked) if compiled else hooked)(*arguments, **keywords)

    return calling


class AutoencoderKLSeedVR2(torch.nn.Module):
    """SeedVR2's autoencoder. Pixels are in -1..1; clips are [B, C, T, H, W], single frames [B, C, H, W].

    `.to(device)` says where to compute: what it leaves gets its memory back, weights too, and the next call reads them
    anew. `.to(dtype)` sets the type of what comes out, not how it is computed, which is the parameter `precision`.
    `parameters()` has one empty entry, for programs that look there for device and type.

    Keywords are those of `VideoVae`, such as memory_limit="6GiB"; `configure` changes them. `progress` is as in
    `video_vae.Progress`, for every call.
    """

    progress: Progress = None

    def __init__(
        self,
        weights: str | os.PathLike,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **parameters: Any,
    ) -> None:
        super().__init__()
        _check_parameters(parameters)
        empty = torch.empty(0, device=device or "cpu", dtype=dtype or torch.float32)
        self.placeholder = torch.nn.Parameter(empty, requires_grad=False)
        self._weights, self._parameters_given = str(Path(weights).absolute()), parameters
        self._opened: dict[str, VideoVae] = {}
        self.use_tiling = self.use_slicing = False
        model = self.video_vae.model
        self.spatial_compression_ratio = model.spatial_scale
        self.temporal_compression_ratio = model.time_scale
        self.config = Config(
            scaling_factor=SCALING_FACTOR,
            in_channels=model.pixel_channels,
            out_channels=model.pixel_channels,
            latent_channels=model.latent_channels,
            spatial_compression_ratio=model.spatial_scale,
            temporal_compression_ratio=model.time_scale,
        )
        self.eval()

    @classmethod
    def from_single_file(
        cls,
        file: str | os.PathLike,
        *,
        torch_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **parameters: Any,
    ) -> AutoencoderKLSeedVR2:
        """Opens a checkpoint's file."""
        return cls(file, device, torch_dtype, **parameters)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike,
        *,
        subfolder: str | None = None,
        torch_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **parameters: Any,
    ) -> AutoencoderKLSeedVR2:
        """Opens the checkpoint in a folder. Nothing is downloaded."""
        return cls(_checkpoint_in(Path(folder, subfolder or "")), device, torch_dtype, **parameters)

    def save_pretrained(self, folder: str | os.PathLike, *, safe_serialization: bool = True) -> None:
        """Writes the checkpoint and its configuration into a folder, for `from_pretrained`. The file is the one that
        was opened, byte for byte."""
        if not safe_serialization:
            raise ValueError("safe_serialization is False; video-vae reads and writes safetensors files alone")
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        config = json.dumps({"_class_name": type(self).__name__, **self.config}, indent=2)
        (target / "config.json").write_text(config + "\n", encoding="utf-8")
        file = target / FILES[-1]
        if not (file.exists() and file.samefile(self._weights)):
            # A process that has the old file open keeps it.
            partial = target / f".{FILES[-1]}.{secrets.token_hex(8)}.partial"
            try:
                shutil.copyfile(self._weights, partial)
                partial.replace(file)
            finally:
                partial.unlink(missing_ok=True)

    # ---- The two calls ----

    @_entry
    def encode(self, x: torch.Tensor, return_dict: bool = True) -> EncoderOutput | tuple:
        """Pixels to the distribution of their latents. Other lengths than 4n + 1 and sizes that are no multiples of 8
        are padded by repeating the last frame, row and column."""
        clip, dtype = _as_clip(x, "x"), self._written_dtype

        def run() -> tuple:
            return self._ready(clip).encode(clip, logvar=True, dtype=dtype, progress=self.progress)

        mean, logvar = (self._result(part, x) for part in self._call(run, x))
        posterior = DiagonalGaussianDistribution(mean, logvar)
        return EncoderOutput(posterior) if return_dict else (posterior,)

    @_entry
    def decode(
        self, z: torch.Tensor, return_dict: bool = True, generator: torch.Generator | None = None
    ) -> DecoderOutput | tuple:
        """Latents to pixels. Nothing is drawn, so `generator` is not needed; diffusers' pipelines pass one."""
        clip, dtype = _as_clip(z, "z"), self._written_dtype
        video = self._call(lambda: self._ready(clip).decode(clip, dtype=dtype, progress=self.progress), z)
        sample = self._result(video, z)
        return DecoderOutput(sample) if return_dict else (sample,)

    def forward(
        self,
        sample: torch.Tensor,
        sample_posterior: bool = False,
        return_dict: bool = True,
        generator: torch.Generator | None = None,
    ) -> DecoderOutput | tuple:
        """There and back: by the mean, or by a sample."""
        posterior = self.encode(sample).latent_dist  # type: ignore[union-attr]
        return self.decode(posterior.sample(generator) if sample_posterior else posterior.mode(), return_dict)

    def _call(self, run: Any, x: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and (x.requires_grad or self.placeholder.requires_grad):
            return _NoBackward.apply(run, x, self.placeholder)
        return run()

    def _result(self, out: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return (out.squeeze(2) if like.ndim == 4 else out).to(self.dtype)

    @property
    def _written_dtype(self) -> torch.dtype:
        return self.dtype if self.dtype in WRITTEN else torch.float32

    def _ready(self, clip: torch.Tensor) -> VideoVae:
        if clip.is_cuda and self.device.type == "cpu":
            raise ValueError(f"the input is on {clip.device} and the module on the CPU; call .to({str(clip.device)!r})")
        if self.device.type == "cuda":
            _release_cached(self.device)
        return self.video_vae

    # ---- Where and how ----

    @property
    def device(self) -> torch.device:
        return self.placeholder.device

    @property
    def dtype(self) -> torch.dtype:
        return self.placeholder.dtype

    @property
    def _place(self) -> str:
        """The library's name of the device. PyTorch may number the CPU."""
        return "cpu" if self.device.type == "cpu" else str(self.device)

    @property
    def video_vae(self) -> VideoVae:
        """The object that computes on the present device: for plans, memory and the last run."""
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"the module is on {self.device}; video-vae computes on a CPU or an NVIDIA GPU")
        name = self._place
        if name not in self._opened:
            self._opened[name] = VideoVae(self._weights, name, **self._parameters_given)
        return self._opened[name]

    def configure(self, **parameters: Any) -> None:
        """Changes parameters of the library, such as memory_limit."""
        _check_parameters(parameters)
        for opened in self._opened.values():
            opened.configure(**parameters)
        self._parameters_given = {**self._parameters_given, **parameters}

    def enable_tiling(
        self,
        tile_sample_min_height: int | None = None,
        tile_sample_min_width: int | None = None,
        tile_sample_stride_height: int | None = None,
        tile_sample_stride_width: int | None = None,
    ) -> None:
        """A hint: tiles come only where the plan needs them, and then as large as they fit, overlapping as these sizes
        do. The parameters encode_tiled and decode_tiled force them."""
        self.use_tiling = True
        pairs = (
            (tile_sample_min_height, tile_sample_stride_height),
            (tile_sample_min_width, tile_sample_stride_width),
        )
        overlaps = [size - stride for size, stride in pairs if size is not None and stride is not None]
        if overlaps:
            self.configure(encode_tile_overlap=max(overlaps), decode_tile_overlap=max(overlaps))

    def disable_tiling(self) -> None:
        """A hint, as `enable_tiling`: a plan that needs tiles has them. The parameter tiles="never" forbids them."""
        self.use_tiling = False

    def enable_slicing(self) -> None:
        """A hint that changes nothing: a batch is cut as the memory needs it, with the same results."""
        self.use_slicing = True

    def disable_slicing(self) -> None:
        self.use_slicing = False

    def _apply(self, *arguments: Any, **keywords: Any) -> AutoencoderKLSeedVR2:
        # Behind to(), cuda(), cpu(), half() and those of a module around this one.
        before = self._place
        super()._apply(*arguments, **keywords)
        self._left(before)
        return self

    def _left(self, before: str) -> None:
        """A device that the module was moved from gets its memory back."""
        if self._place != before and before in self._opened:
            self._opened[before].trim(weights=True)

    def __getstate__(self) -> dict:
        # Copies and pickles open the file themselves.
        return {**self.__dict__, "_opened": {}}

    def extra_repr(self) -> str:
        given = "".join(f", {key}={value!r}" for key, value in self._parameters_given.items())
        return f"{Path(self._weights).name!r}, device={str(self.device)!r}, dtype={self.dtype}{given}"


def _check_parameters(parameters: dict[str, Any]) -> None:
    for key, why in FIXED.items():
        if key in parameters:
            raise TypeError(f"AutoencoderKLSeedVR2 has no parameter {key!r}: {why}")


def _as_clip(x: torch.Tensor, argument: str) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{argument} is a {type(x).__name__}; it must be a torch.Tensor")
    if x.ndim not in (4, 5):
        raise ValueError(f"{argument} has shape {tuple(x.shape)}; it must be [B, C, T, H, W] or [B, C, H, W]")
    if x.is_floating_point() and x.dtype not in WRITTEN:
        x = x.float()
    x = x.detach()
    return x.unsqueeze(2) if x.ndim == 4 else x


def _release_cached(device: torch.device) -> None:
    """Hands memory that PyTorch holds unused back to the driver, as plans count what the driver has free."""
    if torch.cuda.memory_reserved(device) > torch.cuda.memory_allocated(device):
        free, total = torch.cuda.mem_get_info(device)
        # While half of the card is free there is no need, and giving back makes PyTorch's next calls slower.
        if free < total // 2:
            torch.cuda.empty_cache()


def _checkpoint_in(folder: Path) -> Path:
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; it must be one with {FILES[0]}, as nothing is downloaded")
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    known = [name for name in FILES if name in found] or (found if len(found) == 1 else [])
    if not known:
        has = f"has several: {', '.join(found)}; give one of them to from_single_file" if found else "has none"
        raise CheckpointError(f"{folder}: expected {FILES[0]} or one other .safetensors file; it {has}")
    return folder / known[0]
