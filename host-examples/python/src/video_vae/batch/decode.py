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
from .files import own_folder, write_atomic
from .fingerprint import bit_settings, fingerprint
from .folder import record_path
from .progress import Figures
from .run import Job, WorkerMaker
from .settings import Resources, latents_of, said_latents
from .shards import Sample, read_shard
from .sources import Item, Shard
from .timing import Timing
from .videos import VideoWriter, video_name

# Latent frames that go to the device at a time, and pieces of video that wait for a writer.
_PIECE, _PIECES = 8, 4
# Of a key that names a file: names have 255 at most, and a file that is not complete has 26 more.
_KEY_BYTES = 200
# What the manifest says of a sample itself.
_OURS = ("key", "shard", "file", "error")
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
        self._latents = latents_of(self._vae)
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
        path = Path(shard.items[0].path)
        found: list[tuple[dict[str, Any], Future[int]]] = []
        names: set[str] = set()
        with self._device_turn, _ReadAhead(path) as samples:
            for sample in samples:
                about = {key: value for key, value in sample.about.items() if key not in _OURS}
                about.update(shard=str(path), **({} if sample.key is None else {"key": sample.key}))
                found.append((about, self._begun(sample, about, path.stem, names)))
                self._check()
        files, broken = {}, 0
        for about, done in found:
            try:
                bytes_written = done.result()
                files[about["file"]] = {"bytes": bytes_written}
                self._count(about["frames"], about["height"], about["width"], bytes_written)
            except BrokenInput as error:
                about.pop("file", None)
                about["error"], broken = str(error), broken + 1
        with self._lock:
            self._figures.broken += broken
        return self._finish(shard, files, [about for about, _ in found])

    def _begun(self, sample: Sample, about: dict[str, Any], folder: str, names: set[str]) -> Future[int]:
        """The size of the sample's file, or why there is none. `names` has those of the shard so far."""
        try:
            if sample.error is not None:
                raise BrokenInput(sample.error)
            if _stem(sample.key) in names:
                raise BrokenInput(f"a sample before it has the key {sample.key!r} too")
            stem = _source_stem(about, sample.key, names)
            done = self._decode(sample, about, f"{folder}/{stem}")
            names.update((sample.key, stem))
            return done
        except BrokenInput as error:
            failed: Future[int] = Future()
            failed.set_exception(error)
            return failed

    def _finish(self, shard: Shard, files: dict[str, Any], abouts: list[dict[str, Any]]) -> dict[str, Any]:
        """The files are there; now the record is."""
        record = {"shard": shard.index, "files": files, "items": abouts}
        write_atomic(record_path(self._folder, shard), json.dumps(record, sort_keys=True) + "\n")
        return record

    def _decode(self, sample: Sample, about: dict[str, Any], stem: str) -> Future[int]:
        """Decodes a sample into the queue of a writer. `stem`: the file within the folder, without its ending."""
        latent = latent_of(sample.tensors)
        self._take_latents(about)
        size = encoded_size(about, latent.shape, self._vae)
        timing = _timing(about, size[0])
        about.update(frames=size[0], height=size[1], width=size[2])
        about["file"] = video_name(stem, size[0], self._settings.codec)
        own_folder((self._folder / stem).parent)
        pieces: queue.Queue[numpy.ndarray | None] = queue.Queue(_PIECES)
        done = self._start_writer(self._folder / about["file"], timing, pieces)
        parts = (latent[:, :, first : first + _PIECE] for first in range(0, latent.shape[2], _PIECE))
        try:
            with self._at_work():
                for frames in self._vae.stream_decode(parts, size=size, layout="THWC", dtype="uint8"):
                    self._hand_over(pieces, frames, done)
                self._hand_over(pieces, None, done)
        except CLIP_ERRORS as error:
            self._hand_over(pieces, _GIVEN_UP, done)
            raise BrokenInput(str(error)) from error
        return done

    def _take_latents(self, about: dict[str, Any]) -> None:
        """Decodes the latents that the JSON beside them says, from now on; without a word, those of the settings."""
        wanted = {**self._latents, **said_latents(about)}
        if wanted == latents_of(self._vae):
            return
        try:
            self._vae.configure(**wanted)
        except CLIP_ERRORS as error:
            raise BrokenInput(f"its JSON: {error}") from error

    def _start_writer(self, path: Path, timing: Timing, pieces: queue.Queue[Any]) -> Future[int]:
        while not self._room.acquire(timeout=1):
            self._check()
        return self._writers.submit(self._write, path, timing, pieces)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """The device computes within."""
        start = time.perf_counter()
        yield
        with self._lock:
            self._figures.device_seconds += time.perf_counter() - start

    def _count(self, frames: int, height: int, width: int, size: int) -> None:
        """A clip whose file is there."""
        with self._lock:
            self._figures.clips += 1
            self._figures.megapixel_frames += frames * height * width / 1e6
            self._figures.bytes += size

    def _hand_over(self, pieces: queue.Queue[Any], piece: Any, done: Future[int]) -> None:
        while True:
            with contextlib.suppress(queue.Full):
                pieces.put(piece, timeout=1)
                return
            if done.done():
                done.result()
            self._check()

    def _write(self, path: Path, timing: Timing, pieces: queue.Queue[Any]) -> int:
        try:
            writer = VideoWriter(path, self._settings.codec, timing, self._settings.crf)
            try:
                for piece in self._taken(pieces):
                    if piece is _GIVEN_UP:
                        return 0
                    writer.add(piece)
                return writer.commit()
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
    """The samples of a shard, a few of them read ahead."""

    def __init__(self, path: Path) -> None:
        self._failure: BaseException | None = None
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
        if self._failure is not None:
            kind = type(self._failure).__name__
            raise BatchError(f"{self._path}: reading it failed: {kind}: {self._failure}") from self._failure

    def _read(self) -> None:
        try:
            for sample in read_shard(self._path):
                if not self._put(sample):
                    return
        except BaseException as error:  # somebody waits for this thread
            self._failure = error
        self._put(None)

    def _put(self, sample: Sample | None) -> bool:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(sample, timeout=0.2)
                return True
        return False


