"""What a run needs from ComfyUI: its progress bar, its interrupt button, and room on the GPU."""

from __future__ import annotations

from typing import Any, Callable

import comfy.model_management
import comfy.utils
import video_vae
from video_vae import VideoVae


def progress() -> Callable[[int, int, str], None]:
    """Moves ComfyUI's bar; raises when its user has pressed the button, which cancels the run and comes out of it."""
    bars: dict[str, Any] = {}

    def tell(done: int, total: int, stage: str) -> None:
        interruptible(done, total, stage)
        if total and stage not in ("plan", "load"):
            if stage not in bars:
                bars[stage] = comfy.utils.ProgressBar(total)
            bars[stage].update_absolute(done, total)

    return tell


def interruptible(done: int, total: int, stage: str) -> None:
    """Only the button, for nodes that have a bar of their own."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def make_room(vae: VideoVae, node: str, shape: Any) -> None:
    """Asks ComfyUI to put aside models of its own, as the library's memory is not in its books. The run then plans with
    what has become free."""
    if not vae.device.startswith("cuda"):
        return
    import torch

    missing = wanted_bytes(vae, node, shape) - vae.memory_info().now
    comfy.model_management.free_memory(max(0, missing), torch.device(vae.device))
    comfy.model_management.soft_empty_cache()


def wanted_bytes(vae: VideoVae, node: str, shape: Any) -> int:
    """What a job takes if the rest of the device's memory is free, within a limit that the user gave in bytes."""
    limit = str(vae.memory_limit)
    total = next(device.memory_total for device in video_vae.devices() if device.id == vae.device)
    depends_on_free = limit == "auto" or limit.endswith("%")
    share = float(limit[:-1]) / 100 if limit.endswith("%") else 1.0
    with vae.configured(memory_limit=total if depends_on_free else vae.memory_limit):
        plan = vae.plan_encode(shape) if node == "encode" else vae.plan_decode(shape)
    return min(total, int(plan.device_bytes / share))
