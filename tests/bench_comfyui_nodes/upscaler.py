"""ComfyUI-SeedVR2_VideoUpscaler: its phases of encode and decode, with its own VAE and with ours in its cache.

The diffusion model is a stand-in that is never run. Everything else is that pack's code.
"""

from __future__ import annotations

import importlib
import shutil
from typing import Any

import nodes
import torch
from measure import GIB, clock, largest_difference, measure, relative_error
from workflow import Bench, load

DIT = "stub_3b.safetensors"


class Stub(torch.nn.Module):
    """In place of the diffusion model."""

    _model_name = DIT
    # As that pack writes on models that it has in its cache.
    _config_compile = _config_swap = None
    _config_attn = "sdpa"

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1), requires_grad=False)


class Upscaler:
    def __init__(self, bench: Bench) -> None:
        folder = bench.options.pack.resolve()
        self._name, self.device = str(folder).replace(".", "_x_"), str(bench.device)
        if bench.device.type == "cuda":
            self.device = f"cuda:{bench.device.index or 0}"
        try:
            load(folder)
        except RuntimeError:
            # Without a GPU that pack cannot describe its widgets. Its code is loaded anyway.
            if bench.device.type == "cuda":
                raise
        self.file = "random_vae.safetensors"
        shutil.copy(bench.checkpoint("seedvr2"), bench.seedvr2_folder / self.file)

    def part(self, name: str) -> Any:
        return importlib.import_module(f"{self._name}.src.{name}")

    def own(self) -> dict:
        """What that pack's own VAE loader puts out. Kept between runs, as ours is."""
        device = {"device": self.device, "offload_device": "none"}
        return {"model": self.file, "cache_model": True, "node_id": "own", **device}

    def ours(self) -> dict:
        node = nodes.NODE_CLASS_MAPPINGS["VideoVaeForSeedVR2"]
        types = node.INPUT_TYPES()["required"]
        widgets = {key: options["default"] for key, (kind, options) in types.items() if "default" in options}
        given = {**widgets, "vae_name": self.file, "device": self.device, "unique_id": "ours"}
        return node().configure(**given)[0]

    def runner(self, config: dict) -> tuple[Any, dict, Any]:
        utils = self.part("core.generation_utils")
        debug = self.part("utils.debug").Debug(enabled=False)
        cache = self.part("core.model_cache").get_global_cache()
        cache.set_dit({"node_id": "stub", "cache_model": True}, Stub(), DIT)
        ctx = utils.setup_generation_context(self.device, self.device, None, None, None, debug)
        runner, ctx["cache_context"] = utils.prepare_runner(
            dit_model=DIT, vae_model=config["model"], model_dir=self.part("utils.constants").get_base_cache_dir(),
            debug=debug, ctx=ctx, dit_cache=True, vae_cache=config["cache_model"], dit_id="stub",
            vae_id=config["node_id"],
        )  # fmt: skip
        return runner, ctx, debug

    def phases(self, config: dict, images: torch.Tensor) -> tuple[str, dict, list, torch.Tensor]:
        """The name of the VAE's class, seconds of both phases, latents, and the video."""
        run, utils = self.part("core.generation_phases"), self.part("core.generation_utils")
        runner, ctx, debug = self.runner(config)
        size = {"resolution": images.shape[1], "batch_size": images.shape[0]}
        images, _ = utils.compute_generation_info(ctx=ctx, images=images, debug=debug, **size)
        name = type(runner.vae).__name__
        arguments = {"images": images, "debug": debug, "seed": 1, "color_correction": "none", **size}
        encode, ctx = clock(lambda: run.encode_all_batches(runner, ctx=ctx, **arguments))
        latents = [latent.clone() for latent in ctx["all_latents"]]
        ctx["all_upscaled_latents"] = [latent.clone() for latent in latents]
        decode, ctx = clock(lambda: run.decode_all_batches(runner, ctx=ctx, debug=debug, cache_model=True))
        return name, {"encode": encode, "decode": decode}, latents, ctx["final_video"].float().cpu()


def pack(bench: Bench) -> None:
    if bench.options.pack is None:
        bench.say("--pack is not given")
        return
    upscaler = Upscaler(bench)
    size = (5, 16, 32) if bench.options.small else (9, 720, 1280)
    images = torch.rand(*size, 3, generator=torch.Generator().manual_seed(1))
    results = {}
    for who, config in (("its own", upscaler.own()), ("ours", upscaler.ours())):
        found: list = []
        whole = measure(lambda: found.append(upscaler.phases(config, images)), bench.device, 1)  # noqa: B023
        name, seconds, latents, video = found[-1]
        results[who] = (latents, video)
        bench.say(
            f"- {who} ({name}): encode {seconds['encode']:.3f} s, decode {seconds['decode']:.3f} s of "
            f"{' x '.join(map(str, size))}, {whole.peak / GIB:.2f} GiB",
            step="pack", who=who, peak=whole.peak, **seconds,
        )  # fmt: skip
    (own_latents, own_video), (our_latents, our_video) = results.values()
    parts = {"latents": (our_latents[0].float().cpu(), own_latents[0].float().cpu()), "video": (our_video, own_video)}
    for part, (found, right) in parts.items():
        far, error = largest_difference(found, right), relative_error(found, right)
        bench.say(f"- {part}: largest difference {far:.2e}, relative {error:.2e}", part=part, far=far, error=error)
