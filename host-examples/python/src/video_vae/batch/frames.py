"""Reads the frames of one video or image with PyAV. Knows no process, device or shard."""

from __future__ import annotations

import bisect
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from .buckets import Size, choose, cover
from .errors import BrokenInput
from .missing import Count, missing
from .timing import Times, said_by_rate, without_times

# The same pixels on every processor: no approximations that depend on its instructions.
_SCALE = "flags=bicubic+accurate_rnd+bitexact+full_chroma_int+full_chroma_inp"
_FORMATS = {3: "rgb24", 4: "rgba"}
_TURNS = {90: ["transpose=clock"], 180: ["hflip", "vflip"], 270: ["transpose=cclock"]}

# Damages of an input that its line in the manifest names.
_DAMAGES = 3


@dataclass(frozen=True)
class FrameRule:
    """Which frames of an input are taken, at which size, with alpha or without. `keep_damaged`: also those of a damaged
    one."""

    buckets: tuple[Size, ...] = ()
    max_frames: int | None = None
    rate: str | None = None
    keep_damaged: bool = False
    channels: int = 3


@dataclass(frozen=True)
class FrameSpan:
    """Frames [first, first + count) of an input. With `entry` they are found by seeking: the time of the first, and of
    the last keyframe before it."""

    first: int
    count: int
    entry: tuple[int, int] | None = None


class FrameIndex:
    """How many frames a file has and where to enter it, found without decoding. Those of a damaged file are counted by
    decoding it."""

    def __init__(self, path: str, rule: FrameRule = FrameRule()) -> None:
        self._times: list[int] = []
        self._keys: list[int] = []
        if not rule.keep_damaged:
            with FrameReader(path, rule) as frames:
                self._scan(frames)
        self.seekable = len(set(self._times)) == len(self._times) > 0
        self._times.sort()
        self._keys.sort()
        self.count = len(self._times) if self.seekable else count_frames(path, rule)

    def _scan(self, frames: FrameReader) -> None:
        for packet in frames.packets():
            if packet.pts is None:
                self._times = []
                return
            self._times.append(packet.pts)
            if packet.is_keyframe:
                self._keys.append(packet.pts)

    def span(self, first: int, count: int) -> FrameSpan:
        if not self.seekable:
            return FrameSpan(first, count)
        place = bisect.bisect_right(self._keys, self._times[first])
        if place == 0:
            return FrameSpan(first, count)
        return FrameSpan(first, count, (self._times[first], self._keys[place - 1]))


def reader_version() -> str:
    """What the pixels depend on beside the file."""
    import av

    libraries = av.library_versions
    parts = (f"{name} {'.'.join(map(str, libraries[name]))}" for name in ("libavcodec", "libavfilter", "libswscale"))
    return f"PyAV {av.__version__}, {', '.join(parts)}"


