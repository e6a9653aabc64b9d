"""The classes against those of diffusers: tiny random checkpoints, f32, on the CPU."""

import copy
import pickle
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from conftest import SMALL  # noqa: E402
from tiny_checkpoints import TINY, both, close  # noqa: E402

import video_vae.torch as ours  # noqa: E402
from video_vae import CheckpointError  # noqa: E402


@pytest.fixture(scope="module", params=TINY)
def pair(request, tmp_path_factory):
    """Diffusers' module and ours, of the same folder."""
    folder = tmp_path_factory.mktemp(request.param)
    return (*both(request.param, folder), folder)


def is_image(module) -> bool:
    return module.convention.images


def pixels(module, *batch_frames_size, seed=1):
    """Random pixels with the axes that diffusers' class takes."""
    batch, frames, height, width = batch_frames_size
    if isinstance(module, ours.AutoencoderKLQwenImage21):
        shape = (batch, 1, height, width)
    else:
        shape = (batch, height, width) if is_image(module) else (batch, frames, height, width)
    values = np.random.default_rng(seed).uniform(-1, 1, (shape[0], module.video_vae.model.pixel_channels, *shape[1:]))
    return torch.from_numpy(values.astype("f4"))


@pytest.mark.parametrize("batch, frames", [(1, 1), (2, 5)])
def test_encode_and_decode(pair, batch, frames):
    theirs, module, _ = pair
    x = pixels(module, batch, frames, 32, 48)
    with torch.no_grad():
        right, found = theirs.encode(x).latent_dist, module.encode(x).latent_dist
        close(found.mean, right.mean)
        close(found.logvar, right.logvar)
        generators = [torch.Generator().manual_seed(seed) for seed in (4, 4)]
        close(found.sample(generators[0]), right.sample(generators[1]))
        z = right.mode()
        close(module.decode(z).sample, theirs.decode(z).sample)
        close(module.decode(z, return_dict=False)[0], theirs.decode(z, return_dict=False)[0])
        close(module(x).sample, theirs(x).sample)
        seeded = [torch.Generator().manual_seed(6) for _ in range(2)]
        close(
            module(x, sample_posterior=True, generator=seeded[0]).sample,
            theirs(x, sample_posterior=True, generator=seeded[1]).sample,
        )


def test_large_values_are_cut_where_diffusers_cuts_them(pair):
    theirs, module, _ = pair
    x = pixels(module, 1, 1, 16, 16)
    with torch.no_grad():
        z = 30 * theirs.encode(x).latent_dist.mode()
        right = theirs.decode(z).sample
        close(module.decode(z).sample, right)
    assert module.convention.clamps == (float(right.abs().max()) == 1.0)


def test_trailing_frames_are_dropped(pair):
    theirs, module, _ = pair
    if is_image(module):
        pytest.skip("images have no frames")
    with torch.no_grad():
        for frames in (2, 4, 7, 8):
            x = pixels(module, 1, frames, 16, 16, seed=frames)
            close(module.encode(x).latent_dist.mode(), theirs.encode(x).latent_dist.mode())


def test_sizes_that_do_not_fit_are_refused(pair):
    _, module, _ = pair
    factor = module.spatial_compression_ratio
    with pytest.raises(ValueError, match=rf"multiples of {factor}. Crop it, for example to 16 x 32"):
        module.encode(pixels(module, 1, 1, 17, 33))


def test_slicing_and_tiling_change_nothing(pair):
    theirs, module, _ = pair
    x = pixels(module, 2, 1, 32, 32)
    exact = module.encode(x).latent_dist.mode()
    module.enable_slicing()
    module.enable_tiling()
    assert module.use_slicing and module.use_tiling
    assert torch.equal(module.encode(x).latent_dist.mode(), exact) and module.video_vae.last_run().exact
    module.disable_slicing()
    module.disable_tiling()
    assert not module.use_slicing and not module.use_tiling


