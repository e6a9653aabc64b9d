"""The pack ComfyUI-SeedVR2_VideoUpscaler with our VAE in its cache: its own phases, and its upscaler node.

The diffusion model is a stand-in that gives back the latents it is conditioned on. Everything else is that pack's code.
"""

import asyncio
import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
from conftest import nodes, randomise, relative_error

if "SEEDVR2_PACK" not in os.environ:
    pytest.skip("SEEDVR2_PACK is not set", allow_module_level=True)

PACK = Path(os.environ["SEEDVR2_PACK"]).resolve()
NAME = str(PACK).replace(".", "_x_")
FILE = "random_vae.safetensors"


def of_pack(name: str):
    return importlib.import_module(f"{NAME}.src.{name}")


class Stub(torch.nn.Module):
    """In place of the diffusion model: the velocity that leads from the noise to the condition in one step."""

    _model_name = "stub_3b.safetensors"
    # As that pack writes on models that it has in its cache.
    _config_compile = _config_swap = None
    _config_attn = "sdpa"

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, vid, txt, vid_shape, txt_shape, timestep):
        class Result:
            vid_sample = vid[:, :16] - vid[:, 16:32]

        return Result


@pytest.fixture(scope="module")
def pack(ours, models):
    # Without a GPU that pack cannot describe its widgets, whose default is the first GPU. Its code is loaded anyway.
    found = asyncio.run(nodes.load_custom_node(str(PACK)))
    assert found or not torch.cuda.is_available()
    from omegaconf import OmegaConf
    from safetensors.torch import save_file

    config = of_pack("common.config").load_config(str(PACK / "src/models/video_vae_v3/s8_c16_t4_inflation_sd3.yaml"))
    wrapper = of_pack("models.video_vae_v3.modules.attn_video_vae").VideoAutoencoderKLWrapper
    options = {key: value for key, value in OmegaConf.to_container(config).items() if not key.startswith("__")}
    factors = {"spatial_downsample_factor": 8, "temporal_downsample_factor": 4, "freeze_encoder": False}
    module = wrapper(**{**options, **factors})
    randomise(module)
    save_file({key: value.contiguous() for key, value in module.state_dict().items()}, models / "SEEDVR2" / FILE)
    stub = Stub()
    cache = of_pack("core.model_cache").get_global_cache()
    cache.set_dit({"node_id": "stub", "cache_model": True}, stub, Stub._model_name)
    return cache


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def compute(request, pack, monkeypatch):
    """The type that the pack computes in. bf16 is its own; in f32 the two VAEs can be compared."""
    for name in ("optimization.compatibility", "core.generation_utils"):
        monkeypatch.setattr(of_pack(name), "COMPUTE_DTYPE", request.param)
    return request.param


DIT = {"model": Stub._model_name, "device": "cpu", "offload_device": "cpu", "cache_model": True, "node_id": "stub"}


def own_config(**settings) -> dict:
    """What that pack's own VAE loader puts out."""
    return {"model": FILE, "device": "cpu", "offload_device": "cpu", "cache_model": False, "node_id": "own", **settings}


def our_config(node_id: str, **settings) -> dict:
    node = nodes.NODE_CLASS_MAPPINGS["VideoVaeForSeedVR2"]
    types = node.INPUT_TYPES()["required"]
    widgets = {key: options["default"] for key, (kind, options) in types.items() if "default" in options}
    assert FILE in types["vae_name"][0]
    given = {**widgets, "vae_name": FILE, "device": "cpu", "unique_id": node_id, **settings}
    return node().configure(**given)[0]


def phases(config: dict, images: torch.Tensor, batch: int = 5):
    """The pack's preparation, encoding and decoding, without its upscaling."""
    utils, run = of_pack("core.generation_utils"), of_pack("core.generation_phases")
    debug = of_pack("utils.debug").Debug(enabled=False)
    ctx = utils.setup_generation_context("cpu", "cpu", None, None, None, debug)
    tiling = {
        key: (config.get(key, 512),) * 2
        for key in ("encode_tile_size", "encode_tile_overlap", "decode_tile_size", "decode_tile_overlap")
    }
    runner, ctx["cache_context"] = utils.prepare_runner(
        dit_model=DIT["model"],
        vae_model=config["model"],
        model_dir=of_pack("utils.constants").get_base_cache_dir(),
        debug=debug,
        ctx=ctx,
        dit_cache=True,
        vae_cache=config["cache_model"],
        dit_id="stub",
        vae_id=config["node_id"],
        encode_tiled=config.get("encode_tiled", False),
        decode_tiled=config.get("decode_tiled", False),
        **tiling,
    )
    images, _ = utils.compute_generation_info(
        ctx=ctx, images=images, resolution=images.shape[1], batch_size=batch, debug=debug
    )
    used = type(runner.vae).__name__
    ctx = run.encode_all_batches(
        runner, ctx=ctx, images=images, debug=debug, batch_size=batch, seed=1, resolution=images.shape[1],
        color_correction="none",
    )  # fmt: skip
    latents = [latent.clone() for latent in ctx["all_latents"]]
    ctx["all_upscaled_latents"] = [latent.clone() for latent in latents]
    ctx = run.decode_all_batches(runner, ctx=ctx, debug=debug, cache_model=config["cache_model"])
    return used, latents, ctx["final_video"].float()


