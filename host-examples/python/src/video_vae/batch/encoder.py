"""Turns clips into latents on one device. Knows nothing of shards and files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy

from .. import ArgumentError, MemoryLimitError, Stream, TensorError, VideoVae
from .ahead import Broken, Clip, Piece, Restart
from .errors import BrokenInput
from .fingerprint import fingerprint
from .settings import Settings, latents_of
from .sources import Item

# What is wrong with the clip and not with the device.
CLIP_ERRORS = (ArgumentError, TensorError, MemoryLimitError)


class _Ended(BrokenInput):
    """The input ended with an error; nothing more of it comes."""


class Encoder:
    """A device with its model."""

    def __init__(self, settings: Settings, device: str) -> None:
        self._settings = settings
        self._vae = VideoVae(settings.weights, device, **settings.all_parameters())
        try:
            self.fingerprint = fingerprint(self._vae, device, settings.weights, "encode")
        except BaseException:
            self._vae.close()
            raise
        self._sampled = self._vae.posterior == "sample"
        self._seed = self._vae.seed
        self._channels = self._vae.model.pixel_channels
        self._latents = latents_of(self._vae)

    def cancel(self) -> None:
        self._vae.cancel()

    def close(self) -> None:
        self._vae.close()

    def encode(self, clip: Clip, item: Item) -> tuple[dict[str, numpy.ndarray], dict[str, Any]]:
        """Tensors [C, T, H, W] and what they are of. Raises BrokenInput."""
        about: dict[str, Any] = {}
        if self._sampled:
            # Parts of one clip have the seed of the clip.
            about["seed"] = self._vae.seed = self._seed if item.span else item_seed(self._seed, item.key)
        try:
            if clip.whole and item.span is None:
                tensors, frames = self._whole(clip)
            else:
                tensors, frames = self._streamed(clip, item.first or 0)
        except CLIP_ERRORS as error:
            raise BrokenInput(str(error)) from error
        about.update(self._about(clip, frames))
        return tensors, about

    def takes_batch(self, clip: Clip, item: Item) -> bool:
        """Whether this is an image that can be encoded beside others of its shape: samples have seeds of their own."""
        return clip.whole and clip.shape[0] == 1 and item.span is None and not self._sampled

    def encode_images(self, clips: Sequence[Clip]) -> list[tuple[dict[str, numpy.ndarray], dict[str, Any]]]:
        """Images of one shape as a batch: of each what `encode` gives. Raises BrokenInput."""
        pieces = [clip.pieces.get() for clip in clips]
        try:
            images = numpy.stack([piece.frames for piece in pieces])  # type: ignore[union-attr]
        finally:
            for piece in pieces:
                piece.release()  # type: ignore[union-attr]
        count, _, height, width, channels = images.shape
        tensors = self._arrays(self._vae.model.latent_shape((count, channels, 1, height, width)))
        try:
            self._vae.encode(images, layout="BTHWC", out=self._first(tensors), logvar=tensors.get("logvar"))
        except CLIP_ERRORS as error:
            raise BrokenInput(str(error)) from error
        parts = ({name: array[place] for name, array in tensors.items()} for place in range(count))
        return [(part, self._about(clip, 1)) for part, clip in zip(parts, clips)]

    def _about(self, clip: Clip, frames: int) -> dict[str, Any]:
        return {"frames": frames, "height": clip.shape[1], "width": clip.shape[2], **clip.info, **self._latents}

    @staticmethod
    def _first(tensors: dict[str, numpy.ndarray]) -> numpy.ndarray:
        """Of the tensors of a clip, what is no log-variance."""
        return next(iter(tensors.values()))

    def _arrays(self, shape: tuple[int, ...]) -> dict[str, numpy.ndarray]:
        names = ["latent"] if self._sampled else ["mean", "logvar"] if self._settings.logvar else ["mean"]
        return {name: numpy.empty(shape, self._settings.dtype) for name in names}

    def _whole(self, clip: Clip) -> tuple[dict[str, numpy.ndarray], int]:
        piece = clip.pieces.get()
        assert isinstance(piece, Piece)
        try:
            count, height, width, _ = piece.frames.shape
            tensors = self._arrays(self._vae.model.latent_shape((1, self._channels, count, height, width))[1:])
            self._vae.encode(piece.frames, out=self._first(tensors), logvar=tensors.get("logvar"))
        finally:
            piece.release()
        return tensors, count

    def _streamed(self, clip: Clip, first: int) -> tuple[dict[str, numpy.ndarray], int]:
        """A clip too long to be held, or a part from latent frame `first` on: piece by piece, the same bits."""
        while True:
            count, height, width, _ = clip.shape
            stream = self._vae.open_stream("encode", (1, self._channels, count, height, width), first)
            try:
                result = self._streamed_once(clip, stream)
            except _Ended:
                raise
            except BaseException:
                self._drain(clip)
                raise
            finally:
                stream.close()
            if result is not None:
                return result

    def _streamed_once(self, clip: Clip, stream: Stream) -> tuple[dict[str, numpy.ndarray], int] | None:
        """None if the pieces begin anew."""
        found: list[dict[str, numpy.ndarray]] = []
        total = 0
        while True:
            piece = clip.pieces.get()
            if isinstance(piece, Restart):
                return None
            if isinstance(piece, Broken):
                raise _Ended(piece.reason)
            try:
                frames = piece.frames
                total += len(frames)
                while len(frames):
                    frames = frames[stream.push(frames) :]
                    self._pull(stream, piece.frames.shape, found)
            finally:
                piece.release()
            if piece.last:
                stream.finish()
                self._pull(stream, piece.frames.shape, found)
                return {name: numpy.concatenate([part[name] for part in found], 1) for name in found[0]}, total

    def _pull(self, stream: Stream, shape: tuple[int, ...], found: list[dict[str, numpy.ndarray]]) -> None:
        """Everything that is ready."""
        count, height, width, _ = shape
        while True:
            room = self._arrays(self._vae.model.latent_shape((1, self._channels, count + 1, height, width))[1:])
            written = stream.pull(room.get("mean", room.get("latent")), logvar=room.get("logvar"))
            if not written:
                return
            found.append({name: array[:, :written].copy() for name, array in room.items()})

    @staticmethod
    def _drain(clip: Clip) -> None:
        """Gives back the slots of the rest of a clip, which its reader may wait for."""
        while True:
            piece = clip.pieces.get()
            if isinstance(piece, Piece):
                piece.release()
            if isinstance(piece, Broken) or (isinstance(piece, Piece) and piece.last):
                return


def item_seed(seed: int, key: str) -> int:
    """The seed of one item: items of one seed differ, and none depends on the order of work."""
    return int.from_bytes(hashlib.sha256(f"{seed} {key}".encode()).digest()[:8], "little") >> 1
