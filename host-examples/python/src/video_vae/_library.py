"""Finds and loads the library."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from . import _abi

NAME = {"win32": "video_vae.dll", "darwin": "libvideo_vae.dylib"}.get(sys.platform, "libvideo_vae.so")


def candidates() -> Iterator[Path]:
    """Where the library may be, best first: what the user says, what the wheel brought, what cargo built."""
    named = os.environ.get("VIDEO_VAE_LIBRARY")
    if named:
        yield Path(named)
        return
    package = Path(__file__).resolve().parent
    yield package / NAME
    # src/video_vae in host-examples/python of an uninstalled checkout.
    for folder in package.parents:
        if (folder / "include" / "video_vae.h").is_file():
            yield Path(os.environ.get("CARGO_TARGET_DIR", folder / "target")) / "release" / NAME


def find() -> Path:
    tried = []
    for path in candidates():
        if path.is_file():
            return path
        tried.append(str(path))
    raise ImportError(
        f"{NAME} is in none of: {', '.join(tried)}. Build it with `cargo build --release`, or say where it is in the "
        "environment variable VIDEO_VAE_LIBRARY."
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The library, loaded at first use, so that importing the package costs and requires nothing."""
    path = find()
    # CDLL releases the interpreter's lock during calls, and takes it in callbacks.
    loaded = ctypes.CDLL(str(path))
    loaded.vvae_abi_version.restype = ctypes.c_uint32
    version = loaded.vvae_abi_version()
    major, minor = version >> 16, version & 0xFFFF
    if major != _abi.VVAE_ABI_MAJOR or minor < _abi.VVAE_ABI_MINOR:
        raise ImportError(
            f"{path} has ABI {major}.{minor}; this package needs {_abi.VVAE_ABI_MAJOR}.{_abi.VVAE_ABI_MINOR} or a "
            f"later {_abi.VVAE_ABI_MAJOR}.x"
        )
    for name, (result, arguments) in _abi.SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded
