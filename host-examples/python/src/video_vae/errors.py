"""Failures, one class a kind. The text is the library's: it names the argument, what it was and what would be right."""

from __future__ import annotations

import ctypes

from . import _abi
from ._library import library


class VideoVaeError(Exception):
    """What every failure of the library is. `status` is its VVAE_ERROR_ number."""

    status = _abi.VVAE_ERROR_INTERNAL


class ArgumentError(VideoVaeError, ValueError):
    """An argument is out of range or contradicts another one."""

    status = _abi.VVAE_ERROR_ARGUMENT


class TensorError(VideoVaeError, ValueError):
    """An array's shape, strides, type or device do not fit the call."""

    status = _abi.VVAE_ERROR_TENSOR


class CheckpointError(VideoVaeError):
    """A file cannot be read or written, or is no checkpoint of this model."""

    status = _abi.VVAE_ERROR_CHECKPOINT


class DeviceError(VideoVaeError):
    """The device named does not exist or cannot be used."""

    status = _abi.VVAE_ERROR_DEVICE


class MemoryLimitError(VideoVaeError, MemoryError):
    """Neither the limit nor the machine has room for the job."""

    status = _abi.VVAE_ERROR_MEMORY


class Cancelled(VideoVaeError):
    """`cancel()`, `close()` or the progress callback asked to stop. The object can be used again, unless closed."""

    status = _abi.VVAE_ERROR_CANCELLED


class StateError(VideoVaeError):
    """The call came at the wrong time: the object is busy in another thread, closed, or the stream has ended."""

    status = _abi.VVAE_ERROR_STATE


class InternalError(VideoVaeError):
    """A bug of the library's, caught at its boundary. The object it happened in can only be closed."""


BY_STATUS = {
    kind.status: kind
    for kind in (
        ArgumentError,
        TensorError,
        CheckpointError,
        DeviceError,
        MemoryLimitError,
        Cancelled,
        StateError,
        InternalError,
    )
}


def last_error(handle: int | None) -> str:
    """The text of the last failure of a handle; of this thread, if None."""
    text = ctypes.create_string_buffer(1024)
    length = library().vvae_error(handle, text, len(text))
    if length >= len(text):
        text = ctypes.create_string_buffer(length + 1)
        library().vvae_error(handle, text, len(text))
    return text.value.decode("utf-8", "replace")


def check(status: int, handle: int | None = None) -> int:
    """The status, if it is no failure."""
    if status >= 0:
        return status
    raise BY_STATUS.get(status, VideoVaeError)(last_error(handle))
