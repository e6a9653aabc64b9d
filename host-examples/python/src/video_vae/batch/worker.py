"""One device at work: inputs are read ahead of it and shards are written behind it.

    read-ahead processes -> ready clips -> device thread -> results in order -> writer thread -> shard, record

Memory is bounded: `Resources.items_ahead` items at most are under way beyond the oldest that is not written.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable

import numpy

from .. import VideoVae
from .ahead import Clip, ReadAhead
from .encoder import Encoder
from .errors import BatchError, BrokenInput
from .files import write_atomic
from .folder import record_path
from .frames import FrameRule
from .progress import Figures
from .settings import Resources, Settings
from .shards import ShardWriter
from .sources import Item, Shard


@dataclass(eq=False)
class _Job:
    shard: Shard
    first: int
    done: Future[dict[str, Any]]


@dataclass
class _Result:
    about: dict[str, Any]
    tensors: dict[str, numpy.ndarray] | None

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.tensors.values()) if self.tensors else 0


class Worker:
    """Encodes shards on one device. `submit` returns at once; a few shards at a time leave the device no pause."""

    def __init__(self, settings: Settings, device: str, resources: Resources) -> None:
        self._resources = resources
        self.device = device
        self._folder = Path()
        self._changed = threading.Condition()
        self._items: dict[int, Item] = {}
        self._waiting: deque[tuple[int, Item]] = deque()
        self._ready: list[Clip] = []
        self._results: dict[int, _Result] = {}
        self._jobs: deque[_Job] = deque()
        self._tickets = 0
        self._written = 0
        self._held = 0
        self._figures = Figures()
        self._failure: BaseException | None = None
        self._closing = False
        # The readers start while the weights are loaded.
        self._ahead = ReadAhead(
            resources.readers, _rule(settings), resources.slot_bytes, self._on_clip, self._on_broken, self._fail
        )
        try:
            self._encoder = Encoder(settings, device)
            self.fingerprint = self._encoder.fingerprint
        except BaseException:
            self._ahead.close()
            raise
        self._threads = [self._thread(self._run_device, "device"), self._thread(self._run_writer, "writer")]

    def open_folder(self, folder: Path) -> None:
        """Where shards go; before the first `submit`."""
        self._folder = folder

    def reader_processes(self) -> list[int]:
        return self._ahead.processes()

    def submit(self, shard: Shard) -> Future[dict[str, Any]]:
        """The record of the shard, when it is complete on the disk."""
        done: Future[dict[str, Any]] = Future()
        with self._changed:
            if self._failure is not None:
                done.set_exception(self._failure)
                return done
            self._jobs.append(_Job(shard, self._tickets, done))
            for item in shard.items:
                self._items[self._tickets] = item
                self._waiting.append((self._tickets, item))
                self._tickets += 1
            self._changed.notify_all()
        self._hand_out()
        return done

    def figures(self) -> dict[str, Any]:
        with self._changed:
            return asdict(self._figures)

    def close(self) -> None:
        """Stops where it is. Shards that are not complete leave nothing."""
        self._fail(BatchError("stopped"))
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._encoder.cancel()
        self._ahead.close()
        for thread in self._threads:
            thread.join()
        self._encoder.close()

    # ---- In order ----

    def _hand_out(self) -> None:
        """Asks for inputs as far ahead as memory allows. The oldest one is always asked for, so that work goes on."""
        with self._changed:
            while self._waiting and self._failure is None:
                ticket, item = self._waiting[0]
                full = ticket >= self._written + self._resources.items_ahead()
                if ticket > self._written and (full or self._held > self._resources.held_bytes):
                    return
                self._waiting.popleft()
                self._ahead.read(ticket, item.path, item.span)

    def _on_clip(self, clip: Clip) -> None:
        with self._changed:
            self._ready.append(clip)
            self._changed.notify_all()

    def _on_broken(self, ticket: int, reason: str) -> None:
        self._resolve(ticket, {"error": reason}, None)

    def _resolve(self, ticket: int, about: dict[str, Any], tensors: dict[str, numpy.ndarray] | None) -> None:
        with self._changed:
            item = self._items.pop(ticket)
            result = _Result({"key": item.key, "source": item.path, **about}, tensors)
            self._results[ticket] = result
            self._held += result.bytes
            self._changed.notify_all()

    # ---- The device ----

    def _run_device(self) -> None:
        shape: tuple[int, ...] | None = None
        while True:
            clips = self._next_clips(shape)
            if not clips:
                return
            shape = clips[0].shape
            start = time.perf_counter()
            try:
                found = self._encoded(clips)
            except BrokenInput as error:
                for clip in clips:
                    self._resolve(clip.ticket, {"error": str(error)}, None)
                continue
            with self._changed:
                self._figures.device_seconds += time.perf_counter() - start
            for clip, (tensors, about) in zip(clips, found):
                self._resolve(clip.ticket, about, tensors)

    def _encoded(self, clips: list[Clip]) -> list[tuple[dict[str, numpy.ndarray], dict[str, Any]]]:
        if len(clips) > 1:
            return self._encoder.encode_images(clips)
        with self._changed:
            item = self._items[clips[0].ticket]
        return [self._encoder.encode(clips[0], item)]

    def _next_clips(self, shape: tuple[int, ...] | None) -> list[Clip]:
        """A clip that is ready, or all images of one shape that are. Those of the last shape need no new plan. None at
        the end."""
        start = time.perf_counter()
        with self._changed:
            # Waiting for something to do is not waiting for frames.
            while not self._items and not self._closing and self._failure is None:
                self._changed.wait()
                start = time.perf_counter()
            while not self._ready and not self._closing and self._failure is None:
                self._changed.wait()
            if self._closing or self._failure is not None:
                return []
            self._figures.feed_wait_seconds += time.perf_counter() - start
            same = (place for place, clip in enumerate(self._ready) if clip.shape == shape)
            clips = [self._ready.pop(next(same, 0))]
            if self._is_image(clips[0]):
                clips += [clip for clip in self._ready if clip.shape == clips[0].shape and self._is_image(clip)]
                self._ready = [clip for clip in self._ready if clip not in clips]
            return clips

    def _is_image(self, clip: Clip) -> bool:
        return self._encoder.takes_batch(clip, self._items[clip.ticket])

    # ---- The writer ----

    def _run_writer(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                job = self._jobs[0]
            record = self._write(job)
            if record is None:
                return
            with self._changed:
                self._jobs.popleft()
            with contextlib.suppress(InvalidStateError):  # a failure elsewhere came first
                job.done.set_result(record)

    def _write(self, job: _Job) -> dict[str, Any] | None:
        """Appends the shard's results as they come, then makes it appear. None if the worker stops meanwhile."""
        writer: ShardWriter | None = None
        abouts: list[dict[str, Any]] = []
        try:
            for ticket in range(job.first, job.first + len(job.shard.items)):
                result = self._await(ticket)
                if result is None:
                    return None
                abouts.append(result.about)
                if result.tensors is not None:
                    writer = writer or ShardWriter(self._folder / job.shard.name)
                    writer.add(result.about["key"], result.tensors, result.about)
                    abouts[-1] = {**result.about, "file": job.shard.name}
                self._count(result)
                self._hand_out()
            files = {}
            if writer is not None:
                size, digest = writer.commit()
                files[job.shard.name] = {"bytes": size, "sha256": digest}
            record = {"shard": job.shard.index, "files": files, "items": abouts}
            write_atomic(record_path(self._folder, job.shard), json.dumps(record, sort_keys=True) + "\n")
            return record
        finally:
            if writer is not None:
                writer.abort()

    def _await(self, ticket: int) -> _Result | None:
        with self._changed:
            while ticket not in self._results and not self._closing and self._failure is None:
                self._changed.wait()
            return self._results.pop(ticket, None)

    def _count(self, result: _Result) -> None:
        """What is written needs no memory any more."""
        with self._changed:
            self._written += 1
            self._held -= result.bytes
            figures = self._figures
            if result.tensors is None:
                figures.broken += 1
                return
            about = result.about
            figures.clips += 1
            figures.damaged += "damaged" in about
            figures.megapixel_frames += about["frames"] * about["height"] * about["width"] / 1e6
            figures.bytes += result.bytes

    # ---- The end ----

    def _fail(self, error: BaseException) -> None:
        """The first failure ends everything that was asked for."""
        with self._changed:
            if self._failure is not None:
                return
            self._failure = error
            jobs = list(self._jobs)
            self._changed.notify_all()
        for job in jobs:
            with contextlib.suppress(InvalidStateError):  # the writer may have finished it just now
                job.done.set_exception(error)

    def _thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        def run() -> None:
            try:
                target()
            except BaseException as error:
                self._fail(error)

        thread = threading.Thread(target=run, name=f"{name} {self.device}", daemon=True)
        thread.start()
        return thread


def _rule(settings: Settings) -> FrameRule:
    """Frames with alpha for a model that has it."""
    with VideoVae(settings.weights, "cpu") as vae:
        return replace(settings.rule, channels=vae.model.pixel_channels)
