"""The module for PyTorch, as users of diffusers call it."""

import copy
import functools
import io
import json
import pickle
import shutil
import subprocess
import sys

import pytest
from conftest import GOLDEN, SMALL, SOURCES, golden, random_latent, random_video, relative_error

from video_vae import CheckpointError, TensorError, VideoVae

torch = pytest.importorskip("torch")

from video_vae.torch import AutoencoderKLSeedVR2  # noqa: E402


@pytest.fixture
def module():
    return AutoencoderKLSeedVR2.from_single_file(SMALL)


def video(*shape):
    return torch.from_numpy(random_video(*shape))


def latent(*shape):
    return torch.from_numpy(random_latent(*shape))


@pytest.mark.parametrize("clip", ["small-clip5", "small-image"])
def test_goldens(module, clip):
    if not (GOLDEN / f"{clip}.safetensors").is_file():
        pytest.skip(f"no golden {clip}")
    right = {name: torch.from_numpy(values.copy()) for name, values in golden(clip).items()}
    posterior = module.encode(right["encode_video"]).latent_dist
    assert relative_error(posterior.mean, right["encode_mean"]) <= 1e-5
    assert relative_error(module.decode(right["decode_latent"]).sample, right["decode_video"]) <= 1e-5


def test_it_is_the_library_unscaled(module, vae):
    x, z = video(2, 3, 5, 16, 24), latent(2, 16, 2, 2, 3)
    mean, logvar = vae.encode(x, logvar=True)
    posterior = module.encode(x).latent_dist
    assert torch.equal(posterior.mean, mean) and torch.equal(posterior.mode(), mean)
    assert torch.equal(posterior.logvar, logvar.clamp(-30, 20))
    assert torch.equal(module.decode(z).sample, vae.decode(z))
    assert module.config.scaling_factor == module.config["scaling_factor"] == 0.9152
    assert (module.config.latent_channels, module.spatial_compression_ratio) == (16, 8)
    with pytest.raises(AttributeError, match="scaling_factor"):
        module.config.shift  # noqa: B018


def test_outputs_are_read_in_every_way(module):
    x, z = video(1, 3, 1, 16, 16), latent(1, 16, 1, 2, 2)
    out = module.decode(z)
    assert out.sample is out["sample"] is out[0] is out.to_tuple()[0]
    (sample,) = module.decode(z, return_dict=False)
    assert torch.equal(sample, out.sample)
    (posterior,) = module.encode(x, return_dict=False)
    assert torch.equal(posterior.mean, module.encode(x)["latent_dist"].mean)
    round_trip = module.decode(posterior.mode()).sample
    assert torch.equal(module(x).sample, round_trip)
    seeded = [module(x, True, generator=torch.Generator().manual_seed(3)).sample for _ in range(2)]
    assert torch.equal(*seeded) and not torch.equal(seeded[0], round_trip)


def test_images_have_four_axes(module):
    x, z = video(2, 3, 16, 24), latent(2, 16, 2, 3)
    mean = module.encode(x).latent_dist.mean
    assert mean.shape == (2, 16, 2, 3)
    assert torch.equal(mean, module.encode(x[:, :, None]).latent_dist.mean[:, :, 0])
    assert module.decode(z).sample.shape == (2, 3, 16, 24)
    assert torch.equal(module.decode(z).sample, module.decode(z[:, :, None]).sample[:, :, 0])


