"""ComfyUI as a user has it: its folders of models, our nodes in it, and its executor for workflows."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import traceback
from pathlib import Path
from typing import Any, Callable

import comfy.memory_management
import comfy.model_management as management
import comfyui_version
import execution
import folder_paths
import nodes
import torch
import vaes

NODES = Path(__file__).resolve().parents[2] / "host-examples" / "comfyui" / "video_vae_nodes"


class Give:
    """Begins a workflow with what the step has, and tells the step that it begins."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "give"
    CATEGORY = "bench"
    given: dict = {}
    begins: Callable[[], Any] = staticmethod(lambda: None)

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"name": ("STRING", {})}}

    def give(self, name: str) -> tuple:
        Give.begins()
        return (Give.given[name],)


class Keep:
    """Ends a workflow, and keeps what comes out."""

    RETURN_TYPES = ()
    FUNCTION = "keep"
    OUTPUT_NODE = True
    CATEGORY = "bench"
    kept: dict = {}

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        return {"required": {"images": ("IMAGE",)}}

    def keep(self, images: torch.Tensor) -> tuple:
        Keep.kept["images"] = images
        return ()


class Server:
    """Where ComfyUI's executor sends its messages."""

    client_id = last_node_id = last_prompt_id = None

    def send_sync(self, *message: Any) -> None:
        pass


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.rows = options, []
        self.device = management.get_torch_device()
        # The reference in fp32 is one only without this.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self._vae = folder / "vae"
        self.seedvr2_folder = folder / "SEEDVR2"
        for made in (self._vae, self.seedvr2_folder):
            made.mkdir()
        folder_paths.models_dir = str(folder)
        folder_paths.add_model_folder_path("vae", str(self._vae))
        folder_paths.add_model_folder_path("seedvr2", str(self.seedvr2_folder))
        load(NODES)
        nodes.NODE_CLASS_MAPPINGS.update(BenchGive=Give, BenchKeep=Keep)
        known = inspect.signature(execution.PromptExecutor).parameters
        # Older ones have no second.
        settings = {"cache_type": execution.CacheType.CLASSIC, "cache_args": {"ram": 4.0}}
        settings = {key: value for key, value in settings.items() if key in known}
        self._executor = execution.PromptExecutor(Server(), **settings)

    def title(self) -> str:
        import video_vae

        gpu = "CPU"
        if self.device.type == "cuda":
            gpu = f"{torch.cuda.get_device_name(self.device)}, {torch.cuda.get_allocator_backend()}"
        dynamic = "on" if getattr(comfy.memory_management, "aimdo_enabled", False) else "off"
        versions = f"PyTorch {torch.__version__}; video-vae {video_vae.version()}"
        return f"{gpu}; ComfyUI {comfyui_version.__version__}, dynamic VRAM {dynamic}; {versions}"

    def checkpoint(self, model: str) -> Path:
        """Written when first asked for."""
        path = self._vae / f"{model}_vae.safetensors"
        if not path.exists():
            vaes.write(model, path, self.device)
        return path

    def ours(self, model: str, **settings: Any) -> vaes.Ours:
        device = "cpu" if self.device.type == "cpu" else f"cuda:{self.device.index or 0}"
        return vaes.Ours(self.checkpoint(model).name, **{"device": device, **settings})

    def core(self, model: str, dtype: torch.dtype | None = None) -> vaes.Core:
        return vaes.core(model, self.checkpoint(model), dtype)

    def say(self, line: str, **figures: Any) -> None:
        print(line, flush=True)
        if figures:
            self.rows.append(figures)

    def attempt(self, what: str, part: Callable[[], Any]) -> bool:
        """Whether a part ended. One that fails leaves the others worth having."""
        try:
            part()
        except Exception as error:
            places = "".join(traceback.format_tb(error.__traceback__)[-4:])
            print(f"{what} failed: {type(error).__name__}: {str(error)[:600]}\n{places}", flush=True)
            return False
        return True

    def run(self, loader: dict, latent: str) -> str:
        """A workflow that decodes: `success`, `interrupted`, or the message of its error."""
        Keep.kept.clear()
        prompt = {
            "1": {"class_type": "BenchGive", "inputs": {"name": latent}},
            "2": loader,
            "3": {"class_type": "VAEDecode", "inputs": {"samples": ["1", 0], "vae": ["2", 0]}},
            "4": {"class_type": "BenchKeep", "inputs": {"images": ["3", 0]}},
        }
        valid = asyncio.run(execution.validate_prompt("bench", prompt, None))
        if not valid[0]:
            raise RuntimeError(f"ComfyUI does not take the workflow: {valid}")
        self._executor.execute(prompt, "bench", {}, ["4"])
        if self._executor.success:
            return "success"
        name, details = self._executor.status_messages[-1]
        return "interrupted" if name == "execution_interrupted" else str(details.get("exception_message", name))


def load(folder: Path) -> bool:
    """As ComfyUI loads the folders of custom_nodes."""
    if not asyncio.run(nodes.load_custom_node(str(folder))):
        raise RuntimeError(f"{folder} did not load; ComfyUI's log says why")
    return True