class FrameReader:
    """The frames of a file as they are stored: iteration gives PyAV frames in rgb24 or rgba. `info` says what the file
    is, and after the last frame also when each is shown and what is damaged."""

    def __init__(self, path: str, rule: FrameRule, span: FrameSpan | None = None, threads: int = 1) -> None:
        import av

        self._av, self._rule, self._span, self._path = av, rule, span, path
        try:
            # A pipe would be waited for.
            if not stat.S_ISREG(Path(path).stat().st_mode):
                raise BrokenInput("not a regular file")
            # A name such as "concat:a" would be taken for a protocol.
            self._container = av.open(f"file:{path}")
        except (OSError, ValueError, av.FFmpegError) as error:
            raise BrokenInput(_reason(error)) from error
        try:
            streams = [s for s in self._container.streams.video if not s.disposition & s.disposition.attached_pic]
            if not streams:
                raise BrokenInput("no video stream")
            self._stream = streams[0]
            if self._stream.codec_context is None:
                raise BrokenInput("no decoder for its video stream")
            self._stream.codec_context.thread_count = threads
            if not rule.keep_damaged:
                # What a decoder would conceal is an error.
                self._stream.codec_context.options = {"err_detect": "explode"}
            self.frames_hint: int = self._stream.frames
        except BaseException:
            self._container.close()
            raise
        self.info: dict[str, Any] = {}
        self._count = Count()
        self._damage: list[str] = []

    def __enter__(self) -> FrameReader:
        return self

    def __exit__(self, *error: Any) -> None:
        self._container.close()

    def __iter__(self) -> Iterator[Any]:
        first, end = 0, self._rule.max_frames
        if self._span is not None:
            first = 0 if self._span.entry else self._span.first
            end = first + self._span.count
        count, times = 0, Times(self._container.start_time)
        for frame in self._filtered():
            if count == end:
                break
            if count >= first:
                times.add(frame)
                yield frame
            count += 1
        else:
            if self._span is None or self._span.entry is None:
                self._check_whole()
        if count == 0:
            raise BrokenInput("no frames")
        if self._span is not None and count < first + self._span.count:
            raise BrokenInput(f"{count} frames from frame {self._span.first - first} on; more were expected")
        self.info.update(times.info())
        # A part does not know whether the rest of the clip has the times of the rate.
        if self._span is None and said_by_rate(self.info):
            self.info = without_times(self.info)
        if self._rule.rate:
            self.info["source_frames"] = self._count.decoded
        if self._damage:
            more = len(self._damage) - _DAMAGES
            self.info["damaged"] = "; ".join([*self._damage[:_DAMAGES], *([f"and {more} more"] if more > 0 else [])])

    def packets(self) -> Iterator[Any]:
        """The compressed frames that are shown, of a file that has all it should have."""
        yield from (packet for packet in self._demuxed() if packet.size and not packet.is_discard)
        self._count.decoded = self._count.shown
        self._check_whole()

    def _damaged(self, reason: str) -> None:
        if not self._rule.keep_damaged:
            raise BrokenInput(reason)
        self._damage.append(reason)

    def _check_whole(self) -> None:
        """That there are as many frames as the container says."""
        reason = missing(self._container, self._stream, self._count, self._path)
        if reason is not None:
            self._damaged(reason)

    def _filtered(self) -> Iterator[Any]:
        graph, shape = None, None
        for frame in self._decoded():
            if graph is None:
                shape = (frame.width, frame.height)
                graph = self._graph(frame)
            elif shape != (frame.width, frame.height):
                raise BrokenInput(f"the size changes from {shape[0]}x{shape[1]} to {frame.width}x{frame.height}")
            graph.push(frame)
            yield from self._pulled(graph)
        if graph is not None:
            graph.push(None)
            yield from self._pulled(graph)

    def _demuxed(self) -> Iterator[Any]:
        """The packets of the stream, and an empty one at the end."""
        try:
            for packet in self._container.demux(self._stream):
                # A packet without data in the middle repeats a frame; to a decoder it would be the end.
                at_end = packet.dts is None and not packet.size
                if not at_end:
                    self._count.add(packet)
                if at_end or packet.size:
                    yield packet
        except self._av.FFmpegError as error:
            self._damaged(f"frame {self._count.decoded} cannot be read: {_reason(error)}")

    def _decoded(self) -> Iterator[Any]:
        start = None
        try:
            if self._span is not None and self._span.entry is not None:
                start, key = self._span.entry
                self._container.seek(key, stream=self._stream, backward=True)
        except self._av.FFmpegError as error:
            raise BrokenInput(f"frame {self._span.first} was not found by seeking: {_reason(error)}") from error
        for packet in self._demuxed():
            for frame in self._frames(packet):
                if start is not None and frame.pts < start:
                    continue
                if start is not None and self._count.decoded == 0 and frame.pts != start:
                    raise BrokenInput(f"frame {self._span.first} was not found by seeking")
                if frame.is_corrupt:
                    self._damaged(f"frame {self._count.decoded} is damaged")
                self._count.decoded += 1
                self._count.interlaced |= frame.interlaced_frame
                yield frame

    def _frames(self, packet: Any) -> list[Any]:
        try:
            return packet.decode()
        except self._av.FFmpegError as error:
            self._damaged(f"frame {self._count.decoded} cannot be decoded: {_reason(error)}")
            return []

    def _pulled(self, graph: Any) -> Iterator[Any]:
        while True:
            try:
                yield graph.vpull()
            except (self._av.BlockingIOError, self._av.EOFError):
                return

    def _graph(self, frame: Any) -> Any:
        """Rotation, rate, size and colours, in this order."""
        turn = -frame.rotation % 360
        if turn not in (0, 90, 180, 270):
            raise BrokenInput(f"turned by {turn} degrees")
        width, height = (frame.height, frame.width) if turn in (90, 270) else (frame.width, frame.height)
        rate = self._stream.average_rate or self._stream.guessed_rate
        self.info = {
            "source_width": width,
            "source_height": height,
            "source_rate": str(rate) if rate else None,
            "rate": self._rule.rate or (str(rate) if rate else None),
        }
        steps, colours = list(_TURNS.get(turn, [])), f"format={_FORMATS[self._rule.channels]}"
        if self._rule.rate:
            steps.append(f"fps={self._rule.rate}")
        if self._rule.buckets:
            bucket = choose(width, height, self._rule.buckets)
            wide, high = cover(width, height, bucket)
            steps += [f"scale={wide}:{high}:{_SCALE}", colours, "crop={}:{}:exact=1".format(*bucket)]
        else:
            steps += [f"scale={_SCALE}", colours]
        return self._chain(frame, steps)

    def _chain(self, frame: Any, steps: list[str]) -> Any:
        graph = self._av.filter.Graph()
        graph.threads = 1
        base = self._stream.time_base or Fraction(1, 1000)
        last = graph.add_buffer(width=frame.width, height=frame.height, format=frame.format, time_base=base)
        try:
            for step in steps:
                name, _, arguments = step.partition("=")
                node = graph.add(name, arguments or None)
                last.link_to(node)
                last = node
            last.link_to(graph.add("buffersink"))
            graph.configure()
        except (ValueError, self._av.FFmpegError) as error:
            raise BrokenInput(f"{frame.width}x{frame.height} {frame.format.name}: {_reason(error)}") from error
        return graph


def _reason(error: Exception) -> str:
    """One line without the path, which is recorded beside it."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())


def count_frames(path: str, rule: FrameRule) -> int:
    """How many frames a file has, by reading it."""
    with FrameReader(path, rule, threads=os.cpu_count() or 1) as frames:
        return sum(1 for _ in frames)
