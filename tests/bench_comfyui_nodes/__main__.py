"""Our nodes inside ComfyUI beside its own VAE, in one process and on one machine.

    python tests/bench_comfyui_nodes --comfyui FOLDER [--pack FOLDER] [--steps models,interrupt,memory,pack] [--small]

Weights are random, in the sizes that ComfyUI accepts, and written to a temporary folder. The pack is
ComfyUI-SeedVR2_VideoUpscaler. `--small` takes sizes for a CPU. The library is $VIDEO_VAE_LIBRARY.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOSTS = HERE.parents[1] / "host-examples"
STEPS = ("models", "interrupt", "memory", "pack")


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True, help="ComfyUI's folder")
    parser.add_argument("--pack", type=Path, help="the folder of ComfyUI-SeedVR2_VideoUpscaler")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--models", default="wan21,flux,seedvr2")
    parser.add_argument("--cpu", action="store_true", help="as ComfyUI's own --cpu; the default without a GPU")
    parser.add_argument("--small", action="store_true", help="small images and clips")
    parser.add_argument("--repeat", type=int, default=2, help="timed calls after the first, which warms up")
    parser.add_argument("--disable-dynamic-vram", action="store_true", help="ComfyUI's option of that name")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(words)
    options.steps = options.steps.split(",")
    options.models = options.models.split(",")
    if unknown := set(options.steps) - set(STEPS):
        parser.error(f"--steps {', '.join(sorted(unknown))}: the steps are {', '.join(STEPS)}")
    return options


def start(options: argparse.Namespace) -> None:
    """What ComfyUI's main.py does before its server starts."""
    sys.path[:0] = [str(options.comfyui.resolve()), str(HOSTS / "python" / "src")]
    words = ["--cpu"] if options.cpu else []
    words += ["--disable-dynamic-vram"] if options.disable_dynamic_vram else []
    sys.argv = ["main.py", *words]
    import comfy.options

    comfy.options.enable_args_parsing()
    from comfy import cli_args

    import cuda_malloc  # noqa: F401  (ComfyUI's own: it chooses PyTorch's allocator, before PyTorch is there)

    dynamic = getattr(cli_args, "enables_dynamic_vram", lambda: False)()
    if dynamic:
        import comfy_aimdo.control

        comfy_aimdo.control.init()
    import comfy.model_management as management
    import comfy.model_patcher

    if dynamic and management.is_nvidia() and comfy_aimdo.control.init_device(management.get_torch_device().index):
        # As main.py does. Without a level it prints every allocation.
        comfy_aimdo.control.set_log_info()
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True


def main() -> int:
    options, began = options_of(), time.perf_counter()
    start(options)
    # These import PyTorch, which ComfyUI wants to do itself.
    import steps
    import workflow

    import torch

    failed = False
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        bench = workflow.Bench(options, Path(folder))
        print(f"{bench.title()}; started in {time.perf_counter() - began:.1f} s", flush=True)
        for name in options.steps:
            began = time.perf_counter()
            print(f"\n### {name}", flush=True)
            failed |= not bench.attempt(name, lambda: getattr(steps, name)(bench))  # noqa: B023
            print(f"### {name} took {time.perf_counter() - began:.1f} s", flush=True)
            if options.json:
                options.json.write_text(json.dumps(bench.rows, indent=1), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
