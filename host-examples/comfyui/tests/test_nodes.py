"""The logic of the nodes, without ComfyUI."""

import json
import os
import re
import shutil
import subprocess
import sys
import uuid

import numpy as np
import pytest
from conftest import FOLDER, GOLDEN, HERE, REPOSITORY, Comfy, InterruptProcessingException, ProgressBar, defaults, shown

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
    # Tile sizes are a hint: what fits whole is computed whole.
    tiled = vae.decode_tiled(samples, tile_x=3, tile_y=2, overlap=1, tile_t=16, overlap_t=2)
    assert np.array_equal(np.asarray(tiled), np.asarray(out))
    tiled = vae.encode_tiled(images, tile_x=64, tile_y=64, overlap=16, tile_t=64, overlap_t=8)
    assert np.array_equal(np.asarray(tiled), np.asarray(samples))
    # Settings of one call do not stay.
    assert np.array_equal(np.asarray(vae.decode(samples)), np.asarray(out))


def loaded_with(nodes, **settings):
    loader = nodes["VideoVaeLoader"]
    return loader().load(**{**defaults(loader), "device": "cpu", **settings})[1]


WIDE = np.random.default_rng(5).uniform(0, 1, (5, 144, 208, 3)).astype("f4")


def test_tiles_can_be_forced(nodes, caplog):
    vae, exact = loaded_with(nodes, force_tiles=True), loaded_with(nodes)
    samples = exact.encode(WIDE)
    caplog.clear()
    found = vae.decode_tiled(samples, tile_x=8, tile_y=8, overlap=2)
    assert found.shape == exact.decode(samples).shape and not np.array_equal(found, exact.decode(samples))
    assert vae.video_vae.last_run().tiles[0] > 1
    # A tiled run is told at warning level, once.
    told = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1 and "tile" in told[0].message, caplog.text
    for overlap in (0, 4, 64):
        assert vae.decode_tiled(samples, tile_x=8, tile_y=8, overlap=overlap).shape == found.shape
    # The plain nodes stay exact.
    assert np.array_equal(vae.decode(samples), exact.decode(samples))


