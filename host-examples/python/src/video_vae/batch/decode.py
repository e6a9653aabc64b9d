"""The decode command: shards of latents to video files."""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy

from .. import VideoVae
from .encoder import CLIP_ERRORS
from .errors import BatchError, BrokenInput
from .fingerprint import bit_settings, fingerprint
from .files import own_folder, write_atomic
from .folder import record_path
from .progress import Figures
from .run import Job, WorkerMaker
from .settings import Resources
from .shards import Sample, read_shard
from .sources import Item, Shard
from .videos import VideoWriter, video_name

# Latent frames that go to the device at a time, and pieces of video that wait for a writer.
_PIECE, _PIECES = 8, 4
# Samples that are read ahead of the device.
_AHEAD = 4


@dataclass(frozen=True)
class DecodeSettings:
    """Of one decode run."""

    weights: str
    codec: str = "h264"
    crf: int = 18
    parameters: dict[str, str] = field(default_factory=dict)

    def all_parameters(self) -> dict[str, str]:
        return {"tiles": "never", **self.parameters}

    def identity(self) -> dict[str, Any]:
        parameters = bit_settings("decode", self.all_parameters())
        return {"codec": self.codec, "crf": self.crf, "parameters": parameters}


def decode_job(sources: Sequence[str], settings: DecodeSettings) -> Job:
    """Every shard is a unit of work. `sources` are shards and folders of them."""
    paths: list[Path] = []
    for source in sources:
        path = Path(source)
        paths += sorted(path.glob("*.tar")) if path.is_dir() else [path]
    names = {path.stem: path for path in paths}
    for path in paths:
        if not path.is_file():
            raise BatchError(f"{path} is not there")
        if names[path.stem] != path:
            raise BatchError(f"{path} and {names[path.stem]} would be decoded to the same folder; decode one at a time")
    if not paths:
        raise BatchError(f"no shards (*.tar) in {', '.join(sources)}")
    items = [Item(index, str(path), path.stat().st_size) for index, path in enumerate(sorted(paths))]
    return Job(
        {"command": "decode", "settings": settings.identity()}, items, [Shard(item.index, (item,)) for item in items]
    )


def decode_worker(settings: DecodeSettings) -> WorkerMaker:
    return functools.partial(DecodeWorker, settings)


