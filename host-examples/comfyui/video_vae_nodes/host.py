"""What a run needs from ComfyUI: its progress bar, its interrupt button, and room on the GPU."""

from __future__ import annotations

from typing import Any, Callable

import comfy.model_management
import comfy.utils


def progress() -> Callable[[int, int, str], None]:
    """Moves ComfyUI's bar; raises when its user has pressed the button, which cancels the run and comes out of it."""
    bars: dict[str, Any] = {}

    def tell(done: int, total: int, stage: str) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        if total and stage not in ("plan", "load"):
            if stage not in bars:
                bars[stage] = comfy.utils.ProgressBar(total)
            bars[stage].update_absolute(done, total)

    return tell


def make_room(device: str, bytes_: int) -> None:
    """Asks ComfyUI to put aside models of its own, as the library's memory is not in its books."""
    if device.startswith("cuda"):
        import torch

        comfy.model_management.free_memory(bytes_, torch.device(device))
        comfy.model_management.soft_empty_cache()
