"""One long clip in parts: encoded or decoded by many workers and joined in order, with the bits of one device.

Parts are ranges of the output. Each worker reads the input frames that its range needs. What is done lies in a folder
beside the output until everything is joined.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import queue
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import numpy

from .. import VideoVae
from .decode import DecodeSettings, DecodeWorker, encoded_size, latent_of
from .errors import BatchError, BrokenInput, storage_error
from .files import PARTIAL, AtomicFile, open_regular
from .folder import complete_record
from .frames import FrameIndex
from .run import Job, WorkerMaker
from .settings import Settings, said_latents
from .shards import Sample, parse_about, parse_safetensors, read_shard, safetensors_header
from .sources import Item, Shard
from .timing import Timing, said_by_rate, without_times
from .videos import CODECS, FORMATS


def parts_folder(out: Path) -> Path:
    return out.with_name(out.name + ".parts")


# ---- Encode ----


def encode_clip_job(source: str, settings: Settings, part_frames: int) -> Job:
    """Parts of `part_frames` latent frames."""
    if settings.rule.rate or settings.rule.max_frames:
        raise BatchError("a clip in parts is taken whole and at its own rate")
    try:
        index = FrameIndex(source, settings.rule)
        size = Path(source).stat().st_size
    except BrokenInput as error:
        raise BatchError(f"{source}: {error}") from error
    items = []
    with VideoVae(settings.weights, "cpu") as vae:
        total = vae.model.latent_shape((1, 3, index.count, 8, 8))[2]
        for number, first in enumerate(range(0, total, part_frames)):
            inputs = vae.range_inputs("encode", slice(first, min(first + part_frames, total)), index.count)
            span = index.span(inputs.start, inputs.stop - inputs.start)
            items.append(Item(number, source, size, span, first))
    identity = {"command": "encode-clip", "settings": settings.identity(), "part_frames": part_frames}
    identity.update(clip_frames=index.count, latent_frames=total)
    return Job(identity, items, [Shard(item.index, (item,)) for item in items])


def join_latents(job: Job, folder: Path, out: Path) -> None:
    """One safetensors file of all parts, one of them in memory at a time. What it is of is in its metadata."""
    frames, about = job.identity["latent_frames"], _joined_about(job, folder)
    with AtomicFile(out) as file:
        starts: dict[str, int] = {}
        for shard in job.shards:
            for sample in _samples(folder, shard):
                starts = starts or _begin(file, sample, frames, about)
                for name, array in sample.tensors.items():
                    plane = array[0, 0].nbytes
                    for channel, part in enumerate(array):
                        at = starts[name] + (channel * frames + (shard.items[0].first or 0)) * plane
                        file.write_at(at, numpy.ascontiguousarray(part))
        file.commit()


def _joined_about(job: Job, folder: Path) -> dict[str, Any]:
    """What the whole clip is. A part knows the times of the frames that it was computed from."""
    times: dict[int, int] = {}
    damaged: list[str] = []
    about: dict[str, Any] = {}
    for shard in job.shards:
        part, span = _part(folder, shard), shard.items[0].span
        if "error" in part:
            raise BatchError(f"part {shard.index}: {part['error']}")
        about = {**part, **about}
        if "times" in part and span is not None:
            times.update(enumerate(part["times"], span.first))
        if "damaged" in part:
            damaged.append(part["damaged"])
    frames = job.identity["clip_frames"]
    about = {key: value for key, value in about.items() if key not in ("key", "file", "times", "damaged")}
    about["frames"] = frames
    if damaged:
        about["damaged"] = max(damaged, key=len)
    if "time_base" in about and len(times) == frames:
        about["times"] = [times[frame] for frame in range(frames)]
    return without_times(about) if said_by_rate(about) else about


def _begin(file: AtomicFile, sample: Sample, frames: int, about: dict[str, Any]) -> dict[str, int]:
    """Writes the header, and says where each tensor of `frames` frames begins."""
    shapes = {}
    for name, array in sample.tensors.items():
        shapes[name] = (array.dtype, (array.shape[0], frames, *array.shape[2:]))
    header = safetensors_header(shapes, {"about": json.dumps(about, sort_keys=True)})
    file.write(header)
    starts, at = {}, len(header)
    for name, array in sample.tensors.items():
        starts[name] = at
        at += array.nbytes // array.shape[1] * frames
    return starts


def _samples(folder: Path, shard: Shard) -> Iterator[Sample]:
    record = complete_record(folder, shard)
    if record is None:
        raise BatchError(f"part {shard.index} is not in {folder}")
    for about in record["items"]:
        if "error" in about:
            raise BatchError(f"part {shard.index}: {about['error']}")
    for name in record["files"]:
        for sample in read_shard(folder / name):
            if sample.error is not None:
                raise BatchError(f"{folder / name}: {sample.error}")
            yield sample


# ---- Decode ----


@dataclass(frozen=True)
class LatentClip:
    """A latent [C, T, H, W] in a safetensors file, and the video that it is of."""

    latent: numpy.ndarray
    frames: int
    height: int
    width: int
    timing: Timing

    @classmethod
    def open(cls, path: str, vae: VideoVae, take_latents: Callable[[dict[str, Any]], None]) -> LatentClip:
        """`take_latents` has `vae` decode the latents that the file says."""
        with _said_of(path):
            tensors, about = _contents(path)
            latent = latent_of(tensors)
            take_latents(about)
            size = encoded_size(about, latent.shape, vae)
            return cls(latent[0], *size, Timing.of(about, size[0]))


def _contents(path: str) -> tuple[dict[str, numpy.ndarray], dict[str, Any]]:
    """The tensors of a latent file, and what it is of."""
    with open_regular(Path(path)) as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors, metadata = parse_safetensors(memoryview(data))
    return tensors, parse_about(metadata.get("about", "{}").encode())


@contextlib.contextmanager
def _said_of(path: str) -> Iterator[None]:
    """What is wrong with a latent file ends the run."""
    try:
        yield
    except (OSError, ValueError, BrokenInput) as error:
        raise BatchError(f"{path}: {error}") from error


def decode_clip_job(source: str, settings: DecodeSettings, part_frames: int) -> Job:
    """Parts of `part_frames` video frames."""
    with VideoVae(settings.weights, "cpu") as vae:
        clip = LatentClip.open(source, vae, lambda about: vae.configure(**said_latents(about)))
    size = Path(source).stat().st_size
    firsts = range(0, clip.frames, part_frames)
    items = [Item(number, source, size, None, first) for number, first in enumerate(firsts)]
    identity = {"command": "decode-clip", "settings": settings.identity(), "part_frames": part_frames}
    return Job(identity, items, [Shard(item.index, (item,)) for item in items])


def decode_clip_worker(settings: DecodeSettings, part_frames: int) -> WorkerMaker:
    return functools.partial(PartDecoder, part_frames, settings)


class PartDecoder(DecodeWorker):
    """Decodes parts of one clip, each to a video file of its own."""

    def __init__(self, part_frames: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._part_frames = part_frames

    def _decode_shard(self, shard: Shard) -> dict[str, Any]:
        item = shard.items[0]
        first = item.first or 0
        name = f"part-{shard.index:06d}{CODECS[self._settings.codec][2]}"
        pieces: queue.Queue[Any] = queue.Queue(2)
        with self._device_turn:
            clip = LatentClip.open(item.path, self._vae, self._take_latents)
            end = min(first + self._part_frames, clip.frames)
            # Parts are evenly timed; frames get their times when parts are joined.
            timing = Timing(clip.timing.rate, 1 / clip.timing.rate, range(end - first))
            done = self._start_writer(self._folder / name, timing, pieces)
            with self._at_work():
                for frames in self._part(clip, first, end):
                    self._hand_over(pieces, frames, done)
                self._hand_over(pieces, None, done)
        size = self._written(done, name)
        self._count(end - first, clip.height, clip.width, size)
        about = {"key": item.key, "file": name, "first": first, "frames": end - first}
        return self._finish(shard, {name: {"bytes": size}}, [about])

    @staticmethod
    def _written(done: Future[int], name: str) -> int:
        try:
            return done.result()
        except BrokenInput as error:
            raise BatchError(f"{name}: {error}") from error

    def _part(self, clip: LatentClip, first: int, end: int) -> Iterator[numpy.ndarray]:
        """Video frames [first, end)."""
        inputs = self._vae.range_inputs("decode", slice(first, end), clip.latent.shape[1])
        latent = clip.latent[None, :, inputs]
        left = end - first
        with self._vae.open_stream("decode", latent.shape, first) as stream:
            taken = 0
            while left:
                if taken < latent.shape[2]:
                    taken += stream.push(latent[:, :, taken : taken + 8])
                else:
                    stream.finish()
                while left:
                    size = (clip.height, clip.width, self._vae.model.pixel_channels)
                    room = numpy.empty((min(left, 32), *size), numpy.uint8)
                    written = stream.pull(room)
                    if not written:
                        break
                    left -= written
                    yield room[:written]


def join_videos(job: Job, folder: Path, out: Path) -> None:
    """One video of all parts, without compressing anew. Frames get the times that the latent's file has."""
    import av

    records = [_part(folder, shard) for shard in job.shards]
    parts, source = [folder / record["file"] for record in records], job.items[0].path
    with _said_of(source):
        timing = Timing.of(_contents(source)[1], sum(record["frames"] for record in records))
    partial = out.parent / f".{out.name}.{secrets.token_hex(8)}{PARTIAL}"
    try:
        delay = max(_reordering(part) for part in parts)
        options = {"fflags": "+bitexact"}
        with av.open(str(partial), "w", format=FORMATS[out.suffix], options=options) as target:
            joined = _Joined(target, timing, delay)
            for path in parts:
                joined.append(path)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(out)
    except OSError as error:
        raise storage_error(error, out) from error
    except (ValueError, av.FFmpegError) as error:
        raise BatchError(f"{out}: the parts cannot be joined: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _part(folder: Path, shard: Shard) -> dict[str, Any]:
    record = complete_record(folder, shard)
    if record is None:
        raise BatchError(f"part {shard.index} is not in {folder}")
    return record["items"][0]


def _packets(part: Any) -> list[tuple[int, Any]]:
    """The packets of a part as they are stored, each with the number of its frame."""
    packets = [packet for packet in part.demux(part.streams.video[0]) if packet.size]
    places = {time: place for place, time in enumerate(sorted(packet.pts for packet in packets))}
    return [(places[packet.pts], packet) for packet in packets]


def _reordering(path: Path) -> int:
    """How many frames later than it is stored a frame of a part is shown, at most."""
    import av

    with av.open(str(path)) as part:
        return max(stored - shown for stored, (shown, _) in enumerate(_packets(part)))


class _Joined:
    """A video that parts are appended to. `delay` is the most that any of them reorders frames."""

    def __init__(self, target: Any, timing: Timing, delay: int) -> None:
        self._target, self._timing, self._delay = target, timing, delay
        self._stream: Any = None
        self._frames = 0

    def append(self, path: Path) -> None:
        import av

        with av.open(str(path)) as part:
            source = part.streams.video[0]
            if self._stream is None:
                self._stream = self._target.add_stream_from_template(source)
                self._stream.time_base = self._timing.base
            packets = _packets(part)
            for stored, (shown, packet) in enumerate(packets):
                packet.time_base = self._timing.base
                packet.pts = self._timing.times[self._frames + shown]
                packet.dts = self._decoded(self._frames + stored)
                packet.duration = 0
                packet.stream = self._stream
                self._target.mux(packet)
            self._frames += len(packets)

    def _decoded(self, stored: int) -> int:
        """When a packet is decoded: these times rise, and none is after the time its frame is shown."""
        times, place = self._timing.times, stored - self._delay
        return times[place] if place >= 0 else times[0] + place


def remove_parts(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
