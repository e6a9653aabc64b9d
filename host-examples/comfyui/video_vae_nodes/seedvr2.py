"""The node pack ComfyUI-SeedVR2_VideoUpscaler: where it keeps its VAE, and the dictionary that its upscaler takes.

Nothing of that pack is changed: a VAE that lies in its cache is what its upscaler uses.
"""

from __future__ import annotations

import sys
from typing import Any

# The end of the names under which ComfyUI imports that pack's files, whatever its folder is called.
CACHE = ".src.core.model_cache"


def caches() -> list[Any]:
    """The caches of all copies of the pack that are loaded."""
    found = [module for name, module in list(sys.modules.items()) if name.endswith(CACHE)]
    return [module.get_global_cache() for module in found if hasattr(module, "get_global_cache")]


def compute_dtype() -> Any:
    """The type that the pack computes in, for which its VAE is asked too."""
    import torch

    for name, module in list(sys.modules.items()):
        if name.endswith(".src.optimization.compatibility") and hasattr(module, "COMPUTE_DTYPE"):
            return module.COMPUTE_DTYPE
    return torch.bfloat16


def node_key(node_id: Any) -> str:
    """The key in the cache: not the id alone, which may be that of a loader of the pack's in another workflow."""
    return f"video-vae {node_id}"


def model_name(file: str) -> str:
    """Not the file's name: for the names that it knows, the pack looks for a file of its own and downloads it."""
    return f"{file} by video-vae"


def put(module: Any, key: str, name: str) -> None:
    """Puts a module where the upscaler looks for one it has used before."""
    found = caches()
    if not found:
        raise RuntimeError(
            "the nodes of ComfyUI-SeedVR2_VideoUpscaler are not loaded; this node is for them. Install that pack, or "
            "use Load Video VAE for ComfyUI's own SeedVR2 nodes"
        )
    module._model_name = name
    for cache in found:
        cache.remove_vae({"node_id": key})
        cache.set_vae({"node_id": key, "cache_model": True}, module, name)


def is_there(key: str, name: str) -> bool:
    """Whether the upscaler would still find it."""
    found = [cache.get_vae({"node_id": key, "cache_model": True}) for cache in caches()]
    return bool(found) and all(getattr(module, "_model_name", None) == name for module in found)