def test_hints_count_where_tiles_are_needed(nodes):
    whole = loaded_with(nodes)
    samples = whole.encode(WIDE)
    needed = whole.video_vae.plan_decode(samples.shape).device_bytes
    for share in range(15, 0, -1):
        tight = loaded_with(nodes, memory_limit=str(needed * share // 16))
        if not tight.video_vae.plan_decode(samples.shape).exact:
            break
    tight.decode_tiled(samples, tile_x=64, tile_y=64, overlap=4)
    assert "overlap 32" in str(tight.video_vae.last_run())


def test_collapsed_latents(loaded):
    vae = loaded[1]
    samples = np.random.default_rng(4).standard_normal((2, 16, 3, 4, 5)).astype("f4")
    whole = vae.decode(samples)
    assert np.array_equal(vae.decode(samples.reshape(2, 48, 4, 5)), whole)
    assert np.array_equal(vae.decode_tiled(samples.reshape(2, 48, 4, 5), tile_x=64, tile_y=64, overlap=8), whole)
    assert vae.decode(samples[:, :, 0]).shape == (2, 1, 32, 40, 3)
    with pytest.raises(ValueError, match="must be 16, or that times"):
        vae.decode(samples.reshape(2, 24, 8, 5))


def test_attributes_of_comfyui_s_vae(loaded):
    vae = loaded[1]
    plan = vae.video_vae.plan_decode((1, 16, 3, 4, 5))
    assert vae.memory_used_decode((1, 16, 3, 4, 5), None) == plan.device_bytes
    assert vae.memory_used_decode((1, 48, 4, 5), None) == plan.device_bytes
    assert vae.memory_used_encode((1, 3, 9, 32, 40), None) == vae.video_vae.plan_encode((1, 3, 9, 32, 40)).device_bytes
    assert vae.model_size() > plan.weight_bytes
    torch = pytest.importorskip("torch")
    assert (vae.device, vae.output_device) == (torch.device("cpu"), torch.device("cpu"))
    assert (vae.vae_dtype, vae.working_dtypes, vae.vae_output_dtype()) == (
        torch.float32,
        [torch.float32],
        torch.float32,
    )
    model = vae.first_stage_model
    assert model is vae.first_stage_model and next(model.parameters()).device == torch.device("cpu")
    pixels = torch.rand(1, 9, 32, 40, 3)
    inner = vae.process_input(pixels.movedim(-1, 1))
    samples = vae.encode(pixels)
    assert torch.allclose(model.encode(inner), samples, rtol=1e-4, atol=1e-5)
    shown = vae.process_output(model.decode(samples)).movedim(1, -1)
    assert torch.allclose(shown, vae.decode(samples), atol=1e-5)
    assert torch.equal(model.decode(samples.reshape(1, 48, 4, 5)), model.decode(samples))
    assert torch.allclose(model(inner), model.decode(samples), atol=1e-4)


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

    found = {}
    for node in nodes.values():
        found.update({key: entry for key, entry in shown(node).items() if key not in found})
    fixed = {"pixel_range", "mixed_devices", "nonfinite", "autotune_path", "device_like", "trace", "latents"}
    fixed.add("latent_format")
    assert set(video_vae.parameters()) - fixed <= set(found)
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
        assert (found[key][0], found[key][1]["default"]) == (kind, default), key
    assert found["decode_tile_size"][1]["min"] == 64 and found["decode_tile_size"][1]["step"] == 32
    assert found["offload_device"][0] == ["none", "cpu"]
    # Plain words for each; the library's own are for programmers.
    from_library = {parameter.help for parameter in video_vae.parameters().values()}
    for key, (_, *options) in found.items():
        if options:
            assert options[0]["tooltip"] and options[0]["tooltip"] not in from_library, key
    json.dumps({name: node.INPUT_TYPES() for name, node in nodes.items()})


def test_memory_is_given_back_when_asked(nodes, images):
    loader = nodes["VideoVaeLoader"]
    (vae, _) = loader().load(**{**defaults(loader), "device": "cpu", "offload_device": "cpu"})
    vae.encode(images)
    assert vae.video_vae.memory_info().now == 0


def test_room_is_asked_for_as_if_all_were_free(pack, loaded):
    """A plan for the memory that is free now would never ask ComfyUI to move a model."""
    host = sys.modules[f"{pack.__name__}.host"]
    vae, shape = loaded[0].video_vae, (1, 16, 5, 16, 16)
    with vae.configured(memory_limit="1024GiB"):
        unlimited = vae.plan_decode(shape).device_bytes
    for limit, expected in (("auto", unlimited), ("50%", unlimited * 2)):
        with vae.configured(memory_limit=limit):
            assert host.wanted_bytes(vae, "decode", shape) == expected, limit
    # What the user gives in bytes is kept to.
    with vae.configured(memory_limit=unlimited - 1):
        assert host.wanted_bytes(vae, "decode", shape) < unlimited
    pixels = (1, 3, 17, 128, 128)
    assert host.wanted_bytes(vae, "encode", pixels) == vae.plan_encode(pixels).device_bytes
    assert vae.memory_limit == "auto"


def test_room_is_made_on_a_gpu(pack, loaded):
    torch = pytest.importorskip("torch")
    host = sys.modules[f"{pack.__name__}.host"]

    class OnGpu:
        """The plans of the CPU under a GPU's name: what is asked does not depend on where."""

        def __getattr__(self, name):
            return "cuda:0" if name == "device" else getattr(loaded[0].video_vae, name)

    Comfy.room = []
    host.make_room(loaded[0].video_vae, "decode", (1, 16, 5, 16, 16))
    assert Comfy.room == [], "the CPU's memory is not ComfyUI's to free"
    host.wanted_bytes, kept = (lambda *job: 1 << 30), host.wanted_bytes
    try:
        host.make_room(OnGpu(), "decode", (1, 16, 5, 16, 16))
    finally:
        host.wanted_bytes = kept
    assert Comfy.room == [((1 << 30) - loaded[0].video_vae.memory_info().now, torch.device("cuda:0"))]


def any_model(nodes, name, **settings):
    """The VAE that the loader of all models gives, and the library with the settings that it should have."""
    loader = nodes["VideoVaeLoad"]
    vae = loader().load(**{**defaults(loader), "device": "cpu", "vae_name": name, **settings})[0]
    from video_vae import VideoVae

    return vae, VideoVae(GOLDEN / name, "cpu", pixel_range="0..1")


PICTURES = np.random.default_rng(6).uniform(0, 1, (3, 37, 45, 4)).astype("f4")


def test_a_model_of_images(nodes):
    vae, right = any_model(nodes, "families/sdxl.safetensors")
    # ComfyUI crops what does not fit, at both ends, and takes images for a batch.
    samples = vae.encode(PICTURES)
    clips = np.ascontiguousarray(PICTURES[:, None, 2:34, 2:42, :3])
    assert samples.shape == (3, 4, 4, 5)
    assert np.array_equal(samples, right.encode(clips, layout="BTHWC")[:, :, 0])
    images = vae.decode(samples)
    assert np.array_equal(images, right.decode(samples[:, :, None], layout="BTHWC").clip(0, 1)[:, 0])
    assert np.array_equal(vae.decode_tiled(samples, tile_x=64, tile_y=64, overlap=8), images)
    assert (vae.latent_dim, vae.latent_channels, vae.upscale_ratio, vae.downscale_ratio) == (2, 4, 8, 8)
    assert vae.temporal_compression_decode() is None and vae.video_vae.scaling_factor == 1.0
    # Our own nodes pad, and give back the size.
    (latent,) = nodes["VideoVaeEncode"]().encode(vae, PICTURES)
    assert latent["samples"].shape == (3, 4, 5, 6)
    assert nodes["VideoVaeDecode"]().decode(vae, latent)[0].shape == (3, 37, 45, 3)
    right.close()


def test_a_model_of_video(nodes):
    vae, right = any_model(nodes, "families/wan21.safetensors")
    samples = vae.encode(np.concatenate([PICTURES, PICTURES, PICTURES]))
    assert samples.shape == (1, 16, 3, 4, 5) and vae.encode(PICTURES).shape == (1, 16, 1, 4, 5)
    first = np.ascontiguousarray(PICTURES[:1, 2:34, 2:42, :3])
    assert np.array_equal(vae.encode(PICTURES), right.encode(first, layout="THWC"))
    assert vae.decode(samples).shape == (1, 9, 32, 40, 3) and vae.latent_dim == 3
    right.close()


def test_the_loader_of_all_models_takes_seedvr2(nodes, loaded, images):
    vae = any_model(nodes, "small.safetensors")[0]
    assert np.array_equal(np.asarray(vae.encode(images)), np.asarray(loaded[1].encode(images)))
    loader = nodes["VideoVaeLoader"]
    with pytest.raises(ValueError, match="use Load VAE"):
        loader().load(**{**defaults(loader), "device": "cpu", "vae_name": "families/sdxl.safetensors"})


API_WORKFLOWS = [HERE.parent / "workflow_api.json", *sorted((HERE.parent / "workflows").glob("*.json"))]


@pytest.mark.parametrize("file", API_WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_fit_the_nodes(nodes, file):
    workflow = json.loads(file.read_text(encoding="utf-8"))
    ours = {step["class_type"]: step["inputs"] for step in workflow.values() if step["class_type"] in nodes}
    if file.stem == "workflow_api":
        assert set(ours) == {"VideoVaeLoader", "VideoVaeEncode", "VideoVaeDecode"}
    else:
        assert set(ours) == {"VideoVaeLoad"}
    for name, inputs in ours.items():
        required = nodes[name].INPUT_TYPES()["required"]
        assert set(inputs) == set(required), name
        for key, value in inputs.items():
            if key in defaults(nodes[name]) and key != "vae_name":
                assert value == defaults(nodes[name])[key], key


def test_a_missing_library_is_an_import_failure(tmp_path):
    """ComfyUI lists folders that fail to import. Nodes that fail when it asks for their widgets are left out."""
    program = f"import sys; sys.path.insert(0, {str(HERE)!r}); import conftest; conftest.import_folder(conftest.FOLDER)"
    environment = {**os.environ, "VIDEO_VAE_LIBRARY": str(tmp_path / "absent.so")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "ImportError" in done.stderr, done.stderr
    assert "absent.so" in done.stderr and "VIDEO_VAE_LIBRARY" in done.stderr


WORKFLOWS = ["workflow.json", "workflow_seedvr2.json"]


def pair(value):
    return len(value) == 2 and all(isinstance(number, (int, float)) for number in value)


@pytest.mark.parametrize("file", WORKFLOWS)
def test_the_page_takes_the_workflows(file):
    """What its schema asks for. It warns of a workflow that has something else."""
    workflow = json.loads((HERE.parent / file).read_text(encoding="utf-8"))
    assert str(uuid.UUID(workflow["id"])) == workflow["id"]
    for key in ("revision", "last_node_id", "last_link_id", "version"):
        assert isinstance(workflow[key], (int, float)), key
    forms = {"cnr_id": r"[a-zA-Z0-9]([\w.-]*[a-zA-Z0-9])?", "ver": r"v?\d+\.\d+\.\d+|[0-9a-f]{4,40}"}
    for step in workflow["nodes"]:
        assert isinstance(step["id"], int) and step["id"] <= workflow["last_node_id"] and isinstance(step["type"], str)
        assert pair(step["pos"]) and pair(step["size"]) and isinstance(step["flags"], dict)
        assert all(isinstance(step[key], int) for key in ("order", "mode"))
        properties = step["properties"]
        for key, form in forms.items():
            assert key not in properties or re.fullmatch(form, properties[key]), properties
        for model in properties.get("models", []):
            assert {"name", "url", "directory"} <= set(model) and model["url"].startswith("https://")
        assert all(isinstance(socket["name"], str) for socket in [*step.get("inputs", []), *step.get("outputs", [])])
    for link in workflow["links"]:
        assert len(link) == 6 and all(isinstance(number, int) for number in link[:5]) and isinstance(link[5], str)
        assert link[0] <= workflow["last_link_id"]
    for group in workflow.get("groups", []):
        assert isinstance(group["title"], str) and len(group["bounding"]) == 4


def test_workflows_have_names_of_their_own():
    ids = [json.loads((HERE.parent / file).read_text(encoding="utf-8"))["id"] for file in WORKFLOWS]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("file", WORKFLOWS)
def test_the_workflows_of_the_page_fit_the_nodes(nodes, file):
    """Values stand in the order of the widgets; links and sockets name each other."""
    workflow = json.loads((HERE.parent / file).read_text(encoding="utf-8"))
    steps = {step["id"]: step for step in workflow["nodes"]}
    ours = [step for step in steps.values() if step["type"] in nodes]
    assert len(ours) == 1 and any(step["type"] == "MarkdownNote" for step in steps.values())
    for step in ours:
        given = dict(zip(defaults(nodes[step["type"]]), step["widgets_values"]))
        given.pop("vae_name")
        assert given == {key: value for key, value in defaults(nodes[step["type"]]).items() if key != "vae_name"}
        assert tuple(output["type"] for output in step["outputs"]) == nodes[step["type"]].RETURN_TYPES
    for number, source, out, target, into, kind in workflow["links"]:
        assert number in steps[source]["outputs"][out]["links"]
        assert steps[target]["inputs"][into]["link"] == number
        assert steps[source]["outputs"][out]["type"] == kind and kind in steps[target]["inputs"][into]["type"]


def test_the_registry_s_entry_is_of_this_version():
    entry = (FOLDER / "pyproject.toml").read_text(encoding="utf-8")
    cargo = (REPOSITORY / "Cargo.toml").read_text(encoding="utf-8")
    version = next(line for line in cargo.splitlines() if line.startswith("version = "))
    assert version in entry and "[tool.comfy]" in entry


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
    # Without the site's packages: a wheel that is installed comes first.
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    inside = "python/src/video_vae" if how == "linked" else "custom_nodes/video_vae_nodes/video_vae"
    assert inside in done.stdout.replace("\\", "/")
