"""ComfyUI core's own SeedVR2 VAE beside video-vae on one machine: seconds, peak memory, error against fp32.

    python tests/bench_comfyui.py --comfyui FOLDER [--shapes 21x720x1280,...] [--repeat 3] [--json FILE]

FOLDER has ComfyUI's `comfy` and what it imports. Weights are random, of the real size, and made where they are missing.
Both are called as ComfyUI's nodes call a VAE: tensors lie in host memory, in and out, and time includes their copies.
Peak memory counts weights. fp32 is core's own network in fp32 on the same device. The library is $VIDEO_VAE_LIBRARY.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch

SCALE = 0.9152
GIB = 1 << 30


def core_vae(folder: Path):
    """The module of ComfyUI's files, with the names of its base that an older base lacks."""
    sys.path.insert(0, str(folder))
    arguments, sys.argv = sys.argv, ["main.py", *([] if torch.cuda.is_available() else ["--cpu"])]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.model_management
    import comfy.ops
    import comfy.quant_ops
    import comfy_kitchen

    sys.argv = arguments
    management = comfy.model_management
    if not hasattr(comfy.ops, "_fp16_linear_wanted"):
        # fp16 accumulation is an option there, off by default.
        comfy.ops._fp16_linear_wanted = lambda x: False
    if not hasattr(management, "ensure_pin_budget"):
        import psutil

        pin = management.pin_memory
        management.pin_memory = lambda tensor, evict_active=True: pin(tensor)
        management.ensure_pin_budget = lambda size, evict_active=True: psutil.virtual_memory().available > 2 * size
    if not hasattr(comfy.quant_ops, "TensorWiseINT8Layout"):
        from comfy_kitchen.tensor.int8 import TensorWiseINT8Layout

        comfy.quant_ops.TensorWiseINT8Layout = TensorWiseINT8Layout
    print("comfy_kitchen:", {name: state.get("available") for name, state in comfy_kitchen.list_backends().items()})
    from comfy.ldm.seedvr import vae

    return vae


def make_weights(module: torch.nn.Module, path: Path) -> None:
    """Random weights that keep activations near 1, in f16 as the real file."""
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, value in module.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        if value.ndim > 1:
            tensors[name] = noise * value[0].numel() ** -0.5
        else:
            tensors[name] = 0.1 * noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    save_file({name: value.half().contiguous() for name, value in tensors.items()}, path)


def load(core, path: Path, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    from safetensors.torch import load_file

    with torch.device("meta"):
        module = core.VideoAutoencoderKLWrapper()
    module.load_state_dict({name: value.to(device, dtype) for name, value in load_file(path).items()}, assign=True)
    return module.requires_grad_(False).eval()


class Timer:
    """The median of some calls, after one that warms up."""

    def __init__(self, device: torch.device, repeat: int) -> None:
        self.device, self.repeat = device, repeat

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __call__(self, run) -> float:
        times = []
        for _ in range(1 + self.repeat):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])


