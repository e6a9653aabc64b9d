"""A module of PyTorch around the library: what the classes of all models share."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from .._progress import Progress
from ..checkpoint import Header
from ..errors import CheckpointError
from ..model import Model
from ..vae import VideoVae
from .files import FILES, checkpoint_in, config_beside, read_config
from .hooks import NoBackward, entry
from .outputs import DecoderOutput, DiagonalGaussianDistribution, EncoderOutput

# Parameters of the library that diffusers' calls have no place for.
FIXED = {
    "pixel_range": "pixels are in -1..1",
    "scaling_factor": "nothing is scaled inside; multiply by config.scaling_factor",
    "latents": "nothing is scaled inside; config says how the diffusion model scales",
    "posterior": "encode gives the distribution",
    "seed": "latent_dist.sample takes a generator",
}

# Types that the library writes itself.
WRITTEN = (torch.float16, torch.bfloat16, torch.float32)


class Config(dict):
    """Settings that can be read as attributes too. `missing` says why a setting is not there."""

    def __init__(self, values: dict[str, Any], missing: str = "") -> None:
        super().__init__(values)
        self._missing = missing

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            why = f"; {self._missing}" if self._missing else ""
            raise AttributeError(f"the configuration has no {name!r}; it has {', '.join(self)}{why}") from None

    def __reduce__(self) -> tuple:
        return (Config, (dict(self), self._missing))


@dataclass(frozen=True)
class Convention:
    """How the model's own class goes about pixels."""

    images: bool
    """Whether it is for images: one latent frame for each frame."""
    pads: bool
    """Whether any length and size is padded. Otherwise trailing frames are dropped and sizes must fit, as in
    diffusers."""
    clamps: bool
    """Whether decoded pixels are cut to -1..1."""


class Autoencoder(torch.nn.Module):
    """An autoencoder. Pixels are in -1..1; clips are [B, C, T, H, W], single frames [B, C, H, W].

    `.to(device)` says where to compute: what it leaves gets its memory back, weights too, and the next call reads them
    anew. `.to(dtype)` sets the type of what comes out, not how it is computed, which is the parameter `precision`.
    `parameters()` has one empty entry, for programs that look there for device and type.

    Keywords are those of `VideoVae`, such as memory_limit="6GiB"; `configure` changes them. `progress` is as in
    `video_vae.Progress`, for every call.
    """

    convention: ClassVar[Convention]
    families: ClassVar[tuple[str, ...]]
    """Of models, as the library names them."""
    packed: ClassVar[bool] = False
    """Whether the diffusion model packs pixels of latents into channels."""
    progress: Progress = None
    _classes: ClassVar[list[type[Autoencoder]]] = []
    """Those that say what they are for."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "families" in vars(cls):
            Autoencoder._classes.append(cls)

    def __init__(
        self,
        weights: str | os.PathLike,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: str | os.PathLike | dict[str, Any] | None = None,
        **parameters: Any,
    ) -> None:
        """`config` is diffusers' configuration: its file, its folder or its fields. Without it, config.json beside the
        checkpoint counts."""
        super().__init__()
        self._check_parameters(parameters)
        empty = torch.empty(0, device=device or "cpu", dtype=dtype or torch.float32)
        self.placeholder = torch.nn.Parameter(empty, requires_grad=False)
        self._weights, self._parameters_given = str(Path(weights).absolute()), parameters
        self._opened: dict[str, VideoVae] = {}
        self.use_tiling = self.use_slicing = False
        model = self.video_vae.model
        self._check_model(model)
        self.spatial_compression_ratio = model.spatial_scale
        self.temporal_compression_ratio = model.time_scale
        file = Path(self._weights)
        header = Header(file)
        given = config if isinstance(config, dict) else read_config(config) if config else config_beside(file)
        found = self._config(model, header)
        self.config = Config({**found, **given}, found._missing)
        self._read(header)
        self.eval()

    @classmethod
    def from_single_file(
        cls,
        file: str | os.PathLike,
        *,
        torch_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **parameters: Any,
    ) -> Autoencoder:
        """Opens a checkpoint's file: of the autoencoder, or of a whole diffusion model."""
        return cls(file, device, torch_dtype, **parameters)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike,
        *,
        subfolder: str | None = None,
        variant: str | None = None,
        torch_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **parameters: Any,
    ) -> Autoencoder:
        """Opens the checkpoint in a folder. Nothing is downloaded."""
        return cls(checkpoint_in(Path(folder, subfolder or ""), variant), device, torch_dtype, **parameters)

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

    @entry
    def encode(self, x: torch.Tensor, return_dict: bool = True) -> EncoderOutput | tuple:
        """Pixels to the distribution of their latents."""
        clip, dtype = self._fitting(_as_clip(x, "x")), self._written_dtype

        def run() -> tuple:
            return self._ready(clip).encode(clip, logvar=True, dtype=dtype, progress=self.progress)

        mean, logvar = (self._result(part, x) for part in self._call(run, x))
        posterior = DiagonalGaussianDistribution(mean, logvar)
        return EncoderOutput(posterior) if return_dict else (posterior,)

    @entry
    def decode(
        self, z: torch.Tensor, return_dict: bool = True, generator: torch.Generator | None = None
    ) -> DecoderOutput | tuple:
        """Latents to pixels. Nothing is drawn, so `generator` is not needed; diffusers' pipelines pass one."""
        clip, dtype = _as_clip(z, "z"), self._written_dtype
        video = self._call(lambda: self._ready(clip).decode(clip, dtype=dtype, progress=self.progress), z)
        sample = self._result(video.clamp(-1, 1) if self.convention.clamps else video, z)
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

    def _fitting(self, clip: torch.Tensor) -> torch.Tensor:
        """The part of a clip that the model's own class encodes."""
        if self.convention.pads:
            return clip
        space, time = self.spatial_compression_ratio, self.temporal_compression_ratio
        height, width = clip.shape[-2:]
        if height % space or width % space:
            raise ValueError(
                f"x is {height} x {width} pixels; both must be multiples of {space}. Crop it, for example to "
                f"{height - height % space} x {width - width % space}"
            )
        return clip[:, :, : 1 + (clip.shape[2] - 1) // time * time]

    def _call(self, run: Any, x: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and (x.requires_grad or self.placeholder.requires_grad):
            return NoBackward.apply(run, x, self.placeholder)
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
        self._check_parameters(parameters)
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

    # ---- What a class says ----

    def _config(self, model: Model, header: Header) -> Config:
        """The fields of diffusers' configuration that the checkpoint implies."""
        raise NotImplementedError

    def _read(self, header: Header) -> None:
        """Reads what pipelines ask for beside encode and decode."""

    @classmethod
    def _is_for(cls, model: Model) -> bool:
        return model.family in cls.families and cls.packed == (model.latents is not None and model.latents.packing > 1)

    def _check_model(self, model: Model) -> None:
        if not self._is_for(model):
            names = " or ".join(other.__name__ for other in self._classes if other._is_for(model))
            raise CheckpointError(f"{self._weights}: {type(self).__name__} is for other checkpoints; use {names}")

    def _check_parameters(self, parameters: dict[str, Any]) -> None:
        for key, why in FIXED.items():
            if key in parameters:
                raise TypeError(f"{type(self).__name__} has no parameter {key!r}: {why}")

    # ---- What PyTorch calls ----

    def _apply(self, *arguments: Any, **keywords: Any) -> Autoencoder:
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
