"""Whether a file has all the frames that its container says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import matroska

# Codecs with packets that show nothing: references alone, or "as before".
_HIDDEN = {"vp8", "mpeg4", "msmpeg4v1", "msmpeg4v2", "msmpeg4v3"}


@dataclass
class Count:
    """What was found in a stream: packets, those of them that are shown, and frames."""

    stored: int = 0
    shown: int = 0
    decoded: int = 0
    interlaced: bool = False
    end: int = 0

    def add(self, packet: Any) -> None:
        self.stored += 1
        self.shown += bool(packet.size) and not packet.is_discard
        self.end = max(self.end, (packet.pts or 0) + (packet.duration or 0))


def missing(container: Any, stream: Any, count: Count, path: str) -> str | None:
    """What a file that was read to its end lacks. MP4 and AVI say how many frames they have, Matroska where elements
    end. Others say neither."""
    name = container.format.name
    said = 0
    if name.startswith("mov"):
        # Without what an edit list cuts off.
        said = len(stream.index_entries)
    elif name == "avi":
        said = stream.frames
    if count.stored < said:
        return f"frame {count.stored} is missing: the container says {said} frames and has {count.stored}"
    if said and count.decoded < count.shown and not count.interlaced and stream.codec_context.name not in _HIDDEN:
        return f"frame {count.decoded} is missing: {count.shown} are stored and {count.decoded} could be decoded"
    return _of_matroska(stream, count, path) if name.startswith("matroska") else None


def _of_matroska(stream: Any, count: Count, path: str) -> str | None:
    try:
        matroska.check(path)
    except matroska.Damaged as damage:
        if not damage.cut:
            return f"frame {damage.frames} may be missing: the file is damaged at byte {damage.at}"
        if not _reaches_its_end(stream, count):
            return f"frame {damage.frames} is missing: the file is cut at byte {damage.at}"
    return None


def _reaches_its_end(stream: Any, count: Count) -> bool:
    """Whether the last frame ends where the stream does: then only what comes after the frames was cut off."""
    try:
        hours, minutes, seconds = stream.metadata["DURATION"].split(":")
        said = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    except (KeyError, ValueError):
        return False
    # Times in a Matroska file are rounded to milliseconds.
    return float(count.end * stream.time_base) >= said - 0.002