class DecodeWorker:
    """Decodes shards on one device: samples are read ahead of it, videos are written behind it."""

    def __init__(self, settings: DecodeSettings, device: str, resources: Resources) -> None:
        self.device = device
        self._settings = settings
        self._vae = VideoVae(settings.weights, device, **settings.all_parameters())
        self.fingerprint = fingerprint(self._vae, device, settings.weights, "decode")
        self._figures, self._lock = Figures(), threading.Lock()
        self._folder = Path()
        self._stopped = threading.Event()
        # One shard at a time; the next is read while the last videos of this one are written.
        self._device_turn = threading.Lock()
        self._shards = ThreadPoolExecutor(2, "shard")
        self._writers = ThreadPoolExecutor(resources.readers, "video")
        self._room = threading.Semaphore(resources.readers + 1)

    def open_folder(self, folder: Path) -> None:
        self._folder = folder

    def submit(self, shard: Shard) -> Future[dict[str, Any]]:
        return self._shards.submit(self._decode_shard, shard)

    def figures(self) -> dict[str, Any]:
        with self._lock:
            return asdict(self._figures)

    def close(self) -> None:
        self._stopped.set()
        self._vae.cancel()
        self._shards.shutdown(cancel_futures=True)
        self._writers.shutdown(cancel_futures=True)
        self._vae.close()

    def _decode_shard(self, shard: Shard) -> dict[str, Any]:
        item = shard.items[0]
        written: list[tuple[dict[str, Any], Future[int]]] = []
        abouts: list[dict[str, Any]] = []
        with self._device_turn, _ReadAhead(Path(item.path)) as samples:
            for sample in samples:
                about = {**sample.about, "key": sample.key, "shard": item.path}
                try:
                    written.append((about, self._decode(sample, about, Path(item.path).stem)))
                except BrokenInput as error:
                    abouts.append({**about, "error": str(error)})
                self._check()
            if samples.error is not None:
                abouts.append({"shard": item.path, "error": samples.error})
        files = {about["file"]: {"bytes": done.result()} for about, done in written}
        with self._lock:
            self._figures.broken += len(abouts)
        return self._finish(shard, files, [*(about for about, _ in written), *abouts])

    def _finish(self, shard: Shard, files: dict[str, Any], abouts: list[dict[str, Any]]) -> dict[str, Any]:
        """The files are there; now the record is."""
        record = {"shard": shard.index, "files": files, "items": abouts}
        write_atomic(record_path(self._folder, shard), json.dumps(record, sort_keys=True) + "\n")
        return record

    def _decode(self, sample: Sample, about: dict[str, Any], folder: str) -> Future[int]:
        """Decodes a sample into the queue of a writer."""
        latent, size = _latent(sample), _size(sample, self._vae)
        about.update(frames=size[0], height=size[1], width=size[2])
        about["file"] = f"{folder}/{video_name(sample.key, size[0], self._settings.codec)}"
        own_folder(self._folder / folder)
        pieces: queue.Queue[numpy.ndarray | None] = queue.Queue(_PIECES)
        done = self._start_writer(self._folder / about["file"], about.get("rate"), pieces)
        parts = (latent[:, :, first : first + _PIECE] for first in range(0, latent.shape[2], _PIECE))
        try:
            with self._at_work(*size):
                for frames in self._vae.stream_decode(parts, size=size, layout="THWC", dtype="uint8"):
                    self._hand_over(pieces, frames, done)
                self._hand_over(pieces, None, done)
        except CLIP_ERRORS as error:
            self._hand_over(pieces, _GIVEN_UP, done)
            raise BrokenInput(str(error)) from error
        return done

    def _start_writer(self, path: Path, rate: str | None, pieces: queue.Queue[Any]) -> Future[int]:
        while not self._room.acquire(timeout=1):
            self._check()
        return self._writers.submit(self._write, path, rate, pieces)

    @contextlib.contextmanager
    def _at_work(self, frames: int, height: int, width: int) -> Iterator[None]:
        """Counts a clip that is decoded within."""
        start = time.perf_counter()
        yield
        with self._lock:
            self._figures.device_seconds += time.perf_counter() - start
            self._figures.clips += 1
            self._figures.megapixel_frames += frames * height * width / 1e6

    def _hand_over(self, pieces: queue.Queue[Any], piece: Any, done: Future[int]) -> None:
        while True:
            with contextlib.suppress(queue.Full):
                pieces.put(piece, timeout=1)
                return
            if done.done():
                done.result()
            self._check()

    def _write(self, path: Path, rate: str | None, pieces: queue.Queue[Any]) -> int:
        try:
            writer = VideoWriter(path, self._settings.codec, rate, self._settings.crf)
            try:
                for piece in self._taken(pieces):
                    if piece is _GIVEN_UP:
                        return 0
                    writer.add(piece)
                size = writer.commit()
                with self._lock:
                    self._figures.bytes += size
                return size
            finally:
                writer.abort()
        finally:
            self._room.release()

    def _taken(self, pieces: queue.Queue[Any]) -> Iterator[Any]:
        while True:
            self._check()
            with contextlib.suppress(queue.Empty):
                piece = pieces.get(timeout=1)
                if piece is None:
                    return
                yield piece

    def _check(self) -> None:
        if self._stopped.is_set():
            raise BatchError("stopped")


# In a writer's queue: the clip cannot be decoded, and nothing is to be written.
_GIVEN_UP = object()


class _ReadAhead:
    """The samples of a shard, a few of them read ahead. `error` says why they ended early."""

    def __init__(self, path: Path) -> None:
        self.error: str | None = None
        self._path = path
        self._queue: queue.Queue[Sample | None] = queue.Queue(_AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="shard reader", daemon=True)
        self._thread.start()

    def __enter__(self) -> _ReadAhead:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop.set()
        self._thread.join()

    def __iter__(self) -> Iterator[Sample]:
        while (sample := self._queue.get()) is not None:
            yield sample

    def _read(self) -> None:
        try:
            for sample in read_shard(self._path):
                if not self._put(sample):
                    return
        except BatchError as error:
            self.error = str(error)
        self._put(None)

    def _put(self, sample: Sample | None) -> bool:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(sample, timeout=0.2)
                return True
        return False


def _latent(sample: Sample) -> numpy.ndarray:
    """[1, C, T, H, W]."""
    latent = sample.tensors.get("mean", sample.tensors.get("latent"))
    if latent is None or latent.ndim != 4:
        raise BrokenInput("no tensor mean or latent of four axes")
    return latent[None]


def _size(sample: Sample, vae: VideoVae) -> tuple[int, int, int]:
    """Frames, height and width that were encoded, or all of the latent."""
    whole = vae.model.video_shape(_latent(sample).shape)[2:]
    size = tuple(sample.about.get(name, full) for name, full in zip(("frames", "height", "width"), whole))
    if not all(isinstance(part, int) and 0 < part <= full for part, full in zip(size, whole)):
        raise BrokenInput(f"the sample says {size}, its latent {tuple(whole)}")
    return size
