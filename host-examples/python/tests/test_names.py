"""Checkpoints by name, the version, and what a closed object says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SMALL

import video_vae
from video_vae import CheckpointError, StateError, VideoVae

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_the_version_is_the_library_s():
    assert video_vae.__version__ == video_vae.version()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = video_vae.nothing


def test_demo_is_a_known_name():
    with VideoVae("demo", "cpu") as vae:
        assert vae.model.latent_channels == 16


def test_a_name_is_found_where_vvae_get_puts_it(tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match="seedvr2 is not on this machine; get it with: vvae get seedvr2"):
        VideoVae("seedvr2", "cpu")
    folder = tmp_path / "hub" / "models--numz--SeedVR2_comfyUI"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for version in ("f" * 40, COMMIT, "0" * 40):
        place = folder / "snapshots" / version / "ema_vae_fp16.safetensors"
        place.parent.mkdir(parents=True)
        place.symlink_to(SMALL if version == COMMIT else tmp_path / "gone")
    with VideoVae("seedvr2", "cpu") as vae:
        assert COMMIT in repr(vae) or "ema_vae_fp16" in repr(vae)


def test_a_mistyped_name_is_told_the_names(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match='"sedvr2" is no file here .*names are demo, seedvr2, '):
        VideoVae("sedvr2", "cpu")
    # A file may have such a name.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sedvr2").symlink_to(SMALL)
    VideoVae("sedvr2", "cpu").close()


def test_a_closed_object_says_so():
    vae = VideoVae(SMALL, "cpu")
    vae.close()
    vae.close()
    for use in (vae.memory_info, vae.cancel, lambda: vae.plan_decode((1, 16, 1, 8, 8)), lambda: vae.configure(seed=1)):
        with pytest.raises(StateError, match="this VideoVae is closed"):
            use()


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_a_reader_may_leave_early():
    package = str(Path(video_vae.__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": package}
    command = f"'{sys.executable}' -m video_vae | head -1"
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("video-vae ") and done.stderr == "", done.stderr