def test_the_distribution_is_that_of_diffusers(module):
    diffusers = pytest.importorskip("diffusers.models.autoencoders.vae")
    ours = module.encode(video(2, 3, 5, 16, 16)).latent_dist
    theirs = diffusers.DiagonalGaussianDistribution(ours.parameters)
    for name in ("mean", "logvar", "std", "var"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    draw = [one.sample(torch.Generator().manual_seed(7)) for one in (ours, theirs)]
    assert torch.equal(*draw)
    both = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    again = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    assert torch.equal(ours.sample(both), theirs.sample(again))
    assert torch.allclose(ours.kl().sum(), theirs.kl().sum(), rtol=1e-5)
    with pytest.raises(ValueError, match="the batch has 2"):
        ours.sample(both[:1])


def test_kl_by_its_definition(module):
    a = module.encode(video(2, 3, 1, 16, 16)).latent_dist
    b = module.encode(-video(2, 3, 1, 16, 16)).latent_dist
    normal = [torch.distributions.Normal(one.mean, one.std) for one in (a, b)]
    expected = torch.distributions.kl_divergence(*normal).sum(dim=(1, 2, 3, 4))
    assert torch.allclose(a.kl(b), expected, rtol=1e-4)
    unit = torch.distributions.Normal(torch.zeros_like(a.mean), torch.ones_like(a.mean))
    assert torch.allclose(a.kl(), torch.distributions.kl_divergence(normal[0], unit).sum(dim=(1, 2, 3, 4)), rtol=1e-4)


def test_types_are_those_of_the_module(module):
    x, z = video(1, 3, 1, 16, 16), latent(1, 16, 1, 2, 2)
    exact = module.decode(z).sample
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float32):
        assert module.to(dtype) is module and module.dtype == dtype
        assert next(module.parameters()).dtype == dtype and next(module.parameters()).numel() == 0
        posterior = module.encode(x).latent_dist
        assert posterior.mean.dtype == posterior.logvar.dtype == posterior.sample().dtype == dtype
        assert module.decode(z).sample.dtype == dtype
        assert relative_error(module.decode(z.double()).sample.float(), exact) < 5e-3
    assert module.half().dtype == torch.float16 and module.video_vae.precision == "auto"
    shown = (x * 127.5 + 127.5).round().to(torch.uint8)
    assert relative_error(module.float().encode(shown).latent_dist.mean, module.encode(x).latent_dist.mean) < 1e-2


def test_autocast_and_modes_change_nothing(module):
    x, z = video(1, 3, 5, 16, 16), latent(1, 16, 2, 2, 2)
    mean, sample = module.encode(x).latent_dist.mean, module.decode(z).sample
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            assert torch.equal(module.encode(x).latent_dist.mean, mean)
            assert torch.equal(module.decode(z).sample, sample)
    assert not module.training and module.train().eval() is module
    around = torch.nn.Sequential(module).to(torch.float16)
    assert module.dtype == torch.float16 and around[0] is module


def test_a_gradient_is_refused_with_words(module):
    z = latent(1, 16, 1, 2, 2).requires_grad_()
    out = module.decode(z).sample
    assert torch.equal(out.detach(), module.decode(z.detach()).sample)
    with pytest.raises(RuntimeError, match="no gradients"):
        out.sum().backward()
    x = video(1, 3, 1, 16, 16).requires_grad_()
    with pytest.raises(RuntimeError, match="no gradients"):
        module.encode(x).latent_dist.sample().sum().backward()
    with torch.no_grad():
        assert not module.decode(z).sample.requires_grad
    # Someone who wants to train it is told too.
    with pytest.raises(RuntimeError, match="no gradients"):
        module.requires_grad_(True).decode(z.detach()).sample.sum().backward()


def test_leaving_a_device_gives_its_memory_back(module):
    z = latent(1, 16, 1, 2, 2)
    expected = module.decode(z).sample
    opened = module.video_vae
    assert opened.memory_info().now > 0
    module.to("meta")
    assert opened.memory_info().now == 0
    with pytest.raises(ValueError, match="on meta"):
        module.decode(z)
    # PyTorch moves nothing out of meta; an empty parameter has nothing to move.
    module.to_empty(device="cpu")
    assert torch.equal(module.decode(z).sample, expected) and module.video_vae is opened


def test_a_gpu_takes_it_back_and_forth(module):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    z = latent(1, 16, 2, 4, 4)
    exact = module.decode(z).sample
    module.to("cuda")
    assert module.device == torch.device("cuda", torch.cuda.current_device())
    found = module.decode(z.cuda()).sample
    assert found.is_cuda and relative_error(found.cpu(), exact) < 1e-2
    on_gpu = module.video_vae
    assert on_gpu.memory_info().now > 0
    module.to("cpu")
    assert on_gpu.memory_info().now == 0
    assert torch.equal(module.decode(z).sample, exact)
    with pytest.raises(ValueError, match=r"call \.to\('cuda:0'\)"):
        module.decode(z.cuda())
    assert torch.equal(module.cuda().decode(z.cuda()).sample, found)


