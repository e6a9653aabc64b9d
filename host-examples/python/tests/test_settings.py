"""Parameters, plans, memory, discovery, and errors of every kind."""

import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import SMALL, SOURCES, random_latent, random_video

import video_vae
from video_vae import (
    ArgumentError,
    CheckpointError,
    DeviceError,
    MemoryLimitError,
    StateError,
    VideoVae,
    VideoVaeError,
)
from video_vae.__main__ import _save


def test_every_parameter_is_a_keyword_and_an_attribute(vae):
    for key, parameter in video_vae.parameters().items():
        assert getattr(vae, key) == parameter.default
        assert key in dir(vae)
        setattr(vae, key, parameter.default)
        assert getattr(vae, key) == parameter.default
    with VideoVae(SMALL, "cpu", **{key: p.default for key, p in video_vae.parameters().items()}) as other:
        assert other.seed == 42
    vae.memory_limit = "4GiB"
    assert vae.memory_limit == "4GiB"
    vae.memory_limit = None
    assert vae.memory_limit == "auto"
    vae.memory_limit = 1 << 30
    vae.decode_tiled = "1"
    assert vae.decode_tiled is True
    with vae.configured(decode_tiled=False, seed=7):
        assert (vae.decode_tiled, vae.seed) == (False, 7)
    assert (vae.decode_tiled, vae.seed) == (True, 42)


def test_unknown_names_are_told_with_the_nearest(vae):
    with pytest.raises(AttributeError, match="memory_limit"):
        vae.memory_limits = "4GiB"
    with pytest.raises(AttributeError, match="did you mean 'decode'"):
        vae.decod  # noqa: B018
    with pytest.raises(TypeError, match="did you mean 'threads'"):
        VideoVae(SMALL, thread=2)
    with pytest.raises(ArgumentError, match="memory_limit"):
        vae.memory_limit = "much"
    assert vae.memory_limit == "auto"


def test_devices_by_every_name(vae):
    class TorchDevice:
        """As torch.device prints itself."""

        def __str__(self):
            return "cpu"

    with VideoVae(SMALL, TorchDevice()) as other:
        assert other.device == "cpu"
    with VideoVae(SMALL) as other:
        assert other.device == ([device.id for device in video_vae.devices() if device.id != "cpu"] or ["cpu"])[0]
    if len(video_vae.devices()) == 1:
        # "cuda" is a device's name, told as such where there is no GPU.
        with pytest.raises(DeviceError, match="cuda:0"):
            VideoVae(SMALL, "cuda")


def test_its_text_says_what_it_is(vae):
    assert repr(vae) == "<VideoVae small.safetensors on cpu>"
    vae.memory_limit = "4GiB"
    vae.seed = 42
    assert repr(vae) == "<VideoVae small.safetensors on cpu, memory_limit='4GiB'>"
    vae.close()
    assert repr(vae) == "<VideoVae small.safetensors, closed>"


def test_errors_by_kind(tmp_path, vae):
    with pytest.raises(CheckpointError, match="absent"):
        VideoVae(tmp_path / "absent.safetensors")
    damaged = tmp_path / "Größe 視頻.safetensors"
    damaged.write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match="Größe 視頻"):
        VideoVae(damaged)
    with pytest.raises(DeviceError, match="tpu"):
        VideoVae(SMALL, "tpu:0")
    vae.memory_limit = "100KiB"
    with pytest.raises(MemoryLimitError) as limit:
        vae.encode(random_video(1, 64, 64, 3))
    assert isinstance(limit.value, VideoVaeError) and isinstance(limit.value, MemoryError)
    vae.close()
    vae.close()
    assert vae.closed
    with pytest.raises(StateError):
        vae.encode(random_video(1, 64, 64, 3))


def test_texts_with_a_nul_are_errors(tmp_path, vae):
    """C would take the text before it."""
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(SMALL.read_bytes())
    for call, name in [
        (lambda: VideoVae(f"{copy}\0.old", "cpu"), "weights"),
        (lambda: VideoVae(copy, "cpu\0:3"), "device"),
        (lambda: VideoVae(copy, "cpu", memory_limit="1GiB\0 or so"), "memory_limit"),
        (lambda: setattr(vae, "tiles", "never\0"), "tiles"),
        (lambda: vae.open_stream("decode\0", (1, 16, 1, 2, 2)), "node"),
        (lambda: vae.plan_timeline("decode\0", (1, 16, 1, 2, 2)), "node"),
        (lambda: vae.range_inputs("decode\0", slice(0, 1), 2), "node"),
        (lambda: vae.open_stream("\udc80", (1, 16, 1, 2, 2)), "node"),
    ]:
        with pytest.raises(ArgumentError, match=name):
            call()
    assert (vae.memory_limit, vae.tiles) == ("auto", "auto")


