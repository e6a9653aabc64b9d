"""Ranges: which frames of a clip a call is about."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from ._calls import c_int64, c_text, call
from .errors import ArgumentError


@dataclass(frozen=True)
class FrameRange:
    """Output frames of a clip, and the input frames that they need."""

    clip_frames: int
    first: int
    count: int
    inputs: slice

    @classmethod
    def of(cls, handle: int, node: str, frames: slice | range, clip_frames: int, outputs: int) -> FrameRange:
        """`frames` of the `outputs` frames that `clip_frames` input frames make."""
        first, count = _bounds(frames, outputs)
        start, length = ctypes.c_int64(), ctypes.c_int64()
        clip_frames, name = c_int64(clip_frames, "clip_frames"), c_text(node, "node")
        out = (ctypes.byref(start), ctypes.byref(length))
        call(handle, "vvae_range_inputs", handle, name, clip_frames, first, count, *out)
        return cls(clip_frames, first, count, slice(start.value, start.value + length.value))

    def of_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """[B, C, T, H, W] of the range, for that of the whole output."""
        return (*shape[:2], self.count, *shape[3:])


def _bounds(frames: slice | range, outputs: int) -> tuple[int, int]:
    """First and count. Unlike slices of arrays, none is cut to what is there: too many frames are a mistake."""
    if not isinstance(frames, (slice, range)):
        raise ArgumentError(f"frames is {frames!r}; it must be a slice such as slice(1000, 1100)")
    if frames.step not in (None, 1):
        raise ArgumentError(f"frames is {frames!r}; its step must be 1")
    first = 0 if frames.start is None else frames.start
    stop = outputs if frames.stop is None else frames.stop
    if isinstance(frames, slice):
        first, stop = (at + outputs if at < 0 else at for at in (first, stop))
    if first < 0 or stop <= first:
        raise ArgumentError(f"frames is {frames!r}, which is no frame of the {outputs} of the clip")
    return c_int64(first, "frames"), c_int64(stop - first, "frames")
