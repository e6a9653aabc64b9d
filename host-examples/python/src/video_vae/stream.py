"""Clips of any length at constant memory."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from . import _abi, _arrays
from ._calls import c_five, c_int64, c_text, call, calling
from ._library import library
from ._progress import Progress
from ._run import Run
from ._tensors import LATENT_LAYOUTS, VIDEO_LAYOUTS, View
from .model import Model, Size


class Owner(Protocol):
    """What a stream needs of its `VideoVae`."""

    _handle: int

    @property
    def model(self) -> Model: ...


class Stream:
    """A clip in pieces. Push frames as they come, pull results as they get ready; `VideoVae.stream_encode` and
    `stream_decode` do both. Keeps the settings that the object had when it was opened."""

    def __init__(self, vae: Owner, node: str, shape: Sequence[int], first: int = 0) -> None:
        handle, five = ctypes.c_void_p(), c_five(shape, "shape")
        place = (five, c_int64(first, "first"))
        call(vae._handle, "vvae_stream_open_at", vae._handle, c_text(node, "node"), *place, ctypes.byref(handle))
        self._vae, self._handle = vae, handle.value
        kinds = (VIDEO_LAYOUTS, LATENT_LAYOUTS)
        self._layouts = kinds if node == "encode" else kinds[::-1]
        self._finalizer = weakref.finalize(self, _close, vae._handle, self._handle)

    def push(self, frames: Any, *, layout: str | None = None) -> int:
        """Offers frames and says how many were taken from the front. If not all: pull, then push the rest."""
        return self._push(View.of(frames, "frames", layout, self._layouts[0]))

    def finish(self) -> None:
        """Says that the clip is complete."""
        call(self._vae._handle, "vvae_stream_push", self._handle, None, None)

    def pull(self, out: Any, *, logvar: Any = None, layout: str | None = None, progress: Progress = None) -> int | None:
        """Computes what is ready into `out`, and says how many frames that is: 0 until more is pushed, None when
        everything has been pulled. `logvar` of a stream that encodes is written to as `out` is. After Cancelled the
        next pull goes on from where it was."""
        second = None if logvar is None else View.of_out(logvar, "logvar", layout, self._layouts[1])
        return self._pull(View.of_out(out, "out", layout, self._layouts[1]), progress, second)

    def close(self) -> None:
        """Gives back what it holds."""
        self._finalizer()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _push(self, view: View) -> int:
        taken = ctypes.c_int64()
        # Pushing has no stream to be ordered on.
        _arrays.synchronize(view.memory)
        call(self._vae._handle, "vvae_stream_push", self._handle, view.reference, ctypes.byref(taken))
        return taken.value

    def _pull(self, view: View, progress: Progress, logvar: View | None = None) -> int | None:
        written, views = ctypes.c_int64(), [view] if logvar is None else [view, logvar]
        with Run(self._vae._handle, views, progress, logvar) as run:
            run.call("vvae_stream_pull", self._handle, view.reference, run.info, ctypes.byref(written))
        return None if run.status == _abi.VVAE_END else written.value


def _close(vae: int, stream: int) -> None:
    """Closes a stream. One that its VideoVae closed before, or of another process, answers with a status."""
    with calling(vae):
        library().vvae_stream_close(stream)


def drain(
    vae: Owner,
    node: str,
    pieces: Iterable[Any],
    layout: str | None,
    out_layout: str,
    size: Size | None,
    dtype: Any,
    progress: Progress,
) -> Iterator[Any]:
    """Pushes pieces and yields results, each an array of its own."""
    defaults = VIDEO_LAYOUTS if node == "encode" else LATENT_LAYOUTS
    left = None if size is None else size[0]
    stream, last = None, None

    def results(stream: Stream, piece: View) -> Iterator[Any]:
        nonlocal left
        # As many frames as a piece of this length in the middle of a clip makes.
        shape = _out_shape(vae, node, piece, size)
        name = piece.float_dtype if dtype is None else _arrays.dtype_name(dtype)
        while left != 0:
            room = piece.make(shape, out_layout, name)
            written = stream._pull(room, progress)
            if not written:
                return
            count = written if left is None else min(written, left)
            left = None if left is None else left - count
            yield _arrays.finished(room.first_frames(count), piece.array)

    try:
        for array in pieces:
            piece = View.of(array, "piece", layout, defaults)
            if stream is None:
                stream = Stream(vae, node, piece.shape)
            while piece.frames:
                piece.drop_frames(stream._push(piece))
                yield from results(stream, piece)
                if left == 0:
                    return
            last = piece
        if stream is not None and last is not None:
            stream.finish()
            yield from results(stream, last)
    finally:
        if stream is not None:
            stream.close()


def _out_shape(vae: Owner, node: str, piece: View, size: Size | None) -> list[int]:
    scale = vae.model.time_scale
    frames = piece.shape[2]
    if node == "encode":
        shape = list(vae.model.latent_shape(piece.shape))
        shape[2] = -(-frames // scale)
    else:
        shape = list(vae.model.video_shape(piece.shape, size))
        shape[2] = frames * scale
    return shape