def test_the_configuration_is_that_of_diffusers(pair):
    theirs, module, folder = pair
    for key, value in theirs.config.items():
        if not key.startswith("_"):
            assert module.config[key] == getattr(module.config, key), key
            assert list(np.ravel(module.config[key])) == list(np.ravel(value)), key
    # Without config.json, the checkpoint's sizes.
    settings = {"config": {}}
    if "shift_factor" in theirs.config:
        settings["latent_format"] = "sdxl" if theirs.config.latent_channels == 4 else "flux"
    single = type(module).from_single_file(folder / "diffusion_pytorch_model.safetensors", **settings)
    for key, value in single.config.items():
        if key in theirs.config:
            assert list(np.ravel(value)) == list(np.ravel(theirs.config[key])), key
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.config == module.config


def test_types_and_what_pipelines_read(pair):
    theirs, module, folder = pair
    half = type(module).from_pretrained(folder, torch_dtype=torch.bfloat16)
    x = pixels(module, 1, 1, 16, 16)
    assert half.dtype == half.encode(x.bfloat16()).latent_dist.sample().dtype == torch.bfloat16
    assert half.to(torch.float32).encode(x).latent_dist.mode().dtype == torch.float32
    if hasattr(theirs, "bn"):
        close(module.bn.running_mean, theirs.bn.running_mean)
        close(module.bn.running_var, theirs.bn.running_var)
        assert half.to(torch.bfloat16).bn.running_mean.dtype == torch.bfloat16
    if isinstance(module, ours.AutoencoderKL):
        assert next(iter(half.to(torch.float16).post_quant_conv.parameters())).dtype == torch.float16
    if hasattr(theirs, "temperal_downsample"):
        assert list(module.temperal_downsample) == list(theirs.temperal_downsample)
    if hasattr(theirs, "spatial_compression_ratio"):
        assert module.spatial_compression_ratio == theirs.spatial_compression_ratio


def test_it_is_saved_for_diffusers(pair, tmp_path):
    theirs, module, _ = pair
    module.save_pretrained(tmp_path)
    again = type(theirs).from_pretrained(tmp_path)
    x = pixels(module, 1, 1, 16, 16)
    with torch.no_grad():
        assert torch.equal(again.encode(x).latent_dist.mode(), theirs.encode(x).latent_dist.mode())


def test_a_file_that_may_be_of_two_models(pair, tmp_path):
    theirs, module, folder = pair
    if not isinstance(module, ours.AutoencoderKL):
        pytest.skip("only SD and SDXL, and SD3 and FLUX.1, have the same tensors")
    # Away from its configuration.
    alone = shutil.copy(folder / "diffusion_pytorch_model.safetensors", tmp_path / "alone.safetensors")
    single = ours.AutoencoderKL.from_single_file(alone)
    names = '"sd" or "sdxl"' if theirs.config.latent_channels == 4 else '"sd3" or "flux"'
    with pytest.raises(AttributeError, match=f"latent_format={names}"):
        single.config.scaling_factor  # noqa: B018
    told = ours.AutoencoderKL.from_single_file(alone, config=folder)
    assert told.config.scaling_factor == theirs.config.scaling_factor


def test_a_class_for_other_checkpoints(pair):
    _, module, folder = pair
    if not isinstance(module, ours.AutoencoderKLFlux2):
        with pytest.raises(CheckpointError, match="AutoencoderKLFlux2 is for"):
            ours.AutoencoderKLFlux2.from_pretrained(folder)
    others = [ours.AutoencoderKLSeedVR2]
    if not isinstance(module, ours.AutoencoderKL):
        others.append(ours.AutoencoderKL)
    for other in others:
        with pytest.raises(CheckpointError, match=f"{other.__name__} is for"):
            other.from_pretrained(folder)


def test_seedvr2_is_no_wan():
    with pytest.raises(CheckpointError, match="use AutoencoderKLSeedVR2"):
        ours.AutoencoderKLWan.from_single_file(SMALL)


def test_variants(pair, tmp_path):
    theirs, module, _ = pair
    theirs.save_pretrained(tmp_path, variant="fp16")
    assert type(module).from_pretrained(tmp_path, variant="fp16").config == module.config
    with pytest.raises(CheckpointError, match="variant is 'bf16'"):
        type(module).from_pretrained(tmp_path, variant="bf16")
