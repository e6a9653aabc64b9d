"""Puts the library into the wheel. Everything else is in pyproject.toml.

The library is $VIDEO_VAE_LIBRARY, or the repository's target/release, where cargo builds it if it is not there yet.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
NAME = {"win32": "video_vae.dll", "darwin": "libvideo_vae.dylib"}.get(sys.platform, "libvideo_vae.so")


def library() -> Path:
    named = os.environ.get("VIDEO_VAE_LIBRARY")
    if named:
        if not Path(named).is_file():
            raise SystemExit(f"VIDEO_VAE_LIBRARY is {named}, and there is no such file")
        return Path(named)
    built = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target")) / "release" / NAME
    if not built.is_file():
        if not (REPOSITORY / "Cargo.toml").is_file():
            raise SystemExit(f"no {NAME}: install from a clone of the repository, or set VIDEO_VAE_LIBRARY")
        subprocess.run(["cargo", "build", "--release", "--lib"], cwd=REPOSITORY, check=True)
    return built


def version() -> str:
    """One version for the library and the package."""
    cargo = REPOSITORY / "Cargo.toml"
    if cargo.is_file():
        return re.search(r'^version = "(.+)"', cargo.read_text(encoding="utf-8"), re.MULTILINE).group(1)
    return "0.0.0"


class WithLibrary(build_py):
    def run(self) -> None:
        super().run()
        # Also for `pip install -e`, which imports from the checkout and finds target/release from there.
        if not self.editable_mode:
            shutil.copy2(library(), Path(self.build_lib) / "video_vae" / NAME)


class AnyPython(bdist_wheel):
    """ctypes needs no particular Python, only the system that the library is for."""

    def get_tag(self) -> tuple:
        return ("py3", "none", super().get_tag()[2])


class Binary(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(version=version(), distclass=Binary, cmdclass={"build_py": WithLibrary, "bdist_wheel": AnyPython})
