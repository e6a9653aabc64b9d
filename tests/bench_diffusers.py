"""diffusers' own autoencoders beside video-vae on one machine: error, seconds and memory.

    python tests/bench_diffusers.py [errors] [tiling] [speed] [--device cuda] [--models LIST] [--size 1024]
                                    [--clip 9x480x832] [--large 4096] [--limit 8GiB] [--rounds 7] [--precisions LIST]
                                    [--diffusers FOLDER] [--json FILE]

errors  relative RMS of both in fp16 and bf16, decode and encode, against diffusers in fp32
tiling  a decode of LARGE x LARGE: diffusers' tiles beside video-vae within LIMIT; error against video-vae in fp32 without
        tiles (diffusers needs minutes for that; `errors` compares the two), and against the same implementation without tiles
speed   both in turns: the median of the ratios, and the ratio of the least times, decode and encode, in each of
        PRECISIONS (fp32,bf16 and on a GPU fp16)

Models: flux, sdxl, wan21, wan22, qwen, qwen21; without a list flux and sdxl. Images have SIZE x SIZE pixels, clips of
video models FRAMESxHEIGHTxWIDTH. Tiling is of the first model, one of images.
Without a part: errors and tiling. Weights are random, of the real size. Tensors lie on the device. FOLDER has diffusers
and what it imports, if Python does not. The library is $VIDEO_VAE_LIBRARY, or target/release.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "host-examples" / "python" / "src"))
GIB = 1 << 30
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Model:
    """A class of diffusers, its sizes, and what its arrays look like."""

    kind: str
    sizes: dict
    latent_channels: int = 16
    scale: int = 8
    pixel_channels: int = 3
    is_video: bool = True
    # Images of some classes have an axis of one frame.
    has_frames: bool = True


def images(channels: int, quant: bool) -> Model:
    """A model of images: latent channels, and whether 1x1 convolutions stand before the decoder and behind the encoder."""
    sizes = {
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "latent_channels": channels,
        "norm_num_groups": 32,
        "sample_size": 1024,
        "use_quant_conv": quant,
        "use_post_quant_conv": quant,
    }
    return Model("AutoencoderKL", sizes, channels, is_video=False, has_frames=False)


WAN22 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
}
MODELS = {
    "sdxl": images(4, True),
    "flux": images(16, False),
    "wan21": Model("AutoencoderKLWan", {}),
    "wan22": Model("AutoencoderKLWan", WAN22, latent_channels=48, scale=16),
    "qwen": Model("AutoencoderKLQwenImage", {}, is_video=False),
    "qwen21": Model("AutoencoderKLQwenImage21", {}, 64, scale=16, pixel_channels=4, is_video=False),
}


class Missing(type):
    """A class that stands for anything of a package that is not there."""

    def __getattr__(cls, name: str):
        return Stub

    def __or__(cls, other):
        return cls

    __ror__ = __or__


class Stub(metaclass=Missing):
    pass


def stub(name: str) -> types.ModuleType:
    def attribute(key: str):
        if key == "__version__":
            return "9.0"
        if key.startswith("__"):
            raise AttributeError(key)
        return Stub

    module = types.ModuleType(name)
    module.__path__ = []
    module.__getattr__ = attribute
    return module


def diffusers_module(folder: str | None):
    """diffusers. Packages that only downloads need are stubbed where they are missing."""
    if folder:
        sys.path.insert(0, folder)
    for name in ("transformers", "peft", "accelerate"):
        sys.modules[name] = None
    for _ in range(20):
        try:
            import diffusers

            diffusers.AutoencoderKL, diffusers.AutoencoderKLWan  # imported when they are named
            # It warns of every change of type.
            logging.getLogger("diffusers").setLevel(logging.ERROR)
            return diffusers
        except ModuleNotFoundError as missing:
            sys.modules[missing.name] = stub(missing.name)
            for name in list(sys.modules):
                if name.startswith(("diffusers", "huggingface_hub")):
                    del sys.modules[name]
    raise SystemExit("diffusers cannot be imported")


class Pair:
    """One model in both implementations, with the same random weights."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path) -> None:
        from safetensors.torch import save_file

        self.name, self.model, self.device = name, MODELS[name], options.device
        torch.manual_seed(0)
        with torch.device(self.device):
            self.peer = getattr(options.diffusers_module, self.model.kind)(**self.model.sizes).eval()
        weights = folder / f"{name}.safetensors"
        self.state = {key: value.cpu().clone() for key, value in self.peer.state_dict().items()}
        save_file(self.state, str(weights))
        from video_vae import VideoVae

        self.own = VideoVae(weights, "cuda:0" if self.device == "cuda" else self.device)

    def rounded(self, precision: str):
        """diffusers' model in a type, from the weights in fp32."""
        self.peer.to(torch.float32).load_state_dict(self.state)
        return self.peer.to(DTYPES[precision])

    def shape(self, options: argparse.Namespace) -> list[int]:
        """Frames of a clip, height and width."""
        if self.model.is_video:
            return [int(n) for n in options.clip.split("x")]
        return [*[1] * self.model.has_frames, options.size, options.size]

    def inputs(self, shape: list[int]) -> dict[str, torch.Tensor]:
        """Values that every type has."""
        random = torch.Generator(self.device).manual_seed(1)
        frames = [1 + (shape[0] - 1) // 4] if self.model.has_frames else []
        latent = [1, self.model.latent_channels, *frames, *(side // self.model.scale for side in shape[-2:])]
        latents = torch.randn(latent, generator=random, device=self.device)
        pixels = torch.rand([1, self.model.pixel_channels, *shape], generator=random, device=self.device) * 2 - 1
        return {"decode": latents.bfloat16().float(), "encode": pixels.bfloat16().float()}

    def call_peer(self, node: str, value: torch.Tensor) -> torch.Tensor:
        if node == "decode":
            return self.peer.decode(value, return_dict=False)[0]
        return self.peer.encode(value, return_dict=False)[0].mode()

    def call_own(self, node: str, value: torch.Tensor) -> torch.Tensor:
        if self.model.has_frames:
            # diffusers clamps the pixels of these models.
            return self.own.decode(value).clamp(-1, 1) if node == "decode" else self.own.encode(value)
        if node == "decode":
            return self.own.decode(value)[:, :, 0]
        return self.own.encode(value[:, :, None])[:, :, 0]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square, relative to that of what is expected."""
    total = expected.double().square().sum()
    return ((found.double() - expected.double()).square().sum() / total).sqrt().item()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: str, times: int = 1) -> float:
    def once() -> float:
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        return time.perf_counter() - start

    return statistics.median(once() for _ in range(times))


def peak_gib(device: str) -> float:
    return torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0


def forget_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def errors(pair: Pair, options: argparse.Namespace) -> list[dict]:
    shape, rows = pair.shape(options), []
    inputs = pair.inputs(shape)
    torch.backends.cudnn.benchmark = False
    pair.rounded("fp32")
    expected = {node: pair.call_peer(node, value) for node, value in inputs.items()}
    precisions = ["fp32", "bf16", "fp16"] if pair.device == "cuda" else ["fp32", "bf16"]
    for precision in precisions:
        pair.rounded(precision)
        pair.own.precision = precision
        for node, value in inputs.items():
            own = error(pair.call_own(node, value), expected[node])
            peer = error(pair.call_peer(node, value.to(DTYPES[precision])), expected[node])
            rows.append({"part": "errors", "model": pair.name, "node": node, "precision": precision})
            rows[-1] |= {"shape": shape, "own": own, "diffusers": peer, "holds": own <= peer}
            print(f"errors {pair.name} {node} {precision}: video-vae {own:.2e}, diffusers {peer:.2e}", flush=True)
    return rows


def tiling(pair: Pair, options: argparse.Namespace) -> list[dict]:
    latent, device = pair.inputs([options.large] * 2)["decode"], pair.device
    precision = "fp16" if device == "cuda" else "bf16"
    typed, rows = latent.to(DTYPES[precision]), []
    torch.backends.cudnn.benchmark = False
    pair.own.configure(precision="fp32", memory_limit="auto", tiles="never")
    expected = pair.call_own("decode", latent).cpu()

    def told(who: str, work: Callable[[], torch.Tensor], gib: Callable[[], float], untiled: torch.Tensor | None):
        found = work()
        forget_peak(device)
        took, row = seconds(work, device, 1), {"part": "tiling", "model": pair.name, "who": who}
        row |= {"size": options.large, "precision": precision, "seconds": took, "gib": gib()}
        row["error"] = error(found.cpu(), expected)
        figures = f"{took:.3f} s, {row['gib']:.2f} GiB, error {row['error']:.2e}"
        if untiled is not None:
            row["error_against_untiled"] = error(found.cpu(), untiled)
            figures += f", against untiled {row['error_against_untiled']:.2e}"
        rows.append(row)
        print(f"tiling {pair.name} {options.large}^2 {who}: {figures}", flush=True)
        return found.cpu()

    own = lambda: pair.call_own("decode", typed)
    used = lambda: pair.own.last_run().device_bytes / GIB
    pair.own.trim(weights=True)
    pair.own.configure(precision=precision)
    whole = told("video-vae, no limit", own, used, None)
    pair.own.trim(weights=True)
    pair.own.configure(memory_limit=options.limit)
    told(f"video-vae, {options.limit}", own, used, whole)
    report = pair.own.last_run()
    print(f"  {report.host_bytes / GIB:.2f} GiB of host memory, exact {report.exact}", flush=True)
    pair.own.trim(weights=True)
    forget_peak(device)
    torch.backends.cudnn.benchmark = True
    pair.rounded(precision)
    pair.peer.enable_tiling()
    tiled = told("diffusers, tiled", lambda: pair.call_peer("decode", typed), lambda: peak_gib(device), None)
    pair.peer.disable_tiling()
    untiled = told("diffusers, untiled", lambda: pair.call_peer("decode", typed), lambda: peak_gib(device), None)
    rows[-2]["error_against_untiled"] = error(tiled, untiled)
    print(f"  diffusers, tiled against untiled: {rows[-2]['error_against_untiled']:.2e}", flush=True)
    return rows


def speed(pair: Pair, options: argparse.Namespace) -> list[dict]:
    shape, rows = pair.shape(options), []
    inputs, name = pair.inputs(shape), f"{pair.name} {'x'.join(map(str, shape))}"
    torch.backends.cudnn.benchmark = True
    for precision in options.precisions.split(","):
        pair.rounded(precision)
        pair.own.precision = precision
        for node, value in inputs.items():
            typed = value.to(DTYPES[precision])
            own, peer = [lambda: pair.call_own(node, typed), lambda: pair.call_peer(node, typed)]
            own(), peer()
            times = [(seconds(own, pair.device), seconds(peer, pair.device)) for _ in range(options.rounds)]
            ratio = statistics.median(theirs / ours for ours, theirs in times)
            # Of both at their fastest: other programs may slow one more than the other.
            least = min(theirs for _, theirs in times) / min(ours for ours, _ in times)
            ours, theirs = (statistics.median(column) for column in zip(*times))
            rows.append({"part": "speed", "model": pair.name, "node": node, "precision": precision})
            rows[-1] |= {"shape": shape, "own": ours, "diffusers": theirs, "ratio": ratio, "least_ratio": least}
            both = f"video-vae {ours:.4f} s, diffusers {theirs:.4f} s, {ratio:.2f} times as fast"
            both += f", {least:.2f} by the least times"
            print(f"speed {name} {node} {precision}: {both}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"errors": errors, "tiling": tiling, "speed": speed}
    parser.add_argument("parts", nargs="*", default=["errors", "tiling"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--models", default="flux,sdxl")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--clip", default="9x480x832")
    parser.add_argument("--large", type=int, default=4096)
    parser.add_argument("--limit", default="8GiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precisions", default="fp32,bf16,fp16" if torch.cuda.is_available() else "fp32,bf16")
    parser.add_argument("--diffusers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"parts: {', '.join(sorted(unknown))}; expected errors, tiling or speed")
    options.diffusers_module = diffusers_module(options.diffusers)
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            pair = Pair(name, options, Path(folder))
            for part in options.parts:
                if part != "tiling" or name == options.models.split(",")[0]:
                    rows += parts[part](pair, options)
                    pair.peer.to(options.device)
            pair.own.close()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    lost = [row for row in rows if row["part"] == "errors" and row["precision"] != "fp32" and not row["holds"]]
    for row in lost:
        print(f"{row['model']} {row['node']} {row['precision']}: {row['own']:.2e} is more than {row['diffusers']:.2e}")
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