# What our VAE gave in f32, to compare with in bf16. That pack's own VAE is too slow on a CPU to run it in both.
IN_F32: dict = {}


def agrees(compute, case: str, found: list, own) -> None:
    """In f32 with that pack's own VAE, in bf16 with ours in f32."""
    if compute == torch.float32:
        IN_F32[case] = found
    right, most = (own(), 1e-5) if compute == torch.float32 else (IN_F32[case], 3e-2)
    errors = [relative_error(a, b) for a, b in zip(found, right)]
    print(f"\n{case}, {compute}: relative error {', '.join(f'{error:.1e}' for error in errors)}")
    assert [part.shape for part in found] == [part.shape for part in right] and max(errors) < most


@pytest.mark.parametrize("frames", [1, 6])
def test_phases(compute, frames):
    torch.manual_seed(frames)
    images = torch.rand(frames, 16, 32, 3)
    used, latents, video = phases(our_config(f"phases {frames}"), images)
    assert used == "SeedVr2Module" and all(latent.dtype == compute for latent in latents)

    def own():
        used, latents, video = phases(own_config(), images)
        assert used == "VideoAutoencoderKLWrapper"
        return [*latents, video]

    agrees(compute, f"phases of {frames} frames: latents and video", [*latents, video], own)


def upscale(vae: dict, images: torch.Tensor, **settings) -> torch.Tensor:
    node = of_pack("interfaces.video_upscaler").SeedVR2VideoUpscaler
    # It releases the latents it was conditioned on, so each run has a stub that is new in the cache.
    of_pack("core.model_cache").get_global_cache().set_dit({**DIT}, Stub(), DIT["model"])
    options = {"seed": 1, "resolution": 24, "batch_size": 5, "color_correction": "none", **settings}
    return node.execute(image=images, dit=DIT, vae=vae, **options).args[0]


@pytest.mark.parametrize("channels", [3, 4])
def test_the_upscaler_node(compute, channels):
    """execute() to its end: resize, encode, the stub, decode, the rest; RGB and RGBA."""
    torch.manual_seed(channels)
    # Its code for alpha stumbles over batches that it has to pad, with either VAE.
    images = torch.rand(2 if channels == 3 else 1, 12, 20, channels)
    found = upscale(our_config(f"node {channels}"), images)
    agrees(compute, f"upscaler node, {channels} channels", [found], lambda: [upscale(own_config(), images)])


def test_a_second_run_finds_it_again(compute, pack):
    config = our_config("again")
    images = torch.rand(1, 12, 20, 3)
    first = upscale(config, images)
    module = pack.get_vae({"node_id": config["node_id"], "cache_model": True})
    assert module is not None and torch.equal(upscale(config, images), first)
    assert pack.get_vae({"node_id": config["node_id"], "cache_model": True}) is module
    # Other settings are another module, in the same place.
    our_config("again", memory_limit="8GiB")
    other = pack.get_vae({"node_id": config["node_id"], "cache_model": True})
    assert other is not module and other.video_vae.memory_limit == "8GiB"
    assert torch.equal(upscale(config, images), first)


def test_tile_settings_are_hints(compute, pack):
    images = torch.rand(1, 160, 192, 3)
    tiles = {"encode_tiled": True, "encode_tile_size": 64, "encode_tile_overlap": 32}
    tiles.update({key.replace("encode", "decode"): value for key, value in tiles.items()})
    plain, hinted = phases(our_config("plain"), images)[2], phases(our_config("hinted", **tiles), images)[2]
    assert torch.equal(plain, hinted)
    config = our_config("forced", force_tiles=True, **tiles)
    assert not torch.equal(phases(config, images)[2], plain)
    module = pack.get_vae({"node_id": config["node_id"], "cache_model": True})
    assert not module.video_vae.last_run().exact


def test_the_node_runs_anew_when_the_pack_has_dropped_the_vae(pack):
    node = nodes.NODE_CLASS_MAPPINGS["VideoVaeForSeedVR2"]
    assert node.IS_CHANGED(unique_id="gone") == ""
    config = our_config("gone")
    assert node.IS_CHANGED(unique_id="gone") == ""
    pack.remove_vae({"node_id": config["node_id"]})
    assert node.IS_CHANGED(unique_id="gone") != node.IS_CHANGED(unique_id="gone"), "NaN: never as before"


def test_nothing_is_downloaded(pack, models):
    """For a name that it knows, the pack would look for its own file, check it, and fetch it."""
    assert of_pack("utils.downloads").download_weight(dit_model=DIT["model"], vae_model=our_config("net")["model"])
    assert sorted(path.name for path in (models / "SEEDVR2").glob("*.safetensors")) == [FILE]


def test_without_the_pack_it_says_so(pack, monkeypatch):
    hidden = [name for name in sys.modules if name.endswith(".src.core.model_cache")]
    for name in hidden:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RuntimeError, match="ComfyUI-SeedVR2_VideoUpscaler are not loaded"):
        our_config("without")
