"""ComfyUI's widgets, drawn from what the library says about its parameters."""

from __future__ import annotations

from typing import Any

import video_vae
from video_vae import Parameter

# Not the user's to choose: ComfyUI's images have this range, it names one device, and it never stops for NaN.
FIXED = {
    "pixel_range": "0..1",
    "mixed_devices": "refuse",
    "nonfinite": "propagate",
    "autotune_path": "",
    "device_like": "none",
    "trace": "",
    # ComfyUI's latent formats scale latents themselves.
    "latents": "raw",
    "latent_format": "auto",
}

# What ComfyUI's users have elsewhere: its own SeedVR2 nodes and the diffusion model exchange scaled latents.
DEFAULTS = {"scaling_factor": 0.9152}


# In plain words, for people who have never seen the library.
TOOLTIPS = {
    "memory_limit": "The most GPU memory the VAE may use, such as 6GiB or 80%. auto: all that is free. With less "
    "memory it takes longer, but the result is the same, as long as no tiles are needed.",
    "host_memory_limit": "The most of the computer's own memory that may help out when GPU memory is short, such as "
    "8GiB. auto: what can be spared.",
    "tiles": "If even this does not fit: auto cuts the image into tiles, which can show at their seams; never stops "
    "with an error instead.",
    "threads": "How many processor threads work. 0: all. The result is the same.",
    "instruction_set": "Leave at auto. Which instructions the processor uses.",
    "precision": "Leave at auto: fp16 on a GPU. fp32 is more exact and several times slower.",
    "cache": "u8 halves the memory that long clips need between their frames, for a small loss that is hard to see. "
    "exact loses nothing. On a GPU only.",
    "scaling_factor": "Leave at 0.9152 for SeedVR2. 1.0 gives the plain latents of the autoencoder.",
    "slice_frames": "Leave at 0. How many latent frames are computed at a time. The result is the same.",
    "chunk_frames": "Leave at 0. How many frames a part of the network computes at a time. The result is the same.",
    "rates": "Leave at auto. How fast the device is thought to be when plans are compared. The result is the same.",
    "autotune": "on: measure the GPU once, for two seconds, so that the best plan is found on every card. The result "
    "is the same.",
    "posterior": "mean: the best latent. sample: one drawn at random, as when the model was trained.",
    "seed": "Which random latent posterior = sample draws.",
    "encode_tiled": "Cut the images into tiles even if they fit. Never exact, and not needed to save memory.",
    "decode_tiled": "Cut the images into tiles even if they fit. Never exact, and not needed to save memory.",
    "encode_tile_size": "Height and width of a tile.",
    "decode_tile_size": "Height and width of a tile.",
    "encode_tile_overlap": "How far neighbouring tiles overlap; there they fade into each other.",
    "decode_tile_overlap": "How far neighbouring tiles overlap; there they fade into each other.",
}

# Shown only to who asks for all settings.
ADVANCED = {"instruction_set", "slice_frames", "chunk_frames", "rates", "autotune", "threads", "host_memory_limit"}


def shared_parameters() -> list[Parameter]:
    """Those of both nodes, which belong to the loader."""
    encode, decode = (_keys(node) for node in ("encode", "decode"))
    return [p for key, p in video_vae.parameters().items() if key in encode & decode and key not in FIXED]


def own_parameters(node: str) -> list[Parameter]:
    """Those of one node alone."""
    other = _keys("decode" if node == "encode" else "encode")
    return [p for key, p in video_vae.parameters().items() if key in _keys(node) - other and key not in FIXED]


def _keys(node_id: str) -> set[str]:
    return {p.key for node in video_vae.nodes() if node.id == node_id for p in node.parameters}


def widgets(parameters: list[Parameter]) -> dict[str, tuple]:
    return {parameter.key: _widget(parameter) for parameter in parameters}


def _widget(parameter: Parameter) -> tuple:
    unit = " In pixels." if parameter.unit == "pixels" else ""
    default = DEFAULTS.get(parameter.key, parameter.default)
    options: dict[str, Any] = {"default": default, "tooltip": TOOLTIPS.get(parameter.key, parameter.help) + unit}
    if parameter.key in ADVANCED:
        options["advanced"] = True
    if parameter.kind == "choice":
        return (list(parameter.choices), options)
    if parameter.kind == "bool":
        return ("BOOLEAN", options)
    if parameter.kind == "int":
        # The library's word for "auto" that fits a number field is 0.
        low = 0 if parameter.auto else int(parameter.minimum or 0)
        options.update(default=0 if default == "auto" else default, min=low, max=_whole(parameter.maximum))
        options["step"] = max(1, int(parameter.step or 1))
        return ("INT", options)
    if parameter.kind == "float" and default != "auto":
        # Without "round" the field would round 0.9152 to its step.
        options.update(min=parameter.minimum, max=parameter.maximum, step=parameter.step or 0.01, round=False)
        return ("FLOAT", options)
    return ("STRING", options)


def _whole(maximum: float | None) -> int:
    # As a double, the largest 64-bit number is one too large to be one.
    return min(int(maximum), 2**64 - 1) if maximum is not None else 2**31 - 1
