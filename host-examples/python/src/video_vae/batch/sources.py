"""The inputs of a run, in an order that depends on their names alone, and their division into shards."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import BatchError
from .frames import FrameSpan

VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts", ".wmv", ".flv")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif")


@dataclass(frozen=True)
class Item:
    """One input, or one part of it: the frames `span`, which give the output frames from `first` on. `key` names its
    files in a shard."""

    index: int
    path: str
    bytes: int
    span: FrameSpan | None = None
    first: int | None = None

    @property
    def key(self) -> str:
        return f"{self.index:09d}"


@dataclass(frozen=True)
class Shard:
    """Items that become one tar file."""

    index: int
    items: tuple[Item, ...]

    @property
    def name(self) -> str:
        return f"latents-{self.index:06d}.tar"


def list_items(sources: Sequence[str]) -> list[Item]:
    """Files, the videos and images in folders, and the lines of `@list` files; sorted, each path once. What is named
    here must exist. A line of a list may name a file that is gone, which is recorded as broken."""
    paths = sorted({path for source in sources for path in _paths(source)})
    if not paths:
        raise BatchError(f"no videos or images in {', '.join(sources)}")
    return [Item(index, path, _size(path)) for index, path in enumerate(paths)]


def digest(items: Sequence[Item]) -> str:
    """A hash of all names and sizes."""
    state = hashlib.sha256()
    for item in items:
        state.update(json.dumps([item.path, item.bytes]).encode() + b"\n")
    return state.hexdigest()


def shards(items: Sequence[Item], shard_items: int) -> list[Shard]:
    """Equal parts of the list: which shard an item is in depends on its index alone."""
    starts = range(0, len(items), shard_items)
    return [Shard(index, tuple(items[start : start + shard_items])) for index, start in enumerate(starts)]


def _paths(source: str) -> Iterator[str]:
    if source.startswith("@"):
        yield from _lines(Path(source[1:]))
        return
    if not os.path.lexists(source):
        raise BatchError(f"{source}: there is no such file or folder")
    if not Path(source).is_dir():
        yield source
        return
    for folder, _, names in os.walk(source, onerror=_unreadable):
        for name in names:
            if name.lower().endswith(VIDEOS + IMAGES):
                yield str(Path(folder, name))


def _lines(listing: Path) -> Iterator[str]:
    try:
        text = listing.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BatchError(f"{listing}: {error}") from error
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            yield line.strip()


def _unreadable(error: OSError) -> None:
    raise BatchError(f"{error.filename}: {error.strerror}") from error


def _size(path: str) -> int:
    """0 for a file that is not there: reading it gives the reason."""
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0