def test_tiling_is_a_hint(module):
    z = latent(1, 16, 1, 16, 16)
    exact = module.decode(z).sample
    module.enable_tiling(64, 64, 48, 40)
    module.enable_slicing()
    assert module.use_tiling and module.use_slicing
    assert torch.equal(module.decode(z).sample, exact) and module.video_vae.last_run().exact
    assert module.video_vae.decode_tile_overlap == module.video_vae.encode_tile_overlap == 24
    # Where the plan needs tiles it has them, with the hint's overlap.
    whole = tight = module.video_vae.plan_decode(z.shape)
    for share in range(15, 0, -1):
        module.configure(memory_limit=whole.device_bytes * share // 16)
        tight = module.video_vae.plan_decode(z.shape)
        if not tight.exact:
            break
    assert whole.exact and not tight.exact and tight.tile_overlap == 24
    module.configure(memory_limit="auto", decode_tiled=True, decode_tile_size=64)
    module.decode(z)
    assert not module.video_vae.last_run().exact
    module.disable_tiling()
    module.disable_slicing()
    assert not module.use_tiling and not module.use_slicing


def test_compiled_programs_go_around_it(module):
    """A graph ends before a call and the next begins after it. The compiler needs no backend for that."""
    x, z = video(1, 3, 5, 16, 16), latent(1, 16, 2, 2, 2)
    sample, mean = module.decode(z).sample, module.encode(x).latent_dist.mean
    compiled = functools.partial(torch.compile, backend="eager")
    assert torch.equal(compiled(module.decode)(z).sample, sample)
    assert torch.equal(compiled(module.encode)(x).latent_dist.mean, mean)
    assert torch.equal(compiled(module)(x).sample, module(x).sample)
    assert torch.equal(compiled(lambda z: module.decode(z * 1.0).sample + 1)(z), sample + 1)
    assert compiled(module.decode)(z, return_dict=False)[0].shape == sample.shape


def test_importing_it_imports_no_compiler():
    program = f"import sys; sys.path.insert(0, {str(SOURCES)!r}); import video_vae.torch"
    program += "; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_accelerate_moves_it(module, device):
    """Parameters are on meta between the calls, and the memory of the device is given back."""
    accelerate = pytest.importorskip("accelerate")
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    x, z = video(1, 3, 5, 16, 16), latent(1, 16, 2, 2, 2)
    sample = module.to(device).decode(z.to(device)).sample.cpu()
    module.to("cpu")
    accelerate.cpu_offload(module, torch.device(device))
    assert module.device.type == "meta"
    for _ in range(2):
        assert torch.equal(module.decode(z).sample.cpu(), sample)
        assert module.device.type == "meta" and module._opened[device].memory_info().now == 0
        assert module.encode(x).latent_dist.mean.shape == (1, 16, 2, 2, 2)
        assert module(x).sample.shape == x.shape
    with pytest.raises(TensorError):
        module.decode(latent(1, 3, 2, 2, 2))
    assert torch.equal(module.decode(z).sample.cpu(), sample)
    around = torch.nn.Sequential(AutoencoderKLSeedVR2.from_single_file(SMALL))
    hook = accelerate.cpu_offload_with_hook(around[0], torch.device(device))[1]
    assert torch.equal(around[0].decode(z.to(device)).sample.cpu(), sample)
    hook.offload()
    assert around[0].device == torch.device("cpu")


def test_a_pipeline_of_diffusers_moves_it(module):
    """enable_sequential_cpu_offload, which wants a GPU."""
    diffusers = pytest.importorskip("diffusers")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")

    class Pipeline(diffusers.DiffusionPipeline):
        def __init__(self, vae):
            super().__init__()
            self.register_modules(vae=vae)

    z = latent(1, 16, 2, 2, 2)
    sample = module.to("cuda").decode(z.cuda()).sample.cpu()
    pipeline = Pipeline(module.to("cpu"))
    pipeline.enable_sequential_cpu_offload()
    assert torch.equal(pipeline.vae.decode(z.cuda()).sample.cpu(), sample)
    assert module.device.type == "meta"


def test_it_is_saved_as_it_was_opened(module, tmp_path):
    folder, z = tmp_path / "new" / "vae", latent(1, 16, 2, 2, 2)
    module.save_pretrained(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert (folder / "diffusion_pytorch_model.safetensors").read_bytes() == SMALL.read_bytes()
    config = json.loads((folder / "config.json").read_text())
    assert config["_class_name"] == "AutoencoderKLSeedVR2" and config["scaling_factor"] == 0.9152
    opened = AutoencoderKLSeedVR2.from_pretrained(folder)
    assert torch.equal(opened.decode(z).sample, module.decode(z).sample)
    # Over the file that it was opened from.
    opened.save_pretrained(folder)
    assert torch.equal(opened.decode(z).sample, module.decode(z).sample)
    with pytest.raises(ValueError, match="safetensors"):
        module.save_pretrained(folder, safe_serialization=False)


def test_folders(tmp_path):
    with pytest.raises(CheckpointError, match="nothing is downloaded"):
        AutoencoderKLSeedVR2.from_pretrained(tmp_path / "ByteDance-Seed")
    with pytest.raises(CheckpointError, match="has none"):
        AutoencoderKLSeedVR2.from_pretrained(tmp_path)
    (tmp_path / "vae").mkdir()
    shutil.copy(SMALL, tmp_path / "vae" / "some.safetensors")
    assert AutoencoderKLSeedVR2.from_pretrained(tmp_path, subfolder="vae").dtype == torch.float32
    shutil.copy(SMALL, tmp_path / "vae" / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"other\.safetensors, some\.safetensors"):
        AutoencoderKLSeedVR2.from_pretrained(tmp_path / "vae")
    shutil.copy(SMALL, tmp_path / "vae" / "ema_vae_fp16.safetensors")
    opened = AutoencoderKLSeedVR2.from_pretrained(tmp_path / "vae", torch_dtype=torch.bfloat16, memory_limit="1GiB")
    assert opened.dtype == torch.bfloat16 and opened.video_vae.memory_limit == "1GiB"
    assert "ema_vae_fp16.safetensors" in repr(opened) and "memory_limit='1GiB'" in repr(opened)
    assert AutoencoderKLSeedVR2.from_pretrained(SMALL).device == torch.device("cpu")


def test_mistakes_are_named(module):
    with pytest.raises(TypeError, match="memory_limit"):
        AutoencoderKLSeedVR2.from_single_file(SMALL, memory_limi="1GiB")
    for key in ("scaling_factor", "pixel_range", "posterior", "seed"):
        with pytest.raises(TypeError, match=key):
            AutoencoderKLSeedVR2.from_single_file(SMALL, **{key: 1})
        with pytest.raises(TypeError, match=key):
            module.configure(**{key: 1})
    with pytest.raises(ValueError, match=r"\[B, C, T, H, W\]"):
        module.encode(video(3, 16, 16))
    with pytest.raises(TypeError, match="list"):
        module.decode([1.0])
    with pytest.raises(TensorError):
        module.encode(video(1, 4, 1, 16, 16))


def test_copies_and_pickles_open_the_file_themselves(module):
    z = latent(1, 16, 1, 2, 2)
    expected = module.decode(z).sample
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert other.video_vae is not module.video_vae
        assert torch.equal(other.decode(z).sample, expected)


def test_progress_reaches_every_call(module):
    told = []
    module.progress = lambda done, total, stage: told.append(stage)
    module.decode(latent(1, 16, 1, 2, 2))
    assert "decode" in told


def test_video_vae_takes_torch_s_words():
    with VideoVae(SMALL, torch.device("cpu")) as vae:
        z = latent(2, 16, 2, 3)
        assert torch.equal(vae.decode(z), vae.decode(z[:, :, None]))
        assert vae.device == "cpu"
        with pytest.raises(TensorError, match=r"video: dtype float64.*float32 copy"):
            vae.encode(video(1, 16, 16, 3).double())


def test_the_package_itself_imports_no_torch():
    program = f"import sys; sys.path.insert(0, {str(SOURCES)!r}); import video_vae; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
