"""Stand-ins for the parts of ComfyUI that the nodes touch, and the folder imported the way ComfyUI does it."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "video_vae_nodes"
REPOSITORY = HERE.parents[2]
GOLDEN = REPOSITORY / "tests" / "golden"

# This checkout's, also where a wheel is installed.
sys.path.insert(0, str(REPOSITORY / "host-examples" / "python" / "src"))

np = pytest.importorskip("numpy")


class InterruptProcessingException(Exception):
    pass


class ProgressBar:
    made: list = []

    def __init__(self, total):
        self.total, self.values = total, []
        ProgressBar.made.append(self)

    def update_absolute(self, value, total=None, preview=None):
        self.values.append(value)


class Comfy:
    """What the stand-ins share with the tests."""

    interrupt_after = None
    asked = 0
    room: list = []

    @classmethod
    def throw_exception_if_processing_interrupted(cls):
        cls.asked += 1
        if cls.interrupt_after is not None and cls.asked > cls.interrupt_after:
            raise InterruptProcessingException


def module(name: str, **content) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(content)
    sys.modules[name] = made
    return made


def full_path(kind: str, name: str) -> str:
    assert kind == "vae"
    if not (GOLDEN / name).is_file():
        raise FileNotFoundError(name)
    return str(GOLDEN / name)


module("folder_paths", get_filename_list=lambda kind: ["small.safetensors"], get_full_path_or_raise=full_path)
comfy = module("comfy")
comfy.utils = module("comfy.utils", ProgressBar=ProgressBar)
comfy.model_management = module(
    "comfy.model_management",
    throw_exception_if_processing_interrupted=Comfy.throw_exception_if_processing_interrupted,
    free_memory=lambda bytes_, device: Comfy.room.append((bytes_, device)),
    soft_empty_cache=lambda: None,
)


def import_folder(folder: Path) -> types.ModuleType:
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="session")
def pack():
    return import_folder(FOLDER)


@pytest.fixture
def nodes(pack):
    Comfy.interrupt_after, Comfy.asked, Comfy.room, ProgressBar.made = None, 0, [], []
    return pack.NODE_CLASS_MAPPINGS


def shown(node) -> dict:
    """Sockets and widgets of a node."""
    types = node.INPUT_TYPES()
    return {**types["required"], **types.get("optional", {})}


def defaults(node) -> dict:
    """What ComfyUI passes for widgets that the user leaves alone."""
    found = {}
    for name, (kind, *options) in shown(node).items():
        if options and (options[0].get("default") is not None):
            found[name] = options[0]["default"]
        elif isinstance(kind, list):
            found[name] = kind[0]
    return found


@pytest.fixture
def loaded(nodes):
    loader = nodes["VideoVaeLoader"]
    return loader().load(**{**defaults(loader), "device": "cpu"})


def _kinds():
    kinds = [lambda array: array]
    if importlib.util.find_spec("torch"):
        import torch

        kinds.append(torch.from_numpy)
    return kinds


@pytest.fixture(params=_kinds(), ids=["numpy", "torch"][: len(_kinds())])
def images(request):
    """Seven frames; NumPy's arrays stand in for PyTorch's where that is not installed."""
    return request.param(np.random.default_rng(3).uniform(0, 1, (7, 36, 52, 3)).astype("f4"))
