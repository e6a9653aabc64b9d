"""Clips of any length at constant memory."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import _abi, _arrays
from ._library import library
from ._progress import Progress
from ._run import Run
from ._tensors import LATENT_LAYOUTS, VIDEO_LAYOUTS, View
from .errors import check

if TYPE_CHECKING:
    from .vae import VideoVae


class Stream:
    """A clip in pieces. Push frames as they come, pull results as they get ready; `VideoVae.stream_encode` and
    `stream_decode` do both. Keeps the settings that the object had when it was opened."""

    def __init__(self, vae: VideoVae, node: str, shape: Sequence[int], first: int = 0) -> None:
        handle, five = ctypes.c_void_p(), _abi.Five(*shape)
        status = library().vvae_stream_open_at(vae._handle, node.encode(), five, first, ctypes.byref(handle))
        check(status, vae._handle)
        self._vae, self._handle = vae, handle.value
        kinds = (VIDEO_LAYOUTS, LATENT_LAYOUTS)
        self._layouts = kinds if node == "encode" else kinds[::-1]
        # One that was closed together with its VideoVae answers with a status, which is fine.
        self._finalizer = weakref.finalize(self, library().vvae_stream_close, self._handle)

    def push(self, frames: Any, *, layout: str | None = None) -> int:
        """Offers frames and says how many were taken from the front. If not all: pull, then push the rest."""
        return self._push(View.of(frames, "frames", layout, self._layouts[0]))

    def finish(self) -> None:
        """Says that the clip is complete."""
        check(library().vvae_stream_push(self._handle, None, None), self._vae._handle)

    def pull(self, out: Any, *, layout: str | None = None, progress: Progress = None) -> int | None:
        """Computes what is ready into `out`, and says how many frames that is: 0 until more is pushed, None when
        everything has been pulled. After Cancelled the next pull goes on from where it was."""
        return self._pull(View.of_out(out, "out", layout, self._layouts[1]), progress)

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
        status = library().vvae_stream_push(self._handle, view.reference, ctypes.byref(taken))
        check(status, self._vae._handle)
        return taken.value

    def _pull(self, view: View, progress: Progress) -> int | None:
        written = ctypes.c_int64()
        with Run(self._vae._handle, [view], progress) as run:
            status = library().vvae_stream_pull(self._handle, view.reference, run.info, ctypes.byref(written))
        check(status, self._vae._handle)
        return None if status == _abi.VVAE_END else written.value


def drain(
    vae: VideoVae,
    node: str,
    pieces: Iterable[Any],
    layout: str | None,
    out_layout: str,
    size: Sequence[int | None] | None,
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


def _out_shape(vae: VideoVae, node: str, piece: View, size: Sequence[int | None] | None) -> list[int]:
    scale = vae.model.time_scale
    frames = piece.shape[2]
    if node == "encode":
        shape = list(vae.model.latent_shape(piece.shape))
        shape[2] = -(-frames // scale)
    else:
        shape = list(vae.model.video_shape(piece.shape, size))
        shape[2] = frames * scale
    return shape
