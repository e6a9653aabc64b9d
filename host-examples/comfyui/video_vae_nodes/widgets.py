"""ComfyUI's widgets, drawn from what the library says about its parameters."""

from __future__ import annotations

from typing import Any

import video_vae
from video_vae import Parameter

# ComfyUI's images have this range, so it is not the user's to choose.
FIXED = {"pixel_range": "0..1"}

# What ComfyUI's users have elsewhere: its own SeedVR2 nodes and the diffusion model exchange scaled latents.
DEFAULTS = {"scaling_factor": 0.9152}


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
    unit = f" In {parameter.unit}." if parameter.unit else ""
    default = DEFAULTS.get(parameter.key, parameter.default)
    options: dict[str, Any] = {"default": default, "tooltip": parameter.help + unit}
    if parameter.kind == "choice":
        return (list(parameter.choices), options)
    if parameter.kind == "bool":
        return ("BOOLEAN", options)
    if parameter.kind == "int":
        # The library's word for "auto" that fits a number field is 0.
        low = 0 if parameter.auto else int(parameter.minimum or 0)
        options.update(default=0 if default == "auto" else default, min=low, max=_whole(parameter.maximum))
        options["step"] = max(1, int(parameter.step or 1))
        if parameter.auto:
            options["tooltip"] += " 0: automatic."
        return ("INT", options)
    if parameter.kind == "float" and default != "auto":
        # Without "round" the field would round 0.9152 to its step.
        options.update(min=parameter.minimum, max=parameter.maximum, step=parameter.step or 0.01, round=False)
        return ("FLOAT", options)
    return ("STRING", options)


def _whole(maximum: float | None) -> int:
    # As a double, the largest 64-bit number is one too large to be one.
    return min(int(maximum), 2**64 - 1) if maximum is not None else 2**31 - 1
