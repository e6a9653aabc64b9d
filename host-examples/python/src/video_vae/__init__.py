"""video-vae: autoencoders of diffusion models. Video and images to latents and back, exactly, within a memory limit.

    from video_vae import VideoVae

    with VideoVae("seedvr2", device="auto", memory_limit="6GiB") as vae:  # a file, or a name of `vvae get`
        latent = vae.encode(video)            # [B, 3, T, H, W] float in -1..1, or [T, H, W, 3] uint8
        video = vae.decode(latent)            # [B, 3, T, H, W] float in -1..1
        frames = vae.decode(latent, layout="THWC", dtype="uint8")
        print(vae.plan_decode(latent.shape))
        for frames in vae.stream_decode(latents):
            ...

Arrays are those of NumPy, PyTorch, CuPy, JAX, or anything with `__dlpack__` or `__cuda_array_interface__`. They are
read and written where they are.
"""

import logging

from ._progress import Progress
from .discovery import Device, Node, Parameter, Port, devices, nodes, parameters, version
from .errors import (
    ArgumentError,
    Cancelled,
    CheckpointError,
    DeviceError,
    InternalError,
    MemoryLimitError,
    StateError,
    TensorError,
    VideoVaeError,
)
from .model import LatentScaling, Model
from .stream import Stream
from .vae import DeviceShare, Memory, Plan, RunReport, VideoVae


def __getattr__(name: str) -> str:
    # The library's own version, known once it is loaded.
    if name == "__version__":
        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Failures are raised; their lines in the log are for who wants them.
logging.getLogger(__name__).addHandler(logging.NullHandler())

__all__ = [
    "ArgumentError",
    "Cancelled",
    "CheckpointError",
    "Device",
    "DeviceError",
    "DeviceShare",
    "InternalError",
    "LatentScaling",
    "Memory",
    "MemoryLimitError",
    "Model",
    "Node",
    "Parameter",
    "Plan",
    "Port",
    "Progress",
    "RunReport",
    "StateError",
    "Stream",
    "TensorError",
    "VideoVae",
    "VideoVaeError",
    "devices",
    "nodes",
    "parameters",
    "version",
]
