"""Puts library, command and demo checkpoint into the wheel. Everything else is in pyproject.toml.

The library is $VIDEO_VAE_LIBRARY, or what cargo builds in the repository, which is always that of the current sources.
The command is $VIDEO_VAE_COMMAND, or built the same way. packaging/build.sh sets both, and what else it needs.
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
REPOSITORY = Path(os.environ.get("VIDEO_VAE_ROOT", HERE.parents[1]))
LIBRARY = {"win32": "video_vae.dll", "darwin": "libvideo_vae.dylib"}.get(sys.platform, "libvideo_vae.so")
COMMAND = "examples/vvae.exe" if sys.platform == "win32" else "examples/vvae"


def built(variable: str, name: str, *target: str) -> Path:
    """The file that `variable` names, or what cargo builds as `name`."""
    named = os.environ.get(variable)
    if named:
        if not Path(named).is_file():
            raise SystemExit(f"{variable} is {named}, and there is no such file")
        return Path(named)
    if not (REPOSITORY / "Cargo.toml").is_file():
        raise SystemExit(f"no {name}: install from a clone of the repository, or set {variable}")
    # Cargo knows whether the sources are newer than the file.
    subprocess.run(["cargo", "build", "--release", *target], cwd=REPOSITORY, check=True)
    return Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target")) / "release" / name


def contents() -> list:
    """What goes into the package beside the sources."""
    files = [
        built("VIDEO_VAE_LIBRARY", LIBRARY, "--lib"),
        built("VIDEO_VAE_COMMAND", COMMAND, "--example", "vvae"),
        *(REPOSITORY / "host-examples" / "assets" / name for name in ("demo.safetensors", "models.json")),
    ]
    notices = os.environ.get("VIDEO_VAE_NOTICES")
    return [*files, Path(notices)] if notices else files


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
            for file in contents():
                shutil.copy2(file, Path(self.build_lib) / "video_vae" / file.name)


class AnyPython(bdist_wheel):
    """ctypes needs no particular Python, only the system that the library is for."""

    def get_tag(self) -> tuple:
        return ("py3", "none", super().get_tag()[2])


class Binary(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(version=version(), distclass=Binary, cmdclass={"build_py": WithLibrary, "bdist_wheel": AnyPython})
