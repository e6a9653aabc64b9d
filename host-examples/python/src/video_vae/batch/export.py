"""The export command: shards of latents to the cache files that a trainer reads.

Of musubi-tuner (kohya-ss/musubi-tuner, `dataset/image_video_dataset.py`, format 1.0.1): a file for each item, whose
name has the item, for video its first frame and length, the size of its frames, and the architecture. A tensor's name
has its shape and type.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from .errors import BatchError, BrokenInput, storage_error
from .files import PARTIAL, AtomicFile, own_folder, sync_folder
from .shards import Sample, read_shard, safetensors_header

# By the option --layout: what the architecture is called in names of files, and in their metadata.
LAYOUTS = {"musubi-wan": ("wan", "wan"), "musubi-qwen-image": ("qi", "qwen_image")}
_FORMAT = "1.0.1"
# Both have the autoencoder of Wan 2.1.
_CHANNELS, _SCALE, _TIME = 16, 8, 4


@dataclass(frozen=True)
class _Cached:
    """A cache file."""

    name: str
    is_video: bool
    tensor: str
    latent: numpy.ndarray
    metadata: dict[str, str]


def export(shards: Sequence[str], layout: str, out: Path) -> int:
    """Writes a cache file for each sample, and returns their number. What cannot be cached raises, and then `out` has
    the files that it had before."""
    own_folder(out)
    with _partial_folder(out) as partial:
        names = _write_all(shards, layout, Path(partial))
        _move(names, Path(partial), out)
    return len(names)


def _partial_folder(out: Path) -> tempfile.TemporaryDirectory[str]:
    """Inside `out`, so that a rename stays on one file system."""
    try:
        return tempfile.TemporaryDirectory(prefix=".export.", suffix=PARTIAL, dir=out)
    except OSError as error:
        raise storage_error(error, out) from error


def _move(names: list[str], partial: Path, out: Path) -> None:
    for name in names:
        try:
            (partial / name).replace(out / name)
        except OSError as error:
            raise storage_error(error, out / name) from error
    sync_folder(out)


def _write_all(shards: Sequence[str], layout: str, folder: Path) -> list[str]:
    """The names of the files."""
    written: dict[str, str] = {}
    kinds: dict[bool, str] = {}
    for path in _paths(shards):
        for sample in read_shard(path):
            place = f"{path}, {sample.key or 'a damaged place'}"
            try:
                cached = _cached(sample, *LAYOUTS[layout])
            except BrokenInput as error:
                raise BatchError(f"{place}: {error}") from error
            if cached.name in written:
                raise BatchError(f"{place} and {written[cached.name]} would both be {cached.name}; rename one's source")
            written[cached.name] = place
            kinds[cached.is_video] = place
            if len(kinds) > 1:
                raise BatchError(f"{kinds[True]} is video, {kinds[False]} an image; the trainer wants a folder of each")
            _write(folder / cached.name, cached)
    return list(written)


def _paths(shards: Sequence[str]) -> Iterator[Path]:
    for name in shards:
        path = Path(name)
        found = sorted(path.glob("*.tar")) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise BatchError(f"{path}: there is no shard (*.tar)")
        yield from found


def _cached(sample: Sample, short: str, architecture: str) -> _Cached:
    if sample.error is not None:
        raise BrokenInput(sample.error)
    about = sample.about
    if about.get("latents") != "model":
        raise BrokenInput(f"its latents are {about.get('latents')!r}; the trainer reads those of latents=model")
    latent = sample.tensors.get("mean", sample.tensors.get("latent"))
    if latent is None or latent.ndim != 4 or latent.shape[0] != _CHANNELS:
        raise BrokenInput(f"it has no latent of {_CHANNELS} channels, which {architecture} has")
    frames, height, width = (_number(about, key) for key in ("frames", "height", "width"))
    if frames % _TIME != 1:
        raise BrokenInput(f"it has {frames} frames; the trainer takes 4n + 1: encode with --max-frames 81, for example")
    _, depth, rows, columns = latent.shape
    if (depth, rows * _SCALE, columns * _SCALE) != (1 + frames // _TIME, height, width):
        raise BrokenInput(f"{width} x {height} pixels are no multiples of {_SCALE}; encode with --buckets")
    part = "" if frames == 1 else f"_00000-{frames:03d}"
    metadata = {"architecture": architecture, "width": str(width), "height": str(height), "format_version": _FORMAT}
    if frames > 1:
        metadata["frame_count"] = str(frames)
    return _Cached(
        name=f"{_stem(about)}{part}_{width:04d}x{height:04d}_{short}.safetensors",
        is_video=frames > 1,
        tensor=f"latents_{depth}x{rows}x{columns}_{latent.dtype.name}",
        latent=latent,
        metadata=metadata,
    )


def _number(about: dict[str, Any], key: str) -> int:
    value = about.get(key)
    if not isinstance(value, int) or value < 1:
        raise BrokenInput(f"its JSON: {key} is {value!r}; it must be a whole number of at least 1")
    return value


def _stem(about: dict[str, Any]) -> str:
    """The item, as the trainer knows it: its captions are found by it."""
    source = about.get("source")
    stem = Path(source).stem if isinstance(source, str) else ""
    if not stem or stem.startswith(".") or "\0" in stem:
        raise BrokenInput(f"its JSON: source is {source!r}, which names no file")
    return stem


def _write(path: Path, cached: _Cached) -> None:
    latent = numpy.ascontiguousarray(cached.latent)
    header = safetensors_header({cached.tensor: (latent.dtype, latent.shape)}, cached.metadata)
    with AtomicFile(path) as file:
        file.write(header)
        file.write(memoryview(latent).cast("B"))
        file.commit()
