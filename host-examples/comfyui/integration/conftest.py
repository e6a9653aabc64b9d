"""The nodes inside the real ComfyUI and beside the real pack, run by tests/integration.sh.

COMFYUI and SEEDVR2_PACK are their folders. Nothing of either is a part of this repository.
"""

import asyncio
import inspect
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "video_vae_nodes"
PYTHON = HERE.parents[1] / "python" / "src"
GOLDEN = HERE.parents[2] / "tests" / "golden"

torch = pytest.importorskip("torch")
if "COMFYUI" not in os.environ:
    pytest.skip("COMFYUI is not set", allow_module_level=True)
sys.path[:0] = [os.environ["COMFYUI"], str(PYTHON)]

# As `python main.py --cpu`.
sys.argv = ["main.py", *([] if torch.cuda.is_available() else ["--cpu"])]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import execution  # noqa: E402
import folder_paths  # noqa: E402
import nodes  # noqa: E402


def load(folder: Path) -> None:
    """As ComfyUI loads the folders of custom_nodes."""
    assert asyncio.run(nodes.load_custom_node(str(folder))), f"{folder} did not load; ComfyUI's log says why"


class Keep:
    """Ends a workflow, and keeps what comes out for the test."""

    RETURN_TYPES = ()
    FUNCTION = "keep"
    OUTPUT_NODE = True
    CATEGORY = "test"
    kept: dict = {}

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": ("*", {}), "name": ("STRING", {})}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types):
        return True

    def keep(self, value, name):
        Keep.kept[name] = value
        return ()


class Give:
    """Begins a workflow with what the test has."""

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "give"
    CATEGORY = "test"
    given: dict = {}

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"name": ("STRING", {})}}

    def give(self, name):
        return (Give.given[name],)


nodes.NODE_CLASS_MAPPINGS.update(Keep=Keep, Give=Give)


class Server:
    """Where ComfyUI's executor sends its messages."""

    client_id = last_node_id = last_prompt_id = None

    def send_sync(self, *message):
        pass


@pytest.fixture
def run():
    """Runs workflows in API format with ComfyUI's own executor, all in one session of it."""
    # Older ones have no second.
    options = {"cache_type": execution.CacheType.CLASSIC, "cache_args": {"ram": 4.0}}
    known = inspect.signature(execution.PromptExecutor).parameters
    executor = execution.PromptExecutor(Server(), **{key: value for key, value in options.items() if key in known})

    def start(prompt: dict) -> dict:
        Keep.kept = {}
        ends = [key for key, step in prompt.items() if step["class_type"] == "Keep"]
        valid = asyncio.run(execution.validate_prompt("test", prompt, None))
        assert valid[0], valid
        executor.execute(prompt, "test", {}, ends)
        assert executor.success, executor.status_messages[-1]
        return Keep.kept

    return start


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder of models with a file of our own making."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "vae").mkdir()
    (folder / "SEEDVR2").mkdir()
    (folder / "vae" / "small.safetensors").symlink_to(GOLDEN / "small.safetensors")
    folder_paths.models_dir = str(folder)
    folder_paths.add_model_folder_path("vae", str(folder / "vae"))
    folder_paths.add_model_folder_path("seedvr2", str(folder / "SEEDVR2"))
    return folder


@pytest.fixture(scope="session")
def ours(models):
    load(FOLDER)
    return nodes.NODE_CLASS_MAPPINGS


def relative_error(found, right) -> float:
    found, right = found.double().flatten(), right.double().flatten()
    return float((found - right).square().sum().sqrt() / right.square().sum().sqrt())


def randomise(module) -> None:
    """Weights that keep activations near 1, for a network of the real size without the real file."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in module.named_parameters():
            if value.ndim > 1:
                value.normal_(0, (value[0].numel()) ** -0.5)
            elif name.endswith("weight"):
                value.normal_(1, 0.05)
            else:
                value.normal_(0, 0.05)
