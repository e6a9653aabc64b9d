"""The files of a checkpoint: where they lie in a folder, and what they say beside the weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import Header
from ..errors import CheckpointError

# What a folder's file is called: numz's, Comfy-Org's and diffusers' names.
FILES = (
    "ema_vae_fp16.safetensors",
    "seedvr2_ema_vae_fp16.safetensors",
    "ema_vae.safetensors",
    "diffusion_pytorch_model.safetensors",
)

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def checkpoint_in(folder: Path, variant: str | None) -> Path:
    """The file of a folder; `variant` is a part of its name, such as "fp16"."""
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; it must be one with {FILES[-1]}, as nothing is downloaded")
    if variant is not None:
        file = folder / f"{Path(FILES[-1]).stem}.{variant}.safetensors"
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file; variant is {variant!r}")
        return file
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    known = [name for name in FILES if name in found] or (found if len(found) == 1 else [])
    if not known:
        has = f"has several: {', '.join(found)}; give one of them to from_single_file" if found else "has none"
        raise CheckpointError(f"{folder}: expected {FILES[-1]} or one other .safetensors file; it {has}")
    return folder / known[0]


def config_beside(file: Path) -> dict[str, Any]:
    """The fields of diffusers' config.json, if there is one beside the checkpoint."""
    path = file.with_name("config.json")
    return read_config(path) if path.is_file() else {}


def read_config(path: str | os.PathLike) -> dict[str, Any]:
    """The fields of diffusers' configuration: a file, or a folder with config.json."""
    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        text = f"config: {file}: {why}; it must be diffusers' config.json, or a folder with it"
        raise CheckpointError(text) from None
    return {key: value for key, value in found.items() if not key.startswith("_")}


def tensor(header: Header, ending: str) -> torch.Tensor:
    """The tensor whose name ends so, in f32."""
    raw = header.read(ending)
    return torch.frombuffer(raw.data, dtype=DTYPES[raw.dtype]).reshape(raw.shape).float()
