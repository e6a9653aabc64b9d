"""The GPU is nearly full of diffusion models, or of what ComfyUI cannot free: what a VAE then gets."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import comfy.model_management as management
import comfy.model_patcher
import comfy.ops
import torch
from measure import GIB, Peak, clock, used
from vaes import Core, Ours
from workflow import Bench


class Diffusion(torch.nn.Module):
    """Weights of some gibibytes, in layers of ComfyUI's."""

    def __init__(self, layers: int, side: int) -> None:
        super().__init__()
        layer = comfy.ops.manual_cast.Linear
        made = [layer(side, side, bias=False, dtype=torch.bfloat16, device="cpu") for _ in range(layers)]
        self.layers = torch.nn.ModuleList(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Models:
    """Diffusion models that lie on the GPU, as after sampling."""

    def __init__(self, bench: Bench, number: int, layers: int, side: int) -> None:
        self.device, self._side = bench.device, side
        patcher = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
        self._patchers = [
            patcher(Diffusion(layers, side).eval(), load_device=bench.device, offload_device=torch.device("cpu"))
            for _ in range(number)
        ]

    def load(self) -> None:
        for one in self._patchers:
            management.load_models_gpu([one])
            one.model(torch.zeros(1, self._side, dtype=torch.bfloat16, device=self.device))

    def loaded(self) -> str:
        return " + ".join(f"{one.loaded_size() / GIB:.2f}" for one in self._patchers) + " GiB"


class Warnings(logging.Handler):
    """Whether ComfyUI said that it ran out of memory and went over to tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.tiled = False

    def emit(self, record: logging.LogRecord) -> None:
        self.tiled |= "Ran out of memory" in record.getMessage()


@contextlib.contextmanager
def watched() -> Iterator[Warnings]:
    handler = Warnings()
    logging.getLogger().addHandler(handler)
    try:
        yield handler
    finally:
        logging.getLogger().removeHandler(handler)


def occupied(device: torch.device, left: int) -> torch.Tensor | None:
    """Memory of another program: all but `left` bytes. ComfyUI cannot free it."""
    management.soft_empty_cache()
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return torch.empty(max(0, free - left), dtype=torch.uint8, device=device)


def decode(bench: Bench, who: str, vae: Core | Ours, latent: torch.Tensor, models: Models | None) -> None:
    before = management.get_free_memory(bench.device)
    others = f"diffusion models {models.loaded()} -> " if models else ""
    first = used(bench.device)
    failed = ""
    with watched() as said, Peak(bench.device) as peak:
        try:
            seconds, _ = clock(lambda: vae.decode(latent.clone()))
        except torch.cuda.OutOfMemoryError as error:
            # A result of ComfyUI's own VAE. Ours plans within what is free, so there it is a failure.
            if isinstance(vae, Ours):
                raise
            failed = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    after = management.get_free_memory(bench.device)
    figures = {"step": "memory", "who": who, "before": before, "after": after, "models": bool(models)}
    if failed:
        bench.say(f"- {who}: {failed}{', also with tiles' if said.tiled else ''}", failed=failed, **figures)
        return
    tiled = said.tiled
    details = ""
    if isinstance(vae, Ours):
        report = vae.vae.video_vae.last_run()
        tiled = not report.exact
        kept = vae.vae.video_vae.memory_info().now
        details = f"; its plan {report.device_bytes / GIB:.2f} GiB, kept {kept / GIB:.2f}"
    if models:
        others += models.loaded() + "; "
    bench.say(
        f"- {who}: {seconds:.3f} s, {'TILED' if tiled else 'whole frames'}; {others}free {before / GIB:.2f} -> "
        f"{after / GIB:.2f} GiB, at most {max(0, peak.bytes - first) / GIB:.2f} more in use{details}",
        seconds=seconds, tiled=tiled, **figures,
    )  # fmt: skip


def memory(bench: Bench) -> None:
    model = bench.options.models[0]
    tiny = bench.options.small
    shape = (1, 16) + (() if model == "flux" else (2 if tiny else 11,)) + ((4, 4) if tiny else (60, 104))
    latent = torch.randn(shape)
    both = {"core": bench.core(model), "ours": bench.ours(model)}
    for vae in both.values():
        vae.decode(latent.clone())
        vae.release()
    number, layers, side = (2, 2, 64) if tiny else (2, 32, 8192)
    size = number * layers * side * side * 2
    room = 3 * GIB
    bench.say(
        f"decode {model} {tuple(latent.shape)}; {room / GIB:.0f} GiB free beside {number} diffusion models of "
        f"{size / number / GIB:.2f} GiB, which ComfyUI may free"
    )
    models = Models(bench, number, layers, side)
    ended = [
        bench.attempt(who, lambda: beside(bench, who, vae, latent, models, size + room))  # noqa: B023
        for who, vae in both.items()
    ]
    del models
    for left in (2, 1):
        bench.say(f"the same decode where {left} GiB are free and nothing can be freed")
        for who, vae in both.items():
            ended.append(bench.attempt(who, lambda: alone(bench, who, vae, latent, left * GIB)))  # noqa: B023
    if not all(ended):
        raise RuntimeError("a part failed, see above")


def beside(bench: Bench, who: str, vae: Core | Ours, latent: torch.Tensor, models: Models, room: int) -> None:
    taken = occupied(bench.device, room)
    models.load()
    decode(bench, who, vae, latent, models)
    vae.release()
    seconds, _ = clock(models.load)
    bench.say(f"  the models loaded again in {seconds:.2f} s: {models.loaded()}")
    management.unload_all_models()
    del taken


def alone(bench: Bench, who: str, vae: Core | Ours, latent: torch.Tensor, room: int) -> None:
    taken = occupied(bench.device, room)
    decode(bench, who, vae, latent, None)
    vae.release()
    del taken