def job(op: str, shape: tuple[int, int, int]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What goes in, in host memory, and the shape of what comes out."""
    t, h, w = shape
    generator = torch.Generator().manual_seed(1)
    latent, video = (1, 16, (t + 3) // 4, h // 8, w // 8), (1, 3, t, h, w)
    if op == "encode":
        return torch.rand(video, generator=generator) * 2 - 1, latent
    return torch.randn(latent, generator=generator) * SCALE, video


def core_call(module, op: str, x: torch.Tensor, out: torch.Tensor, device: torch.device, dtype: torch.dtype):
    """As comfy/sd.py goes about it: latents go to the device whole, pixels slice by slice both ways."""
    if op == "encode":
        return lambda: out.copy_(module.encode(x.to(dtype), device=device).reshape(out.shape))
    return lambda: module.decode(x.to(device=device, dtype=dtype), output_buffer=out)


@contextmanager
def caches_on_the_device():
    """Core keeps its causal caches in host memory if there is room for them."""
    import comfy.model_management

    usual = comfy.model_management.ensure_pin_budget
    comfy.model_management.ensure_pin_budget = lambda *size, **how: False
    try:
        yield
    finally:
        comfy.model_management.ensure_pin_budget = usual


def measure_core(module, op: str, x: torch.Tensor, shape: tuple, timer: Timer, dtype: torch.dtype) -> dict:
    out = torch.empty(shape)
    if timer.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(timer.device)
    seconds = timer(core_call(module, op, x, out, timer.device, dtype))
    peak = torch.cuda.max_memory_allocated(timer.device) if timer.device.type == "cuda" else 0
    return {"seconds": seconds, "peak": peak, "out": out}


def in_fp32(core, path: Path, op: str, x: torch.Tensor, shape: tuple, device: torch.device) -> torch.Tensor:
    module, out = load(core, path, device, torch.float32), torch.empty(shape)
    with caches_on_the_device():
        core_call(module, op, x, out, device, torch.float32)()
    return out


def measure_ours(path: Path, op: str, x: torch.Tensor, shape: tuple, timer: Timer, limit: str | int) -> dict:
    from video_vae import VideoVae

    out = torch.empty(shape)
    name = f"cuda:{timer.device.index or 0}" if timer.device.type == "cuda" else "cpu"
    # Core's encode leaves the scaling to sd.py, its decode undoes it.
    with VideoVae(path, name, memory_limit=limit, scaling_factor=1.0 if op == "encode" else SCALE) as vae:
        seconds = timer(lambda: getattr(vae, op)(x, out=out))
        return {"seconds": seconds, "peak": vae.memory_info().peak, "out": out, "exact": vae.last_run().exact}


def relative_error(found: torch.Tensor, right: torch.Tensor) -> float:
    # In pieces, as a long clip in f64 takes much memory.
    difference = size = 0.0
    for a, b in zip(found.flatten().split(1 << 24), right.flatten().split(1 << 24)):
        difference += float((a.double() - b.double()).square().sum())
        size += float(b.double().square().sum())
    return (difference / size) ** 0.5


def compare(core, path: Path, op: str, size: tuple, timer: Timer, dtype: torch.dtype, reference: bool) -> list[dict]:
    x, shape = job(op, size)
    rows = []

    def note(who: str, result: dict) -> dict:
        rows.append({"who": who, "op": op, "shape": "x".join(map(str, size)), **result})
        return result

    with torch.no_grad():
        module = load(core, path, timer.device, dtype)
        default = note("core", measure_core(module, op, x, shape, timer, dtype))
        with caches_on_the_device():
            note("core, caches on the device", measure_core(module, op, x, shape, timer, dtype))
        del module
        right = in_fp32(core, path, op, x, shape, timer.device) if reference else None
    if timer.device.type == "cuda":
        torch.cuda.empty_cache()
    note("ours", measure_ours(path, op, x, shape, timer, "auto"))
    if default["peak"]:
        note("ours, within core's memory", measure_ours(path, op, x, shape, timer, default["peak"]))
    for row in rows:
        out = row.pop("out")
        row["error"] = relative_error(out, right) if right is not None else None
        row.setdefault("exact", None)
    return rows


def show(row: dict) -> None:
    error = f"{row['error']:.2e}" if row["error"] is not None else "-"
    tiled = ", tiled" if row["exact"] is False else ""
    numbers = f"{row['seconds']:.4g} | {row['peak'] / GIB:.2f} | {error}"
    print(f"| {row['op']} {row['shape']} | {row['who']}{tiled} | {numbers} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True, help="a folder with comfy/ldm/seedvr/vae.py")
    parser.add_argument("--weights", type=Path, help="a checkpoint of the real size; made if it is not there")
    shapes = "1x1024x1024,5x512x512,21x720x1280,21x1080x1920"
    parser.add_argument("--shapes", default=shapes, help="frames x rows x columns")
    parser.add_argument("--reference", default="1x1024x1024,5x512x512,21x720x1280", help="the shapes with an error")
    parser.add_argument("--ops", default="decode,encode")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    here = Path(__file__).resolve().parent
    sys.path.insert(0, str(here.parent / "host-examples" / "python" / "src"))
    device = torch.device(options.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    core = core_vae(options.comfyui.resolve())
    import video_vae

    path = options.weights or Path(tempfile.gettempdir()) / f"video-vae-bench-{os.getpid()}.safetensors"
    if not path.exists():
        make_weights(core.VideoAutoencoderKLWrapper(), path)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{gpu}; PyTorch {torch.__version__}; video-vae {video_vae.version()}; core and ours in {options.dtype}\n")
    print("| work | who | seconds | peak GiB | error |\n|---|---|---|---|---|")
    rows, failed = [], False
    try:
        for shape in options.shapes.split(","):
            for op in options.ops.split(","):
                size = tuple(map(int, shape.split("x")))
                timer, dtype = Timer(device, options.repeat), getattr(torch, options.dtype)
                try:
                    found = compare(core, path, op, size, timer, dtype, shape in options.reference.split(","))
                except Exception as error:  # the other shapes are worth having
                    failed = True
                    print(f"| {op} {shape} | failed: {type(error).__name__}: {str(error)[:300]} | | | |", flush=True)
                    continue
                for row in found:
                    show(row)
                rows += found
    finally:
        if options.weights is None:
            path.unlink(missing_ok=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
