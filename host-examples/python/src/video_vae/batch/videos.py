"""Writes frames to video files and images with PyAV. A file appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any

import numpy

from .errors import BrokenInput, storage_error
from .files import PARTIAL, sync_folder
from .timing import Timing

# The bytes of x264 depend on when its threads run; several videos are written at a time instead.
_THREADS = 1
FORMATS = {".mp4": "mp4", ".mkv": "matroska", ".png": "image2"}
# Encoder, pixel format and extension.
CODECS = {"h264": ("libx264", "yuv420p", ".mp4"), "ffv1": ("ffv1", "bgr0", ".mkv")}
# Of frames by their channels, and what lossless files are written in. H.264 has no alpha.
_FRAMES = {3: "rgb24", 4: "rgba"}
_WITH_ALPHA = {"bgr0": "bgra", "rgb24": "rgba"}


def video_name(stem: str, frames: int, codec: str) -> str:
    """One frame is an image."""
    return stem + (".png" if frames == 1 else CODECS[codec][2])


class VideoWriter:
    """Appends frames [T, H, W, C] to a file; `commit` makes it appear."""

    def __init__(self, path: Path, codec: str, timing: Timing, crf: int = 18) -> None:
        import av

        self._av, self.path = av, path
        self._partial = path.parent / f".{path.stem}.{secrets.token_hex(8)}{PARTIAL}"
        self._codec, self._pixels, _ = ("png", "rgb24", "") if path.suffix == ".png" else CODECS[codec]
        self._options = {"crf": str(crf)} if codec == "h264" and path.suffix != ".png" else {}
        self._timing, self._count = timing, 0
        self._stream: Any = None
        try:
            # Matroska has random numbers otherwise; an image is one file without a number.
            options = {"update": "1"} if path.suffix == ".png" else {"fflags": "+bitexact"}
            self._container = av.open(str(self._partial), "w", format=FORMATS[path.suffix], options=options)
        except OSError as error:
            raise storage_error(error, path) from error

    def add(self, frames: numpy.ndarray) -> None:
        with self._failures():
            if self._stream is None:
                self._open(*frames.shape[1:])
            for frame in frames:
                colours = _FRAMES[frame.shape[-1]]
                picture = self._av.VideoFrame.from_ndarray(numpy.ascontiguousarray(frame), format=colours)
                picture.pts, picture.time_base = self._timing.times[self._count], self._timing.base
                self._count += 1
                self._container.mux(self._stream.encode(picture))

    def commit(self) -> int:
        """The size of the file, which is now there."""
        with self._failures():
            if self._stream is not None:
                self._container.mux(self._stream.encode())
            self._container.close()
            with self._partial.open("rb") as file:
                os.fsync(file.fileno())
            self._partial.replace(self.path)
            sync_folder(self.path.parent)
            return self.path.stat().st_size

    def abort(self) -> None:
        """Leaves nothing behind. Does nothing after `commit`."""
        with contextlib.suppress(Exception):
            self._container.close()
        self._partial.unlink(missing_ok=True)

    def _open(self, height: int, width: int, channels: int) -> None:
        if channels == 4:
            self._pixels = _WITH_ALPHA.get(self._pixels, self._pixels)
        # Chroma at half size needs even sizes: the last row and column are cut off.
        if self._pixels == "yuv420p":
            height, width = max(height & ~1, 2), max(width & ~1, 2)
        self._stream = self._container.add_stream(self._codec, rate=self._timing.rate, options=self._options)
        self._stream.time_base = self._stream.codec_context.time_base = self._timing.base
        self._stream.height, self._stream.width, self._stream.pix_fmt = height, width, self._pixels
        self._stream.codec_context.thread_count = _THREADS

    @contextlib.contextmanager
    def _failures(self) -> Any:
        try:
            yield
        except OSError as error:
            self.abort()
            raise storage_error(error, self.path) from error
        except (ValueError, ArithmeticError, self._av.FFmpegError) as error:
            self.abort()
            raise BrokenInput(f"it cannot be written as {self._codec}: {error}") from error
