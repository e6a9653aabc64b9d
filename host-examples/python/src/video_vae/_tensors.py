"""Layouts: from an array of the caller's, in any order of axes, to the tensor that the library takes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from . import _abi, _arrays
from .errors import ArgumentError, TensorError

AXES = "BCTHW"

# What a number of axes means unless a layout is given.
VIDEO_LAYOUTS = {5: "BCTHW", 4: "THWC", 3: "HWC"}
LATENT_LAYOUTS = {5: "BCTHW", 4: "CTHW"}


def layout_of(ndim: int, layout: str | None, argument: str, defaults: dict[int, str]) -> str:
    """The order of an array's axes: as said, or as its number of axes makes likely."""
    if layout is None:
        if ndim in defaults:
            return defaults[ndim]
        known = " or ".join(defaults.values())
        raise TensorError(
            f"{argument} has {ndim} axes; it must have those of {known}, or a layout must say what they are"
        )
    check_layout(layout)
    if len(layout) != ndim:
        raise TensorError(f"{argument} has {ndim} axes, but layout {layout} has {len(layout)}")
    return layout


def latent_layout(shape: Sequence[int], argument: str, channels: int) -> str:
    """As `layout_of`; 4 axes without the channels in front are single frames with the channels behind."""
    if len(shape) == 4 and shape[0] != channels and shape[1] == channels:
        return "BCHW"
    return layout_of(len(shape), None, argument, LATENT_LAYOUTS)


@functools.lru_cache(maxsize=64)
def check_layout(layout: str) -> None:
    letters = set(layout)
    if len(letters) != len(layout) or not set("CHW") <= letters <= set(AXES):
        raise ArgumentError(
            f"layout is {layout!r}; it must have each of C, H and W, may have B and T, and none twice: "
            "BCTHW, BTHWC, THWC, TCHW, HWC, ..."
        )


@functools.lru_cache(maxsize=64)
def positions(layout: str) -> list[int]:
    """Where B, C, T, H and W are in a layout; -1: not there."""
    return [layout.find(axis) for axis in AXES]


def to_five(shape: Sequence[int], layout: str, absent: int = 1) -> tuple[int, ...]:
    """A shape, or strides, in the order B, C, T, H, W."""
    return tuple([shape[at] if at >= 0 else absent for at in positions(layout)])


def from_five(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """A shape of B, C, T, H, W in the order of a layout."""
    lost = [axis for axis, size in zip(AXES, shape) if axis not in layout and size != 1]
    if lost:
        raise ArgumentError(f"layout {layout} has no {lost[0]}, but there are {dict(zip(AXES, shape))[lost[0]]} of it")
    return tuple(shape[AXES.index(axis)] for axis in layout)


class View:
    """An array as the library sees it. Holds the array, and everything the struct points to."""

    __slots__ = ("array", "layout", "memory", "shape", "struct", "_shape", "_strides")

    def __init__(self, array: Any, layout: str, memory: _arrays.Memory) -> None:
        self.array, self.layout, self.memory = array, layout, memory
        self.shape = to_five(memory.shape, layout)
        self._shape, self._strides = _abi.Five(*self.shape), _abi.Five(*to_five(memory.strides, layout, 0))
        self.struct = _abi.vvae_tensor(
            memory.address, memory.device_type, memory.device_id, 5, memory.dtype, self._shape, self._strides
        )

    @classmethod
    def of(cls, array: Any, argument: str, layout: str | None, defaults: dict[int, str]) -> View:
        memory = _arrays.memory_of(array, argument)
        return cls(array, layout_of(len(memory.shape), layout, argument, defaults), memory)

    @classmethod
    def of_latent(cls, array: Any, argument: str, channels: int) -> View:
        memory = _arrays.memory_of(array, argument)
        return cls(array, latent_layout(memory.shape, argument, channels), memory)

    @classmethod
    def of_out(cls, array: Any, argument: str, layout: str | None, defaults: dict[int, str]) -> View:
        view = cls.of(array, argument, layout, defaults)
        if not view.memory.writable:
            raise TensorError(f"{argument} is read-only; it must be an array that can be written to")
        return view

    def make(self, shape: Sequence[int], layout: str, dtype: str) -> View:
        """A new array of the same kind on the same device, with its view."""
        array = _arrays.empty_like(self.array, self.memory, from_five(shape, layout), dtype)
        return View(array, layout, _arrays.memory_of(array, "result"))

    @property
    def reference(self) -> Any:
        return ctypes.byref(self.struct)

    @property
    def dtype(self) -> str:
        return _arrays.DTYPES.get(self.struct.dtype, "float32")

    @property
    def float_dtype(self) -> str:
        """The type of results that have to be floats."""
        return self.dtype if "float" in self.dtype else "float32"

    def drop_frames(self, count: int) -> None:
        """Takes frames off the front, without touching the array."""
        size = (self.struct.dtype >> 8 & 0xFF) // 8
        self.struct.data = (self.struct.data or 0) + count * self._strides[2] * size
        self._shape[2] -= count

    def keep_frames(self, frames: slice) -> None:
        """Leaves only these frames, without touching the array."""
        self.drop_frames(frames.start)
        self._shape[2] = frames.stop - frames.start

    @property
    def frames(self) -> int:
        return self._shape[2]

    def first_frames(self, count: int) -> Any:
        """The front of the array, as an array."""
        if count == self.shape[2]:
            return self.array
        return self.array[(slice(None),) * self.layout.index("T") + (slice(count),)]