def _stem(key: str | None) -> str:
    """The key as the name of a file."""
    size = len(key.encode(errors="surrogateescape")) if key else 0
    if not key or "/" in key or not key.isprintable() or size > _KEY_BYTES:
        raise BrokenInput(
            f"its key {(key or '')[:60]!r} cannot name a file: it must have 1 to {_KEY_BYTES} bytes and no slash"
        )
    return key


def _source_stem(about: dict[str, Any], key: str, names: set[str]) -> str:
    """The name of the source without its ending, as a file's name. Where two have one name, or it is none: the key."""
    source = about.get("source")
    stem = Path(source).stem if isinstance(source, str) else ""
    try:
        return key if _stem(stem) in names or stem.startswith(".") else stem
    except BrokenInput:
        return key


def latent_of(tensors: dict[str, numpy.ndarray]) -> numpy.ndarray:
    """[1, C, T, H, W]."""
    latent = tensors.get("mean", tensors.get("latent"))
    if latent is None or latent.ndim != 4 or not latent.size:
        raise BrokenInput("no tensor mean or latent of four axes")
    return latent[None]


def encoded_size(about: dict[str, Any], latent: Sequence[int], vae: VideoVae) -> tuple[int, int, int]:
    """Frames, height and width that were encoded, or all of the latent."""
    whole = vae.model.video_shape(latent)[2:]
    size = tuple(about.get(name, full) for name, full in zip(("frames", "height", "width"), whole))
    if not all(type(part) is int and 0 < part <= full for part, full in zip(size, whole)):
        names = {name: about.get(name) for name in ("frames", "height", "width") if name in about}
        raise BrokenInput(f"its JSON says {str(names)[:100]}; the latent is of frames, height and width {tuple(whole)}")
    return size


def _timing(about: dict[str, Any], frames: int) -> Timing:
    try:
        return Timing.of(about, frames)
    except ValueError as error:
        raise BrokenInput(f"its JSON: {error}") from error
