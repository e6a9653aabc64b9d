"""Whether the elements of a Matroska or WebM file follow each other to its end. ffmpeg passes over what is damaged.

Knows the structure alone: ids and sizes of elements, and which track a block belongs to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .files import open_regular

_EBML, _SEGMENT, _CLUSTER = 0x1A45DFA3, 0x18538067, 0x1F43B675
_SIMPLE_BLOCK, _BLOCK_GROUP, _BLOCK = 0xA3, 0xA0, 0xA1
_TRACKS, _TRACK, _TRACK_NUMBER, _TRACK_TYPE, _VIDEO = 0x1654AE6B, 0xAE, 0xD7, 0x83, 1
# The bytes of an id and a size, at most.
_HEAD = 12
_ANYWHERE = {0xEC, 0xBF}  # Void, CRC-32
# SeekHead, Info, Tracks, Cluster, Cues, Attachments, Chapters, Tags.
_IN_SEGMENT = {0x114D9B74, 0x1549A966, _TRACKS, _CLUSTER, 0x1C53BB6B, 0x1941A469, 0x1043A770, 0x1254C367}
# Timestamp, SilentTracks, Position, PrevSize, EncryptedBlock.
_IN_CLUSTER = {0xE7, 0x5854, 0xA7, 0xAB, _SIMPLE_BLOCK, _BLOCK_GROUP, 0xAF}


class Damaged(Exception):
    """At this byte no element begins, or the file ends. `frames` of the first video track come before it."""

    def __init__(self, at: int, frames: int, cut: bool) -> None:
        super().__init__(at)
        self.at, self.frames, self.cut = at, frames, cut


@dataclass(frozen=True)
class _Element:
    id: int
    start: int
    end: int | None  # None: not known, as in a live recording


def check(path: str) -> None:
    """Raises Damaged. Elements of unknown size end the check."""
    with open_regular(Path(path)) as file:
        _Walk(file.fileno()).run()


class _Walk:
    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._size = descriptor, os.fstat(descriptor).st_size
        self._track: int | None = None
        self._frames = 0

    def run(self) -> None:
        head = self._element(0)
        if head is None or head.id != _EBML or head.end is None:
            return
        segment = self._element(head.end)
        if segment is None or segment.id != _SEGMENT or segment.end is None:
            return
        for element in self._children(segment, _IN_SEGMENT):
            if element.end is None:
                return
            if element.id == _TRACKS:
                self._tracks(element)
            elif element.id == _CLUSTER:
                self._cluster(element)

    def _tracks(self, tracks: _Element) -> None:
        for track in self._children(tracks, {_TRACK}):
            if track.id != _TRACK:
                continue
            found = {one.id: self._value(one) for one in self._children(track, None)}
            if self._track is None and found.get(_TRACK_TYPE) == _VIDEO:
                self._track = found.get(_TRACK_NUMBER)

    def _value(self, element: _Element) -> int:
        size = min((element.end or element.start) - element.start, 8)
        return int.from_bytes(os.pread(self._descriptor, size, element.start), "big")

    def _cluster(self, cluster: _Element) -> None:
        for element in self._children(cluster, _IN_CLUSTER):
            block = element
            if element.id == _BLOCK_GROUP:
                block = next((one for one in self._children(element, None) if one.id == _BLOCK), element)
            if block.id in (_SIMPLE_BLOCK, _BLOCK):
                self._frames += self._number(block.start, keep_mark=False)[0] == self._track

    def _children(self, parent: _Element, allowed: set[int] | None) -> Iterator[_Element]:
        at, end = parent.start, parent.end or parent.start
        while at < end:
            element = self._element(at)
            known = element is not None and (allowed is None or element.id in allowed | _ANYWHERE)
            if element is None or not known or (element.end is not None and element.end > end):
                raise Damaged(at, self._frames, at + _HEAD > self._size)
            cut = element.end is not None and element.end > self._size
            # The frames of a cluster before the end of the file are counted.
            if not cut or element.id == _CLUSTER:
                yield element
            if cut:
                raise Damaged(self._size, self._frames, True)
            if element.end is None:
                return
            at = element.end

    def _element(self, at: int) -> _Element | None:
        id, width = self._number(at, keep_mark=True)
        size, more = self._number(at + width, keep_mark=False)
        if not width or not more:
            return None
        start = at + width + more
        return _Element(id, start, None if size == (1 << 7 * more) - 1 else start + size)

    def _number(self, at: int, keep_mark: bool) -> tuple[int, int]:
        """A number and its width in bytes, which is that of the zeros in front of it, and one. 0: there is none."""
        data = os.pread(self._descriptor, 8, at)
        width = 9 - data[0].bit_length() if data and data[0] else 0
        if not 0 < width <= min(len(data), 4 if keep_mark else 8):
            return 0, 0
        value = int.from_bytes(data[:width], "big")
        return (value if keep_mark else value & ((1 << 7 * width) - 1)), width
