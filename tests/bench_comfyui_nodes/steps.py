"""What is measured. Each step takes the bench and prints its own table."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import comfy.model_management as management
import nodes
import torch
from freed import memory
from measure import GIB, clock, largest_difference, measure, relative_error
from upscaler import pack
from vaes import Core, Ours
from workflow import Bench, Give

__all__ = ["interrupt", "memory", "models", "pack"]


@dataclass(frozen=True)
class Case:
    frames: int
    height: int
    width: int

    def images(self) -> torch.Tensor:
        return torch.rand(self.frames, self.height, self.width, 3, generator=torch.Generator().manual_seed(1))

    def latent(self, time_scale: int) -> torch.Tensor:
        time = ((self.frames - 1) // time_scale + 1,) if time_scale > 1 else ()
        shape = (1, 16, *time, self.height // 8, self.width // 8)
        return torch.randn(shape, generator=torch.Generator().manual_seed(2))

    def __str__(self) -> str:
        return f"{self.frames} x {self.height} x {self.width}"


LARGE = {"wan21": Case(81, 480, 832), "flux": Case(1, 1024, 1024), "seedvr2": Case(9, 720, 1280)}
# In these both are compared with ComfyUI's network in fp32.
SMALL = {"wan21": Case(9, 64, 96), "flux": Case(1, 128, 128), "seedvr2": Case(5, 64, 96)}
TINY = {"wan21": Case(5, 32, 32), "flux": Case(1, 32, 32), "seedvr2": Case(5, 16, 32)}


def models(bench: Bench) -> None:
    """Time, memory and differences of both."""
    bench.say("| model | work | core s | ours s | core GiB | ours GiB | largest difference | relative |")
    bench.say("|---|---|---|---|---|---|---|---|")
    ended = [bench.attempt(model, lambda: side_by_side(bench, model)) for model in bench.options.models]  # noqa: B023
    bench.say("\n| model | work | core against fp32 | ours against fp32 |\n|---|---|---|---|")
    ended += [bench.attempt(model, lambda: exactness(bench, model)) for model in bench.options.models]  # noqa: B023
    if not all(ended):
        raise RuntimeError("a model failed, see above")


def side_by_side(bench: Bench, model: str) -> None:
    both = bench.core(model), bench.ours(model)
    case = (TINY if bench.options.small else LARGE)[model]
    if not bench.options.small:
        # Kernels that a first call loads are no memory of the model's.
        for vae in both:
            vae.decode(vae.encode(SMALL[model].images()))
    for work in ("decode", "encode"):
        compare(bench, model, case, work, both)
    for one in both:
        one.release()


def job(vae: Core | Ours, case: Case, work: str, time_scale: int) -> Any:
    if work == "encode":
        images = case.images()
        return lambda: vae.encode(images)
    latent = case.latent(time_scale)
    return lambda: vae.decode(latent.clone())


def compare(bench: Bench, model: str, case: Case, work: str, both: tuple[Core, Ours]) -> None:
    scale = both[1].vae.video_vae.model.time_scale
    found = []
    for vae in both:
        for other in both:
            other.release()
        found.append(measure(job(vae, case, work, scale), bench.device, bench.options.repeat))
    core, ours = found
    if core.out.shape != ours.out.shape:
        raise RuntimeError(f"{model} {work}: shapes {tuple(core.out.shape)} and {tuple(ours.out.shape)}")
    exact = "" if both[1].vae.video_vae.last_run().exact else " (tiled)"
    far, error = largest_difference(ours.out, core.out), relative_error(ours.out, core.out)
    bench.say(
        f"| {model} | {work} {case}{exact} | {core.seconds:.4g} | {ours.seconds:.4g} | {core.peak / GIB:.2f} | "
        f"{ours.peak / GIB:.2f} | {far:.2e} | {error:.2e} |",
        step="models", model=model, work=work, case=str(case), core=core.seconds, core_first=core.first,
        core_peak=core.peak, core_dtype=str(both[0].vae.vae_dtype), ours=ours.seconds, ours_first=ours.first,
        ours_peak=ours.peak, ours_counted=both[1].vae.video_vae.memory_info().peak, difference=far, relative=error,
    )  # fmt: skip


def exactness(bench: Bench, model: str) -> None:
    case = (TINY if bench.options.small else SMALL)[model]
    reference, core, ours = bench.core(model, torch.float32), bench.core(model), bench.ours(model)
    scale = ours.vae.video_vae.model.time_scale
    for work in ("decode", "encode"):
        right, *found = (job(vae, case, work, scale)() for vae in (reference, core, ours))
        errors = [relative_error(one, right) for one in found]
        bench.say(
            f"| {model} | {work} {case} | {errors[0]:.2e} | {errors[1]:.2e} |",
            step="exactness", model=model, work=work, case=str(case), core=errors[0], ours=errors[1],
        )  # fmt: skip
    for one in (reference, core, ours):
        one.release()


def interrupt(bench: Bench) -> None:
    """The button, a while after a workflow has begun to decode."""
    model = bench.options.models[0]
    case = Case(5, 128, 128) if bench.options.small else Case(81, 720, 1280)
    file = bench.checkpoint(model).name
    ours = {"class_type": "VideoVaeLoad", "inputs": bench.ours(model).widgets}
    core = {"class_type": "VAELoader", "inputs": {"vae_name": file}}
    time_scale = 1 if model == "flux" else 4
    bench.say(f"decode {model} {case}, interrupted 0.25 s after the latent is there")
    for who, loader in (("ours", ours), ("core", core)):
        Give.given["little"] = {"samples": Case(1, 64, 64).latent(time_scale)}
        # So that the checkpoint is loaded.
        if (said := bench.run(loader, "little")) != "success":
            raise RuntimeError(f"{who}: {said}")
        Give.given[f"long {who}"] = {"samples": case.latent(time_scale)}
        pressed, said, ended = interrupted(bench, loader, f"long {who}")
        after = f"{ended - pressed:.3f} s after the button" if pressed else "before the button"
        Give.given[f"again {who}"] = {"samples": Case(1, 64, 72).latent(time_scale)}
        again = bench.run(loader, f"again {who}")
        bench.say(
            f"- {who}: {said} {after}; the next workflow: {again}",
            step="interrupt", who=who, said=said, after=ended - pressed if pressed else None, again=again,
        )  # fmt: skip
    # What the whole decode takes, for comparison.
    seconds, _ = clock(lambda: bench.run(ours, "long ours"))
    bench.say(f"- ours, not interrupted: {seconds:.3f} s")
    management.unload_all_models()


def interrupted(bench: Bench, loader: dict, latent: str) -> tuple[float, str, float]:
    """When the button was pressed (0.0: never), what the workflow said, and when it ended."""
    times = [0.0]

    def press() -> None:
        times[0] = time.perf_counter()
        nodes.interrupt_processing()

    timer = threading.Timer(0.25, press)
    Give.begins = timer.start
    try:
        said = bench.run(loader, latent)
        return times[0], said, time.perf_counter()
    finally:
        Give.begins = lambda: None
        timer.cancel()
        management.interrupt_current_processing(False)
