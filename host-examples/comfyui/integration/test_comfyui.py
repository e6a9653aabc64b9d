"""ComfyUI's own nodes with our VAE in their VAE socket, run by ComfyUI's executor."""

import inspect
import json
import threading
import time

import nodes
import pytest
import torch
from conftest import FOLDER, GOLDEN, HERE, Give, randomise, relative_error

SCALE = 0.9152


def loader(**settings):
    return {"class_type": "VideoVaeLoader", "inputs": {**widgets("VideoVaeLoader"), **settings}}


def widgets(name: str) -> dict:
    """What the page sends for a node that the user has just placed."""
    found = {}
    types = nodes.NODE_CLASS_MAPPINGS[name].INPUT_TYPES()
    for key, (kind, *options) in {**types["required"], **types.get("optional", {})}.items():
        if options and options[0].get("default") is not None:
            found[key] = options[0]["default"]
        elif isinstance(kind, list):
            found[key] = kind[0]
    return found


def loaded(run):
    """The VAE that the loader puts out."""
    end = {"class_type": "Keep", "inputs": {"value": ["1", 1], "name": "vae"}}
    return run({"1": loader(vae_name="small.safetensors"), "2": end})["vae"]


@pytest.fixture
def direct():
    from video_vae import VideoVae

    with VideoVae(GOLDEN / "small.safetensors", pixel_range="0..1", scaling_factor=SCALE) as vae:
        yield vae


def test_a_template_with_one_node_swapped(ours, run, direct):
    """The VAE's part of ComfyUI's SeedVR2 template: tiled nodes at their template's sizes."""
    Give.given["clip"] = clip = torch.rand(9, 64, 80, 3)
    sizes = {"tile_size": 64, "overlap": 16, "temporal_size": 16, "temporal_overlap": 4}
    kept = run(
        {
            "1": {"class_type": "Give", "inputs": {"name": "clip"}},
            "2": loader(vae_name="small.safetensors"),
            "3": {"class_type": "VAEEncodeTiled", "inputs": {"pixels": ["1", 0], "vae": ["2", 1], **sizes}},
            "4": {"class_type": "VAEDecodeTiled", "inputs": {"samples": ["3", 0], "vae": ["2", 1], **sizes}},
            "5": {"class_type": "Keep", "inputs": {"value": ["3", 0], "name": "latent"}},
            "6": {"class_type": "Keep", "inputs": {"value": ["4", 0], "name": "images"}},
        }
    )
    latent = direct.encode(clip)
    assert torch.equal(kept["latent"]["samples"], latent)
    assert torch.equal(kept["images"], direct.decode(latent, layout="THWC").clamp(0, 1))


def test_forced_tiles_differ(ours, run, direct, caplog):
    Give.given["wide"] = clip = torch.rand(1, 144, 208, 3)
    sizes = {"tile_size": 64, "overlap": 16, "temporal_size": 16, "temporal_overlap": 4}
    kept = run(
        {
            "1": {"class_type": "Give", "inputs": {"name": "wide"}},
            "2": loader(vae_name="small.safetensors", force_tiles=True),
            "3": {"class_type": "VAEEncodeTiled", "inputs": {"pixels": ["1", 0], "vae": ["2", 1], **sizes}},
            "5": {"class_type": "Keep", "inputs": {"value": ["3", 0], "name": "latent"}},
        }
    )
    latent = direct.encode(clip)
    assert kept["latent"]["samples"].shape == latent.shape and not torch.equal(kept["latent"]["samples"], latent)
    assert any(record.levelname == "WARNING" and "tiles" in record.message for record in caplog.records)


def test_plain_nodes_and_collapsed_latents(ours, run, direct):
    Give.given["still"] = still = torch.rand(1, 64, 64, 4)
    kept = run(
        {
            "1": {"class_type": "Give", "inputs": {"name": "still"}},
            "2": loader(vae_name="small.safetensors"),
            "3": {"class_type": "VAEEncode", "inputs": {"pixels": ["1", 0], "vae": ["2", 1]}},
            "4": {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0], "vae": ["2", 1]}},
            "5": {"class_type": "Keep", "inputs": {"value": ["4", 0], "name": "images"}},
            "6": {"class_type": "Keep", "inputs": {"value": ["3", 0], "name": "latent"}},
            "7": {"class_type": "Keep", "inputs": {"value": ["2", 1], "name": "vae"}},
        }
    )
    latent = direct.encode(still[..., :3])
    assert torch.equal(kept["latent"]["samples"], latent)
    assert torch.equal(kept["images"], direct.decode(latent, layout="THWC").clamp(0, 1))
    collapsed = torch.randn(1, 48, 4, 4)
    (images,) = nodes.VAEDecode().decode(kept["vae"], {"samples": collapsed})
    assert torch.equal(images, direct.decode(collapsed.reshape(1, 16, 3, 4, 4), layout="THWC").clamp(0, 1))


def test_encode_for_inpaint(ours, run):
    if "spacial_compression_encode" not in inspect.getsource(nodes.VAEEncodeForInpaint):
        pytest.skip("VAEEncodeForInpaint of this ComfyUI takes VAEs of images alone")
    vae = loaded(run)
    pixels, mask = torch.rand(1, 67, 75, 3), (torch.rand(1, 67, 75) > 0.5).float()
    (latent,) = nodes.VAEEncodeForInpaint().encode(vae, pixels, mask)
    assert latent["samples"].shape == (1, 16, 1, 8, 9) and latent["noise_mask"].shape == (1, 1, 64, 72)


def test_inpaint_conditioning(ours, run):
    vae = loaded(run)
    pixels, mask = torch.rand(1, 64, 72, 3), (torch.rand(1, 64, 72) > 0.5).float()
    text = [[torch.zeros(1, 1), {}]]
    positive, _, latent = nodes.InpaintModelConditioning().encode(text, text, pixels, vae, mask)
    assert torch.equal(latent["samples"], vae.encode(pixels))
    assert positive[0][1]["concat_latent_image"].shape == latent["samples"].shape


def test_what_other_packs_look_at(ours, run):
    import comfy.model_management

    vae = loaded(run)
    clip = torch.rand(1, 5, 32, 40, 3)
    samples = vae.encode(clip)
    needed = vae.memory_used_decode(samples.shape, vae.vae_dtype)
    assert needed > 0
    comfy.model_management.load_models_gpu([vae.patcher], memory_required=needed)
    assert vae.patcher.model is vae.first_stage_model
    if hasattr(comfy.model_patcher.ModelPatcher, "get_free_memory"):  # older ones have it elsewhere
        assert vae.patcher.get_free_memory(vae.device) > 0
    assert vae.patcher.model_size() == vae.model_size() > 0
    # As ComfyUI's own VAE class goes about it.
    pixels = vae.process_input(clip.movedim(-1, 1)).to(vae.vae_dtype).to(vae.device)
    inner = vae.first_stage_model.encode(pixels).to(vae.output_device)
    assert relative_error(inner, samples) < 5e-3
    out = vae.first_stage_model.decode(samples.to(device=vae.device, dtype=vae.vae_dtype)).to(vae.output_device)
    assert relative_error(vae.process_output(out.float()).movedim(1, -1), vae.decode(samples)) < 5e-3
    comfy.model_management.unload_all_models()
    assert vae.first_stage_model.device == torch.device("cpu")
    assert torch.equal(vae.encode(clip), samples)


def test_interrupt(ours, run):
    import comfy.model_management

    vae = loaded(run)
    samples, started = torch.randn(1, 16, 9, 64, 64), time.monotonic()
    threading.Timer(0.2, comfy.model_management.interrupt_current_processing).start()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        vae.decode(samples)
    assert time.monotonic() - started < 5
    assert vae.decode(samples[:, :, :1, :4, :4]).shape == (1, 1, 32, 32, 3)


@pytest.mark.parametrize("file", ["workflow_api.json", "workflow.json", "workflow_seedvr2.json"])
def test_workflows_are_valid(ours, file):
    """Every node of ours in the files has the widgets of now. Nodes of packs that are not here are let be."""
    workflow = json.loads((HERE.parent / file).read_text(encoding="utf-8"))
    steps = workflow["nodes"] if "nodes" in workflow else workflow.values()
    seen = 0
    for step in steps:
        name = step.get("type") or step["class_type"]
        if not name.startswith("VideoVae"):
            continue
        seen += 1
        expected = widgets(name)
        if "inputs" in step and isinstance(step["inputs"], dict):
            assert set(expected) - {"force_tiles"} <= set(step["inputs"])
        else:
            assert len(step["widgets_values"]) == len(expected) + ("seed" in expected), name
    assert seen


def test_core_s_own_vae_agrees(ours, run, models):
    """ComfyUI's own SeedVR2 VAE on the same weights, where this ComfyUI has one that can be made small enough."""
    seedvr = pytest.importorskip("comfy.ldm.seedvr.vae")
    from safetensors.torch import save_file

    core = seedvr.VideoAutoencoderKLWrapper().float().eval()
    core.device = torch.device("cpu")  # as ComfyUI sets it
    randomise(core)
    file = models / "vae" / "full.safetensors"
    save_file({key: value.contiguous() for key, value in core.state_dict().items()}, file)
    from video_vae.torch import AutoencoderKLSeedVR2

    ours_full = AutoencoderKLSeedVR2(file, "cpu")
    video = torch.rand(1, 3, 5, 16, 32) * 2 - 1
    with torch.no_grad():
        mean = core.encode(video)[0]
        mean = mean if torch.is_tensor(mean) else mean[0]
        found = ours_full.encode(video).latent_dist.mean
        assert relative_error(found, mean.reshape(found.shape)) < 1e-5
        latent = torch.randn(1, 16, 2, 2, 4)
        decoded = core.slicing_decode(latent)
        assert relative_error(ours_full.decode(latent).sample, decoded) < 1e-5
    file.unlink()


def test_registry_entry(ours):
    from comfy_config import config_parser

    found = config_parser.extract_node_configuration(str(FOLDER))
    assert found.project.name == "video-vae-nodes" and found.tool_comfy.publisher_id