def test_integers_beyond_64_bits_are_errors(vae):
    """ctypes would take their lowest 64 bits, and a clip of 2**70 frames would be a stream."""
    huge = 2**70
    for call, name in [
        (lambda: vae.plan_encode((1, 3, huge, 8, 8)), "shape"),
        (lambda: vae.plan_encode((huge, 8, 8, 3)), "shape"),
        (lambda: vae.plan_encode((1, 3, -huge, 8, 8)), "shape"),
        (lambda: vae.plan_decode((1, 16, 1, huge, 8)), "shape"),
        (lambda: vae.plan_decode((1, 16, 2, 8, 8), frames=slice(huge, huge + 1)), "frames"),
        (lambda: vae.plan_timeline("decode", (1, 16, huge, 2, 2)), "shape"),
        (lambda: vae.plan_timeline("decode", (1, 16, 1, 2)), "shape"),
        (lambda: vae.open_stream("encode", (1, 3, 0, 2**64, 8)), "shape"),
        (lambda: vae.open_stream("encode", (1, 3, 0, 8, 8), huge), "first"),
        (lambda: vae.range_inputs("decode", slice(0, 1), huge), "clip_frames"),
        (lambda: vae.range_inputs("decode", slice(0, huge), 2), "frames"),
        (lambda: vae.decode_range(random_latent(1, 16, 1, 2, 2), slice(0, 1), huge), "clip_frames"),
        (lambda: vae.decode(random_latent(1, 16, 1, 2, 2), size=(huge, 8, 8)), "size"),
        (lambda: next(vae.stream_decode(random_latent(1, 16, 1, 2, 2), size=(1, huge, 8))), "size"),
        (lambda: setattr(vae, "seed", huge), "seed"),
        (lambda: setattr(vae, "threads", huge), "threads"),
    ]:
        with pytest.raises(ArgumentError, match=name):
            call()
    for shape in ((1, 3, 1.5, 8, 8), (1, 3, "1", 8, 8)):
        with pytest.raises((ArgumentError, TypeError)):
            vae.plan_encode(shape)
    assert vae.plan_encode(np.array((1, 3, 1, 8, 8))).output_shape == (1, 16, 1, 1, 1)


def test_paths_beyond_ascii(tmp_path):
    copy = tmp_path / "Gewichte – 重み.safetensors"
    copy.write_bytes(SMALL.read_bytes())
    with VideoVae(copy, "cpu") as vae:
        assert vae.model.latent_channels == 16


def test_plans(vae):
    latent = random_latent(1, 16, 3, 8, 8)
    plan = vae.plan_decode(latent.shape)
    assert plan.exact and plan.output_shape == (1, 3, 9, 64, 64) and plan.tiles == (1, 1)
    assert plan.device_bytes == plan.weight_bytes + plan.workspace_bytes
    assert "exact" in str(plan)
    (device,) = vae.plan_timeline("decode", latent.shape)["devices"]
    assert device["device_bytes"] == plan.device_bytes and device["steps"] and device["slots"]
    vae.decode(latent)
    assert vae.memory_info().peak == plan.device_bytes
    assert vae.plan_encode((9, 64, 64, 3)).output_shape == latent.shape
    assert vae.plan_encode((1, 9, 64, 64, 3), layout="BTHWC").output_shape == latent.shape
    vae.trim(weights=True)
    assert vae.memory_info().now == 0


def test_discovery():
    encode, decode = video_vae.nodes()
    assert (encode.id, decode.id) == ("encode", "decode")
    assert [port.name for port in encode.ports if port.optional] == ["logvar"]
    assert "bfloat16" in encode.ports[0].dtypes
    seed = video_vae.parameters()["seed"]
    assert (seed.kind, seed.default) == ("int", 42)
    cpu = video_vae.devices()[-1]
    assert (cpu.id, cpu.uuid, cpu.compute_capability) == ("cpu", "", (0, 0))


def test_the_module_runs(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "video_vae", *map(str, arguments)]
        return subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, timeout=120)

    shown = run()
    assert shown.returncode == 0 and "cpu" in shown.stdout and "memory_limit = auto" in shown.stdout
    video, out = tmp_path / "in.npy", tmp_path / "out.npy"
    np.save(video, np.zeros((3, 20, 20, 3), "u1"))
    done = run("roundtrip", video, out, "--weights", SMALL, "--set", "threads=1")
    assert done.returncode == 0, done.stderr
    assert np.load(out).shape == (3, 20, 20, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npy", "out.npy"]
    assert "CheckpointError" in run("roundtrip", video, out, "--weights", "absent").stderr


def test_the_module_replaces_regular_files_only(tmp_path):
    fifo, file, link = tmp_path / "fifo.npy", tmp_path / "file.npy", tmp_path / "link.npy"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="regular"):
        _save(str(fifo), np.zeros(3))
    file.write_bytes(b"old")
    link.symlink_to(file)
    _save(str(link), np.ones(3))
    assert link.is_symlink() and np.load(file).sum() == 3 and fifo.is_fifo()
    assert len(list(tmp_path.iterdir())) == 3
