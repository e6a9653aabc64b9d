"""The wheel: one file with library, command and demo checkpoint inside, used from a folder of its own."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from conftest import SMALL

from video_vae._library import NAME, find

PACKAGE = Path(__file__).resolve().parents[1]
REPOSITORY = PACKAGE.parents[1]
COMMAND = "vvae.exe" if sys.platform == "win32" else "vvae"


def test_wheel(tmp_path):
    missing = _missing()
    if missing:
        assert "CI" not in os.environ, missing
        pytest.skip(missing)
    # In a copy, so that the build leaves nothing in the checkout.
    sources = tmp_path / "sources"
    shutil.copytree(PACKAGE, sources, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".*"))
    # cargo test builds the command as well. The sources are a copy, so they do not know the repository.
    # The library is beside its folder, or in deps.
    command = next(path for path in (folder / "examples" / COMMAND for folder in find().parents) if path.is_file())
    files = {"VIDEO_VAE_LIBRARY": find(), "VIDEO_VAE_COMMAND": command, "VIDEO_VAE_ROOT": REPOSITORY}
    environment = {**os.environ, **{name: str(path) for name, path in files.items()}}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(sources)]
    subprocess.run(build, check=True, env=environment)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    brought = (NAME, COMMAND, "demo.safetensors", "models.json", "py.typed", "vae.py")
    assert {f"video_vae/{name}" for name in brought} <= set(names)

    target = tmp_path / "site"
    install = [*pip, "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True)
    environment = {**environment, "PYTHONPATH": str(target)}
    for name in files:
        del environment[name]
    program = f"""
import numpy, video_vae
from video_vae import _library
print(_library.find())
with video_vae.VideoVae({str(SMALL)!r}, "cpu") as vae:
    assert vae.decode(vae.encode(numpy.zeros((1, 16, 16, 3), "u1"))).shape == (1, 3, 1, 16, 16)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == (target / "video_vae" / NAME).resolve()

    program = "from video_vae import _command; raise SystemExit(_command.main())"
    demo = [sys.executable, "-c", program, "demo", "--shape", "1x64x64", "--device", "cpu"]
    done = subprocess.run(demo, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(target) in done.stdout and (tmp_path / "vvae-demo" / "contact-sheet.png").is_file()


def test_a_stale_library_is_built_anew(tmp_path):
    """What an earlier build left in target/ is not packed before cargo has looked at it."""
    missing = _missing()
    if missing or sys.platform == "win32":
        pytest.skip(missing or "the stand-in for cargo is a shell script")
    root, release = tmp_path / "root", tmp_path / "root" / "target" / "release"
    (release / "examples").mkdir(parents=True)
    (root / "host-examples" / "assets").mkdir(parents=True)
    for name in ("demo.safetensors", "models.json"):
        (root / "host-examples" / "assets" / name).write_text("{}")
    (root / "Cargo.toml").write_text('version = "0.0.1"\n')
    for stale in (release / NAME, release / "examples" / COMMAND):
        stale.write_text("stale")
    cargo = tmp_path / "bin" / "cargo"
    cargo.parent.mkdir()
    cargo.write_text(
        f"#!/bin/sh\nprintf fresh > '{release / NAME}'\nprintf fresh > '{release / 'examples' / COMMAND}'\n"
    )
    cargo.chmod(0o755)
    sources = tmp_path / "sources"
    shutil.copytree(PACKAGE, sources, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".*"))
    environment = {k: v for k, v in os.environ.items() if k not in ("VIDEO_VAE_LIBRARY", "CARGO_TARGET_DIR")}
    environment.update(VIDEO_VAE_ROOT=str(root), PATH=f"{cargo.parent}:{os.environ['PATH']}")
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "build")]
    subprocess.run(build, check=True, cwd=sources, env=environment)
    (packed,) = (tmp_path / "build").rglob(NAME)
    assert packed.read_text() == "fresh" and (packed.parent / COMMAND).read_text() == "fresh"


def _missing() -> str:
    """What a build without a network lacks."""
    for name, oldest in (("pip", 21), ("setuptools", 64), ("wheel", 0)):
        try:
            if int(version(name).partition(".")[0]) < oldest:
                return f"{name} {version(name)} is too old"
        except PackageNotFoundError:
            return f"{name} is not installed"
    return ""
