"""The logic of the nodes, without ComfyUI."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import FOLDER, GOLDEN, HERE, REPOSITORY, Comfy, InterruptProcessingException, ProgressBar, defaults

SCALE = 0.9152


def direct(**settings):
    from video_vae import VideoVae

    return VideoVae(GOLDEN / "small.safetensors", "cpu", **settings)


def run(nodes, loaded, images, **settings):
    encode, decode = nodes["VideoVaeEncode"], nodes["VideoVaeDecode"]
    (latent,) = encode().encode(loaded[0], images, **{**defaults(encode), **settings})
    return latent, decode().decode(loaded[0], latent, **defaults(decode))[0]


def test_clips_go_through_and_come_back_in_their_size(nodes, loaded, images):
    latent, out = run(nodes, loaded, images)
    assert type(out) is type(images) and tuple(out.shape) == tuple(images.shape)
    assert tuple(latent["samples"].shape) == (1, 16, 3, 5, 7)
    with direct(pixel_range="0..1", scaling_factor=SCALE) as vae:
        expected = vae.encode(np.asarray(images))
        assert np.array_equal(np.asarray(latent["samples"]), expected)
        frames = vae.decode(expected, layout="THWC", size=(7, 36, 52)).clip(0, 1)
        assert np.array_equal(np.asarray(out), frames)


def test_scaled_latents_are_those_of_comfyui(nodes, loaded, images):
    latent, _ = run(nodes, loaded, images)
    with direct() as vae:
        plain = vae.encode(np.asarray(images) * 2 - 1)
    assert np.allclose(np.asarray(latent["samples"]), plain * SCALE, rtol=1e-4, atol=1e-5)


def test_standard_sockets(nodes, loaded, images):
    vae = loaded[1]
    # As VAEEncode, VAEDecode and the tiled nodes call it.
    samples = vae.encode(images)
    assert tuple(samples.shape) == (1, 16, 3, 5, 7)
    out = vae.decode(samples)
    assert tuple(out.shape) == (1, 9, 40, 56, 3)
    assert np.array_equal(np.asarray(vae.encode(images[None])), np.asarray(samples))
    assert tuple(vae.decode(samples[:, :, 0]).shape) == (1, 1, 40, 56, 3)
    scale = vae.spacial_compression_decode()
    assert (scale, vae.temporal_compression_decode()) == (8, 4)
    assert (vae.upscale_ratio[0](3), vae.downscale_ratio[0](9)) == (9, 3)
    tiled = vae.decode_tiled(
        samples, tile_x=512 // scale, tile_y=512 // scale, overlap=64 // scale, tile_t=16, overlap_t=2
    )
    assert np.array_equal(np.asarray(tiled), np.asarray(out)), "one tile is the whole image"
    for overlap in (0, 4, 64):
        small = vae.decode_tiled(samples, tile_x=3, tile_y=2, overlap=overlap)
        assert small.shape == out.shape
    assert tuple(vae.encode_tiled(images, tile_x=64, tile_y=64, overlap=16, tile_t=64, overlap_t=8).shape) == (
        1,
        16,
        3,
        5,
        7,
    )
    # Settings of one call do not stay.
    assert np.array_equal(np.asarray(vae.decode(samples)), np.asarray(out))


def test_more_channels_and_batches(nodes, loaded, images):
    four = np.concatenate([np.asarray(images), np.zeros((7, 36, 52, 1), "f4")], axis=-1)
    vae = loaded[1]
    assert np.array_equal(np.asarray(vae.encode(four)), np.asarray(vae.encode(images)))
    samples = np.random.default_rng(1).standard_normal((2, 16, 2, 3, 3)).astype("f4")
    decode = nodes["VideoVaeDecode"]
    (out,) = decode().decode(loaded[0], {"samples": samples}, **defaults(decode))
    assert out.shape == (10, 24, 24, 3)


def test_a_size_that_no_longer_fits_is_left_alone(nodes, loaded, images):
    latent, _ = run(nodes, loaded, images)
    decode = nodes["VideoVaeDecode"]
    cut = {**latent, "samples": latent["samples"][:, :, :2]}
    (out,) = decode().decode(loaded[0], cut, **defaults(decode))
    assert tuple(out.shape) == (5, 40, 56, 3)


def test_progress_and_interrupt(nodes, loaded, images):
    run(nodes, loaded, images)
    assert len(ProgressBar.made) == 2
    assert all(bar.values == sorted(bar.values) and bar.values[-1] == bar.total for bar in ProgressBar.made)
    Comfy.asked, Comfy.interrupt_after = 0, 5
    with pytest.raises(InterruptProcessingException):
        run(nodes, loaded, images)
    assert Comfy.asked == 6, "nothing runs on after the button"
    Comfy.interrupt_after = None
    run(nodes, loaded, images)


def test_widgets_are_the_library_s(nodes):
    import video_vae

    shown = {}
    for node in nodes.values():
        shown.update(node.INPUT_TYPES()["required"])
    assert set(video_vae.parameters()) - {"pixel_range"} <= set(shown)
    for key, (kind, default) in {
        "encode_tiled": ("BOOLEAN", False),
        "encode_tile_size": ("INT", 1024),
        "encode_tile_overlap": ("INT", 128),
        "decode_tiled": ("BOOLEAN", False),
        "decode_tile_size": ("INT", 1024),
        "decode_tile_overlap": ("INT", 128),
        "seed": ("INT", 42),
        "scaling_factor": ("FLOAT", SCALE),
        "memory_limit": ("STRING", "auto"),
        "host_memory_limit": ("STRING", "auto"),
        "threads": ("INT", 0),
    }.items():
        assert (shown[key][0], shown[key][1]["default"]) == (kind, default), key
    assert shown["decode_tile_size"][1]["min"] == 64 and shown["decode_tile_size"][1]["step"] == 32
    assert shown["offload_device"][0] == ["none", "cpu"]
    json.dumps({name: node.INPUT_TYPES() for name, node in nodes.items()})


def test_memory_is_given_back_when_asked(nodes, images):
    loader = nodes["VideoVaeLoader"]
    (vae, _) = loader().load(**{**defaults(loader), "device": "cpu", "offload_device": "cpu"})
    vae.encode(images)
    assert vae.video_vae.memory_info().now == 0


def test_room_is_made_on_a_gpu(pack):
    torch = pytest.importorskip("torch")
    host = sys.modules[f"{pack.__name__}.host"]
    Comfy.room = []
    host.make_room("cpu", 1 << 30)
    host.make_room("cuda:0", 1 << 30)
    assert Comfy.room == [(1 << 30, torch.device("cuda:0"))]


def test_the_workflow_fits_the_nodes(nodes):
    workflow = json.loads((HERE.parent / "workflow_api.json").read_text(encoding="utf-8"))
    ours = {step["class_type"]: step["inputs"] for step in workflow.values() if step["class_type"] in nodes}
    assert set(ours) == set(nodes)
    for name, inputs in ours.items():
        required = nodes[name].INPUT_TYPES()["required"]
        assert set(inputs) == set(required), name
        for key, value in inputs.items():
            if key in defaults(nodes[name]) and key != "vae_name":
                assert value == defaults(nodes[name])[key], key


@pytest.mark.parametrize("how", ["copied", "linked"])
def test_the_package_is_found_beside_the_folder(tmp_path, how):
    folder = tmp_path / "custom_nodes" / "video_vae_nodes"
    folder.parent.mkdir()
    if how == "linked":
        folder.symlink_to(FOLDER, target_is_directory=True)
    else:
        shutil.copytree(FOLDER, folder)
        shutil.copytree(REPOSITORY / "host-examples" / "python" / "src" / "video_vae", folder / "video_vae")
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); import _package, video_vae; print(video_vae.__file__)"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    inside = "python/src/video_vae" if how == "linked" else "custom_nodes/video_vae_nodes/video_vae"
    assert inside in done.stdout.replace("\\", "/")
