"""What the bits of a result depend on. Workers of one run must agree in all of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy

from .. import VideoVae, VideoVaeError, devices, nodes, parameters, version
from .errors import BatchError
from .files import open_regular
from .frames import reader_version

# Parameters that change time and memory and never a bit.
_FREE = {"memory_limit", "host_memory_limit", "threads", "slice_frames", "chunk_frames", "rates", "trace"}
_FREE |= {"autotune", "autotune_path", "device_like"}


def bit_settings(node: str, given: dict[str, str]) -> dict[str, str]:
    """The parameters that results of a node depend on, with those that were not given."""
    known = {parameter.key: parameter for one in nodes() if one.id == node for parameter in one.parameters}
    for key in given:
        if key not in known:
            raise BatchError(f"{node} has no parameter {key!r}; `python -m video_vae` lists them")
    values = {key: given.get(key, known[key].format(known[key].default)) for key in sorted(set(known) - _FREE)}
    if values.get("posterior") == "mean":
        del values["seed"]
    return values


def checkpoint_digest(path: str) -> str:
    """SHA-256 of the file."""
    state = hashlib.sha256()
    try:
        with open_regular(Path(path)) as file:
            while data := file.read(1 << 22):
                state.update(data)
    except OSError as error:
        raise BatchError(f"{path}: {error.strerror}") from error
    return state.hexdigest()


def instruction_set(vae: VideoVae, node: str) -> str:
    """The name of what is in use: the first whose results are those of the present setting."""
    present, right = vae.instruction_set, _probe(vae, node)
    if present != "auto":
        return present
    for name in parameters()["instruction_set"].choices:
        try:
            with vae.configured(instruction_set=name):
                if name != "auto" and _probe(vae, node) == right:
                    return name
        except VideoVaeError:  # not one of this processor
            continue
    raise BatchError("no instruction set has the results of instruction_set=auto")


def fingerprint(vae: VideoVae, device: str, weights: str, node: str) -> dict[str, Any]:
    """Of a worker that encodes or decodes. The probe is a hash of results: it also tells what the names do not."""
    if device == "cpu":
        architecture, precision = f"cpu {instruction_set(vae, node)}", "fp32"
    else:
        found = next((one for one in devices() if one.id == device), None)
        if found is None:
            raise BatchError(f"{device} is not there; devices are {', '.join(one.id for one in devices())}")
        architecture = "cuda {}.{}".format(*found.compute_capability)
        if "VVAE_ARCH" in os.environ:
            architecture += f" as {os.environ['VVAE_ARCH']}"
        precision = "fp16" if vae.precision == "auto" else vae.precision
    return {
        "library": version(),
        "checkpoint": checkpoint_digest(weights),
        "architecture": architecture,
        "precision": precision,
        "reader": reader_version(),
        "probe": _probe(vae, node),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What two workers disagree in, in words."""
    keys = [key for key in one if one[key] != other.get(key)]
    return [f"{key} {one[key]} and {other.get(key)}" for key in keys]


def _probe(vae: VideoVae, node: str) -> str:
    size = (5, 64, 96, vae.model.pixel_channels)
    clip = numpy.random.default_rng(20).integers(0, 256, size, dtype=numpy.uint8)
    if node == "encode":
        found = vae.encode(clip, logvar=True, dtype="float32")
    else:
        channels = vae.model.latent_channels
        latent = clip.reshape(-1)[: channels * 192].reshape(1, channels, 2, 8, 12) / 64 - 2
        found = (vae.decode(latent.astype("float32")),)
    state = hashlib.sha256()
    for array in found:
        state.update(numpy.ascontiguousarray(array))
    return state.hexdigest()[:16]
