"""Our VAE beside ComfyUI's own, on random checkpoints in the sizes that ComfyUI's own accepts: f32, on the CPU."""

import contextlib
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import HERE, randomise
from safetensors.torch import load_file, save_file
from server import COMFYUI, free_port, main, request, running, until, with_nodes

WORKFLOWS = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in (HERE.parent / "workflows").glob("*")}
LDM = {"double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4]}
LDM = {**LDM, "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}


def image_network(channels, **settings):
    from comfy.ldm.models.autoencoder import AutoencoderKL

    # ComfyUI infers the width of the decoder, but not that of the encoder.
    config = {**LDM, "z_channels": channels, **settings}
    return AutoencoderKL(ddconfig=config, decoder_ddconfig={**config, "ch": 32}, embed_dim=channels)


def without_quant(network):
    """FLUX.1 has no 1x1 convolutions beside the latent."""
    del network.quant_conv, network.post_quant_conv
    return network


def wan_network(channels=3):
    from comfy.ldm.wan.vae import WanVAE

    sizes = {"dim": 32, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "temperal_downsample": [False, True, True]}
    return WanVAE(**sizes, image_channels=channels, conv_out_channels=channels)


def wan22_network():
    """ComfyUI infers no width of this one, so it has the real size."""
    from comfy.ldm.wan.vae2_2 import WanVAE

    return WanVAE(z_dim=48, dim_mult=[1, 2, 4, 4], temperal_downsample=[False, True, True])


def seedvr2_network():
    """The same."""
    from comfy.ldm.seedvr.vae import VideoAutoencoderKLWrapper

    return VideoAutoencoderKLWrapper()


NETWORKS = {
    "sdxl": lambda: image_network(4),
    "flux": lambda: without_quant(image_network(16)),
    "flux2": lambda: image_network(32, batch_norm_latent=True),
    "wan21": wan_network,
    "wan22": wan22_network,
    "qwen_image": wan_network,
    "seedvr2": seedvr2_network,
}


@pytest.fixture(autouse=True)
def no_gradients():
    """As ComfyUI's executor runs nodes."""
    with torch.inference_mode():
        yield


def file_of(family):
    return WORKFLOWS[family]["2"]["inputs"]["vae_name"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The file of a model, made when first asked for: that of Wan 2.2 has 2.8 GB."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def path(family):
        found = folder / f"{family}.safetensors"
        if not found.exists():
            write(family, found)
        return found

    yield path
    shutil.rmtree(folder)


def write(family, path):
    network = NETWORKS[family]()
    randomise(network)
    with torch.no_grad():
        for name, value in network.named_buffers():
            if name.endswith("running_var"):
                value.uniform_(0.5, 2)
            elif name.endswith("running_mean"):
                value.normal_(0, 0.5)
    # Without this word ComfyUI takes SeedVR2's names for those of a model of images in diffusers.
    metadata = {"keep_diffusers_format": "true"} if family == "seedvr2" else None
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, path, metadata)


# Qwen-Image has the network of Wan 2.1; its workflow is run below. So is SeedVR2's, which has nodes of its own.
@pytest.fixture(scope="module", params=[family for family in NETWORKS if family not in ("qwen_image", "seedvr2")])
def vaes(request, ours, models, checkpoint):
    """Of a model: ComfyUI's own VAE object, ours, and its name."""
    import nodes

    family = request.param
    (models / "vae" / file_of(family)).symlink_to(checkpoint(family))
    (core,) = nodes.VAELoader().load_vae(file_of(family))
    loader = ours["VideoVaeLoad"]
    settings = {**WORKFLOWS[family]["2"]["inputs"], "device": "cpu"}
    (vae, _) = loader().load(**settings)
    assert core.vae_dtype == torch.float32
    yield core, vae, family
    (models / "vae" / file_of(family)).unlink()


def close(found, right):
    assert found.shape == right.shape and found.dtype == right.dtype
    assert (found - right).abs().max() <= 1e-4 * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("shape", [(1, 32, 48, 3), (2, 32, 32, 3), (7, 32, 32, 3), (1, 37, 55, 3), (1, 32, 32, 4)])
def test_encode(vaes, shape):
    """One image, a batch or a clip, a length that is not 4n + 1, sizes off the factor, alpha."""
    core, vae, _ = vaes
    pixels = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    right = core.encode(pixels)
    close(vae.encode(pixels), right)
    assert right.ndim == 2 + vae.latent_dim


def test_decode(vaes):
    core, vae, family = vaes
    time = (3,) if vae.is_video else ()
    # ComfyUI's own Wan 2.2 takes minutes for more.
    batch, height, width = (1, 2, 3) if family == "wan22" else (2, 4, 6)
    shape = (batch, vae.latent_channels, *time, height, width)
    samples = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    close(vae.decode(samples), core.decode(samples.clone()))
    if not vae.is_video:
        # Such latents come from models of video.
        several = samples[:, :, None].repeat(1, 1, 2, 1, 1)
        close(vae.decode(several), core.decode(several.clone()))


def test_tiled_calls_stay_exact(vaes):
    _, vae, _ = vaes
    pixels = torch.rand(1, 64, 96, 3)
    latent = vae.encode(pixels)
    assert torch.equal(vae.encode_tiled(pixels, tile_x=64, tile_y=64, overlap=16, tile_t=16, overlap_t=4), latent)
    assert vae.video_vae.last_run().exact
    images = vae.decode(latent)
    assert torch.equal(vae.decode_tiled(latent, tile_x=8, tile_y=8, overlap=2, tile_t=2, overlap_t=1), images)


def test_what_nodes_look_at(vaes):
    core, vae, _ = vaes
    for name in ("latent_channels", "latent_dim", "output_channels", "crop_input", "not_video"):
        assert getattr(vae, name) == getattr(core, name), name
    for name in ("spacial_compression_decode", "spacial_compression_encode", "temporal_compression_decode"):
        assert getattr(vae, name)() == getattr(core, name)(), name
    for name in ("upscale_ratio", "downscale_ratio"):
        found, right = getattr(vae, name), getattr(core, name)
        if vae.is_video:
            assert found[1:] == right[1:] and all(found[0](t) == right[0](t) for t in range(20))
        else:
            assert found == right
    for name in ("upscale_index_formula", "downscale_index_formula"):
        assert getattr(vae, name) == getattr(core, name), name
    time = (5,) if vae.is_video else ()
    # Beside what earlier runs hold: the weights of Wan 2.2's decoder alone are more than an encode takes.
    vae.video_vae.trim(weights=True)
    assert vae.memory_used_encode((1, 3, *time, 1024, 1024), vae.vae_dtype) > 0
    assert vae.memory_used_decode((1, vae.latent_channels, *time, 128, 128), vae.vae_dtype) > 0


def test_the_network_inside(vaes):
    core, vae, _ = vaes
    time = (5,) if vae.is_video else ()
    pixels = torch.rand(1, 3, *time, 32, 32) * 2 - 1
    with torch.no_grad():
        right = core.first_stage_model.encode(pixels)
        close(vae.first_stage_model.encode(pixels), right)
        close(vae.first_stage_model.decode(right), core.first_stage_model.decode(right))


def test_our_own_nodes(vaes, ours):
    _, vae, family = vaes
    images = torch.rand(3, 36, 44, 3)
    (latent,) = ours["VideoVaeEncode"]().encode(vae, images)
    (found,) = ours["VideoVaeDecode"]().decode(vae, latent)
    # FLUX.2's latents are packed, so what does not fit is cropped there.
    assert found.shape == ((3, 32, 32, 3) if family == "flux2" else images.shape)


def test_alpha(ours, models):
    """A model with four channels: images without alpha get 1.0."""
    import nodes

    network = wan_network(4)
    randomise(network)
    file = models / "vae" / "alpha.safetensors"
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, file)
    (core,) = nodes.VAELoader().load_vae(file.name)
    (vae, _) = ours["VideoVaeLoad"]().load(**{**WORKFLOWS["wan21"]["2"]["inputs"], "vae_name": file.name})
    pixels = torch.rand(1, 32, 48, 4)
    close(vae.encode(pixels), core.encode(pixels))
    latent = core.encode(pixels[..., :3])
    close(vae.encode(pixels[..., :3]), latent)
    close(vae.decode(latent), core.decode(latent.clone()))
    file.unlink()


def test_image_to_video(vaes):
    core, vae, family = vaes
    if family != "wan21":
        pytest.skip("a node of Wan")
    from comfy_extras.nodes_wan import WanImageToVideo

    text = [[torch.zeros(1, 1), {}]]
    image = torch.rand(1, 32, 48, 3)
    latents = []
    for one in (core, vae):
        # Older ones are called on an object.
        out = WanImageToVideo.execute(text, text, one, 48, 32, 9, 1, start_image=image)
        latents.append(out.args[0][0][1]["concat_latent_image"])
    close(latents[1], latents[0])


def test_image_to_video_latent(vaes):
    core, vae, family = vaes
    if family != "wan22":
        pytest.skip("a node of Wan 2.2")
    from comfy_extras.nodes_wan import Wan22ImageToVideoLatent

    image = torch.rand(1, 64, 64, 3)
    outs = [Wan22ImageToVideoLatent.execute(one, 64, 64, 9, 1, start_image=image).args[0] for one in (core, vae)]
    for key in ("samples", "noise_mask"):
        close(outs[1][key], outs[0][key])


def swapped(workflow):
    """The workflow with ComfyUI's own loader."""
    loader = {"class_type": "VAELoader", "inputs": {"vae_name": workflow["2"]["inputs"]["vae_name"]}}
    return {**workflow, "2": loader}


def pictures(base, family):
    from PIL import Image

    files = sorted((base / "output").glob(f"video_vae_{family}_*.png"))
    return [np.asarray(Image.open(file)).astype(int) for file in files]


def latents(base, family):
    return [load_file(file)["latent_tensor"] for file in sorted((base / "output").glob(f"video_vae_{family}_*.latent"))]


def noise(*shape):
    from PIL import Image

    return [Image.fromarray(one) for one in np.random.default_rng(3).integers(0, 256, shape, "u1")]


@contextlib.contextmanager
def server(base, checkpoints):
    """ComfyUI's server with a user's folder and files of models: what runs a workflow in it."""
    (base / "models" / "vae").mkdir(parents=True)
    (base / "input").mkdir()
    for name, file in checkpoints.items():
        (base / "models" / "vae" / name).symlink_to(file)
    port = free_port()
    address = f"http://127.0.0.1:{port}"

    def run(prompt):
        job = request("POST", f"{address}/prompt", {"prompt": prompt})["prompt_id"]
        history = until(lambda: request("GET", f"{address}/history/{job}"))
        assert history[job]["status"]["status_str"] == "success", history[job]["status"]

    log = (base / "log").open("w")
    with log, running(*main(base, "--port", str(port), "--fp32-vae"), cwd=COMFYUI, stdout=log, stderr=log):
        until(lambda: request("GET", f"{address}/object_info/VideoVaeLoad"))
        yield run


@pytest.mark.parametrize("families", [WORKFLOWS.keys() - {"wan22", "seedvr2"}, {"wan22"}], ids=["others", "wan22"])
def test_workflows_over_http(tmp_path, ours, checkpoint, families):
    """The files beside the nodes, with our loader and with ComfyUI's own, run by its server."""
    with server(with_nodes(tmp_path), {file_of(family): checkpoint(family) for family in families}) as run:
        noise(1, 37, 55, 3)[0].save(tmp_path / "input" / "example.png")
        for family in families:
            run(WORKFLOWS[family])
            run(swapped(WORKFLOWS[family]))
    for family in families:
        close(*latents(tmp_path, family))
        found, right = pictures(tmp_path, family)
        assert found.shape == right.shape and np.abs(found - right).max() <= 1, family


# What ComfyUI's network does behind its decoder, and ours does not. Newer ComfyUIs have a node for it.
WITHOUT_COLOURS = """import comfy.ldm.seedvr.vae
comfy.ldm.seedvr.vae.lab_color_transfer = lambda pixels, reference: pixels
NODE_CLASS_MAPPINGS = {}
"""


def test_seedvr2_over_http(tmp_path, ours, checkpoint):
    """A clip by the workflow beside the nodes, and by ComfyUI's own loader with its node for SeedVR2."""
    if not hasattr(pytest.importorskip("comfy_extras.nodes_seedvr"), "SeedVR2InputProcessing"):
        pytest.skip("this ComfyUI has no SeedVR2InputProcessing")
    workflow = swapped(WORKFLOWS["seedvr2"])
    first, *others = noise(5, 128, 144, 3)
    # The node scales to its resolution, the shorter side, and takes 120 or more.
    sizes = {"resolution": 128, "spatial_tile_size": 512, "spatial_overlap": 64, "temporal_tile_size": 5}
    inputs = {"images": ["1", 0], "vae": ["2", 0], "enable_tiling": False, **sizes}
    encode = {**workflow, "3": {"class_type": "SeedVR2InputProcessing", "inputs": inputs}}
    decode = {**workflow, "3": {"class_type": "LoadLatent", "inputs": {"latent": "sampled.latent"}}}
    with_nodes(tmp_path)
    (tmp_path / "custom_nodes" / "without_colours.py").write_text(WITHOUT_COLOURS, encoding="utf-8")
    with server(tmp_path, {file_of("seedvr2"): checkpoint("seedvr2")}) as run:
        first.save(tmp_path / "input" / "example.png", save_all=True, append_images=others)
        run(WORKFLOWS["seedvr2"])
        run({key: encode[key] for key in "1236"})
        found, right = latents(tmp_path, "seedvr2")
        right = right.movedim(-1, 1).contiguous()
        # As ComfyUI's sampler hands them on: time is folded into the channels.
        sampled = {"latent_tensor": right.flatten(1, 2), "latent_format_version_0": torch.tensor([])}
        save_file(sampled, tmp_path / "input" / "sampled.latent")
        run({key: decode[key] for key in "2345"})
    close(found, right)
    frames = pictures(tmp_path, "seedvr2")
    assert len(frames) == 10 and np.abs(np.array(frames[:5]) - frames[5:]).max() <= 1
